"""A comparison's table: a row a recipe, mean and standard deviation over seeds; for people and for programs."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protofed.common.config.recipe import Recipe
from protofed.common.csv_cells import Table as CsvTable
from protofed.common.statistics import spread
from protofed.deploy.console.model_warnings import sentences
from protofed.deploy.experiments.columns import TableColumn, named, summarise, usual
from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.model_warnings import warnings_about
from protofed.server.rounds.model_warnings import ModelWarning


@dataclass(frozen=True)
class OverSeeds:
    """Mean and sample standard deviation (n - 1): seeds are drawn, unlike the sites of a run, which are all there are.

    Of a single seed there is no deviation.
    """

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: list[float]) -> OverSeeds:
        """Of at least one value."""
        found, n = spread(values), len(values)
        return cls(found.mean, found.std * math.sqrt(n / (n - 1)) if n > 1 else None)


@dataclass(frozen=True)
class ComparisonRow:
    """One recipe.

    Attributes:
        seeds: all that it was to be run with.
        values: by column and seed, in fractions; seeds without result or score are left out.
    """

    label: str
    seeds: Sequence[int]
    values: Mapping[str, Mapping[int, float]]
    finished: Sequence[int]

    def over_seeds(self, column: str) -> OverSeeds | None:
        """Mean and standard deviation over the seeds that have the number."""
        values = list(self.values[column].values())
        return OverSeeds.of(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """Recipes side by side.

    Attributes:
        results: by recipe, in the order of the rows.
    """

    columns: Sequence[TableColumn]
    rows: Sequence[ComparisonRow]
    results: Mapping[str, Sequence[Result]]
    shortened: int | None

    @classmethod
    def of(
        cls, jobs: Sequence[tuple[Recipe, Result | None]], metrics: Sequence[str] = (), shortened: int | None = None
    ) -> Comparison:
        """The comparison of these jobs, finished or not.

        Args:
            metrics: names of the only columns; none: the usual ones that the results have.

        Raises:
            ConfigError: no result has such a metric.
        """
        seeds = {recipe.name: [other.seed for other, _ in jobs if other.name == recipe.name] for recipe, _ in jobs}
        results = {name: [found for recipe, found in jobs if found and recipe.name == name] for name in seeds}
        runs = {name: {result.recipe.seed: summarise(result) for result in found} for name, found in results.items()}
        all_runs = [run for by_seed in runs.values() for run in by_seed.values()]
        columns = [named(metric, all_runs) for metric in metrics] if metrics and all_runs else usual(all_runs)

        def values(name: str, column: TableColumn) -> dict[int, float]:
            read = {seed: column.read(run) for seed, run in runs[name].items()}
            return {seed: value for seed, value in read.items() if value is not None}

        rows = [
            ComparisonRow(
                name, seeds[name], {column.header: values(name, column) for column in columns}, list(runs[name])
            )
            for name in seeds
        ]
        return cls(columns, rows, results, shortened)

    @property
    def warnings(self) -> list[tuple[str, int, ModelWarning]]:
        """What speaks against the models, each with its recipe and seed."""
        runs = [(label, result) for label, results in self.results.items() for result in results]
        return [(label, result.recipe.seed, found) for label, result in runs for found in warnings_about(result)]

    @property
    def caption(self) -> str:
        """What the numbers are."""
        if not self.columns:
            return "No run has finished: there is nothing to compare yet."
        meanings = "; ".join(f"{column.header}: {column.meaning}" for column in self.columns)
        several = any(len(row.seeds) > 1 for row in self.rows)
        over = "Mean ± sample standard deviation (n - 1) over seeds. " if several else ""
        unit = "In %." if all(column.percent for column in self.columns) else "In %, losses as they are."
        cut = f" Rounds shortened to {self.shortened}." if self.shortened else ""
        return f"{meanings}. {over}{unit}{cut}{self._sampled}"

    @property
    def _sampled(self) -> str:
        """On how many of the shared test images sites' own models were scored, where not on all."""
        by_sample: dict[str, list[str]] = {}
        for label, results in self.results.items():
            for text in {sample_of(result) for result in results}:
                by_sample.setdefault(text, []).append(label)
        of = {text: "" if len(by_sample) == 1 else f" ({', '.join(labels)})" for text, labels in by_sample.items()}
        return "".join(f" Sites' own models: on {text} test images{of[text]}." for text in by_sample if text)


def sample_of(result: Result) -> str:
    """`a stratified 2,000 of 10,000`: images that sites' own models were scored on; empty: all of the shared ones."""
    most, of = result.recipe.evaluation.personal_test_images, result.test_images
    if most is None or of is None or most >= of:
        return ""
    return f"a stratified {most:,} of {of:,}"


def show(comparison: Comparison, console: Console) -> None:
    """For people; a table that is too wide for them is cut into several, one below the other."""
    grid = list(zip(_headers(comparison), *_cells(comparison), strict=True))  # a column: its header, then its cells
    for columns in _fitting(grid[1:], console.width - _width(grid[0]) - 1):
        table = Table()
        table.add_column(grid[0][0], no_wrap=True)
        for header, *_ in columns:
            table.add_column(header, justify="right", no_wrap=True)
        for cells in zip(grid[0][1:], *(column[1:] for column in columns), strict=True):
            table.add_row(*cells)
        console.print(table)
    console.print(comparison.caption, highlight=False, style="dim")
    for line in _notes(comparison):
        console.print(Text(line, "bold yellow"))


def _fitting(columns: Sequence[tuple[str, ...]], width: int) -> list[list[tuple[str, ...]]]:
    """The columns in groups of at most `width` characters, or of one column."""
    groups: list[list[tuple[str, ...]]] = [[]]
    for column in columns:
        if groups[-1] and sum(map(_width, [*groups[-1], column])) > width:
            groups.append([])
        groups[-1].append(column)
    return groups


def _width(column: tuple[str, ...]) -> int:
    """Characters, with the padding and the line that rich draws."""
    return max(map(len, column)) + 3


def markdown(comparison: Comparison) -> str:
    """As a Markdown table with its caption."""
    headers = _headers(comparison)
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *_cells(comparison)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([table, "", comparison.caption, *(f"\n{note}" for note in _notes(comparison)), ""])


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
    """Exact fractions, by recipe, column and seed."""
    told = comparison.warnings

    def row(of: ComparisonRow) -> dict[str, object]:
        values = {}
        for column in comparison.columns:
            if (over := of.over_seeds(column.header)) is not None:
                values[column.header] = {"mean": over.mean, "std": over.std, "seeds": of.values[column.header]}
        results = comparison.results[of.label]
        seconds = {result.recipe.seed: result.seconds for result in results}
        warnings = [{"seed": seed, **found.plain()} for label, seed, found in told if label == of.label]
        sampled = results[0].recipe.evaluation.personal_test_images if results else None
        return {
            "recipe": of.label,
            "personal_test_images": sampled,
            "seeds": of.seeds,
            "values": values,
            "seconds": seconds,
            "warnings": warnings,
        }

    columns = {column.header: column.meaning for column in comparison.columns}
    rows = [row(of) for of in comparison.rows]
    return json.dumps({"columns": columns, "rounds_shortened_to": comparison.shortened, "rows": rows}, indent=2) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {"md": markdown, "csv": comma_separated, "json": as_json}


def _notes(comparison: Comparison) -> list[str]:
    """What speaks against the models, by recipe and seed."""
    by_run: dict[tuple[str, int], list[ModelWarning]] = {}
    for label, seed, found in comparison.warnings:
        by_run.setdefault((label, seed), []).append(found)
    return [
        f"{label}, seed {seed}: {line}"
        for (label, seed), warnings in by_run.items()
        for line in sentences(warnings, "--format json")
    ]


def _headers(comparison: Comparison) -> list[str]:
    return ["recipe", "seeds", *(column.header for column in comparison.columns)]


def _cells(comparison: Comparison) -> list[list[str]]:
    """Rows as text: percent, mean ± deviation."""
    return [[row.label, _seeds(row), *(_cell(row, column) for column in comparison.columns)] for row in comparison.rows]


def _seeds(row: ComparisonRow) -> str:
    done, total = len(row.finished), len(row.seeds)
    return str(total) if done == total else f"{done} of {total}"


def _cell(row: ComparisonRow, column: TableColumn) -> str:
    over = row.over_seeds(column.header)
    if over is None:
        return "–"
    factor, digits = (100, 1) if column.percent else (1, 4)
    shown = (over.mean,) if over.std is None else (over.mean, over.std)
    return " ± ".join(f"{factor * value:.{digits}f}" for value in shown)
