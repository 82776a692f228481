"""How sure an evaluator's scores are, and what they are on parts of its test set: bootstrap intervals and subgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import structlog
import torch
from torch import Tensor

from protofed.client.data.examples import Examples
from protofed.client.task import ClientTask, Predictions
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import QUALIFIED, score_family
from protofed.common.protocol.scores import may_be_qualified, name_ends

log = structlog.get_logger()
MIN_SUBGROUP = 50  # patients, or images where there are no groups: of fewer a score says little
LEVELS = (2.5, 97.5)  # percentiles of the resamples
MIN_DEFINED = 0.9  # share of the resamples in which a score must be defined, to have an interval


def qualified_scores(
    test: str, predictions: Predictions, examples: Examples, task: ClientTask, trained_on: Tensor, recipe: Recipe
) -> dict[str, float]:
    """`<test>.<score>@low` and `@high`, and `<test>.<score>@sex=F`, as far as the recipe asks for them.

    Args:
        predictions: for all `examples`.
        trained_on: as of `ClientTask.scores`.
    """

    def scored(chosen: Tensor) -> Mapping[str, float]:
        values = task.scores(predictions.of_some(chosen), test, trained_on, recipe)
        named = {f"{test}.{name}": value for name, value in values.items()}
        return {name: value for name, value in named.items() if may_be_qualified(score_family(name))}

    units = torch.arange(len(examples)) if examples.units is None else examples.units
    parts = dict(_parts(examples, units, recipe))
    if silent := [subgroup for subgroup in recipe.evaluation.subgroup_names if subgroup not in parts]:
        log.warning(
            "some subgroups have no scores: no column, no image with their value, or too few patients",
            run=recipe.name,
            subgroups=silent,
            needed=f"a column in data.subgroup_columns, and {MIN_SUBGROUP} patients, or images without groups",
        )
    found = dict[str, float]()
    for subgroup, rows in parts.items():
        if subgroup:
            found |= {f"{name}{QUALIFIED}{subgroup}": value for name, value in scored(rows).items()}
        if recipe.evaluation.intervals is None:
            continue
        resampled = dict[str, list[float]]()
        for drawn in _resamples(rows, units[rows], recipe.evaluation.intervals, recipe.seed):
            for name, value in scored(drawn).items():
                resampled.setdefault(name, []).append(value)
        for name, values in resampled.items():
            if len(values) >= MIN_DEFINED * recipe.evaluation.intervals:
                ends = zip(name_ends(subgroup), np.percentile(values, LEVELS), strict=True)
                found |= {f"{name}{QUALIFIED}{end}": float(value) for end, value in ends}
    return found


def _parts(examples: Examples, units: Tensor, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """The whole test set, of no name, then the subgroups that the recipe names and that are large enough: rows [n]."""
    yield "", torch.arange(len(examples))
    for name in recipe.evaluation.subgroup_names:
        inside = examples.subgroups.get(name)
        if inside is not None and len(set(units[inside].tolist())) >= MIN_SUBGROUP:
            yield name, inside.nonzero().flatten()


def _resamples(rows: Tensor, units: Tensor, number: int, seed: int) -> Iterator[Tensor]:
    """Rows of as many units as there are, drawn with replacement, each with all of its examples."""
    rng = np.random.default_rng(seed)
    _, unit = torch.unique(units, return_inverse=True)
    by_unit = torch.split(rows[unit.argsort(stable=True)], unit.bincount().tolist())
    for _ in range(number):
        yield torch.cat([by_unit[one] for one in rng.integers(len(by_unit), size=len(by_unit))])
