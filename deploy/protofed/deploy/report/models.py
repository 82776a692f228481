"""Sections of a report on models and on the run itself: prototypes, norms by class, settings, provenance."""

from __future__ import annotations

import numpy as np

from protofed.common.payload import Array
from protofed.deploy.plots import Panel, matrix, over_rounds
from protofed.deploy.report.document import Figure, Section, thinned, utc
from protofed.deploy.run_view import RunView
from protofed.deploy.shipped import leaves
from protofed.deploy.tables import Table

FIGURES = {
    "prototype_shift": "Prototypes: mean shift from round to round",
    "prototype_min_distance": "Prototypes: smallest distance between two classes",
}
MAX_PAIRS = 10
MAX_IN_TABLE = 30  # classes


def prototypes(record: RunView) -> Section:
    """Cosines between the prototypes of the newest state, and how far prototypes move from round to round."""
    section = record.raw["prototypes"]
    figures, missing = [], []
    if section["cosines"]:
        figures.append(_similarity(_array(section["cosines"]), record.names, section["round"]))
    else:
        missing.append(_no_similarity(record))
    if (drift := _drift(record)) is not None:
        figures.append(drift)
    elif section["cosines"]:
        missing.append("No drift by round: it is recorded from the second round on, by servers of this version.")
    lead = ["A prototype is what a class looks like to the model on average; alike prototypes are easily confused."]
    return Section("prototypes", "Prototypes", lead=lead if figures else [], figures=figures, missing=missing)


def _no_similarity(record: RunView) -> str:
    """Why there are no cosines between prototypes."""
    if record.raw["prototypes"]["round"] is not None:
        method = record.recipe["method"]["name"]
        return f"No prototypes: `{method}` has none, or not yet, or the classes are too many for a picture."
    has_state = any(attempt["state"] for attempt in record.attempts)
    why = "no state of the run is kept any more (`keep_rounds`)" if has_state else "no model was made yet"
    return f"No similarity of prototypes: {why}."


def _drift(record: RunView) -> Figure | None:
    """How far prototypes move from round to round, and how close two classes are; None: not recorded."""
    panels = [
        Panel(title, "", {n: [v] for n, v in values_by_round.items()})
        for name, title in FIGURES.items()
        if (values_by_round := record.statistics(name))
    ]
    if not panels:
        return None
    description = "; ".join(f"{p.title}: {p.values[max(p.values)][0]:.3f} in round {max(p.values)}" for p in panels)
    rounds = thinned(sorted(set().union(*(p.values for p in panels))))
    rows = [[str(n), *(f"{p.values[n][0]:.4f}" if n in p.values else "–" for p in panels)] for n in rounds]
    numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], rows, 0, folded=True)
    return Figure("Drift of the prototypes", f"{description}. Cosine distances.", over_rounds(panels), numbers)


def norms(record: RunView) -> Section:
    """Norms by class of the heads or prototypes that sites sent last: they hint at which classes a site has."""
    section = record.raw["norms"]
    title = "Norms by class and site"
    if not section["sites"]:
        not_kept = (
            "the method sends neither a head nor prototypes by class. Or the server keeps no update any more "
            "(`keep_rounds`). Or a picture has no room for so many classes."
        )
        missing = f"Nothing to show: {not_kept if record.done else 'no update has been used.'}"
        return Section("norms", title, missing=[missing])
    sites = sorted(section["sites"])
    values = _array([section["sites"][site] for site in sites])  # [K, C]
    noun = "rows of the head" if section["part"] == "head" else "prototypes"
    absent = int(np.isnan(values).sum())
    description = (
        f"Norms of the {noun} that {len(sites)} sites sent in round {section['round']}, between {_extent(values)}."
    )
    if np.nanmax(values) - np.nanmin(values) < 0.005:
        description += " All are equal: the method sends directions, so only which of them were sent says anything."
    description += (
        f" Grey: {absent} pairs of a class and a site: the site sent nothing for the class." if absent else ""
    )
    if section["part"] == "head":
        lead = "In a trained head, a class that is common at a site tends to have a larger norm: this page hints at it."
    else:
        lead = "Which prototypes a site sent tells which classes it has."
    classes = record.names
    table = _matrix_table(values.T, classes, sites, "class")
    drawn = Figure(f"Norms of the {noun}", description, matrix(values.T, classes, sites, "norm", signed=False), table)
    return Section("norms", title, lead=[lead], figures=[drawn])


def settings(record: RunView) -> Section:
    """The recipe's keys and values."""
    rows = [[key, _value(value)] for key, value in leaves(record.recipe)]
    header = ["key", "value"]
    return Section(
        "settings", "Settings", tables=[Table("The recipe of the run", header, rows, text_columns=2, css_class="long")]
    )


def provenance(record: RunView) -> Section:
    """Names, versions and digests that identify the run and its states, for checks."""
    run, versions = record.run, record.raw["versions"]
    rows = [
        ["run", run["name"]],
        ["queued", utc(run["began_at"])],
        ["ended", utc(run["ended_at"])],
        ["protofed that made this report's data", versions["protofed"]],
        ["protocol", str(versions["protocol"])],
        ["digest of the recipe (BLAKE3)", run["fingerprint"]],
    ]
    published = [attempt for attempt in record.attempts if attempt["state"]]
    states = [
        [str(one["round"]), utc(one["closed_at"]), "no" if one["outcome"] == "rolled-back" else "yes", one["state"]]
        for one in published
    ]
    newest = [one for one in published if one["outcome"] != "rolled-back"][-1:]
    rows += [[f"digest of the state after round {one['round']}", one["state"]] for one in newest]
    tables = [Table("The run", ["what", "value"], rows, text_columns=2, css_class="digests")]
    if states:
        header = ["round", "published", "counts", "digest (BLAKE3) of the state"]
        tables.append(
            Table(f"All {len(states)} states", header, states, text_columns=4, folded=True, css_class="digests")
        )
    lead = "`protofed runs verify` computes the states that are kept again from the updates, and compares the digests."
    return Section("provenance", "Versions and provenance", lead=[lead], tables=tables)


def _similarity(values: Array, names: list[str], number: int) -> Figure:
    off_diagonal = np.where(np.eye(len(values), dtype=bool), np.nan, values)  # ones there would dim all other colours
    upper = np.where(np.triu(np.ones_like(values), 1) > 0, values, np.nan)
    order = [int(place) for place in np.argsort(-upper, axis=None) if np.isfinite(upper.flat[place])][:MAX_PAIRS]
    pairs = [(place // len(values), place % len(values)) for place in order]
    rows = [[f"{names[a]} and {names[b]}", f"{values[a, b]:.3f}"] for a, b in pairs]
    description = (
        f"Cosines between the prototypes of {len(values)} classes after round {number}; 1: the same direction."
    )
    if pairs:
        a, b = pairs[0]
        description += f" Most alike are classes {names[a]} and {names[b]} with {values[a, b]:.2f}."
    if len(values) <= MAX_IN_TABLE:
        numbers = _matrix_table(values, names, names, "class")
    else:
        numbers = Table("The most alike pairs of classes", ["classes", "cosine"], rows, folded=True)
    picture = matrix(off_diagonal, names, names, "cosine", signed=True)
    return Figure("Similarity of the prototypes", description, picture, numbers)


def _matrix_table(values: Array, rows: list[str], columns: list[str], row_noun: str) -> Table:
    """A table of values [rows, columns]; NaN is a dash."""
    cells = [[name, *("–" if np.isnan(v) else f"{v:.2f}" for v in row)] for name, row in zip(rows, values, strict=True)]
    return Table("The numbers behind", [row_noun, *columns], cells, folded=True)


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
