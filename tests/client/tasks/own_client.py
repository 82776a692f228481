"""The half of `own_task` in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from protofed.client.tasks.regression import RegressionTask
from protofed.tasks import Predictions, Recipe


@dataclass(frozen=True)
class GaugeTask(RegressionTask):
    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        scores = super().scores(predictions, test, trained_on, recipe)
        apart = (self.predict(predictions.outputs).squeeze(1) - predictions.targets).abs()
        return {**scores, "near": float((apart < 1).float().mean())} if scores else {}
