"""Sections of a report on scores: over rounds, by class, by frequency of classes, by site, and calibration."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from protofed.common.statistics import lower_is_better, spread
from protofed.deploy.report.document import Cell, Figure, Row, Section, Table
from protofed.deploy.report.plots import BLUE, GREEN, ORANGE, Panel, Series, lying, over_rounds, points, reliability
from protofed.deploy.report.record import GROUPS, RunRecord, label, percent, shown, some

WHOSE = {"global": "Global model", "personal": "Own models"}
CURVES = {  # by score, what its panel is called
    "global.accuracy": "Global model: accuracy",
    "global.balanced_accuracy": "Global model: balanced accuracy",
    "personal.pm_v": "Own models: on the site's classes, PM(V)",
    "personal.pm_l": "Own models: by class frequency, PM(L)",
    "personal.balanced_accuracy": "Own models: balanced accuracy",
    "personal.local.accuracy": "Own models: on own test sets",
    "global.local.accuracy": "Global model: on the sites' test sets",
}
FAIR = ("personal.pm_v", "personal.pm_l", "personal.balanced_accuracy", "personal.local.accuracy")
MOST_CLASSES = 100  # drawn; of more, those that are found least
PROBABILITIES = "add `[evaluation] probabilities = true` to the recipe"
RELIABILITY = "global.reliability"
POLICY = "the sites' policies must name"


def curves(facts: RunRecord) -> Section:
    """Scores and losses over rounds."""
    panels = [Panel(title, "%", found) for name, title in CURVES.items() if (found := facts.series(name))]
    if losses := facts.losses():
        panels.append(Panel("Training loss at the sites", "", losses))
    if not panels:
        return Section("curves", "Over the rounds", missing=["No round has been scored yet."])
    says = "; ".join(_course(panel) for panel in panels)
    numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], _means(panels), 0, folded=True)
    drawn = Figure("Scores over the rounds", f"{says}.", over_rounds(panels), numbers)
    lead = "Lines are means over sites, bands reach from the worst to the best site."
    return Section("curves", "Over the rounds", lead=[lead], figures=[drawn])


def by_class(facts: RunRecord) -> Section:
    """Recall: the share of a class's test images that a model finds."""
    newest = {whose: _recalls(facts, "newest", whose) for whose in WHOSE}
    missing = [_unsaid(whose) for whose, found in newest.items() if not found]
    if not any(newest.values()):
        return Section("classes", "Class by class", missing=missing)
    rounds = {which: facts.round_of(which) for which in ("newest", "best")}
    series, series_of = [], {"global": (BLUE, "o"), "personal": (ORANGE, "^")}
    for whose, (colour, marker) in series_of.items():
        for which in ("newest", "best") if rounds["newest"] != rounds["best"] else ("newest",):
            if found := _recalls(facts, which, whose):
                text = f"{WHOSE[whose]}, {which} scores (round {rounds[which]})"
                series.append(
                    Series(text, {facts.name(c): v for c, v in found.items()}, colour, marker, hollow=which == "best")
                )
    low = {c: min(found[c] for found in newest.values() if c in found) for c in sorted(set().union(*newest.values()))}
    shown_ = sorted(sorted(low, key=lambda c: (low[c], c))[:MOST_CLASSES])
    says = f"Recall of each class in %, from 0 to 100. {_least(facts, newest)}."
    title = (
        "Recall by class" if len(shown_) == len(low) else f"Recall of the {len(shown_)} classes that are found least"
    )
    numbers = _recall_table(facts, rounds)
    drawn = Figure(title, says, points([facts.name(c) for c in shown_], series, "class"), numbers)
    lead = ["Recall is the share of a class's test images that a model names rightly; own models: mean over sites."]
    if rounds["newest"] != rounds["best"]:
        lead.append(f"The best round is that with the largest {facts.record['classes']['judged_by']}.")
    return Section("classes", "Class by class", lead=lead, figures=[drawn], missing=missing)


def groups(facts: RunRecord) -> Section:
    """Many, medium, few."""
    rows: list[Row] = []
    for whose, name in WHOSE.items():
        found = [facts.last.get(f"{whose}.{group}") for group in GROUPS]
        if any(one is not None for one in found):
            rows.append([name, *("–" if one is None else shown("", one.mean) for one in found)])
    if not rows:
        how = (
            "Not scored: add `[evaluation] frequency_groups = true` to the recipe, with `class_order` if class 0 is "
            "not the commonest."
        )
        return Section("groups", "Frequent and rare classes", missing=[how])
    header = ["model", "many (commonest 20 %)", "medium (next 30 %)", "few (rarest 50 %)", "mean of the three"]
    table = Table(f"Accuracy on groups of classes in round {facts.newest}, in %", header, rows)
    return Section("groups", "Frequent and rare classes", tables=[table])


def fairness(facts: RunRecord) -> Section:
    """How different the sites' own models do."""
    names = [name for name in FAIR if name in facts.last]
    if not names:
        how = f"No site has reported a score of its own model: {POLICY} `personal.pm_v` and the like (`metrics`)."
        return Section("fairness", "Site by site", missing=[how])
    sites = sorted({site for name in names for site in facts.own(name)})
    looks = zip(names, (BLUE, ORANGE, GREEN, "black"), ("o", "^", "s", "D"), strict=False)
    series = [Series(CURVES[name], facts.own(name), colour, marker) for name, colour, marker in looks]
    says = "; ".join(_apart(facts, name) for name in names)
    drawn = Figure("Every site's own model", f"{says}.", lying(sites, series))
    return Section("fairness", "Site by site", figures=[drawn], tables=[_site_table(facts, names, sites)])


def calibration(facts: RunRecord) -> Section:
    """Whether a model is right as often as it is sure."""
    panels = [
        Panel(f"{WHOSE[whose]}: calibration error", "", found)
        for whose in WHOSE
        if (found := facts.series(f"{whose}.ece"))
    ]
    if not panels:
        return Section("calibration", "Calibration", missing=[f"Not scored: {PROBABILITIES}."])
    numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], _means(panels, 4), 0, folded=True)
    says = "; ".join(f"{p.title}: {np.mean(p.values[max(p.values)]):.3f} in round {max(p.values)}" for p in panels)
    figures = [Figure("Expected calibration error over the rounds", f"{says}.", over_rounds(panels), numbers)]
    bins = _bins(facts)
    if bins:
        figures.append(_reliability(facts, bins))
    lead = ["A model is well calibrated if, of all answers of which it is 80 % sure, 80 % are right. 0 is perfect."]
    missing = [] if bins else [f"No reliability diagram: it takes an evaluator whose policy names `{RELIABILITY}.*`."]
    return Section("calibration", "Calibration", lead=lead, figures=figures, missing=missing)


def _bins(facts: RunRecord) -> dict[int, tuple[float, float, float]]:
    """By bin: accuracy, mean confidence, share of the answers; means over evaluators."""
    read = [facts.by_class("newest", f"{RELIABILITY}.{name}") for name in ("accuracy", "confidence", "share")]
    numbers = sorted(set(read[0]) & set(read[1]) & set(read[2]))
    accuracy, confidence, share = ({n: float(np.mean(list(of[n].values()))) for n in numbers} for of in read)
    return {n: (accuracy[n], confidence[n], share[n]) for n in numbers}


def _reliability(facts: RunRecord, bins: Mapping[int, tuple[float, float, float]]) -> Figure:
    sure = max(bins, key=lambda number: bins[number][2])
    accuracy, confidence, share = bins[sure]
    says = (
        f"Most answers ({percent(share)}) are {percent(confidence)} sure on average, and {percent(accuracy)} of them "
        "are right. Points below the dashed line: the model is surer than it should be. Large points: many answers."
    )
    rows = [[str(n), *(shown("", value) for value in of)] for n, of in bins.items()]
    header = ["bin", "right, %", "sure, %", "share of the answers, %"]
    numbers = Table("The numbers behind", header, rows, 0, folded=True)
    return Figure(f"Reliability of the global model in round {facts.newest}", says, reliability(bins), numbers)


def _course(panel: Panel) -> str:
    first, last = min(panel.values), max(panel.values)
    form = percent if panel.unit == "%" else "{:.3f}".format
    began, ended = (form(float(np.mean(panel.values[number]))) for number in (first, last))
    return f"{panel.title}: {began} in round {first}, {ended} in round {last}"


def _means(panels: list[Panel], digits: int = 3) -> list[list[str]]:
    rows = []
    for number in some(sorted(set().union(*(panel.values for panel in panels)))):
        cells = []
        for panel in panels:
            mean = float(np.mean(panel.values[number])) if number in panel.values else None
            cells.append("–" if mean is None else f"{100 * mean:.1f}" if panel.unit == "%" else f"{mean:.{digits}f}")
        rows.append([str(number), *cells])
    return rows


def _recalls(facts: RunRecord, which: str, whose: str) -> dict[int, float]:
    return {c: float(np.mean(list(of.values()))) for c, of in facts.by_class(which, f"{whose}.recall").items()}


def _least(facts: RunRecord, newest: Mapping[str, Mapping[int, float]]) -> str:
    told = []
    for whose, found in newest.items():
        if found:
            worst = min(found, key=lambda c: (found[c], c))
            find = "finds" if whose == "global" else "find"
            told.append(f"{WHOSE[whose]} {find} class {facts.name(worst)} least: {percent(found[worst])}")
    return "; ".join(told)


def _recall_table(facts: RunRecord, rounds: Mapping[str, int | None]) -> Table:
    shared = [_recalls(facts, which, "global") for which in rounds]
    own = facts.by_class("newest", "personal.recall")
    best = _recalls(facts, "best", "personal")
    rows = []
    for c in sorted(set().union(*shared, own)):
        values = list(own.get(c, {}).values())
        extent = f"{shown('', min(values))} to {shown('', max(values))}" if values else "–"
        mean = shown("", float(np.mean(values))) if values else "–"
        told = [shown("", of[c]) if c in of else "–" for of in shared]
        rows.append([facts.name(c), *told, mean, shown("", best[c]) if c in best else "–", extent])
    header = ["class", "global, newest", "global, best", "own, newest", "own, best", "own, newest: worst to best site"]
    return Table("The numbers behind, in %", header, rows, 0, folded=True)


def _unsaid(whose: str) -> str:
    if whose == "global":
        return "No recalls of the global model: they take an evaluator (`--role evaluator`) and a global model."
    return f"No recalls of the sites' own models: {POLICY} `personal.recall`, which tells of a site's classes."


def _apart(facts: RunRecord, name: str) -> str:
    own, told = facts.own(name), facts.last[name]
    (worst, least), best = facts.worst(name), max(own, key=lambda site: own[site])
    return (
        f"{CURVES[name]}: mean {percent(told.mean)}, standard deviation {100 * told.std:.1f}, worst {worst} with "
        f"{percent(least)}, best {best} with {percent(own[best])}"
    )


def _site_table(facts: RunRecord, names: list[str], sites: list[str]) -> Table:
    own = {name: facts.own(name) for name in names}
    rows: list[Row] = [
        [site, *(shown(name, own[name][site]) if site in own[name] else "–" for name in names)] for site in sites
    ]
    for what in ("mean", "std", "worst"):
        told = {n: getattr(spread(list(own[n].values()), lower_is_better(n)), what) for n in names}
        rows.append([Cell(what, "total"), *(Cell(shown(name, told[name]), "total") for name in names)])
    return Table(f"Own models in round {facts.newest}, in %", ["site", *map(label, names)], rows)
