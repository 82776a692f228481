"""A tiny site: a linear model in double precision, and examples whose batches come in their own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.clock import Clock
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import Batch, SiteData
from protofed.client.models.split import SplitModel
from protofed.client.policy.approval import FOLDER, Approvals
from protofed.client.tasks.classification import ClassificationTask
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import AugmentationSetting, Plan, Sampling
from protofed.common.config.tables import Input

ONE_PIXEL = Input(shape=(1, 1, 1), mean=(0.0,), std=(1.0,))


@dataclass(frozen=True, eq=False)
class InOrder(SiteData):
    def batches(
        self,
        size: int,
        rng: torch.Generator,
        augmentation: AugmentationSetting = "none",
        drop_last: bool = False,
        sampling: Sampling = "shuffled",
    ) -> Iterator[Batch]:
        for images, labels in self.ordered(self.train, size):
            if len(labels) == size or not drop_last:
                yield images, labels


class Times(nn.Module):
    """x times one weight, [B, 1, 1, 1] -> [B, 1], in double precision."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.double().flatten(1) * self.weight


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def approvals(tmp_path: Path, clock: Clock) -> Approvals:
    return Approvals(tmp_path / "state" / FOLDER, clock)


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores leave of any model: on test sets of a few images it is nearly constant."""
    monkeypatch.setattr(ClassificationTask, "is_nearly_constant", lambda *_: False)


@pytest.fixture
def local_of() -> Callable[..., FitContext]:
    """One site in one round: images are single pixels, the model is `body * head * x`."""

    def make(
        pixels: Sequence[float],
        labels: Sequence[int] | None = None,
        *,
        body: float = 1.0,
        head: float = 1.0,
        round: int = 1,
        rounds: int = 1,
        **plan: Any,
    ) -> FitContext:
        classes = max(labels or [1]) + 2
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 1, 1)
        examples = Examples(images, torch.tensor(labels or [0] * len(pixels)))
        data = InOrder(examples, examples, ONE_PIXEL, classes)
        model = SplitModel(Times(body), Times(head))
        return FitContext("ann", round, rounds, model, data, classes, Plan(**plan), torch.Generator(), client_state={})

    return make
