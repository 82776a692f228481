"""The section of a report on what evaluators say of single outputs, how sure their scores are, and of subgroups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from protofed.common.protocol.messages import QUALIFIED, score_family
from protofed.common.protocol.scores import name_ends
from protofed.deploy.report.document import Section, formatted, in_percent, label
from protofed.deploy.run_view import ABOUT_INTERVALS, RunView
from protofed.deploy.tables import Table

BY_OUTPUT = "global.class_"  # what the families of single classes or findings begin with


def details(record: RunView) -> Section | None:
    """Tables of the newest scored round; each is left out if no evaluator reports what it has. None: all are."""
    values = _means(record)
    tables = [
        table
        for table in (_by_output(record, values), _of_all(record, values), _by_subgroup(record, values))
        if table.rows
    ]
    lead = [ABOUT_INTERVALS] if any(name.endswith(name_ends()) for name in values) else []
    return Section("details", "Scores in detail", lead=lead, tables=tables) if tables else None


def _means(record: RunView) -> Mapping[str, float]:
    """All of the global model's scores of the newest round, the mean over evaluators."""
    sites = record.raw["classes"]["newest"]["sites"].values()
    names = {name for scores in sites for name in scores if name.startswith("global.")}
    single = {name: fmean(scores[name] for scores in sites if name in scores) for name in names}
    return single | {name: spread.mean for name, spread in record.latest_spreads.items() if name.startswith("global.")}


def _by_output(record: RunView, values: Mapping[str, float]) -> Table:
    families = _ordered(score_family(name) for name in values if name.startswith(BY_OUTPUT))
    numbers = [c for c in range(record.classes) if any(f"{family}.{c}" in values for family in families)]
    rows = [[record.name(c), *(_cell(values, f"{family}.{c}") for family in families)] for c in numbers]
    return Table(f"Each class or finding in round {record.newest}", ["", *map(_heading, families)], rows)


def _of_all(record: RunView, values: Mapping[str, float]) -> Table:
    low, _ = name_ends()
    names = [name for name in _ordered(values) if f"{name}{QUALIFIED}{low}" in values and score_family(name) == name]
    rows = [[_heading(name), _cell(values, name)] for name in names]
    return Table(f"The global model in round {record.newest}", ["score", "value"], rows)


def _by_subgroup(record: RunView, values: Mapping[str, float]) -> Table:
    """Scores of all classes or findings together, by the recipe's subgroups."""
    subgroups = [
        f"{column}={value}"
        for column, named in record.recipe.get("evaluation", {}).get("subgroups", {}).items()
        for value in named
    ]
    there = {name for name in values if name.partition(QUALIFIED)[2] in subgroups}
    families = _ordered(name.partition(QUALIFIED)[0] for name in there)
    families = [family for family in families if score_family(family) == family]
    rows = [
        [subgroup, *(_cell(values, family, subgroup) for family in families)]
        for subgroup in subgroups
        if any(f"{family}{QUALIFIED}{subgroup}" in values for family in families)
    ]
    return Table(f"Subgroups of the test set in round {record.newest}", ["subgroup", *map(_heading, families)], rows)


def _ordered(names: Iterable[str]) -> list[str]:
    return sorted(set(names))


def _heading(name: str) -> str:
    return f"{label(name)}{', %' if in_percent(name) else ''}"


def _cell(values: Mapping[str, float], name: str, subgroup: str = "") -> str:
    """A score with its interval, if it has one."""
    whole = f"{name}{QUALIFIED}{subgroup}" if subgroup else name
    if whole not in values:
        return "–"
    ends = [values.get(f"{name}{QUALIFIED}{end}") for end in name_ends(subgroup)]
    shown = [formatted(score_family(name), value) for value in (values[whole], *ends) if value is not None]
    return shown[0] if len(shown) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"
