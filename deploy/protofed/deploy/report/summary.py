"""The first page of a report: what was trained, by whom, how it ended, how good it is, and what went wrong."""

from __future__ import annotations

from collections import Counter

from protofed.common.citations import paper
from protofed.common.statistics import Spread
from protofed.deploy.console.tables import count as counted
from protofed.deploy.report.document import Section, Table, Tile
from protofed.deploy.report.kept_scores import kept_scores
from protofed.deploy.report.record import GROUPS, LABELS, RunRecord, duration, formatted, label, megabytes, percent, utc
from protofed.server.operator.run_record import JUDGED_BY

NAMED_SITES = 12
# Scores of own models, in the order in which the server judges runs by them.
OWN = tuple(name for name in JUDGED_BY if name.startswith("personal."))


def summary(record: RunRecord) -> Section:
    """The run in plain words: method, sites, outcome, quality, problems."""
    return Section(
        "summary",
        "Summary",
        lead=[_trained(record), _participants(record), _outcome(record), *_quality(record)],
        points=problems(record),
        tables=[table] if (table := _model_comparison(record)) is not None else [],
        missing=_missing(record),
    )


def tiles(record: RunRecord) -> list[Tile]:
    """The headline numbers: accuracy of the global model, of own models, of the worst site, and rounds."""
    latest, headlines = record.latest_spreads, list[Tile]()
    if "global.accuracy" in latest:
        accuracy = percent(latest["global.accuracy"].mean)
        headlines.append(Tile("Global model, accuracy", accuracy, f"round {record.newest}"))
    if (own := own_score(record)) is not None:
        spread, (site, worst) = latest[own], record.worst(own)
        note = f"± {100 * spread.std:.1f}; {label(own)}"
        headlines.append(Tile("Sites' own models, mean", percent(spread.mean), note))
        headlines.append(Tile("Worst site's own model", percent(worst), site))
    used = len(record.rounds)
    degraded = sum(attempt["outcome"] == "degraded" for attempt in record.rounds)
    note = f"{degraded} with fewer sites than wanted" if degraded else "all as wanted" if used else ""
    headlines.append(Tile("Rounds", f"{used} of {record.recipe['rounds']}", note))
    return headlines


def own_score(record: RunRecord) -> str | None:
    """The first score of `JUDGED_BY` that sites reported of their own models; None: they reported none."""
    return next((name for name in OWN if name in record.latest_spreads), None)


def problems(record: RunRecord) -> list[str]:
    """One sentence for each problem of the run; a single one that there was none, if rounds were published."""
    sentences = [*_round_problems(record), *_site_problems(record)]
    # Of a run that failed or was aborted, `_outcome` gives the reason: "nothing went wrong" would contradict it.
    if sentences or not record.rounds or record.run["status"] in ("failed", "aborted"):
        return sentences
    return ["Nothing went wrong: no round was repeated, no update was refused, every site reported."]


def _missing(record: RunRecord) -> list[str]:
    if record.latest_spreads:
        return []
    if record.keeping:
        return ["No scores are here: no evaluator scored a model of all sites, and the sites keep their own."]
    return ["No scores were reported: the run has not got as far as a scored round."]


def _trained(record: RunRecord) -> str:
    recipe = record.recipe
    method = paper(recipe["method"]["name"]).title
    return (
        f"A model that tells {record.classes} classes apart (“{recipe['model']['name']}”) was trained by "
        f"{method}, in {counted(recipe['rounds'], 'round')} as planned, without any image or label leaving a site."
    )


def _participants(record: RunRecord) -> str:
    sites, evaluators = record.sites, record.scored_by
    if not sites:
        return "No site was asked to train."
    named = ", ".join(sites[:NAMED_SITES]) + (", …" if len(sites) > NAMED_SITES else "")
    scored = f" The global model was scored by {', '.join(evaluators)}." if evaluators else ""
    return f"{counted(len(sites), 'site')} took part: {named}.{scored}"


def _outcome(record: RunRecord) -> str:
    run = record.run
    last = max((attempt["round"] for attempt in record.attempts), default=0)
    if run["ended_at"] is None:
        began = utc(run["began_at"])
        return f"The run is {run['status']}, at round {last} of {record.recipe['rounds']}; it began {began}."
    # From the first round, not from the start: a run may have waited in the queue for days.
    first_opened_at = min((attempt["opened_at"] for attempt in record.attempts), default=run["began_at"])
    took = duration(run["ended_at"] - first_opened_at)
    outcome = {"completed": "was completed", "failed": "failed", "aborted": "was aborted"}.get(run["status"], "ended")
    reason = "" if run["reason"] in ("", run["status"]) else f": {run['reason']}"
    return f"The run {outcome} on {utc(run['ended_at'])} in round {last}, after {took}{reason}."


def _quality(record: RunRecord) -> list[str]:
    last, sentences = record.latest_spreads, list[str]()
    if "global.accuracy" in last:
        sentences.append(
            f"The global model is right on {percent(last['global.accuracy'].mean)} of the shared test images"
        )
    if (own := own_score(record)) is not None:
        site, value = record.worst(own)
        several = last[own].sites > 1
        sentences.append(
            f"{'the' if sentences else 'The'} sites' own models reach {percent(last[own].mean)} on average "
            f"({label(own)})" + (f"; the worst is that of {site} with {percent(value)}" if several else "")
        )
    clauses = [", ".join(sentences)] if sentences else []
    by_class = record.by_class("newest", "global.recall")
    recalls = {c: sum(of_sites.values()) / len(of_sites) for c, of_sites in by_class.items()}
    if recalls:
        c = min(recalls, key=lambda number: recalls[number])
        least = f"class {record.name(c)} is found least by the global model, {percent(recalls[c])} of its images"
        clauses.append(least if clauses else least[0].upper() + least[1:])
    kept = kept_scores(record)
    return [*([f"{'; '.join(clauses)}."] if clauses else []), *([kept] if kept else [])]


def _model_comparison(record: RunRecord) -> Table | None:
    """The global model beside the sites' own models, one row for each score, in the order of `LABELS`."""
    names = [name for name in record.latest_spreads if name.startswith(("global.", "personal."))]
    order = list(LABELS)
    scores = {name.partition(".")[2] for name in names} - set(GROUPS)
    ordered = sorted(scores, key=lambda score: (order.index(score) if score in order else len(order), score))
    if not ordered:
        return None
    title = f"Scores of round {record.newest}, in % where nothing else is said"
    if not any(name.startswith("personal.") for name in names):
        rows = [[label(f"global.{score}"), _pair(record, score)[0]] for score in ordered]
        return Table(title, ["score", "global model"], rows)
    return Table(
        title,
        ["score", "global model", "own models: mean", "± std", "worst", "worst site"],
        [[label(f"global.{score}"), *_pair(record, score)] for score in ordered],
    )


def _pair(record: RunRecord, score: str) -> list[str]:
    of_global = record.latest_spreads.get(f"global.{score}")
    own = record.latest_spreads.get(f"personal.{score}")
    left = "–" if of_global is None else formatted(score, of_global.mean)
    if own is None:
        return [left, "–", "–", "–", "–"]
    site, value = record.worst(f"personal.{score}")
    return [left, formatted(score, own.mean), _std(score, own), formatted(score, value), site if own.sites > 1 else "–"]


def _std(name: str, spread: Spread) -> str:
    return formatted(name, spread.std) if spread.sites > 1 else "–"


def _round_problems(record: RunRecord) -> list[str]:
    outcomes = Counter(attempt["outcome"] for attempt in record.attempts)
    sentences = []
    if count := outcomes["degraded"]:
        sentences.append(f"{counted(count, 'round')} went on with fewer updates than wanted.")
    if count := outcomes["abandoned"]:
        reason = next(attempt["reason"] for attempt in reversed(record.attempts) if attempt["outcome"] == "abandoned")
        sentences.append(f"{counted(count, 'attempt')} at a round had to be abandoned, the last one: {reason}.")
    if count := outcomes["rolled-back"]:
        sentences.append(f"{counted(count, 'attempt')} at a round no longer counted after the run was rolled back.")
    refused = [update for _, task in record.tasks() for update in task["refused"]]
    if refused:
        size = megabytes(sum(update["bytes"] for update in refused))
        sentences.append(
            f"{counted(len(refused), 'update')} ({size} MB) were not accepted; each is listed below with its reason."
        )
    return sentences


def _site_problems(record: RunRecord) -> list[str]:
    tasks = [(task["site"], task["task_status"]) for _, task in record.tasks() if task["kind"] == "fit"]
    sentences = []
    for which, problem in (
        ("set-aside", "handed in updates that were set aside"),
        ("failed", "reported that training failed"),
        ("late", "did not report in time"),
    ):
        if by_site := Counter(site for site, task in tasks if task == which):
            sites = [f"{site} ({counted(count, 'time')})" for site, count in by_site.most_common(NAMED_SITES)]
            sentences.append(f"Sites that {problem}: {', '.join(sites)}.")
    if never := sorted({site for site, _ in tasks} - {site for site, task in tasks if task == "reported"}):
        sentences.append(f"No update of {', '.join(never)} was ever used.")
    for site, fields in record.raw["sites"].items():
        if fields["excluded"]:
            sentences.append(f"{site} is excluded: {fields['excluded']}.")
    return sentences
