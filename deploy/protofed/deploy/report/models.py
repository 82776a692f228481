"""Sections of a report on models and on the run itself: prototypes, norms by class, settings, provenance."""

from __future__ import annotations

import numpy as np

from protofed.common.payload import Array
from protofed.deploy.experiments.experiment import leaves
from protofed.deploy.report.document import Figure, Section, Table
from protofed.deploy.report.plots import Panel, matrix, over_rounds
from protofed.deploy.report.record import RunRecord, day, some

FIGURES = {
    "prototype_shift": "Prototypes: mean shift from round to round",
    "prototype_min_distance": "Prototypes: smallest distance between two classes",
}
MOST_PAIRS = 10
MOST_IN_TABLE = 30  # classes


def prototypes(facts: RunRecord) -> Section:
    """How alike the classes look to the model, and how much that still changes."""
    told = facts.record["prototypes"]
    figures, missing = [], []
    if told["cosines"]:
        figures.append(_similarity(_array(told["cosines"]), facts.names, told["round"]))
    elif told["round"] is None:
        missing.append("No similarity of prototypes: no state of the run is kept any more (`keep_rounds`).")
    else:
        method = facts.recipe["method"]["name"]
        missing.append(f"No prototypes: `{method}` has none, or not yet, or the classes are too many for a picture.")
    panels = [
        Panel(title, "", {n: [v] for n, v in found.items()})
        for name, title in FIGURES.items()
        if (found := facts.statistics(name))
    ]
    if panels:
        says = "; ".join(f"{p.title}: {p.values[max(p.values)][0]:.3f} in round {max(p.values)}" for p in panels)
        rounds = some(sorted(set().union(*(p.values for p in panels))))
        rows = [[str(n), *(f"{p.values[n][0]:.4f}" if n in p.values else "–" for p in panels)] for n in rounds]
        numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], rows, 0, folded=True)
        figures.append(Figure("Drift of the prototypes", f"{says}. Cosine distances.", over_rounds(panels), numbers))
    elif told["cosines"]:
        missing.append("No drift by round: it is recorded from the second round on, by servers of this version.")
    lead = ["A prototype is what a class looks like to the model on average; alike prototypes are easily confused."]
    return Section("prototypes", "Prototypes", lead=lead if figures else [], figures=figures, missing=missing)


def norms(facts: RunRecord) -> Section:
    """What the sites' last updates say of each class."""
    told = facts.record["norms"]
    title = "Norms by class and site"
    if not told["sites"]:
        how = (
            "Nothing to show: the method sends neither a head nor prototypes by class, or no update is kept any more "
            "(`keep_rounds`), or the classes are too many for a picture."
        )
        return Section("norms", title, missing=[how])
    sites = sorted(told["sites"])
    values = _array([told["sites"][site] for site in sites])  # [K, C]
    what = "rows of the head" if told["part"] == "head" else "prototypes"
    absent = int(np.isnan(values).sum())
    says = f"Norms of the {what} that {len(sites)} sites sent in round {told['round']}, between {_extent(values)}."
    if np.nanmax(values) - np.nanmin(values) < 0.005:
        says += " All are alike: the method sends directions, so only what is there and what is not tells anything."
    says += f" Grey: {absent} pairs of a class and a site of which nothing was sent." if absent else ""
    if told["part"] == "head":
        lead = "In a trained head, a class that is common at a site tends to have a larger norm: this page hints at it."
    else:
        lead = "Which prototypes a site sent tells which classes it has, unless its policy hides them behind decoys."
    classes = facts.names
    table = _matrix_table(values.T, classes, sites, "class")
    drawn = Figure(f"Norms of the {what}", says, matrix(values.T, classes, sites, "norm", signed=False), table)
    return Section("norms", title, lead=[lead], figures=[drawn])


def settings(facts: RunRecord) -> Section:
    """The recipe, key by key."""
    rows = [[key, _value(value)] for key, value in leaves(facts.recipe)]
    header = ["key", "value"]
    return Section("settings", "Settings", tables=[Table("The recipe of the run", header, rows, words=2, look="long")])


def provenance(facts: RunRecord) -> Section:
    """By what the run and its states can be found again, and checked."""
    run, versions = facts.run, facts.record["versions"]
    rows = [
        ["run", run["name"]],
        ["began", day(run["began_at"])],
        ["ended", day(run["ended_at"])],
        ["protofed that made this report's data", versions["protofed"]],
        ["protocol", str(versions["protocol"])],
        ["digest of the recipe (BLAKE3)", run["fingerprint"]],
    ]
    states = [[str(one["round"]), day(one["closed_at"]), one["state"]] for one in facts.attempts if one["state"]]
    newest = states[-1:] if states else []
    rows += [[f"digest of the state after round {number}", digest] for number, _, digest in newest]
    tables = [Table("The run", ["what", "value"], rows, words=2, look="digests")]
    if states:
        header = ["round", "published", "digest (BLAKE3) of the state"]
        tables.append(Table(f"All {len(states)} states", header, states, words=3, folded=True, look="digests"))
    lead = "`protofed runs verify` computes the states that are kept again from the updates, and compares the digests."
    return Section("provenance", "Versions and provenance", lead=[lead], tables=tables)


def _similarity(values: Array, names: list[str], number: int) -> Figure:
    apart = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    upper = np.where(np.triu(np.ones_like(values), 1) > 0, values, np.nan)
    order = [int(place) for place in np.argsort(-upper, axis=None) if np.isfinite(upper.flat[place])][:MOST_PAIRS]
    pairs = [(place // len(values), place % len(values)) for place in order]
    rows = [[f"{names[a]} and {names[b]}", f"{values[a, b]:.3f}"] for a, b in pairs]
    says = f"Cosines between the prototypes of {len(values)} classes after round {number}; 1: the same direction."
    if pairs:
        a, b = pairs[0]
        says += f" Most alike are classes {names[a]} and {names[b]} with {values[a, b]:.2f}."
    if len(values) <= MOST_IN_TABLE:
        numbers = _matrix_table(values, names, names, "class")
    else:
        numbers = Table("The most alike pairs of classes", ["classes", "cosine"], rows, folded=True)
    return Figure("Similarity of the prototypes", says, matrix(apart, names, names, "cosine", signed=True), numbers)


def _matrix_table(values: Array, rows: list[str], columns: list[str], what: str) -> Table:
    """[rows, columns]."""
    cells = [[name, *("–" if np.isnan(v) else f"{v:.2f}" for v in row)] for name, row in zip(rows, values, strict=True)]
    return Table("The numbers behind", [what, *columns], cells, folded=True)


def _array(nested: list[list[float | None]]) -> Array:
    return np.array([[np.nan if value is None else value for value in row] for row in nested])


def _extent(values: Array) -> str:
    return f"{np.nanmin(values):.2f} and {np.nanmax(values):.2f}" if np.isfinite(values).any() else "none"


def _value(value: object) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
