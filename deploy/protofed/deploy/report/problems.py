"""What did not go as planned: one sentence for each thing, made from the record's attempts, tasks and interventions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from protofed.common.errors import count as counted
from protofed.common.protocol.messages import SUM_STEPS
from protofed.deploy.report.formats import listed, megabytes, utc
from protofed.deploy.run_view import RunView

NAMED_SITES = 12
NAMED_ROUNDS = 8
MOST_TOLD = 20  # sentences of one kind: hundreds of sites may have been excluded, or have left
DONE = {"paused": "The run was paused", "resumed": "It was resumed", "rolled-back": "The run was rolled back"}
HANDS = {
    "excluded": "{} was excluded",
    "admitted": "{} was admitted again",
    "revoked": "{}'s certificate was revoked",
    "forgotten": "{} was forgotten",
    "offered": "a new list of partners was offered to the sites",
    "regrouped": "the group that {} is summed in was dissolved",
}


def problems(record: RunView) -> list[str]:
    """One sentence for each problem of the run; a single one that there was none, if rounds were finished."""
    exits = [*_first(_interventions(record), "things that operators did"), *_first(_left(record), "sites that left")]
    exits += _first(_held_by_budget(record), "sites whose privacy budget ended")
    sentences = [*exits, *_round_problems(record), *_site_problems(record)]
    # A run that failed or was aborted, or made a useless model, has said so above: this would contradict it.
    ended_well = record.run["status"] not in ("failed", "aborted")
    if sentences or not record.done or not ended_well or record.warnings:
        return sentences
    so_far = "" if record.run["status"] == "completed" else " so far"
    used = all(task["task_status"] == "reported" for _, task in record.tasks() if task["kind"] in ("fit", "mask"))
    came = "the update of every invited site was used" if used else "every update that a round needed came"
    return [f"Nothing went wrong{so_far}: no round was repeated, no update was refused, and {came}."]


def who(intervention: Mapping[str, Any]) -> str:
    """` by operator 'anna'`, or nothing: in plain text callers have no names."""
    return f" by operator '{intervention['operator']}'" if intervention["operator"] else ""


def _first(sentences: Iterable[str], what: str) -> list[str]:
    told = list(sentences)
    unlisted = len(told) - MOST_TOLD
    more = [f"{unlisted:,} more {what} are in `protofed report --json`."] if unlisted > 0 else []
    return [*told[:MOST_TOLD], *more]


def _interventions(record: RunView) -> Iterator[str]:
    for done in record.interventions:
        if (what := DONE.get(done["action"]) or HANDS.get(done["action"])) is None:
            continue  # an abort, which is the run's outcome
        during = "" if done["round"] is None else f" in round {done['round']}"
        reason = (
            f" {done['reason']}" if done["action"] == "rolled-back" else f": {done['reason']}" * bool(done["reason"])
        )
        if done["action"] == "rolled-back":
            yield f"{what}{reason}{who(done)} on {utc(done['at'])}{during}."
        else:
            yield f"{what.format(done['site'])}{who(done)} on {utc(done['at'])}{during}{reason}."


def _left(record: RunView) -> Iterator[str]:
    """Sites that took themselves out of the run, with the round; they may have come back."""
    first: dict[str, int] = {}
    for attempt, task in record.tasks():
        if task.get("cause") == "withdrawn":
            first.setdefault(task["site"], attempt["round"])
    for site, number in first.items():
        yield f"{site} left the run, by its own decision, in round {number}."


def _held_by_budget(record: RunView) -> Iterator[str]:
    """Sites whose privacy budget ended during the run, with the round; it may have been raised."""
    first: dict[str, int] = {}
    for attempt, task in record.tasks():
        if task.get("cause") == "budget":
            first.setdefault(task["site"], attempt["round"])
    for site, number in first.items():
        yield f"{site}'s privacy budget allowed no further round from round {number} on."


def _round_problems(record: RunView) -> list[str]:
    outcomes = Counter(attempt["outcome"] for attempt in record.attempts)
    sentences = []
    if degraded := [str(attempt["round"]) for attempt in record.attempts if attempt["outcome"] == "degraded"]:
        which = listed(degraded, NAMED_ROUNDS)
        sentences.append(f"{counted(len(degraded), 'round')} went on with fewer updates than wanted: {which}.")
    if abandoned := [attempt for attempt in record.attempts if attempt["outcome"] == "abandoned"]:
        last = f"the last one in round {abandoned[-1]['round']}: {abandoned[-1]['reason']}"
        sentences.append(f"{counted(len(abandoned), 'attempt')} at a round had to be abandoned, {last}.")
    if count := outcomes["rolled-back"]:
        sentences.append(f"{counted(count, 'attempt')} at a round no longer counted after the run was rolled back.")
    refused = [update for _, task in record.tasks() for update in task["refused"]]
    if refused:
        size = megabytes(sum(update["bytes"] for update in refused))
        were = "was" if len(refused) == 1 else "were"
        sentences.append(
            f"{counted(len(refused), 'update')} ({size} MB) {were} not accepted; each is listed below with its reason."
        )
    return sentences


def _site_problems(record: RunView) -> list[str]:
    # A task with a cause ended without its site's doing: it was excluded, or the run ended.
    tasks = [task for _, task in record.tasks() if not task.get("cause")]
    sentences = []
    for kind, which, problem in (
        ("fit", "set-aside", "handed in updates that were set aside"),
        ("initialise", "failed", "reported that they could not make the first model"),
        ("fit", "failed", "reported that they could not train or hand in an update"),
        ("fit", "late", "had not reported when the round closed"),
        ("refine", "failed", "reported that they could not refine the model"),
        ("refine", "late", "had not refined the model in time"),
        ("score", "failed", "reported that they could not take scores"),
        ("score", "late", "did not answer a request for scores"),
    ):
        if found := [task for task in tasks if (task["kind"], task["task_status"]) == (kind, which)]:
            sentences.append(f"Sites that {problem}: {listed(_named(found), NAMED_SITES)}.")
    if found := [task for task in tasks if task["kind"] in SUM_STEPS and task["task_status"] in ("failed", "late")]:
        sentences.append(f"Sites that dropped out of a secure sum: {listed(_named(found), NAMED_SITES)}.")
    if record.done and (never := sorted(set(record.invited) - set(record.contributors))):
        sentences.append(f"No update of {listed(never, NAMED_SITES)} was ever used.")
    return sentences


def _named(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """`ann (2 times)` for each site of some tasks, the most frequent first; with the codes that failed ones gave."""
    codes: dict[str, list[str]] = {}
    for task in tasks:
        # The first word is the code; what follows is a text, which the table of refusals has.
        codes.setdefault(task["site"], []).append(task["reason"].partition(";")[0] * (task["task_status"] == "failed"))
    return [
        f"{site} ({counted(len(reasons), 'time')}{': ' * any(reasons)}{', '.join(sorted({*reasons} - {''}))})"
        for site, reasons in sorted(codes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
