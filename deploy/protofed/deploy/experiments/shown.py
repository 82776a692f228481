"""A comparison as text: tables for people, on a terminal and in Markdown, with captions made of what they show."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from protofed.common.csv_cells import CsvTable
from protofed.common.errors import count
from protofed.deploy import tables
from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.summary import TableColumn
from protofed.deploy.experiments.table import (
    CONFIDENCE,
    Comparison,
    ComparisonRow,
    PairedDifference,
    can_show,
    smallest_p,
)
from protofed.deploy.experiments.tuning import Trial, TunedRecipe
from protofed.deploy.run_view import warning_lines
from protofed.deploy.tables import Table
from protofed.server.rounds.scores.model_warnings import ModelWarning

NOTHING = "–"
FEW = 0.5  # of the last digit: a cost's deviation that rounds to 0 is not shown


def show(comparison: Comparison, console: Console) -> None:
    """For people; a table that is too wide for them is cut into several, one below the other."""
    for grid in grids(comparison):
        tables.show(grid, console)
    for line in notes(comparison):
        console.print(Text(line, "bold yellow"))


def markdown(comparison: Comparison) -> str:
    """As Markdown tables with their captions."""
    return "\n".join([*map(tables.markdown, grids(comparison)), *(f"{note}\n" for note in notes(comparison))])


def grids(comparison: Comparison, *, every_column: bool = False) -> list[Table]:
    """Scores, differences and the search, as far as there are any.

    Args:
        every_column: differences of all of them, and not of the tested ones alone.
    """
    columns = comparison.columns if every_column else comparison.tested
    differing = [column for column in columns if comparison.differences[column.header]]
    tuned = comparison.options.tuned
    grid_list = [_scores(comparison), _differences(comparison, differing) if differing else None]
    return [grid for grid in (*grid_list, _search(tuned) if tuned else None) if grid is not None]


def notes(comparison: Comparison) -> list[str]:
    """What speaks against the models, by recipe and seed; and which results are of other code."""
    by_run: dict[tuple[str, int], list[ModelWarning]] = {}
    for label, seed, warning in comparison.warnings:
        by_run.setdefault((label, seed), []).append(warning)
    lines = [
        f"{label}, seed {seed}: {line}"
        for (label, seed), warnings in by_run.items()
        for line in warning_lines(warnings, "--format json")
    ]
    if other := comparison.options.other_code:
        which = "; ".join(f"{label}, seeds {', '.join(map(str, seeds))}" for label, seeds in other.items())
        lines.append(f"Computed by other code than the installed one: {which}.")
    return lines


def cell(row: ComparisonRow, column: TableColumn) -> str:
    """Mean ± deviation; of fewer seeds than have ended, how many have the number."""
    if (over := row.over_seeds(column.header)) is None:
        return NOTHING
    numbers = [over.mean]
    negligible = column.cost and over.std is not None and over.std < FEW * 10.0**-column.digits
    if over.std is not None and not negligible:
        numbers.append(over.std)
    having, ended = len(row.values[column.header]), len(row.finished)
    coverage = f" ({having} of {ended})" if having < ended else ""
    return f"{' ± '.join(number(value, column) for value in numbers)}{coverage}"


def number(value: float, column: TableColumn, sign: str = "") -> str:
    """A column's value, shares in percent."""
    return f"{100 * value if column.percent else value:{sign}.{column.digits}f}"


def difference(pair: PairedDifference, column: TableColumn) -> str:
    """Mean [interval] p, with a star if it is significant."""
    mean = number(pair.mean, column, "+")
    if pair.low is None or pair.high is None or pair.corrected is None:
        return mean
    interval = f"[{number(pair.low, column, '+')}, {number(pair.high, column, '+')}]"
    digits = 2 if pair.corrected >= 0.1 else 3  # 0.052 must not look like 0.05
    p = f"{pair.corrected:.{digits}f}" if pair.corrected >= 0.001 else "<0.001"
    return f"{mean} {interval} p {p}{'*' if pair.significant else ''}"


def setting(trial: Trial) -> str:
    """Such as `0.1`, or `0.1, 10` of a grid."""
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in trial.settings.values())


def describe_sample(result: Result) -> str:
    """`a stratified 2,000 of 10,000`: images that sites' own models were scored on; empty: all of the shared ones."""
    most, of = result.recipe.evaluation.personal_test_images, result.test_images
    if most is None or most >= of:
        return ""
    return f"a stratified {most:,} of {of:,}"


def _scores(comparison: Comparison) -> Table:
    chosen = {one.recipe: one.chosen for one in comparison.options.tuned}
    header = ["recipe", "seeds", *(["tuned"] if chosen else []), *(column.header for column in comparison.columns)]
    rows = [
        [
            row.label,
            _seeds(row),
            *([_chosen(chosen[row.label])] if chosen else []),
            *(cell(row, column) for column in comparison.columns),
        ]
        for row in comparison.rows
    ]
    return Table("", header, rows, note=caption(comparison), key="scores")


def caption(comparison: Comparison) -> str:
    """What the numbers are."""
    if not comparison.columns:
        return "No run has finished: there is nothing to compare yet."
    headers: dict[str, list[str]] = {}
    for column in comparison.columns:
        headers.setdefault(column.meaning, []).append(column.header)
    meanings = "; ".join(f"{', '.join(of_one)}: {meaning}" for meaning, of_one in headers.items())
    several = any(len(row.seeds) > 1 for row in comparison.rows)
    over = "Mean ± sample standard deviation (n - 1) over seeds. " if several else ""
    plain = [column for column in comparison.columns if not column.percent]
    losses, costs = any(not column.cost for column in plain), any(column.cost for column in plain)
    unscaled = " and ".join(word for word, present in (("losses", losses), ("costs", costs)) if present)
    unit = f"In %, {unscaled} as they are." if unscaled else "In %."
    shortened = comparison.options.shortened
    cut = f" Rounds shortened to {shortened}." if shortened else ""
    return f"{meanings}. {over}{unit}{cut}{_sampled(comparison)}{_noisy(comparison)}"


def _sampled(comparison: Comparison) -> str:
    """On how many of the shared test images sites' own models were scored, where not on all."""
    by_sample: dict[str, list[str]] = {}
    for label, results in comparison.results.items():
        for text in {describe_sample(result) for result in results}:
            by_sample.setdefault(text, []).append(label)
    of = {text: "" if len(by_sample) == 1 else f" ({', '.join(labels)})" for text, labels in by_sample.items()}
    return "".join(f" Sites' own models: on {text} test images{of[text]}." for text in by_sample if text)


def _noisy(comparison: Comparison) -> str:
    """The recipes without scores of the sites' own, because their runs have noise."""
    labels = [
        label for label, results in comparison.results.items() if any(one.recipe.plan.dp is not None for one in results)
    ]
    every = len(labels) == len(comparison.results)
    of = "" if every else f" ({', '.join(labels)})"
    return f" With plan.dp{of} sites' own scores stay at the sites, as they have no noise." if labels else ""


def _differences(comparison: Comparison, columns: Sequence[TableColumn]) -> Table:
    by_column = comparison.differences
    labels = [row.label for row in comparison.rows if any(row.label in by_column[column.header] for column in columns)]

    def pairs(label: str) -> str:
        counts = {len(by_column[column.header][label].seeds) for column in columns if label in by_column[column.header]}
        return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"

    def shown(label: str, column: TableColumn) -> str:
        of = by_column[column.header].get(label)
        return NOTHING if of is None else difference(of, column)

    rows = [[label, pairs(label), *(shown(label, column) for column in columns)] for label in labels]
    header = ["recipe", "pairs", *(column.header for column in columns)]
    title = f"Differences to {comparison.against}, seed by seed"
    return Table(title, header, rows, note=differences_caption(comparison, columns), key="differences")


def differences_caption(comparison: Comparison, columns: Sequence[TableColumn]) -> str:
    """What the differences are, and what so many seeds can show."""
    pairs = [of for column in columns for of in comparison.differences[column.header].values()]
    seeds = {len(of.seeds) for of in pairs if of.p is not None}
    unit = "percentage points" if any(column.percent for column in columns) else "the columns' own units"
    mean = f"Mean over the seeds that both have, in {unit}"
    lower = [column.header for column in columns if column.lower_is_better]
    better = f" Lower is better: {', '.join(lower)}." if lower else ""
    if not seeds:
        one = "One seed has neither an interval nor a test: it takes several to tell a method from its luck."
        return f"{mean}. {one}{better}"
    rows = max(sum(of.p is not None for of in comparison.differences[column.header].values()) for column in columns)
    star = "; * p ≤ 0.05" if any(of.significant for of in pairs) else ""
    return (
        f"{mean} [95 % interval, Student's t of the differences]; p: exact two-sided sign-flip test of them, with "
        f"Holm's correction over the rows of a column{star}. The interval takes differences as normal, the test does "
        f"not. {can_show(seeds, rows)}{better}"
    )


def _search(tuned: Sequence[TunedRecipe]) -> Table:
    first = tuned[0].trials
    header = ["recipe", "by", *(setting(trial) for trial in first), "chosen"]
    rows = [[one.recipe, _by(one), *(_tried(one, trial) for trial in one.trials), _chosen(one.chosen)] for one in tuned]
    return Table(
        f"Tuned: {', '.join(first[0].settings)}", header, rows, text_columns=2, note=tuning_caption(tuned), key="tuning"
    )


def tuning_caption(tuned: Sequence[TunedRecipe]) -> str:
    """The search's budget, what it was scored on, and its result."""
    trials = tuned[0].trials
    seeds = len(trials[0].scores) + len(trials[0].failed) + len(trials[0].waiting)
    fractions = " or ".join(dict.fromkeys(f"{100 * one.fraction:g} %" for one in tuned))
    runs = f"{count(len(trials), 'setting')} × {count(seeds, 'seed')} = {count(len(trials) * seeds, 'run')}"
    budget = (
        f"{runs} of every recipe, each as long as the compared runs. The score is the mean over seeds in the last "
        f"scored round, on a validation part ({fractions}) of each class's training images. No run of the search saw "
        "the test set. The compared runs train on all training images."
    )
    notes = []
    if any(trial.failed for one in tuned for trial in one.trials):
        notes.append("failed: a run with such settings failed or had no score, so they are not chosen.")
    if edges := [f"{one.recipe} ({', '.join(one.at_edge)})" for one in tuned if one.at_edge]:
        notes.append(f"The best value is the first or last that was tried: {', '.join(edges)}.")
    if unfinished := sum(len(trial.waiting) for one in tuned for trial in one.trials):
        notes.append(f"{count(unfinished, 'run')} of the search {'have' if unfinished > 1 else 'has'} not ended.")
    return " ".join([budget, *notes])


def _by(one: TunedRecipe) -> str:
    return NOTHING if one.score is None else one.score.header


def _tried(one: TunedRecipe, trial: Trial) -> str:
    if trial.mean is not None and one.score is not None:
        return number(trial.mean, one.score)
    return "failed" if trial.failed else NOTHING


def _chosen(trial: Trial | None) -> str:
    return NOTHING if trial is None else setting(trial)


def _seeds(row: ComparisonRow) -> str:
    finished, total = len(row.finished), len(row.seeds)
    return str(total) if finished == total else f"{finished} of {total}"


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
        written.row([row.label, "mean", *("" if summary is None else summary.mean for summary in over)])
        written.row(
            [row.label, "std", *("" if summary is None or summary.std is None else summary.std for summary in over)]
        )
    return text.getvalue()


def as_json(comparison: Comparison) -> str:
    """Exact fractions, by recipe, column and seed; differences by column and recipe."""
    options, all_warnings = comparison.options, comparison.warnings
    content = {
        "columns": {column.header: column.meaning for column in comparison.columns},
        "rounds_shortened_to": options.shortened,
        "rows": [_row(comparison, row, all_warnings) for row in comparison.rows],
        "differences": {
            "against": comparison.against,
            "confidence": CONFIDENCE,
            "interval": "Student's t of the paired differences",
            "test": "sign flips of the paired differences, two-sided; Holm's correction over the rows of a column",
            "columns": {
                header: {label: _difference(of) for label, of in by_label.items()}
                for header, by_label in comparison.differences.items()
                if by_label
            },
        },
        "tuning": [_tuned(one) for one in options.tuned],
        "other_code": {label: list(seeds) for label, seeds in options.other_code.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def _row(
    comparison: Comparison, of: ComparisonRow, all_warnings: Sequence[tuple[str, int, ModelWarning]]
) -> dict[str, object]:
    values = {}
    for column in comparison.columns:
        if (over := of.over_seeds(column.header)) is not None:
            values[column.header] = {"mean": over.mean, "std": over.std, "seeds": of.values[column.header]}
    results = comparison.results[of.label]
    warnings = [{"seed": seed, **warning.plain()} for label, seed, warning in all_warnings if label == of.label]
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
