"""A comparison for programs: exact fractions, as CSV by seed and as JSON with all that was computed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from protofed.common.csv_cells import Table as CsvTable
from protofed.deploy.experiments.paired import CONFIDENCE, PairedDifference, smallest_p
from protofed.deploy.experiments.shown import markdown
from protofed.deploy.experiments.table import Comparison, ComparisonRow
from protofed.deploy.experiments.tuning import TunedRecipe
from protofed.server.rounds.scores.model_warnings import ModelWarning


def comma_separated(comparison: Comparison) -> str:
    """Exact fractions: a line for each recipe and seed, then its mean and standard deviation."""
    text = io.StringIO()
    written = CsvTable(text, "\n")
    headers = [column.header for column in comparison.columns]
    written.row(["recipe", "seed", *headers])
    for row in comparison.rows:
        for seed in row.finished:
            written.row([row.label, seed, *(row.values[header].get(seed, "") for header in headers)])
        over = [row.over_seeds(header) for header in headers]
        written.row([row.label, "mean", *("" if found is None else found.mean for found in over)])
        written.row([row.label, "std", *("" if found is None or found.std is None else found.std for found in over)])
    return text.getvalue()


def as_json(comparison: Comparison) -> str:
    """Exact fractions, by recipe, column and seed; differences by column and recipe."""
    options, told = comparison.options, comparison.warnings
    content = {
        "columns": {column.header: column.meaning for column in comparison.columns},
        "rounds_shortened_to": options.shortened,
        "rows": [_row(comparison, row, told) for row in comparison.rows],
        "differences": {
            "against": comparison.against,
            "confidence": CONFIDENCE,
            "interval": "Student's t of the paired differences",
            "test": "sign flips of the paired differences, two-sided; Holm's correction over the rows of a column",
            "columns": {
                header: {label: _difference(of) for label, of in found.items()}
                for header, found in comparison.differences.items()
                if found
            },
        },
        "tuning": [_tuned(one) for one in options.tuned],
        "other_code": {label: list(seeds) for label, seeds in options.other_code.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def _row(comparison: Comparison, of: ComparisonRow, told: Sequence[tuple[str, int, ModelWarning]]) -> dict[str, object]:
    values = {}
    for column in comparison.columns:
        if (over := of.over_seeds(column.header)) is not None:
            values[column.header] = {"mean": over.mean, "std": over.std, "seeds": of.values[column.header]}
    results = comparison.results[of.label]
    warnings = [{"seed": seed, **found.plain()} for label, seed, found in told if label == of.label]
    return {
        "recipe": of.label,
        "personal_test_images": results[0].recipe.evaluation.personal_test_images if results else None,
        "seeds": of.seeds,
        "values": values,
        "seconds": {result.recipe.seed: result.seconds for result in results},
        "states": {result.recipe.seed: result.state for result in results},
        "warnings": warnings,
    }


def _difference(of: PairedDifference) -> Mapping[str, Any]:
    least = None if of.p is None else smallest_p(len(of.seeds))
    return {**asdict(of), "smallest_p": least, "significant": of.significant}


def _tuned(one: TunedRecipe) -> dict[str, object]:
    chosen = one.chosen
    return {
        "recipe": one.recipe,
        "score": None if one.score is None else one.score.header,
        "validation_fraction": one.fraction,
        "trials": [{**asdict(trial), "mean": trial.mean} for trial in one.trials],
        "chosen": None if chosen is None else dict(chosen.settings),
        "at_edge": one.at_edge,
    }


FORMATS: dict[str, Callable[[Comparison], str]] = {"md": markdown, "csv": comma_separated, "json": as_json}
