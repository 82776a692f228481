"""Where a restarted server continues: the phase of a run as a pure function of its ledger rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protofed.common.protocol.messages import MIN_SUMMED, SUM_STEPS, Subject, TaskKind
from protofed.common.secure_aggregation.groups import Groups, whole
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Aggregating,
    Collecting,
    Evaluating,
    Idle,
    Phase,
    Refining,
    Sites,
    Summing,
)
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.storage.rows import RoundRow, TaskRow


def resumed(
    last: RoundRow,
    tasks: Sequence[TaskRow],
    now: float,
    tries: int,
    required: Sites,
    *,
    holders: bool = False,
    scorers: Sites = NOBODY,
) -> Phase:
    """The phase after a restart.

    Args:
        last: the newest attempt.
        tasks: its invitations, those to score its model among them.
        now: seconds of the new process's monotonic clock; deadlines begin again.
        tries: attempts at its round that were abandoned.
        required: sites without which no round counts, round 0 excepted.
        holders: as of `phases.Summing`.
        scorers: trainers whose own scores are summed after this round.
    """
    if last.state is not None and (scoring := _scoring(last, tasks, now, scorers)) is not None:
        return scoring
    if last.state is not None:  # published, but the process died before it asked for scores
        return Aggregating(last.round, last.attempt, frozenset(), refines=last.aggregate is not None)
    if last.abandoned is not None:
        return Idle(last.round, tries)
    if last.aggregate is not None:
        return _refining(last, [task for task in tasks if task.kind is TaskKind.REFINE], now)
    if steps := [task for task in tasks if task.kind in SUM_STEPS and task.subject is Subject.UPDATE]:
        asked = [task for task in tasks if task.asks_for_update]
        return _summing(last, steps, len(asked), now, tries, required, holders=holders)
    collecting = Collecting(
        last.round,
        last.attempt,
        _sites(tasks),
        last.size,
        last.quorum,
        opened=now,
        reported=_sites(tasks, "reported", "set-aside"),  # set aside: the aggregation had begun, all had come
        failed=_sites(tasks, "failed"),
        required=required if last.round else NOBODY,
        tries=tries,
        enrolled=last.enrolled or 0,
    )
    return replace(collecting, quorum_at=now) if collecting.has_quorum else collecting


def grouped(phase: Phase, groups: Groups, grouping: Grouping) -> Phase:
    """A phase with the groups that sites have: it was resumed, or one of them was dissolved."""
    match phase:
        case Collecting(round) if round:
            found = replace(phase, groups=groups, fewest=grouping.fewest)
            since = phase.opened if phase.quorum_at is None else phase.quorum_at
            return replace(found, quorum_at=since if found.has_quorum else None)
        case Summing():
            of_sum = tuple(group for group in grouping.begun(groups, phase.roster) if phase.roster.issuperset(group))
            return replace(phase, groups=of_sum, survivors=whole(of_sum, phase.survivors))
        case Evaluating():
            asked = phase.awaited | phase.reported if phase.summed else phase.then
            return replace(phase, groups=grouping.begun(groups, asked))
        case _:
            return phase


def _scoring(last: RoundRow, tasks: Sequence[TaskRow], now: float, scorers: Sites) -> Phase | None:
    """Where the scoring of a published model goes on; None: nobody was asked for scores yet."""
    scorings, keyed = ([task for task in tasks if task.kind is kind] for kind in (TaskKind.SCORE, TaskKind.SCORE_SUM))
    steps = [task for task in tasks if task.kind in SUM_STEPS and task.subject is Subject.SCORES]
    if last.scored:
        return Evaluating(last.round, NOBODY, now)
    if steps:
        roster = frozenset(task.site for task in steps if task.kind is SUM_STEPS[0])
        return _summing_of(last, steps, Subject.SCORES, len(roster), MIN_SUMMED, now, holders=True)
    if keyed:
        awaited, reported = frozenset(task.site for task in keyed if task.is_open), _sites(keyed, "reported")
        return Evaluating(last.round, awaited, now, attempt=last.attempt, summed=True, reported=reported)
    if scorings:
        awaited = frozenset(task.site for task in scorings if task.is_open)
        return Evaluating(last.round, awaited, now, then=scorers, attempt=last.attempt)
    return None


def _refining(last: RoundRow, tasks: Sequence[TaskRow], now: float) -> Refining:
    """Where the refinement of an aggregate goes on."""
    failed = [task for task in tasks if not task.is_open and task.task_status != "reported"]
    asked, reported = frozenset(task.site for task in tasks if task.is_open), _sites(tasks, "reported")
    passed = frozenset(task.site for task in failed)
    return Refining(last.round, last.attempt, now, asked | reported, reported, passed, tries=len(failed))


def _summing(
    last: RoundRow, steps: Sequence[TaskRow], asked: int, now: float, tries: int, required: Sites, *, holders: bool
) -> Summing:
    """The sum of a round's updates.

    Args:
        asked: sites that were asked for updates.
    """
    size = min(last.size, asked)
    of_updates = _summing_of(last, steps, Subject.UPDATE, size, last.quorum, now, holders=holders)
    return replace(of_updates, required=required, tries=tries)


def _summing_of(
    last: RoundRow, steps: Sequence[TaskRow], subject: Subject, size: int, quorum: int, now: float, *, holders: bool
) -> Summing:
    """The newest step of a sum; those before it are over, for they are closed as it is opened."""
    by_kind = {kind: [task for task in steps if task.kind is kind] for kind in SUM_STEPS}
    step = [kind for kind in SUM_STEPS if by_kind[kind]][-1]
    newest = by_kind[step]
    return Summing(
        last.round,
        last.attempt,
        subject,
        step,
        _sites(by_kind[SUM_STEPS[0]]),
        _sites(newest),
        size,
        quorum,
        holders,
        opened=now,
        reported=_sites(newest, "reported"),
        failed=_sites(newest, "failed"),
        survivors=_sites(by_kind[TaskKind.MASK], "reported") if step is not TaskKind.MASK else NOBODY,
    )


def _sites(tasks: Sequence[TaskRow], *statuses: str) -> Sites:
    """The sites of these invitations that have one of these statuses (none: any)."""
    return frozenset(task.site for task in tasks if not statuses or task.task_status in statuses)
