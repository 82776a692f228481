"""The steps of a secure aggregation as a pure function `advanced`, as `advance` is of the whole round.

    SHARE ─▶ CONTRIBUTORS ─▶ AGREE_CONTRIBUTORS ─▶ REVEAL_CONTRIBUTORS ─▶ MASK ─▶ AGREE ─▶ REVEAL ─▶ Summed
      └────────────── no class has rows of its own ─────────▲
    any ──too few sites report by the deadline──▶ NotAggregated: the attempt is abandoned

A site that reports a step is asked for the next one. So a site that drops out never comes back into this sum. Until
numbers are there, its group drops out with it: sums are over whole groups. Numbers of fewer sites than the recipe's
quorum are not aggregated. Agreeing and revealing takes t of the roster (Bonawitz et al., CCS 2017).

From the count of the contributors until numbers are there, nobody may drop out. Without that site, a class could be
left with one holder, and the sum would be the holder's row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from protofed.common.errors import FailureReason
from protofed.common.protocol.messages import MIN_SECURE_SITES, SUM_STEPS, SumOf, TaskKind
from protofed.common.secure_aggregation.groups import whole
from protofed.server.rounds.machine.phases import (
    Arrived,
    Collecting,
    Declined,
    Evaluating,
    Event,
    Insufficient,
    Sites,
    Summing,
    Tick,
)
from protofed.server.rounds.machine.rules import Grouping

_REFUSED: Final = (
    "; a site refuses sites whose identity has changed, and a group other than the one it is in: its log says which "
    "(`protofed client consortium`)"
)
_AGGREGATED: Final = frozenset(
    {TaskKind.SHARE, TaskKind.CONTRIBUTORS, TaskKind.MASK}
)  # who reports these is in the sum
_NOBODY_MAY_DROP: Final = frozenset({TaskKind.AGREE_CONTRIBUTORS, TaskKind.REVEAL_CONTRIBUTORS, TaskKind.MASK})


@dataclass(frozen=True)
class Summed:
    """The survivors' numbers can be opened."""

    phase: Summing

    @property
    def complete(self) -> bool:
        """Whether they are those of all sites that the round wanted."""
        return len(self.phase.survivors) >= self.phase.size


@dataclass(frozen=True)
class NotAggregated:
    """The attempt has come to nothing.

    Attributes:
        at_once: it is opened again without a pause: no site is at fault, and most are there.
    """

    reason: str
    now: float
    at_once: bool = False


Outcome: TypeAlias = Summing | Summed | NotAggregated


def started(phase: Collecting, now: float, grouping: Grouping, *, contributors: bool) -> Summing | NotAggregated:
    """The first step of the sum of those that have reported, in whole groups."""
    roster = phase.counted
    if len(roster) < MIN_SECURE_SITES:
        return NotAggregated(
            f"{len(roster)} sites have updates; a secure aggregation takes {MIN_SECURE_SITES} or more", now
        )
    return Summing(
        phase.round,
        phase.attempt,
        SumOf.UPDATE,
        SUM_STEPS[0],
        roster,
        roster,
        min(phase.size, len(phase.cohort)),
        phase.quorum,
        contributors,
        opened=now,
        required=phase.required,
        tries=phase.tries,
        groups=grouping.of(phase.groups, roster),
    )


def started_scores(phase: Evaluating, now: float) -> Summing | None:
    """The first step of the sum of the own scores of those that have taken them, in whole groups; None: of too few."""
    roster = whole(phase.groups, phase.reported)
    if len(roster) < MIN_SECURE_SITES:
        return None
    at = phase.round, phase.attempt, SumOf.SCORES, SUM_STEPS[0]
    groups = tuple(group for group in phase.groups if roster.issuperset(group))
    return Summing(
        *at, roster, roster, size=len(roster), quorum=MIN_SECURE_SITES, contributors=True, opened=now, groups=groups
    )


def advanced(phase: Summing, event: Event, step_s: float) -> Outcome:
    """The sum after an event; the same phase if it changes nothing.

    Args:
        step_s: seconds until a step's deadline.
    """
    match event:
        case Arrived(site, now) if site in phase.cohort - phase.reported:
            arrived = replace(phase, reported=phase.reported | {site}, failed=phase.failed - {site})
            return _closed_if_due(arrived, now, step_s, arrived.awaited)
        case Declined(site, now, reason) if site in phase.awaited:
            declined = replace(phase, failed=phase.failed | {site})
            return _closed_if_due(
                declined, now, step_s, declined.awaited, f" (the last, {site}: {reason})" if reason else ""
            )
        case Insufficient(reason, now):
            return NotAggregated(reason, now)
        case Tick():
            alive = event.trainers | event.evaluators
            return _closed_if_due(phase, event.now, step_s, phase.awaited & alive)
        case _:
            return phase


def counted(phase: Summing, sites: Sites) -> Sites:
    """The sites that the step counts. While it is open who is aggregated, whole groups only."""
    return whole(phase.groups, sites) if phase.step in _AGGREGATED else sites


def is_whole(phase: Summing) -> bool:
    """Whether the step needs each site that is asked."""
    return phase.contributors and phase.step in _NOBODY_MAY_DROP


def needed(phase: Summing) -> int:
    """Sites that the step needs."""
    if is_whole(phase):
        return len(phase.cohort)
    return max(phase.threshold, phase.quorum) if phase.step in _AGGREGATED else phase.threshold


def _closed_if_due(phase: Summing, now: float, step_s: float, hoped_for: Sites, reason: str = "") -> Outcome:
    """Close the step when nobody is waited for, or at its deadline.

    Args:
        hoped_for: awaited sites that are alive. With enough sites the step does not wait for a lost one.
    """
    overdue = now >= phase.opened + step_s
    hoped_for &= counted(phase, phase.cohort - phase.failed)
    if _is_enough(phase, phase.reported):
        return _next(phase, now) if overdue or not hoped_for else phase
    if overdue or not _is_enough(phase, phase.cohort - phase.failed):
        there, reported = len(counted(phase, phase.reported)), len(phase.reported)
        groups = f", {there} in whole groups" if there < reported else ""
        what = f"{phase.step} of the secure aggregation: {reported} of {len(phase.cohort)} sites{groups}"
        lost = ", ".join(sorted(phase.required - phase.reported)) if phase.step in _AGGREGATED else ""
        missing = f"; without {lost} no round counts" if lost else ""
        silent = f"; no answer of {', '.join(sorted(phase.awaited))}" if overdue and phase.awaited else ""
        # A site's refusal is in its own log, and here as the policy's.
        other = _REFUSED if phase.step is TaskKind.SHARE and FailureReason.POLICY in reason else ""
        why = f"{what}, {needed(phase)} are needed{reason}{silent}{missing}{other}"
        return NotAggregated(why, now, at_once=is_whole(phase))
    return phase


def _is_enough(phase: Summing, sites: Sites) -> bool:
    there = counted(phase, sites)
    return len(there) >= needed(phase) and (phase.step not in _AGGREGATED or phase.required <= there)


def _next(phase: Summing, now: float) -> Summing | Summed:
    if phase.step is SUM_STEPS[-1]:
        return Summed(phase)
    following = SUM_STEPS[SUM_STEPS.index(phase.step) + 1]
    if following is TaskKind.CONTRIBUTORS and not phase.contributors:
        following = TaskKind.MASK
    there = counted(phase, phase.reported)
    survivors = there if phase.step is TaskKind.MASK else phase.survivors
    none: Sites = frozenset()
    return replace(phase, step=following, cohort=there, opened=now, reported=none, failed=none, survivors=survivors)
