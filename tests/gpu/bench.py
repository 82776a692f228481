"""The training loop beside the bare PyTorch loop on the same model, images and device, in turns: images a second.

Both in bfloat16 with channels_last, images normalised and on the device before. Each repetition waits for the device
before and after. The median of the repetitions' ratios counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tests.gpu import cifar
from tests.gpu.fits import examples, fit_context, loss_of
from tests.gpu.plan import Proof
from tests.gpu.report import Finding, Found, Status
from torch import nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train

GOAL = 0.95
CLIP = 10.0
REPETITIONS = 9


@dataclass(frozen=True)
class Case:
    """One row: a model of the catalogue, and images of an epoch on a GPU."""

    model: str
    count: int
    batch: int = 64


CASES = (Case("resnet18", 6400), Case("conv2cifar", 12_800))


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    images, named = _images(proof)
    yield Finding("images", named)
    for case in CASES:
        yield measured(proof, case, images)


def measured(proof: Proof, case: Case, images: Examples) -> Finding:
    """One case."""
    count = 2 * case.batch if proof.rehearsal else case.count
    local = fit_context(
        proof.device,
        images.take(torch.arange(count) % len(images)),
        {"name": case.model},
        batch_size=case.batch,
        weight_decay=1e-5,
        max_grad_norm=CLIP,
    )
    ours, bare = (lambda: train(local, loss_of(local))), _bare(local)
    pairs = [(_seconds(proof, ours), _seconds(proof, bare)) for _ in range(2 if proof.rehearsal else REPETITIONS + 1)][
        1:
    ]  # the first warms both up
    ratio = statistics.median(there / here for here, there in pairs)
    speeds = [count / statistics.median(times) for times in zip(*pairs, strict=True)]
    status = Status.PASSED if proof.rehearsal or ratio >= GOAL else Status.MISSED
    found = f"{speeds[0]:,.0f} images/s, bare {speeds[1]:,.0f}: ratio {ratio:.3f}"
    what = f"training loop, {case.model}, batch {case.batch}, {'float32' if proof.rehearsal else 'amp'}"
    return Finding(
        what,
        found,
        "" if proof.rehearsal else f"≥ {GOAL}",
        status,
        {"ratio": ratio, "ours": speeds[0], "bare": speeds[1]},
    )


def _images(proof: Proof) -> tuple[Examples, str]:
    if proof.data is None:
        return examples(6400), "made up, 3 x 32 x 32: there is no CIFAR-10 here"
    return cifar.train_set(proof.data), "CIFAR-10"


def _bare(local: FitContext) -> Callable[[], None]:
    """The loop as one would write it for one experiment, with the plan's optimizer."""
    plan, model, device = local.plan, local.model, local.data.device
    images, labels = local.data.train.normalised(local.data.input), local.data.train.labels
    images = images.contiguous(memory_format=torch.channels_last)

    def bare() -> None:
        optimizer = torch.optim.SGD(model.parameters(), plan.lr, plan.momentum, weight_decay=plan.weight_decay)
        model.train()
        for rows in torch.split(torch.randperm(len(labels)).to(device), plan.batch_size):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                batch = images[rows].contiguous(memory_format=torch.channels_last)
                loss = cross_entropy(model(batch), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    return bare


def _seconds(proof: Proof, work: Callable[[], object]) -> float:
    _wait(proof)
    began = time.perf_counter()
    work()
    _wait(proof)
    return time.perf_counter() - began


def _wait(proof: Proof) -> None:
    if not proof.rehearsal:
        torch.cuda.synchronize()
