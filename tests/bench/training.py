"""The loop that trains a model against a bare PyTorch loop on the same model and data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from tests.bench.report import Row
from tests.bench.timing import seconds
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from protofed.client.data.site_data import Examples, SiteData
from protofed.client.models.catalogue import build
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train
from protofed.common.config.recipe import Input, NamedOptions, Plan

REPETITIONS = 9
PLAN = Plan(epochs=1, lr=0.01, momentum=0.9, weight_decay=1e-5, max_grad_norm=10.0)
CASES = [("digits-cnn", (1, 8, 8), 32, 3200), ("conv2cifar", (3, 32, 32), 64, 1280)]  # model, shape, batch, images


def rows() -> Iterator[Row]:
    """Images a second, on one thread."""
    torch.set_num_threads(1)
    for model, shape, batch, count in CASES:
        ours, bare = loops(model, shape, batch, count)
        yield Row(
            f"SGD loop, {model}, batch {batch}",
            count / statistics.median(ours),
            "images/s",
            count / statistics.median(bare),
            "bare PyTorch",
            statistics.median(b / o for o, b in zip(ours, bare, strict=True)),
            at_least=0.97,
        )


def loops(name: str, shape: tuple[int, int, int], batch: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of an epoch: our loop's and the bare one's, in turns, on the same model and data."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    input_ = Input(shape=shape)
    model = build(NamedOptions(name=name), input_, 10)
    data = SiteData(Examples(images, labels), Examples(images[:10], labels[:10]), input_, 10)
    plan = PLAN.model_copy(update={"batch_size": batch})
    local = FitContext("bench", 1, 1, model, data, 10, plan, generator, {})
    ready = data.train.normalised(input_)

    def ours() -> None:
        train(local, lambda x, y: cross_entropy(model(x), y))

    def bare() -> None:
        optimizer = torch.optim.SGD(model.parameters(), PLAN.lr, PLAN.momentum, weight_decay=PLAN.weight_decay)
        model.train()
        order = torch.randperm(count, generator=generator)
        for start in range(0, count, batch):
            rows = order[start : start + batch]
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(ready[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

    ours()
    bare()
    pairs = [(seconds(ours), seconds(bare)) for _ in range(REPETITIONS)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
