"""The page of a comparison: what was compared, how, with what result, and what it takes to compute it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from protofed.common.config.recipe import Recipe
from protofed.common.errors import count
from protofed.common.version import VERSION
from protofed.deploy.experiments.code_digest import CodeDigest
from protofed.deploy.experiments.curves import ROUNDS, Curves
from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.shown import NOTHING, caption, grids, notes
from protofed.deploy.experiments.table import Comparison
from protofed.deploy.report.document import Document, Figure, Section, Tile, duration, listed, render, thinned
from protofed.deploy.shipped import leaves
from protofed.deploy.tables import Row, Table
from protofed.server.method import server_methods

SEEDS = frozenset({"name", "seed", "data.seed"})  # keys that are told elsewhere, or differ by seed
OF_ONE_MACHINE = ("data.root", "data.options.", "data.dicomweb.")  # keys whose values may be paths


def page(comparison: Comparison, curves: Sequence[Curves], command: str) -> str:
    """The page as HTML, which needs no network, no script and no other file; equal results give equal pages.

    Args:
        command: that computes the same; empty: it was not kept.
    """
    return render(document(comparison, curves, command))


def document(comparison: Comparison, curves: Sequence[Curves], command: str) -> Document:
    """All that the page says. Each sentence is made from the results that it speaks of."""
    results = [result for of in comparison.results.values() for result in of]
    recipes = {label: of[0].recipe for label, of in comparison.results.items() if of}
    sections = [
        _scores(comparison, recipes),
        _curves(curves),
        *([_search(comparison)] if comparison.options.tuned else []),
        _settings(recipes),
        _provenance(comparison, results, command),
    ]
    labels = [row.label for row in comparison.rows]
    finished = [row for row in comparison.rows if row.finished]
    subtitle = (
        f"Simulated federated learning: {count(len(results), 'finished run')} of {count(len(finished), 'recipe')}"
    )
    return Document(
        f"Comparison of {listed(labels, 6)}",
        subtitle,
        _tiles(comparison, results),
        sections,
        f"Made by protofed {VERSION}.",
        notes(comparison),
    )


def _tiles(comparison: Comparison, results: Sequence[Result]) -> list[Tile]:
    if not results:
        return []
    seeds = sorted({result.recipe.seed for result in results})
    rounds = sorted({result.recipe.rounds for result in results})
    sites = sorted({len(result.train_examples) for result in results})
    shortened = comparison.options.shortened
    return [
        Tile("Recipes", str(len(comparison.rows)), f"compared with {comparison.against}"),
        Tile("Seeds", str(len(seeds)), ", ".join(map(str, seeds))),
        Tile("Rounds", _range(rounds), f"shortened to {shortened}" if shortened else "as the recipes say"),
        Tile("Sites", _range(sites)),
    ]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _scores(comparison: Comparison, recipes: Mapping[str, Recipe]) -> Section:
    by_key = {grid.key: grid for grid in grids(comparison)}
    every = {grid.key: grid for grid in grids(comparison, every_column=True)}
    lead = [f"{label} is {server_methods.about(recipe.method.name).cited}." for label, recipe in recipes.items()]
    tables = [replace(by_key["scores"], caption="Scores, mean ± standard deviation over seeds")]
    remarks = [caption(comparison)]
    if "differences" in by_key:
        tables.append(by_key["differences"])
        remarks.append(f"{by_key['differences'].caption}. {by_key['differences'].note}")
    if "differences" in every and every["differences"].header != by_key.get("differences", every["scores"]).header:
        longer = f"{every['differences'].caption}: every column"
        tables.append(replace(every["differences"], caption=longer, folded=True))
    unfinished = [row.label for row in comparison.rows if len(row.finished) < len(row.seeds)]
    missing = [f"Not all seeds have ended of {listed(unfinished)}."] if unfinished else []
    return Section("scores", "Scores", lead=lead, tables=tables, notes=remarks, missing=missing)


def _curves(curves: Sequence[Curves]) -> Section:
    drawn = [Figure(_title(one), _description(one), one.figure, _numbers(one)) for one in curves]
    missing = []
    if curves and all(one.axis is ROUNDS for one in curves):
        missing.append(
            "No curves over bytes or epochs: a round costs the same of all recipes, or its cost was not recorded."
        )
    return Section("curves", "Curves", figures=drawn, missing=missing if drawn else ["No run has scores by round."])


def _title(one: Curves) -> str:
    return one.title if one.axis is ROUNDS else f"{one.title}, over {one.axis.key}"


def _description(one: Curves) -> str:
    ends = {label: (places[-1], 100 * float(values.mean(0)[-1])) for label, (places, values) in one.series.items()}
    endings = "; ".join(f"{label} {value:.1f} % at {place:g}" for label, (place, value) in ends.items())
    return f"Where the lines end: {endings}. Horizontal: {one.axis.label}."


def _numbers(one: Curves) -> Table:
    """The curves' points, thinned: a place and a value of each recipe."""
    rows: list[Row] = []
    longest = max(len(places) for places, _ in one.series.values())
    for place in thinned(range(longest)):
        row = []
        for places, values in one.series.values():
            has_point = place < len(places)
            at = f"{places[place]:.4g}: " if has_point and one.axis is not ROUNDS else ""
            row.append(f"{at}{100 * float(np.mean(values[:, place])):.1f}" if has_point else NOTHING)
        first = next(iter(one.series.values()))[0]
        rows.append([f"{first[place]:g}" if one.axis is ROUNDS and place < len(first) else str(place + 1), *row])
    head = "round" if one.axis is ROUNDS else "point"
    return Table("The numbers behind, in %", [head, *one.series], rows, folded=True)


def _search(comparison: Comparison) -> Section:
    grid = next(grid for grid in grids(comparison) if grid.key == "tuning")
    return Section("tuning", "Tuning", tables=[grid], notes=[grid.note])


def _settings(recipes: Mapping[str, Recipe]) -> Section:
    """The keys in which recipes differ, a column a recipe; then those that they have in common."""
    by_recipe = {label: _plain(recipe) for label, recipe in recipes.items()}
    keys = list(dict.fromkeys(key for of in by_recipe.values() for key in of))
    values = {key: [of.get(key, NOTHING) for of in by_recipe.values()] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    common: list[Row] = [[key, values[key][0]] for key in keys if key not in differing]
    tables = []
    if differing:
        rows: list[Row] = [[key, *values[key]] for key in differing]
        tables.append(Table("What differs", ["key", *by_recipe], rows, text_columns=len(by_recipe) + 1))
    if common:
        what = "What all have in common" if len(by_recipe) > 1 else "The recipe"
        tables.append(Table(what, ["key", "value"], common, text_columns=2, css_class="long", folded=bool(differing)))
    lead = [
        "Keys of the recipes; a key that is not set has its default. Seeds are those of the runs and of their data."
    ]
    return Section("settings", "Settings", lead=lead if tables else [], tables=tables)


def _plain(recipe: Recipe) -> dict[str, str]:
    table = recipe.model_dump(mode="json", exclude_none=True)
    return {key: without_folder(key, _value(value)) for key, value in leaves(table) if key not in SEEDS}


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or NOTHING if isinstance(value, list) else str(value)


def without_folder(key: str, value: str) -> str:
    """A value, in quotes or not, in which a path of this machine has only its last name."""
    quote = value[:1] if value[:1] in ("'", '"') else ""
    is_path = key.startswith(OF_ONE_MACHINE) and "/" in value
    return f"{quote}…/{value.rstrip('/').rpartition('/')[2]}" if is_path else value


def _provenance(comparison: Comparison, results: Sequence[Result], command: str) -> Section:
    states: list[Row] = [
        [label, str(result.recipe.seed), duration(result.seconds), result.state]
        for label, of in comparison.results.items()
        for result in of
    ]
    lead = [
        "A digest of the code covers the modules of protofed that compute a run, the run's method and the versions of "
        "the libraries. Runs of equal recipe, seed, code and kind of machine end in the same state, bit for bit."
    ]
    rows = _made_with(comparison, results, command)
    tables = [Table("The comparison", ["what", "value"], rows, text_columns=2, css_class="digests")]
    if states:
        header = ["recipe", "seed", "time", "digest (BLAKE3) of the final state"]
        tables.append(Table("Final states", header, states, text_columns=4, css_class="digests"))
    return Section("provenance", "Versions and provenance", lead=lead, tables=tables)


def _made_with(comparison: Comparison, results: Sequence[Result], command: str) -> list[Row]:
    """The command, versions, libraries and machines that computed the results, and their time."""
    codes = {label: _codes(of) for label, of in comparison.results.items()}
    versions = dict.fromkeys(result.protofed for result in results)
    libraries = dict.fromkeys(_libraries(code) for of in codes.values() for code in of)
    machines = dict.fromkeys(result.machine for result in results)
    time = f"{duration(sum(result.seconds for result in results))} of all runs together"
    return [
        ["command", command or NOTHING],
        *(["protofed", version] for version in versions),
        *(["libraries", text] for text in libraries),
        *(["computed on", machine] for machine in machines),
        *([f"code of {label}", code.whole] for label, of in codes.items() for code in of),
        *([["time", time]] if results else []),
    ]


def _codes(results: Sequence[Result]) -> list[CodeDigest]:
    """The different ones, in order of their first appearance."""
    return list({result.code.whole: result.code for result in results}.values())


def _libraries(code: CodeDigest) -> str:
    return ", ".join(f"{library} {version}" for library, version in code.libraries.items())
