"""The first page of a report: what was trained, by whom, how it ended, how good it is, and what went wrong."""

from __future__ import annotations

from collections import Counter

from protofed.common.citations import paper
from protofed.common.statistics import Spread
from protofed.deploy.console.tables import count as counted
from protofed.deploy.report.document import Section, Table, Tile
from protofed.deploy.report.record import GROUPS, LABELS, RunRecord, day, label, lasted, megabytes, percent, shown
from protofed.server.operator.run_record import JUDGED_BY

NAMED_SITES = 12
OWN = tuple(name for name in JUDGED_BY if name.startswith("personal."))


def summary(facts: RunRecord) -> Section:
    """In plain words."""
    return Section(
        "summary",
        "Summary",
        lead=[_trained(facts), _by_whom(facts), _ended(facts), *_good(facts)],
        points=troubles(facts),
        tables=[table] if (table := _beside(facts)) is not None else [],
        missing=[] if facts.last else ["No scores were reported: the run has not got as far as a scored round."],
    )


def tiles(facts: RunRecord) -> list[Tile]:
    """The numbers that matter."""
    last, found = facts.last, list[Tile]()
    if "global.accuracy" in last:
        found.append(Tile("Global model, accuracy", percent(last["global.accuracy"].mean), f"round {facts.newest}"))
    if (own := own_score(facts)) is not None:
        spread, (site, worst) = last[own], facts.worst(own)
        found.append(Tile("Sites' own models, mean", percent(spread.mean), f"± {100 * spread.std:.1f}; {label(own)}"))
        found.append(Tile("Worst site's own model", percent(worst), site))
    used = len(facts.rounds)
    degraded = sum(one["outcome"] == "degraded" for one in facts.rounds)
    beside = f"{degraded} with fewer sites than wanted" if degraded else "all as wanted" if used else ""
    found.append(Tile("Rounds", f"{used} of {facts.recipe['rounds']}", beside))
    return found


def own_score(facts: RunRecord) -> str | None:
    """By what the sites' own models are judged first."""
    return next((name for name in OWN if name in facts.last), None)


def troubles(facts: RunRecord) -> list[str]:
    """What went wrong, a sentence each; one that says so where rounds were made and nothing did."""
    found = [*_rounds_amiss(facts), *_sites_amiss(facts)]
    if found or not facts.rounds or facts.run["status"] in ("failed", "aborted"):
        return found
    return ["Nothing went wrong: no round was repeated, no update was refused, every site reported."]


def _trained(facts: RunRecord) -> str:
    recipe = facts.recipe
    method = paper(recipe["method"]["name"]).title
    return (
        f"A model that tells {facts.classes} classes apart (“{recipe['model']['name']}”) was trained by "
        f"{method}, in {counted(recipe['rounds'], 'round')} as planned, without any image or label leaving a site."
    )


def _by_whom(facts: RunRecord) -> str:
    sites, evaluators = facts.sites, facts.evaluators
    if not sites:
        return "No site was asked to train."
    shown_ = ", ".join(sites[:NAMED_SITES]) + (", …" if len(sites) > NAMED_SITES else "")
    scored = f" The global model was scored by {', '.join(evaluators)}." if evaluators else ""
    return f"{counted(len(sites), 'site')} took part: {shown_}.{scored}"


def _ended(facts: RunRecord) -> str:
    run, last = facts.run, max((one["round"] for one in facts.attempts), default=0)
    if run["ended_at"] is None:
        began = day(run["began_at"])
        return f"The run is {run['status']}, at round {last} of {facts.recipe['rounds']}; it began {began}."
    took = lasted(run["ended_at"] - min((one["opened_at"] for one in facts.attempts), default=run["began_at"]))
    how = {"completed": "was completed", "failed": "failed", "aborted": "was aborted"}.get(run["status"], "ended")
    why = "" if run["reason"] in ("", run["status"]) else f": {run['reason']}"
    return f"The run {how} on {day(run['ended_at'])} in round {last}, after {took}{why}."


def _good(facts: RunRecord) -> list[str]:
    last, found = facts.last, list[str]()
    if "global.accuracy" in last:
        found.append(f"The global model is right on {percent(last['global.accuracy'].mean)} of the shared test images")
    if (own := own_score(facts)) is not None:
        site, value = facts.worst(own)
        several = last[own].sites > 1
        found.append(
            f"{'the' if found else 'The'} sites' own models reach {percent(last[own].mean)} on average "
            f"({label(own)})" + (f"; the worst is that of {site} with {percent(value)}" if several else "")
        )
    sentence = ", ".join(found)
    recalls = {c: sum(of.values()) / len(of) for c, of in facts.by_class("newest", "global.recall").items()}
    if recalls:
        c = min(recalls, key=lambda number: recalls[number])
        sentence += f"; class {facts.name(c)} is found least by the global model, {percent(recalls[c])} of its images"
    return [f"{sentence}."] if sentence else []


def _beside(facts: RunRecord) -> Table | None:
    """The global model beside the sites' own ones, score by score."""
    names = [name for name in facts.last if name.startswith(("global.", "personal."))]
    order = list(LABELS)
    found = {name.partition(".")[2] for name in names} - set(GROUPS)
    rests = sorted(found, key=lambda rest: (order.index(rest) if rest in order else len(order), rest))
    if not rests:
        return None
    return Table(
        f"Scores of round {facts.newest}, in % where nothing else is said",
        ["score", "global model", "own models: mean", "± std", "worst", "worst site"],
        [[label(f"global.{rest}"), *_pair(facts, rest)] for rest in rests],
    )


def _pair(facts: RunRecord, rest: str) -> list[str]:
    of_global, own = facts.last.get(f"global.{rest}"), facts.last.get(f"personal.{rest}")
    left = "–" if of_global is None else shown(rest, of_global.mean)
    if own is None:
        return [left, "–", "–", "–", "–"]
    site, value = facts.worst(f"personal.{rest}")
    return [left, shown(rest, own.mean), _std(rest, own), shown(rest, value), site if own.sites > 1 else "–"]


def _std(name: str, of: Spread) -> str:
    return shown(name, of.std) if of.sites > 1 else "–"


def _rounds_amiss(facts: RunRecord) -> list[str]:
    outcomes = Counter(one["outcome"] for one in facts.attempts)
    found = []
    if count := outcomes["degraded"]:
        found.append(f"{counted(count, 'round')} went on with fewer updates than wanted.")
    if count := outcomes["abandoned"]:
        why = next(one["reason"] for one in reversed(facts.attempts) if one["outcome"] == "abandoned")
        found.append(f"{counted(count, 'attempt')} at a round had to be abandoned, the last one: {why}.")
    if count := outcomes["rolled-back"]:
        found.append(f"{counted(count, 'attempt')} at a round no longer counted after the run was taken back.")
    refused = [update for _, task in facts.tasks() for update in task["refused"]]
    if refused:
        found.append(
            f"{counted(len(refused), 'update')} ({megabytes(sum(one['bytes'] for one in refused))} MB) were not taken; "
            "each is listed below with its reason."
        )
    return found


def _sites_amiss(facts: RunRecord) -> list[str]:
    tasks = [(task["site"], task["task_status"]) for _, task in facts.tasks() if task["kind"] == "fit"]
    found = []
    for which, said in (
        ("set-aside", "handed in updates that were set aside"),
        ("failed", "reported that training failed"),
        ("late", "did not report in time"),
    ):
        if by_site := Counter(site for site, task in tasks if task == which):
            who = ", ".join(f"{site} ({counted(count, 'time')})" for site, count in by_site.most_common(NAMED_SITES))
            found.append(f"Sites that {said}: {who}.")
    if never := sorted({site for site, _ in tasks} - {site for site, task in tasks if task == "reported"}):
        found.append(f"No update of {', '.join(never)} was ever used.")
    for site, of in facts.record["sites"].items():
        if of["excluded"]:
            found.append(f"{site} is excluded: {of['excluded']}.")
    return found
