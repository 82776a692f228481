"""Sections of a report on scores: over rounds, by class, by frequency of classes, by site, and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import count
from protofed.common.protocol.messages import score_family
from protofed.common.protocol.scores import MAJORITY, deviation, lower_is_better, spread
from protofed.deploy.plots import (
    BLUE,
    GREEN,
    ORANGE,
    Panel,
    Series,
    horizontal_points,
    over_rounds,
    points,
    reliability,
)
from protofed.deploy.report.document import Figure, Section, formatted, in_percent, label, percent, thinned
from protofed.deploy.run_view import GROUPS, RunView, from_sum, score_text
from protofed.deploy.tables import Cell, Row, Table

WHOSE = {"global": "Global model", "personal": "Own models"}
CURVES = {  # by score, what its panel is called
    "global.balanced_accuracy": "Global model: balanced accuracy",
    "global.accuracy": "Global model: accuracy",
    "personal.pm_v": "Own models: on the site's classes, PM(V)",
    "personal.pm_l": "Own models: by class frequency, PM(L)",
    "personal.balanced_accuracy": "Own models: balanced accuracy",
    "personal.local.balanced_accuracy": "Own models: balanced, on own test sets",
    "personal.local.accuracy": "Own models: accuracy on own test sets",
    "global.local.balanced_accuracy": "Global model: balanced, on the sites' own test sets",
    "global.local.accuracy": "Global model: accuracy on the sites' own test sets",
}
FAIR = ("personal.pm_v", "personal.pm_l", "personal.balanced_accuracy", "personal.local.accuracy")
MAX_CLASSES = 100  # that are drawn; of more classes, those with the least recall
PROBABILITIES = "add `[evaluation] probabilities = true` to the recipe"
FREQUENCY_GROUPS = (
    "add `[evaluation] frequency_groups = true` to the recipe, with `class_order` if class 0 is not the commonest"
)
RELIABILITY = "global.reliability"
CHANCE, COMMONEST = "chance", "commonest class"
BASELINES = {
    CHANCE: "Dashed, “chance”: the balanced accuracy of guessing, 1 of the number of classes in the test set.",
    COMMONEST: "Dashed, “commonest class”: the accuracy of always naming the test set's commonest class.",
}
Rounds: TypeAlias = Mapping[str, int | None]  # the newest scored round and the best; None: there is none
OWN_MEAN = "; own models: mean over sites"


def curves(record: RunView) -> Section:
    """Scores and training losses over rounds."""
    panels = [
        Panel(title, "%" if in_percent(name) else "", values, _baseline(record, name))
        for name, title in _titles(record).items()
        if (values := record.series(name))
    ]
    if losses := record.losses():
        panels.append(Panel("Training loss at the sites", "", losses))
    kept_note = record.kept_scores
    if not panels:
        return Section("curves", "Over the rounds", missing=[kept_note or "No round has been scored yet."])
    description = "; ".join(_first_and_last(panel) for panel in panels)
    numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], _means(panels), 0, folded=True)
    figure = Figure("Scores over the rounds", f"{description}.", over_rounds(panels), numbers)
    return Section(
        "curves",
        "Over the rounds",
        lead=_about_curves(record, panels),
        figures=[figure],
        missing=[kept_note] if kept_note else [],
    )


def _titles(record: RunView) -> Mapping[str, str]:
    """What is drawn: of another task than classification all scores but those of single outputs."""
    if record.task == CLASSIFICATION:
        return CURVES
    models = {"global": "Global model", "personal": "Own models"}
    names = [name for name in record.latest_spreads if score_family(name) == name and name.partition(".")[0] in models]
    return {name: f"{models[name.partition('.')[0]]}: {label(name)}" for name in names}


def _about_curves(record: RunView, panels: Sequence[Panel]) -> list[str]:
    """What lines, bands and dashes mean."""
    lead = ["Lines are means over the sites that reported, bands reach from the smallest to the largest value."]
    if sums := [record.latest_spreads[name].sites for name in CURVES if record.is_aggregated(name)]:
        lead.append(f"Of the sites' own scores: {from_sum(max(sums))}, and so there is no band.")
    drawn = {panel.baseline[0] for panel in panels if panel.baseline is not None}
    return [*lead, *(meaning for how, meaning in BASELINES.items() if how in drawn)]


def _baseline(record: RunView, name: str) -> tuple[str, float] | None:
    """What a global model that has learnt nothing reaches in a score, and how; None: that is not on record."""
    majority = record.latest_spreads.get(MAJORITY)
    if name == "global.balanced_accuracy":
        return CHANCE, record.chance
    return (COMMONEST, majority.mean) if name == "global.accuracy" and majority is not None else None


def by_class(record: RunView) -> Section:
    """Recall of each class: the share of its test images that a model finds."""
    newest = {model: record.recalls("newest", model) for model in WHOSE}
    missing = [_missing_recalls(record, model) for model, recalls in newest.items() if not recalls]
    if not any(newest.values()):
        return Section("classes", "Class by class", missing=missing)
    rounds = {which: record.find_round(which) for which in ("newest", "best")}
    own = OWN_MEAN if newest["personal"] else ""
    lead = [f"Recall is the share of a class's test images that a model names rightly{own}."]
    if rounds["newest"] != rounds["best"]:
        judged_by = record.raw["classes"]["judged_by"]
        lead.append(
            f"The best round is that with the largest {judged_by}: chosen by this score, it is optimistic in it."
        )
    figures = [_recall_figure(record, newest, rounds)]
    return Section("classes", "Class by class", lead=lead, figures=figures, missing=missing)


def _recall_figure(record: RunView, newest: Mapping[str, Mapping[int, float]], rounds: Rounds) -> Figure:
    scored = sorted(set().union(*newest.values()))
    # By the worse of both models: a class that either of them misses must not be left out of the drawing.
    least = {c: min(recalls[c] for recalls in newest.values() if c in recalls) for c in scored}
    drawn_classes = sorted(sorted(least, key=lambda c: (least[c], c))[:MAX_CLASSES])
    sentence = _least(record, newest)
    description = f"Recall of each class in %, from 0 to 100.{f' {sentence}.' if sentence else ''}"
    some_classes = f"Recall of the {len(drawn_classes)} classes that are found least"
    title = "Recall by class" if len(drawn_classes) == len(scored) else some_classes
    drawn = points([record.name(c) for c in drawn_classes], _recall_series(record, rounds), "class")
    return Figure(title, description, drawn, _recall_table(record, rounds))


def _recall_series(record: RunView, rounds: Rounds) -> list[Series]:
    """Of both models, after the newest round and, where it is another one, after the best."""
    series, series_of = [], {"global": (BLUE, "o"), "personal": (ORANGE, "^")}
    for model, (colour, marker) in series_of.items():
        for which in ("newest", "best") if rounds["newest"] != rounds["best"] else ("newest",):
            if recalls := record.recalls(which, model):
                text = f"{WHOSE[model]}, {which} scores (round {rounds[which]})"
                values = {record.name(c): recall for c, recall in recalls.items()}
                series.append(Series(text, values, colour, marker, hollow=which == "best"))
    return series


def groups(record: RunView) -> Section:
    """Accuracy on frequent, medium and rare classes."""
    rows: list[Row] = []
    for model, name in WHOSE.items():
        spreads = [record.latest_spreads.get(f"{model}.{group}") for group in GROUPS]
        if any(spread is not None for spread in spreads):
            rows.append([name, *("–" if spread is None else formatted("", spread.mean) for spread in spreads)])
    if not rows:
        missing = _not_scored(record, "frequency_groups", FREQUENCY_GROUPS)
        return Section("groups", "Frequent and rare classes", missing=[missing])
    header = ["model", "many (commonest 20 %)", "medium (next 30 %)", "few (rarest 50 %)", "mean of the three"]
    by_recipe = "The recipe names the order of the classes, from the commonest to the rarest (`class_order`)."
    by_number = "The recipe names no order: class 0 is taken for the commonest, the last class for the rarest."
    lead = [by_recipe if record.recipe.get("evaluation", {}).get("class_order") else by_number]
    table = Table(f"Accuracy on groups of classes in round {record.newest}, in %", header, rows)
    return Section("groups", "Frequent and rare classes", lead=lead, tables=[table])


def fairness(record: RunView) -> Section:
    """How far apart the sites' own models are."""
    names, kept_note = [name for name in FAIR if name in record.latest_spreads], record.kept_scores
    if not names:
        reason = kept_note or "No site has reported a score of its own model."
        return Section("fairness", "Site by site", missing=[reason])
    if all(map(record.is_aggregated, names)):
        return _aggregated_fairness(record, names)
    names = [name for name in names if not record.is_aggregated(name)]
    sites = sorted({site for name in names for site in record.site_scores(name)})
    looks = zip(names, (BLUE, ORANGE, GREEN, "black"), ("o", "^", "s", "D"), strict=False)
    series = [Series(CURVES[name], record.site_scores(name), colour, marker) for name, colour, marker in looks]
    description = "; ".join(_spread_text(record, name) for name in names)
    title = f"Own models of {len(sites)} of {count(len(record.sites), 'site')}"
    figure = Figure(title, f"{description}.", horizontal_points(sites, series))
    tables, missing = [_site_table(record, names, sites)], [kept_note] if kept_note else []
    return Section("fairness", "Site by site", figures=[figure], tables=tables, missing=missing)


def _aggregated_fairness(record: RunView, names: list[str]) -> Section:
    """How good the sites' own models are. A secure aggregation gives only their mean."""
    spreads = {name: record.latest_spreads[name] for name in names}
    rows: list[Row] = [[CURVES[name], formatted(name, of.mean), str(of.sites)] for name, of in spreads.items()]
    table = Table(f"Own models in round {record.newest}, in %", ["score", "mean", "sites"], rows)
    lead = [f"{from_sum(max(of.sites for of in spreads.values())).capitalize()}."]
    return Section("fairness", "Site by site", lead=lead, tables=[table])


def calibration(record: RunView) -> Section:
    """Expected calibration error over rounds, and the reliability diagram of the newest global model."""
    panels = [
        Panel(f"{WHOSE[model]}: calibration error", "", values)
        for model in WHOSE
        if (values := record.series(f"{model}.ece"))
    ]
    if not panels:
        return Section("calibration", "Calibration", missing=[_not_scored(record, "probabilities", PROBABILITIES)])
    numbers = Table("The numbers behind", ["round", *(p.title for p in panels)], _means(panels, 4), 0, folded=True)
    description = "; ".join(
        f"{p.title}: {score_text(float(np.mean(p.values[max(p.values)])), 3)} in round {max(p.values)}" for p in panels
    )
    figures = [Figure("Expected calibration error over the rounds", f"{description}.", over_rounds(panels), numbers)]
    bins = _bins(record)
    if bins:
        figures.append(_reliability(record, bins))
    lead = ["A model is well calibrated if 80 % of the answers that it is 80 % sure about are right. 0 is perfect."]
    missing = [] if bins else [f"No reliability diagram: it takes an evaluator whose policy names `{RELIABILITY}.*`."]
    return Section("calibration", "Calibration", lead=lead, figures=figures, missing=missing)


def _bins(record: RunView) -> dict[int, tuple[float, float, float]]:
    """(accuracy, mean confidence, share of the answers) by bin; means over evaluators.

    The names of bins end in a number, as those of classes do, so `by_class` reads them, too.
    """
    values = [record.by_class("newest", f"{RELIABILITY}.{name}") for name in ("accuracy", "confidence", "share")]
    numbers = sorted(set(values[0]) & set(values[1]) & set(values[2]))
    accuracy, confidence, share = ({n: float(np.mean(list(by_bin[n].values()))) for n in numbers} for by_bin in values)
    return {n: (accuracy[n], confidence[n], share[n]) for n in numbers}


def _reliability(record: RunView, bins: Mapping[int, tuple[float, float, float]]) -> Figure:
    sure = max(bins, key=lambda number: bins[number][2])
    accuracy, confidence, share = bins[sure]
    description = (
        f"The largest bin of answers ({percent(share)} of all) is {percent(confidence)} sure on average, and "
        f"{percent(accuracy)} of them are right. Points below the dashed line: the model is surer than it should be. "
        "Large points: many answers."
    )
    rows = [[str(n), *(formatted("", value) for value in values)] for n, values in bins.items()]
    header = ["bin", "right, %", "sure, %", "share of the answers, %"]
    numbers = Table("The numbers behind", header, rows, 0, folded=True)
    return Figure(f"Reliability of the global model in round {record.newest}", description, reliability(bins), numbers)


def _first_and_last(panel: Panel) -> str:
    rounds = min(panel.values), max(panel.values)
    form = percent if panel.unit == "%" else partial(score_text, digits=3)
    first, last = (f"{form(float(np.mean(panel.values[number])))} in round {number}" for number in rounds)
    return f"{panel.title}: {first}, {last}"


def _means(panels: list[Panel], digits: int = 3) -> list[list[str]]:
    rows = []
    for number in thinned(sorted(set().union(*(panel.values for panel in panels)))):
        cells = []
        for panel in panels:
            mean = float(np.mean(panel.values[number])) if number in panel.values else None
            cells.append(
                "–" if mean is None else f"{100 * mean:.1f}" if panel.unit == "%" else score_text(mean, digits)
            )
        rows.append([str(number), *cells])
    return rows


def _least(record: RunView, newest: Mapping[str, Mapping[int, float]]) -> str:
    """Which class each of the models finds least; empty where all find all."""
    sentences = []
    for model, recalls in newest.items():
        if recalls and min(recalls.values()) < 1:  # where all are found, none is found least
            worst, recall = min(recalls.items(), key=lambda item: (item[1], item[0]))
            find = "finds" if model == "global" else "find"
            sentences.append(f"{WHOSE[model]} {find} class {record.name(worst)} least: {percent(recall)}")
    return "; ".join(sentences)


def _recall_table(record: RunView, rounds: Rounds) -> Table:
    shared = [record.recalls(which, "global") for which in rounds]
    own = record.by_class("newest", "personal.recall")
    best = record.recalls("best", "personal")
    rows = []
    for c in sorted(set().union(*shared, own)):
        values = list(own.get(c, {}).values())
        extent = f"{formatted('', min(values))} to {formatted('', max(values))}" if values else "–"
        mean = formatted("", float(np.mean(values))) if values else "–"
        cells = [formatted("", recalls[c]) if c in recalls else "–" for recalls in shared]
        own_cells = [mean, formatted("", best[c]) if c in best else "–", extent] if own else []
        rows.append([record.name(c), *cells, *own_cells])
    own_header = ["own, newest", "own, best", "own, newest: worst to best site"] if own else []
    header = ["class", "global, newest", "global, best", *own_header]
    return Table("The numbers behind, in %", header, rows, 0, folded=True)


def _not_scored(record: RunView, key: str, advice: str) -> str:
    """Why scores of `[evaluation] key` are absent."""
    if not record.recipe.get("evaluation", {}).get(key):
        return f"Not scored: {advice}."
    return record.kept_scores or "No site has reported these scores yet."


def _missing_recalls(record: RunView, model: str) -> str:
    if model == "global" and record.evaluators:
        return f"No recalls of the global model: {', '.join(record.evaluators)} sent none."
    if model == "global":
        return "No recalls of the global model: they take an evaluator (`--role evaluator`) and a global model."
    return record.kept_scores or "No site sent recalls of its own model: they would tell which classes it has."


def _spread_text(record: RunView, name: str) -> str:
    scores = record.site_scores(name)
    mean = record.latest_spreads[name].mean
    worst, best = (chosen(scores, key=lambda site: scores[site]) for chosen in (min, max))
    return (
        f"{CURVES[name]}: mean {percent(mean)}, standard deviation {100 * deviation(list(scores.values()), mean):.1f}, "
        f"worst {worst} with {percent(scores[worst])}, best {best} with {percent(scores[best])}"
    )


def _site_table(record: RunView, names: list[str], sites: list[str]) -> Table:
    scores = {name: record.site_scores(name) for name in names}
    rows: list[Row] = [
        [site, *(formatted(name, scores[name][site]) if site in scores[name] else "–" for name in names)]
        for site in sites
    ]
    for statistic in ("mean", "std", "worst"):
        totals = {n: getattr(spread(list(scores[n].values()), lower_is_better(n)), statistic) for n in names}
        rows.append([Cell(statistic, "total"), *(Cell(formatted(name, totals[name]), "total") for name in names)])
    return Table(f"Own models in round {record.newest}, in %", ["site", *map(label, names)], rows)
