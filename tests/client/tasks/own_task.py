"""A task of another package: regression, under a name and a score of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from protofed.client.task import Predictions
from protofed.client.tasks.regression import RegressionTask
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import Regression
from protofed.common.protocol.scores import TaskScore


@dataclass(frozen=True)
class Gauge:
    most: float = 9.0

    client: ClassVar[str] = "tests.client.tasks.own_task:GaugeTask"

    def check(self, classes: int) -> None:
        Regression((0.0, self.most)).check(classes)

    def scores(self) -> tuple[TaskScore, ...]:
        return (*Regression((0.0, self.most)).scores(), TaskScore("near"))


@dataclass(frozen=True)
class GaugeTask(RegressionTask):
    own: Gauge = field(default_factory=Gauge)

    def __init__(self, own: Gauge) -> None:
        object.__setattr__(self, "own", own)
        object.__setattr__(self, "options", Regression((0.0, own.most)))

    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        apart = (self.predict(predictions.outputs).squeeze(1) - predictions.targets).abs()
        near = float((apart < 1).float().mean())
        return {**super().scores(predictions, test, trained_on, recipe), "near": near}
