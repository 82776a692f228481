"""Several findings an image: each of C findings is there or not, or it is unknown whether it is.

Targets are [N, C] float32: 1, 0, or -1 for unknown. An unknown finding adds nothing to loss and scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from protofed.client.task import CONSTANT, NO_CELL, NO_RULE, LeftOut, OwnLabel, OwnNames, Predictions
from protofed.client.tasks.findings import BELOW_ONE, SCORED, reliability_bins, score_finding
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import MultiLabel, UnknownRule
from protofed.common.errors import DataError, short
from protofed.common.protocol.scores import BINS

UNKNOWN = -1.0
_INVALID = -2.0  # in place of what the recipe has no rule for
_RULES: dict[UnknownRule | None, float] = {"ignore": UNKNOWN, "ones": 1.0, "zeros": 0.0, None: _INVALID}
MIN_SET = 10  # examples with one set of findings that are a stratum by themselves
MIN_EACH = 5  # examples with a finding, and without, that scores on a site's own test set need


@dataclass(frozen=True)
class MultiLabelTask:
    """The client half of `protofed.common.config.tasks.MultiLabel`."""

    options: MultiLabel

    def read(self, own: OwnLabel, names: OwnNames) -> tuple[float, ...] | LeftOut:
        """The findings that a cell names, with | between them; or the cells of the findings' columns.

        A cell of names says of all other findings that they are not there. A finding that no column stands for is
        unknown. Names that the site ignores, as "No Finding", add nothing.
        """
        return self._of_columns(own, names) if own.columns else _of_names(own, names)

    def _of_columns(self, own: OwnLabel, names: OwnNames) -> tuple[float, ...] | LeftOut:
        row: list[float | None] = [None] * names.count
        for heading, cell in zip(own.columns, own.cells, strict=True):
            if heading in names.ignored:
                continue
            if (outputs := names.classes.get(heading)) is None:
                return LeftOut(heading)
            if (value := self._value(cell)) == _INVALID:
                return LeftOut(_unclear(heading, cell))
            for output in outputs:
                row[output] = _either(row[output], value)
        return tuple(UNKNOWN if value is None else value for value in row)

    def _value(self, cell: str) -> float:
        if not cell:
            return _RULES[self.options.blank]
        number = _number(cell)
        return _RULES[self.options.uncertain] if number == -1 else number if number in (0, 1) else _INVALID

    def from_array(self, labels: NDArray[Any], classes: int) -> Tensor:
        """A row of C numbers for each example: 1, 0, -1 for uncertain, NaN for blank."""
        rows = labels.reshape(-1, 1) if labels.ndim == 1 and classes == 1 else labels
        if rows.dtype.kind not in "iufb" or rows.ndim != 2 or rows.shape[1] != classes:
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; expected [N, {classes}], a 1 or 0 for each "
                "finding. Labels of one number each need data.label_map, with the findings of each number"
            )
        values = rows.astype(np.float32)
        blank, uncertain = np.isnan(values), values == -1
        values[~blank & ~uncertain & ~np.isin(values, (0, 1))] = _INVALID
        values[blank], values[uncertain] = _RULES[self.options.blank], _RULES[self.options.uncertain]
        return torch.from_numpy(values)

    def valid(self, targets: Tensor, classes: int) -> Tensor:
        """1, 0 or unknown."""
        if targets.dtype != torch.float32 or targets.shape[1:] != (classes,):
            return torch.zeros(len(targets), dtype=torch.bool)
        known: Tensor = (targets == 0) | (targets == 1) | (targets == UNKNOWN)
        return known.all(1)

    def expected(self, classes: int) -> str:
        """As of `ClientTask`."""
        return (
            f"expected a 1 or 0 for each of {classes} findings. For -1 and for blanks the recipe's task.uncertain and "
            "task.blank must say what they count as"
        )

    def strata(self, targets: Tensor) -> Tensor:
        """The sets of findings; a set that few examples have counts as the rarest of its findings."""
        sets, of_each, sizes = torch.unique(targets, dim=0, return_inverse=True, return_counts=True)  # [S, C], [N], [S]
        there, totals = sets == 1, (targets == 1).sum(0)
        rarest = torch.where(there, totals, len(targets) + 1).argmin(1)
        rarest[~there.any(1)] = targets.shape[1]
        by_set = torch.arange(len(sets)) + targets.shape[1] + 1
        strata: Tensor = torch.unique(torch.where(sizes < MIN_SET, rarest, by_set)[of_each], return_inverse=True)[1]
        return strata

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """Examples with each finding."""
        return (targets == 1).sum(0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The binary cross-entropies of an example's findings, added up; an unknown one adds nothing.

        Not their mean: so an output moves as one of a classification does, predicted less true, and a policy's limits
        of a fit mean the same. An example's share does not depend on what is known of the others.
        """
        known = targets != UNKNOWN
        terms = binary_cross_entropy_with_logits(outputs, targets.clamp(min=0).to(outputs), reduction="none")
        return (terms * known).sum() / len(targets)

    def predict(self, outputs: Tensor) -> Tensor:
        """The probability of each finding."""
        return outputs.sigmoid()

    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        """Of each finding that some have and others have not, and the means; empty for a model that has diverged."""
        from torchmetrics.functional.classification import binary_calibration_error  # seconds of imports

        outputs, targets = predictions.outputs, predictions.targets
        known = targets != UNKNOWN  # [N, C]
        if not outputs.isfinite().all() or not known.any():
            return {}
        values = dict[str, float]()
        for c in range(recipe.classes):
            column, truth = outputs[known[:, c], c], targets[known[:, c], c]
            found = score_finding(column, truth, recipe.evaluation.specificity) or ()
            values |= {f"class_{name}.{c}": value for name, value in zip(SCORED, found, strict=False)}
        for name in SCORED:
            of_findings = [value for key, value in values.items() if key.startswith(f"class_{name}.")]
            values |= {name: sum(of_findings) / len(of_findings)} if of_findings else {}
        probabilities, truth = outputs.double().sigmoid()[known], targets[known]
        values["brier"] = float((probabilities - truth).square().mean())
        confidence = probabilities.clamp(max=BELOW_ONE)
        values["ece"] = float(binary_calibration_error(confidence, truth.long(), BINS, "l1"))
        return values | (reliability_bins(probabilities, truth == 1) if test == "global" else {})

    def is_nearly_constant(self, outputs: Tensor) -> bool:
        """Whether of some finding nearly all examples get one value: then the score tells of the few others."""
        most = max(int(torch.unique(column, return_counts=True)[1].max()) for column in outputs.unbind(1))
        return len(outputs) - most <= 1 + CONSTANT * len(outputs)

    def can_be_asked(self, targets: Tensor) -> bool:
        """Whether of some finding there are `MIN_EACH` examples with it, and as many without."""
        with_it, without = (targets == 1).sum(0), (targets == 0).sum(0)
        return bool((torch.minimum(with_it, without) >= MIN_EACH).any())


def _of_names(own: OwnLabel, names: OwnNames) -> tuple[float, ...] | LeftOut:
    text = own.cells[0] if own.cells else own.text
    whole = text in names.classes or text in names.ignored  # a name with | in it
    row = [0.0] * names.count
    for name in (text,) if whole else map(str.strip, text.split("|")):
        if name in names.ignored or not name:
            continue
        outputs = names.classes.get(name, (names.count,))
        if any(output >= names.count for output in outputs):
            return LeftOut(name)
        for output in outputs:
            row[output] = 1.0
    return tuple(row)


def _either(one: float | None, other: float) -> float:
    """Of two own columns for one finding: there if it is in one of them, and else unknown if it is so in one."""
    if one is None or other == 1:
        return other
    return one if one == 1 or other == 0 else UNKNOWN


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _unclear(heading: str, cell: str) -> str:
    if not cell:
        return f"blank in column {heading} ({NO_RULE}blank)"
    if _number(cell) == -1:
        return f"-1 in column {heading} ({NO_RULE}uncertain)"
    return f"{short(cell)} in column {heading} ({NO_CELL})"
