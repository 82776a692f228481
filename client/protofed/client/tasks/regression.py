"""One number an image, such as an age or an ejection fraction.

Targets are [N] float32, in the numbers' own unit. The model's one output is trained to the number's place in the task's
range, from -1 to 1, so that learning rates do not depend on the unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from protofed.client.task import CONSTANT, NO_COLUMN, NO_NUMBER, LeftOut, OwnLabel, OwnNames, Predictions
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import Regression
from protofed.common.errors import DataError, short

STRATA = 10  # equal parts of the range
MIN_SET = 20  # examples of a stratum: `hold_out` tests on 5 or more of each stratum, and not on one below 10
NEAR = 0.01  # of the range: predictions that are nearer than this are much the same
AGREEMENT = 1.96  # standard deviations from the bias to a limit of agreement (Bland and Altman, Lancet 1986)


@dataclass(frozen=True)
class RegressionTask:
    """The client half of `protofed.common.config.tasks.Regression`."""

    options: Regression

    def read(self, own: OwnLabel, names: OwnNames) -> float | LeftOut:
        """The number that the label is."""
        if own.columns:
            return LeftOut(NO_COLUMN)
        text = own.cells[0] if own.cells else own.text
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if self._low <= number <= self._high:
            return number
        ignored = text in names.ignored
        return LeftOut(text if ignored else f"{short(text)} ({NO_NUMBER} {self._low:g} to {self._high:g})", ignored)

    def from_array(self, labels: NDArray[Any], classes: int) -> Tensor:
        """A number for each example."""
        if labels.dtype.kind not in "iuf" or labels.ndim != 1:
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; expected one number for each image"
            )
        return torch.from_numpy(labels.astype(np.float32))

    def valid(self, targets: Tensor, classes: int) -> Tensor:
        """In the range."""
        if targets.dtype != torch.float32 or targets.ndim != 1:
            return torch.zeros(len(targets), dtype=torch.bool)
        return (targets >= self._low) & (targets <= self._high)

    def expected(self, classes: int) -> str:
        """As of `ClientTask`."""
        return f"expected numbers from {self._low:g} to {self._high:g}, the recipe's task.range"

    def strata(self, targets: Tensor) -> Tensor:
        """Tenths of the range; one with few examples is joined with the next ones."""
        share = (targets - self._low) / (self._high - self._low)
        parts = (share * STRATA).long().clamp(0, STRATA - 1)
        strata, number, size = [], 0, 0
        for count in torch.bincount(parts, minlength=STRATA).tolist():
            strata.append(number)
            size += count
            if size >= MIN_SET:
                number, size = number + 1, 0
        return torch.tensor(strata).clamp(max=max(number - 1, 0))[parts]  # too few at the end join the stratum before

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """All examples."""
        return torch.tensor([len(targets)])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of the place in the range."""
        return mse_loss(outputs.squeeze(1), ((targets - self._middle) / self._half).to(outputs))

    def predict(self, outputs: Tensor) -> Tensor:
        """The number, in its own unit and within the range."""
        return (self._middle + self._half * outputs).clamp(self._low, self._high)

    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        """Mean absolute error, bias, and the limits of agreement; empty for a model that has diverged."""
        if not predictions.outputs.isfinite().all():
            return {}
        errors = self.predict(predictions.outputs.double()).squeeze(1) - predictions.targets
        values = {"mae": float(errors.abs().mean()), "bias": float(errors.mean())}
        if len(errors) > 1:
            reach = AGREEMENT * float(errors.std())
            values |= {"agreement_low": values["bias"] - reach, "agreement_high": values["bias"] + reach}
        return values

    def is_nearly_constant(self, outputs: Tensor) -> bool:
        """Whether nearly all predictions are within `NEAR` of the range of each other."""
        return self._are_near(self.predict(outputs).flatten())

    def can_be_asked(self, targets: Tensor) -> bool:
        """Whether the numbers differ."""
        return not self._are_near(targets)

    def _are_near(self, values: Tensor) -> bool:
        """Whether some part of `NEAR` of the range has all values [N] but `CONSTANT` of them and one."""
        if not values.isfinite().all():
            return True
        kept = max(1, len(values) - math.floor(1 + CONSTANT * len(values)))
        ordered = values.sort().values
        spans = ordered[kept - 1 :] - ordered[: len(ordered) - kept + 1]
        return float(spans.min()) <= NEAR * (self._high - self._low)

    @property
    def _low(self) -> float:
        return self.options.range[0]

    @property
    def _high(self) -> float:
        return self.options.range[1]

    @property
    def _middle(self) -> float:
        return (self._low + self._high) / 2

    @property
    def _half(self) -> float:
        return (self._high - self._low) / 2
