"""Sections of a report on what happened: participation, updates that were not taken, and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from protofed.deploy.console.tables import count
from protofed.deploy.report.document import Cell, Figure, Row, Section, Table
from protofed.deploy.report.plots import volumes
from protofed.deploy.report.record import RunRecord, megabytes, some

COLUMNS = 50  # of the calendar; more rounds share one, in which the worst status is shown
TASK_STATUSES = {  # the worst first: letter, look, and what it means
    "refused": ("X", "task-refused", "its update was refused, and none was taken"),
    "set-aside": ("A", "task-aside", "its update was set aside"),
    "failed": ("F", "task-failed", "it reported that it cannot train"),
    "late": ("L", "task-late", "it did not report in time"),
    "invited": ("i", "task-open", "invited, and not started (yet)"),
    "started": ("s", "task-open", "started, and not done (yet)"),
    "not-needed": ("n", "task-unneeded", "the round had enough updates without it"),
    "reported": ("●", "task-ok", "its update was used"),
}
NOT_ASKED = ("·", "task-none", "not invited")
MOST_LISTED = 500


def participation(facts: RunRecord) -> Section:
    """Site by round, by status."""
    sites, attempts = facts.sites, [one for one in facts.attempts if one["round"]]
    if not sites or not attempts:
        return Section("participation", "Who took part when", missing=["No round has been opened yet."])
    spans = _spans(sorted({one["round"] for one in attempts}))
    tasks: dict[tuple[str, int], list[str]] = {}
    for one, task in facts.tasks():
        if task["kind"] == "fit" and one["round"]:
            tasks.setdefault((task["site"], one["round"]), []).append(_task_status(task))
    rows: list[Row] = [[site, *(_cell(site, span, tasks) for span in spans)] for site in sites]
    header = ["site", *(str(span[0]) if place % 5 == 0 else "" for place, span in enumerate(spans))]
    width = max(map(len, spans))
    several = f" A column is up to {width} rounds; it shows the worst that happened to the site in them."
    lead = "A column is a round. Of rounds with several attempts the worst status is shown." if width == 1 else several
    used = sorted({task for found in tasks.values() for task in found}, key=list(TASK_STATUSES).index)
    calendar = Table("Sites by rounds", header, rows, look="calendar")
    legend = Table(
        "Signs",
        ["sign", "meaning"],
        [[Cell(TASK_STATUSES[f][0], TASK_STATUSES[f][1]), TASK_STATUSES[f][2]] for f in used],
        2,
    )
    return Section(
        "participation",
        "Who took part when",
        lead=[lead.strip()],
        tables=[calendar, legend, _tally(sites, tasks, used), *_attempts(facts)],
    )


def refusals(facts: RunRecord) -> Section:
    """Every update that was not used, with its reason."""
    rows: list[list[str]] = []
    for one, task in facts.tasks():
        at = [f"{one['round']}" + (f" (attempt {one['attempt']})" if one["attempt"] > 1 else ""), task["site"]]
        rows += [[*at, u["code"] or u["verdict"], u["reason"], megabytes(u["bytes"])] for u in task["refused"]]
        if task["task_status"] == "set-aside":
            rows.append([*at, "set-aside", task["reason"], megabytes(task["received"])])
    if not rows:
        return Section("refusals", "Updates that were not used", lead=["None: every update that came was used."])
    header = ["round", "site", "what", "reason", "MB"]
    table = Table(count(len(rows), "update"), header, rows[:MOST_LISTED], words=4, look="long")
    left = len(rows) - MOST_LISTED
    missing = [f"{left:,} more are not listed; `protofed report RUN --json` has all of them."] if left > 0 else []
    return Section("refusals", "Updates that were not used", tables=[table], missing=missing)


def transfers(facts: RunRecord) -> Section:
    """What went over the wire."""
    by_round, by_site = facts.bytes_by("round"), facts.bytes_by("site")
    if not by_round:
        return Section("transfers", "Transfers", missing=["Nothing has been sent yet."])
    received, sent = (sum(both[place] for both in by_site.values()) for place in (0, 1))
    largest = max(by_round, key=lambda number: sum(by_round[number]))
    says = (
        f"{megabytes(received)} MB were received in updates and {megabytes(sent)} MB sent in models to be trained; "
        f"most in round {largest}: {megabytes(sum(by_round[largest]))} MB."
    )
    shown_ = {number: by_round[number] for number in some(list(by_round))}
    numbers = _volumes("The numbers behind", "round", {str(number): both for number, both in shown_.items()}, True)
    table = _volumes("By site, over all rounds", "site", {**by_site, "all": (received, sent)}, False)
    return Section(
        "transfers",
        "Transfers",
        lead=["Of updates that were taken, and of models that sites were asked to fetch and train. 1 MB is 10⁶ bytes."],
        figures=[Figure("Bytes by round", says, volumes(by_round), numbers)],
        tables=[table],
    )


def _task_status(task: Mapping[str, Any]) -> str:
    refused = task["refused"] and not task["received"]
    return "refused" if refused else task["task_status"] if task["task_status"] in TASK_STATUSES else "invited"


def _spans(numbers: Sequence[int]) -> list[list[int]]:
    """At most COLUMNS of them."""
    width = -(-len(numbers) // COLUMNS)
    return [list(numbers[first : first + width]) for first in range(0, len(numbers), width)]


def _cell(site: str, span: Sequence[int], tasks: Mapping[tuple[str, int], Sequence[str]]) -> Cell:
    found = [task_status for number in span for task_status in tasks.get((site, number), [])]
    letter, look, meaning = TASK_STATUSES[min(found, key=list(TASK_STATUSES).index)] if found else NOT_ASKED
    when = f"round {span[0]}" if len(span) == 1 else f"rounds {span[0]} to {span[-1]}"
    return Cell(letter, look, f"{site}, {when}: {meaning}")


def _tally(sites: Sequence[str], tasks: Mapping[tuple[str, int], Sequence[str]], used: Sequence[str]) -> Table:
    rows: list[Row] = []
    for site in sites:
        counts = Counter(task_status for (who, _), found in tasks.items() if who == site for task_status in found)
        rows.append([site, str(sum(counts.values())), *(str(counts[task_status]) for task_status in used)])
    return Table("Invitations to train, and what became of them", ["site", "invited", *used], rows, folded=True)


def _attempts(facts: RunRecord) -> list[Table]:
    """Those that were not as wanted."""
    odd = [one for one in facts.attempts if one["outcome"] in ("degraded", "abandoned", "rolled-back")]
    rows = [[str(one["round"]), str(one["attempt"]), one["outcome"], one["reason"] or "–"] for one in odd]
    header = ["round", "attempt", "outcome", "reason"]
    return [Table("Rounds that were not as wanted", header, rows[-MOST_LISTED:], words=4, look="long")] if rows else []


def _volumes(caption: str, what: str, moved: Mapping[str, tuple[int, int]], folded: bool) -> Table:
    rows = [[place, megabytes(received), megabytes(sent)] for place, (received, sent) in moved.items()]
    return Table(f"{caption}, in MB", [what, "received", "sent"], rows, folded=folded)
