"""Sections of a report on what happened: participation, updates that were not used, and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from protofed.common.errors import count
from protofed.deploy.plots import RoundSize, round_sizes, volumes
from protofed.deploy.report.document import Figure, Section, megabytes, thinned, utc
from protofed.deploy.run_view import RunView, used_sites
from protofed.deploy.tables import Cell, Row, Table

COLUMNS = 50  # of the calendar; if there are more rounds, several share a column
TASK_STATUSES = {  # the worst first: letter, class of the style sheet, meaning
    "refused": ("X", "task-refused", "its update was refused, and none was taken"),
    "rejected": ("A", "task-aside", "its update was rejected"),
    "dropped": (
        "D",
        "task-aside",
        "it had trained, and dropped out of the secure aggregation before it sent its vector",
    ),
    "failed": ("F", "task-failed", "it reported that it could not train or send an update"),
    "late": ("L", "task-late", "it had not reported when the round closed"),
    "out": ("E", "task-out", "it was excluded, or its certificate revoked"),
    "unused": ("u", "task-unused", "its update came, and the round did not count"),
    "ended": ("–", "task-open", "the run ended, or was rolled back, before it reported"),
    "left": ("W", "task-out", "the site left the run, or denied it"),
    "paused": (
        "p",
        "task-unneeded",
        "it took no task then: awaited approval, outside its hours, paused, policy unreadable",
    ),
    "budget": ("b", "task-unneeded", "its privacy budget allowed no further round"),
    "waits": ("w", "task-open", "its update came, and the round is open"),
    "invited": ("i", "task-open", "invited, and not started (yet)"),
    "started": ("s", "task-open", "started, and not done (yet)"),
    "not-needed": ("n", "task-unneeded", "the round had enough updates without it"),
    "reported": ("●", "task-ok", "its update was used"),
}
NOT_INVITED = ("·", "task-none", "not invited")
MAX_LISTED = 500


def participation(record: RunView) -> Section:
    """A calendar of sites by rounds, with the status of each task, and a table of attempts with problems."""
    sites, attempts = record.sites, [attempt for attempt in record.attempts if attempt["round"]]
    if not sites or not attempts:
        return Section("participation", "Who took part when", missing=["No round has been opened yet."])
    spans = _spans(sorted({attempt["round"] for attempt in attempts}))
    tasks = _fit_statuses(record)
    width = max(map(len, spans))
    several = f"A column is up to {width} rounds; it shows the worst that happened to the site in them."
    lead = "A column is a round. Of rounds with several attempts the worst status is shown." if width == 1 else several
    statuses = sorted({status for of_round in tasks.values() for status in of_round}, key=list(TASK_STATUSES).index)
    calendar = _calendar(sites, spans, tasks)
    legend = Table(
        "Signs",
        ["sign", "meaning"],
        [[Cell(letter, css_class), meaning] for letter, css_class, meaning in map(TASK_STATUSES.__getitem__, statuses)],
        2,
    )
    return Section(
        "participation",
        "Who took part when",
        lead=[lead],
        figures=_sizes(record),
        tables=[calendar, legend, _tally(sites, tasks, statuses), *_attempts(record), *_interventions(record)],
    )


def _fit_statuses(record: RunView) -> dict[tuple[str, int], list[str]]:
    """By site and round, the status of each of its tasks to train, one an attempt."""
    tasks: dict[tuple[str, int], list[str]] = {}
    for attempt, task in record.tasks():
        if task["kind"] == "fit" and attempt["round"]:
            tasks.setdefault((task["site"], attempt["round"]), []).append(_task_status(record, attempt, task))
    return tasks


def _calendar(
    sites: Sequence[str], spans: Sequence[Sequence[int]], tasks: Mapping[tuple[str, int], list[str]]
) -> Table:
    rows: list[Row] = [[site, *(_cell(site, span, tasks) for span in spans)] for site in sites]
    heads = [str(span[0]) if place % 5 == 0 else Cell(_when(span), "heard") for place, span in enumerate(spans)]
    return Table("Sites by rounds", ["site", *heads], rows, css_class="calendar")


def _sizes(record: RunView) -> list[Figure]:
    """How many sites each round that counts asked and used, and how long it took; none before the first."""
    abandoned = Counter(attempt["round"] for attempt in record.attempts if attempt["outcome"] == "abandoned")
    by_round = {
        attempt["round"]: RoundSize(
            sum(task["kind"] == "fit" for task in attempt["tasks"]),
            len(used_sites(attempt)),
            (attempt["closed_at"] or attempt["opened_at"]) - attempt["opened_at"],
            abandoned[attempt["round"]],
        )
        for attempt in record.rounds
    }
    if not by_round:
        return []
    used, seconds = [size.used for size in by_round.values()], [size.seconds for size in by_round.values()]
    slowest = max(by_round, key=lambda number: by_round[number].seconds)
    short_of = sum(size.used < size.invited for size in by_round.values())
    description = (
        f"{min(used)} to {max(used)} updates were used in a round; {count(short_of, 'round')} of {len(by_round)} used "
        f"fewer than were asked for. On average a round took {fmean(seconds):.1f} s; the longest, round {slowest}, "
        f"{max(seconds):.1f} s."
    )
    rows = [
        [str(number), str(size.invited), str(size.used), f"{size.seconds:.1f}", str(size.abandoned)]
        for number in thinned(sorted(by_round))
        for size in (by_round[number],)
    ]
    header = ["round", "asked to train", "updates used", "seconds", "abandoned before"]
    numbers = Table("The numbers behind", header, rows, 0, folded=True)
    return [Figure("Sites and seconds by round", description, round_sizes(by_round), numbers)]


def refusals(record: RunView) -> Section:
    """Every update that was not used, with its reason."""
    rows: list[list[str]] = []
    for attempt, task in record.tasks():
        again = f" (attempt {attempt['attempt']})" if attempt["attempt"] > 1 else ""
        key = [f"{attempt['round']}{again}", task["site"]]
        rows += [[*key, u["code"] or u["verdict"], u["reason"], megabytes(u["bytes"])] for u in task["refused"]]
        if task["task_status"] == "rejected":
            rows.append([*key, "rejected", task["reason"], megabytes(task["received"])])
        if task["kind"] == "fit" and _task_status(record, attempt, task) == "unused":
            why = attempt["reason"] or (
                "the run was rolled back" if attempt["state"] else "the run ended before the round"
            )
            rows.append([*key, "round did not count", why, megabytes(task["received"])])
    if not rows:
        is_open = any(attempt["outcome"] == "open" for attempt in record.attempts)
        lead = "None: every update that arrived was used" + (", or is part of the open round." if is_open else ".")
        return Section("refusals", "Updates that were not used", lead=[lead])
    header = ["round", "site", "what", "reason", "MB"]
    table = Table(count(len(rows), "update"), header, rows[:MAX_LISTED], text_columns=4, css_class="long")
    unlisted = len(rows) - MAX_LISTED
    more = f"{unlisted:,} more are not listed; `protofed report RUN --json` has all of them."
    missing = [more] if unlisted > 0 else []
    return Section("refusals", "Updates that were not used", tables=[table], missing=missing)


def transfers(record: RunView) -> Section:
    """Bytes of updates and models, by round and by site."""
    by_round, by_site = record.bytes_by("round"), record.bytes_by("site")
    if not by_round:
        return Section("transfers", "Transfers", missing=["Nothing has been sent yet."])
    received, sent = (sum(both[place] for both in by_site.values()) for place in (0, 1))
    largest = max(by_round, key=lambda number: sum(by_round[number]))
    description = (
        f"{megabytes(received)} MB were received in updates, and models of {megabytes(sent)} MB were offered for "
        f"training; most in round {largest}: {megabytes(sum(by_round[largest]))} MB."
    )
    charted = {number: by_round[number] for number in thinned(list(by_round))}
    numbers = _volumes("The numbers behind", "round", {str(number): both for number, both in charted.items()}, True)
    table = _volumes("By site, over all rounds", "site", {**by_site, "all": (received, sent)}, False)
    return Section(
        "transfers",
        "Transfers",
        lead=[
            "Received: updates and first models that were accepted. Offered: models that sites were asked to fetch and "
            "train, whether they did or not. 1 MB is 10⁶ bytes."
        ],
        figures=[Figure("Bytes by round", description, volumes(by_round), numbers)],
        tables=[table],
    )


CAUSES = {
    "excluded": "out",
    "revoked": "out",
    "withdrawn": "left",
    "paused": "paused",
    "budget": "budget",
    "run-ended": "ended",
    "rolled-back": "ended",
}


def _task_status(record: RunView, attempt: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    """The key of `TASK_STATUSES`: the site's own doing, unless something else ended its task."""
    if task["refused"] and not task["received"]:  # a site may send another update after a refused one
        return "refused"
    if task["task_status"] == "reported":
        if attempt["outcome"] in ("published", "degraded") and task["site"] not in used_sites(attempt):
            return "dropped"
        return "reported" if attempt["outcome"] in ("published", "degraded") else _unused(record, attempt)
    status = CAUSES.get(task.get("cause", ""), task["task_status"])
    return status if status in TASK_STATUSES else "invited"


def _unused(record: RunView, attempt: Mapping[str, Any]) -> str:
    """Of an update in a round that was not finished, or does not count."""
    return "waits" if attempt["outcome"] == "open" and record.run["ended_at"] is None else "unused"


def _spans(numbers: Sequence[int]) -> list[list[int]]:
    """The rounds in at most `COLUMNS` groups."""
    width = -(-len(numbers) // COLUMNS)
    return [list(numbers[first : first + width]) for first in range(0, len(numbers), width)]


def _cell(site: str, span: Sequence[int], tasks: Mapping[tuple[str, int], Sequence[str]]) -> Cell:
    statuses = [status for number in span for status in tasks.get((site, number), [])]
    worst = min(statuses, key=list(TASK_STATUSES).index, default=None)
    letter, css_class, meaning = NOT_INVITED if worst is None else TASK_STATUSES[worst]
    return Cell(letter, css_class, f"{site}, {_when(span)}: {meaning}")


def _when(span: Sequence[int]) -> str:
    return f"round {span[0]}" if len(span) == 1 else f"rounds {span[0]} to {span[-1]}"


def _tally(sites: Sequence[str], tasks: Mapping[tuple[str, int], Sequence[str]], statuses: Sequence[str]) -> Table:
    rows: list[Row] = []
    for site in sites:
        counts = Counter(status for (name, _), of_round in tasks.items() if name == site for status in of_round)
        rows.append([site, str(sum(counts.values())), *(str(counts[status]) for status in statuses)])
    return Table("Invitations to train, and what became of them", ["site", "invited", *statuses], rows, folded=True)


def _attempts(record: RunView) -> list[Table]:
    """The table of degraded, abandoned and rolled back attempts, if there are any."""
    rows = [
        [str(attempt["round"]), str(attempt["attempt"]), attempt["outcome"], attempt["reason"] or "–"]
        for attempt in record.attempts
        if attempt["outcome"] in ("degraded", "abandoned", "rolled-back")
    ]
    if not rows:
        return []
    header = ["round", "attempt", "outcome", "reason"]
    return [Table("Rounds with problems", header, rows[-MAX_LISTED:], text_columns=4, css_class="long")]


def _interventions(record: RunView) -> list[Table]:
    """The table of what operators did, if they did anything."""
    rows = [
        [
            utc(act["at"]),
            "–" if act["round"] is None else str(act["round"]),
            act["action"],
            act["site"] or "the run",
            act["operator"] or "–",
            act["reason"] or "–",
        ]
        for act in record.interventions
    ]
    header = ["when", "round", "what", "to whom", "by operator", "reason"]
    return [Table("What operators did", header, rows[-MAX_LISTED:], text_columns=6, css_class="long")] if rows else []


def _volumes(caption: str, noun: str, moved: Mapping[str, tuple[int, int]], folded: bool) -> Table:
    rows = [[place, megabytes(received), megabytes(sent)] for place, (received, sent) in moved.items()]
    return Table(f"{caption}, in MB", [noun, "received", "offered"], rows, folded=folded)
