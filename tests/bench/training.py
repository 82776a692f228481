"""The SGD loop beside a bare PyTorch loop that does the same: every model of the catalogue, every method's own step.

Ratios are of processor time, which other processes disturb less than the clock, and of turns: ours, bare, ours, bare.
The bare loop is what one writes for one experiment: images normalised before, no checks, nothing counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from tests.bench.report import Row
from tests.bench.server_process import bench_recipe
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import clip_grad_norm_

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.methods import cwfedavg, fednh, fedproc, fedprp
from protofed.client.models.catalogue import architectures, device_model
from protofed.client.models.split import CosineHead, PrototypeHead, SplitModel, dump
from protofed.client.training.context import FitContext
from protofed.client.training.dp import DpContext, DpNoise
from protofed.client.training.loop import Loss, Trained, train
from protofed.common.config.recipe import DpCost, DpPlan, Plan
from protofed.common.payload import Part, Payload, Tensors

CLASSES = 10
LEAST, SECONDS = 15, 6.0  # turns, and processor seconds that a row goes on for: one alone says little
GOAL = 0.97  # of the bare loop's images a second
NOISY_GOAL = 3.0  # times a step without noise
PLAN = Plan(epochs=1, lr=0.01, momentum=0.9, weight_decay=1e-5, max_grad_norm=10.0)
Shape: TypeAlias = tuple[int, int, int]
Epoch: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model of the catalogue on images for which an epoch takes 10 to 100 ms: machines change within seconds."""

    model: str
    shape: Shape
    batch: int
    count: int

    def context(self, method: str = "fedavg", plan: Plan = PLAN) -> FitContext:
        """Random images, and the model as a daemon and a simulation have it."""
        plan = plan.model_copy(update={"batch_size": self.batch})
        tables = {"input": {"shape": self.shape}, "method": {"name": method}, "plan": plan.model_dump()}
        recipe = bench_recipe("bench", 10, self.model, **tables)
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (self.count, *self.shape), dtype=torch.uint8, generator=generator)
        examples = Examples(images, torch.randint(0, CLASSES, (self.count,), generator=generator))
        data = SiteData(examples, examples, recipe.input, CLASSES)
        model = device_model(recipe, torch.device("cpu"), frozenset())
        return FitContext("bench", 5, recipe.rounds, model, data, CLASSES, plan, generator, {})


DIGITS = Case("digits-cnn", (1, 8, 8), 32, 320)
CASES = (
    Case("mlp", (1, 8, 8), 32, 640),
    DIGITS,
    Case("conv2cifar", (3, 32, 32), 64, 64),
    Case("fedavg-cnn", (1, 28, 28), 32, 64),
    Case("simple-cnn", (3, 32, 32), 64, 128),
    Case("resnet18", (3, 8, 8), 8, 8),
    Case("resnet50", (3, 8, 8), 8, 8),
)
assert {case.model for case in CASES} == set(architectures)
FEW = Case("digits-cnn", (1, 8, 8), 32, 14)  # a site of a simulation of small models: one batch a round


def rows() -> Iterator[Row]:
    """Images a second of processor time, on one thread."""
    torch.set_num_threads(1)
    for case in CASES:
        ours, bare = both(case.context())
        yield _row(f"SGD loop, {case.model}, batch {case.batch}", case.count, ours, bare)
    for method in STEPS:
        ours, bare = step_of(method)
        yield _row(f"step of {method}, {DIGITS.model}, batch {DIGITS.batch}", DIGITS.count, ours, bare)
    yield small_fit()
    yield noisy_step()


def both(local: FitContext) -> tuple[Epoch, Epoch]:
    """An epoch of ours and the bare one, of cross-entropy, on the same model and data."""
    model = local.model

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        return cross_entropy(model(images), labels)

    return lambda: train(local, loss), bare_loop(local, loss, list(model.parameters()))


def bare_loop(local: FitContext, loss: Loss, trained: list[Tensor]) -> Epoch:
    """An epoch as one would write it for one experiment, with the plan's SGD."""
    plan, model, generator = local.plan, local.model, local.rng
    images, labels = local.data.train.normalised(local.data.input), local.data.train.labels

    def epoch() -> None:
        optimizer = torch.optim.SGD(trained, plan.lr, plan.momentum, weight_decay=plan.weight_decay)
        model.train()
        for rows in torch.split(torch.randperm(len(labels), generator=generator), plan.batch_size):
            optimizer.zero_grad(set_to_none=True)
            loss(images[rows], labels[rows]).backward()  # type: ignore[no-untyped-call]
            if plan.max_grad_norm is not None:
                clip_grad_norm_(trained, plan.max_grad_norm)
            optimizer.step()

    return epoch


def step_of(method: str) -> tuple[Epoch, Epoch]:
    """An epoch of a method's own step, with all prototypes known, and the bare one of the same mathematics."""
    local = DIGITS.context(method)
    received = _received(method, local.model)
    module, plain = STEPS[method]
    found: list[tuple[Loss, list[Tensor], Callable[[], Tensor] | None]] = []

    def seen(
        _: FitContext,
        loss: Loss,
        parameters: Iterable[Tensor] | None = None,
        regularizer: Callable[[], Tensor] | None = None,
    ) -> Trained:
        """Keep what the fit would train by, in place of training."""
        trained = local.model.parameters() if parameters is None else parameters
        found.append((loss, [tensor for tensor in trained if tensor.requires_grad], regularizer))
        return Trained(loss=0.0, steps=0)

    with patch.object(module, "train", seen):
        client_methods.build(method, {}).fit(local, received)
    loss, trained, regularizer = found[-1]  # of FedPRP the body's
    local.train_calls = 0
    return lambda: train(local, loss, trained, regularizer=regularizer), bare_loop(
        local, plain(local, received, trained), trained
    )


def _received(method: str, model: SplitModel) -> Payload:
    """A broadcast with a prototype of every class: FedNH's are a matrix beside a scale, the others' a row a class."""
    matrix = normalize(torch.randn(CLASSES, model.head.get_parameter("weight").shape[1])).numpy()  # [C, D]
    if method == "fednh":
        head: Tensors = {"scale": np.array(20.0, np.float32)}
        return {Part.BODY: dump(model.body), Part.HEAD: head, Part.PROTOTYPES: {"mean": matrix}}
    named = {str(c): row for c, row in enumerate(matrix)}
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head), Part.PROTOTYPES: named}


def small_fit() -> Row:
    """One batch a fit: what a call of `train` costs around it, in a simulation of small models ten times a round."""
    ours, bare = both(FEW.context(plan=PLAN.model_copy(update={"max_grad_norm": None})))
    times, bare_times = in_turns(lambda: [ours() for _ in range(10)], lambda: [bare() for _ in range(10)])
    own, other = (100 * statistics.median(some) for some in (times, bare_times))  # ms of one
    what = f"a fit of {FEW.count} images, {FEW.model}: beyond the bare loop"
    return Row(what, own - other, "ms", other, "bare PyTorch", at_most=0.3)


def noisy_step() -> Row:
    """A step with `[plan.dp]`, all images drawn, beside the same step without: gradients by example, and noise."""
    (case,) = (case for case in CASES if case.model == "conv2cifar")
    local, plain_local = case.context(), case.context()
    plan = DpPlan(noise_multiplier=1.0, sampling_rate=1.0)
    dp = DpContext(plan, DpCost((10**6,)), DpNoise(b"bench"))
    noisy_local = replace(local, plan=local.plan.model_copy(update={"dp": plan}), dp=dp)

    def epoch(of: FitContext) -> Trained:
        return train(of, lambda x, y: cross_entropy(of.model(x), y))

    times, plain_times = in_turns(lambda: epoch(noisy_local), lambda: epoch(plain_local))
    ratio = statistics.median(n / p for n, p in zip(times, plain_times, strict=True))
    own, other = (1000 * statistics.median(some) for some in (times, plain_times))
    what = f"step with [plan.dp], {case.model}, batch {case.batch}"
    return Row(what, own, "ms", other, "the same step without", ratio, at_most=NOISY_GOAL)


def _row(what: str, count: int, ours: Epoch, bare: Epoch) -> Row:
    times, bare_times = in_turns(ours, bare)
    ratio = statistics.median(b / o for o, b in zip(times, bare_times, strict=True))
    own, other = (count / statistics.median(some) for some in (times, bare_times))
    return Row(what, own, "images/s", other, "bare PyTorch", ratio, at_least=GOAL)


def in_turns(ours: Epoch, bare: Epoch) -> tuple[list[float], list[float]]:
    """Processor seconds of each, in turns; who is first takes turns, too."""
    ours()
    bare()
    pairs, end = list[tuple[float, float]](), time.process_time() + SECONDS
    while len(pairs) < LEAST or time.process_time() < end:
        first, second = (ours, bare) if len(pairs) % 2 else (bare, ours)
        times = {first: _processor_seconds(first), second: _processor_seconds(second)}
        pairs.append((times[ours], times[bare]))
    return [own for own, _ in pairs], [other for _, other in pairs]


def _processor_seconds(work: Epoch) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _fednh(local: FitContext, _: Payload, __: list[Tensor]) -> Loss:
    body, head = local.model.body, CosineHead.of(local.model)
    return lambda x, y: cross_entropy(head.scale * (normalize(body(x)) @ head.prototypes.T), y)


def _fedproc(local: FitContext, received: Payload, _: list[Tensor]) -> Loss:
    body, head = local.model.body, local.model.head
    centers = normalize(torch.stack([torch.tensor(row) for row in received[Part.PROTOTYPES].values()]))
    alpha = 1 - (local.round - 1) / local.rounds
    missing = torch.zeros(CLASSES, dtype=torch.bool)  # classes without a prototype; here none, but there may be some
    targets = torch.arange(CLASSES).masked_fill(missing, -100)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        features = body(images)
        cosines = (normalize(features) @ centers.T).masked_fill(missing, -torch.inf)
        contrast = cross_entropy(cosines, targets[labels], ignore_index=-100, reduction="sum") / len(labels)
        return alpha * contrast + (1 - alpha) * cross_entropy(head(features), labels)

    return loss


def _fedprp(local: FitContext, received: Payload, trained: list[Tensor]) -> Loss:
    """Of its body, with the paper's distance; the class centroids are any, here the prototypes."""
    body, head, margins = local.model.body, PrototypeHead.of(local.model).own, torch.ones(CLASSES)
    prototypes = torch.stack([torch.tensor(row) for row in received[Part.PROTOTYPES].values()])
    known = torch.ones(CLASSES, dtype=torch.bool)  # classes with a prototype; here all, but there may be others

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        features = body(images)
        classes = labels.unique()  # type: ignore[no-untyped-call]
        own = labels == classes.unsqueeze(1)  # [P, B]
        distances = vector_norm(prototypes[classes].unsqueeze(1) - features, dim=2)
        scores = torch.log_softmax(-(distances + margins[classes].unsqueeze(1) * own) / 0.07, dim=1)
        inter = -((scores * own).sum(1) / own.sum(1)).mean()
        intra = ((features - prototypes[labels]).square() * known[labels].unsqueeze(1)).mean()
        total: Tensor = cross_entropy(head(features), labels) + 0.5 * intra + 0.5 * inter
        return total

    return loss


def _cwfedavg(local: FitContext, _: Payload, __: list[Tensor]) -> Loss:
    model, weight, shares = local.model, local.model.head.get_parameter("weight"), local.data.label_frequencies()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        norms = vector_norm(weight, dim=1)
        total: Tensor = cross_entropy(model(images), labels) + 5 * vector_norm(norms / norms.sum() - shares)
        return total

    return loss


# The methods whose step is not that of cross-entropy alone: where each finds `train`, and its step written plainly.
STEPS = {
    "fednh": (fednh, _fednh),
    "fedproc": (fedproc, _fedproc),
    "fedprp": (fedprp, _fedprp),
    "cwfedavg": (cwfedavg, _cwfedavg),
}
