"""What a change of phase counts for: durations, abandoned rounds; of secure sums who dropped out and why one failed.

A pure reading of the state machine's steps, so that nothing in it has to count.
"""

from __future__ import annotations

from collections.abc import Sequence

from protofed.common.payload import SiteId
from protofed.common.protocol.messages import SUM_STEPS, Subject, TaskKind
from protofed.server.metrics import ServerMetrics, SumFailure
from protofed.server.rounds import phases, summing
from protofed.server.rounds.phases import Abandon, Aggregating, Collecting, Effect, Event, Phase, Sites, Summing


def count(
    metrics: ServerMetrics,
    run: str,
    before: Phase,
    event: Event,
    after: Phase,
    effects: Sequence[Effect],
    now: float,
    *,
    summed: bool,
) -> None:
    """Count one step of the state machine, once it is carried out: on a full disk it may be tried many times.

    Args:
        now: seconds of the coordinator's monotonic clock.
        summed: the run has secure sums.
    """
    metrics.phase_changed(run, phases.name(before), phases.name(after), now)
    if abandoned := any(isinstance(effect, Abandon) for effect in effects):
        metrics.round_ended("abandoned")
    match before:
        case Summing(step=step, opened=opened):
            if isinstance(after, Summing) and after.step is step:
                return
            metrics.sum_step_ended(step, now - opened, len(_dropouts(before, event, after)))
            if abandoned or _gives_no_scores(before, event, after):
                metrics.sum_abandoned(step, _failure(before, event))
        case Aggregating(round=number) if summed and abandoned and number:  # what was revealed opens nothing
            metrics.sum_abandoned(TaskKind.REVEAL, SumFailure.UNUSABLE)
        case Collecting():  # with its quorum a round is abandoned only because its sum cannot begin
            reported = before.reported | _arrived(before.cohort, event)
            if abandoned and len(reported) >= before.quorum and before.required <= reported:
                metrics.sum_abandoned(TaskKind.FIT, SumFailure.TOO_FEW)
        case _:
            pass


def _dropouts(before: Summing, event: Event, after: Phase) -> Sites:
    """Who was asked for the step and is not asked for the next; after the last one, or a failure, who did not report.

    Nobody drops out of a step that what sites sent before cannot be asked for, nor because the run is stopped.
    """
    if isinstance(after, Summing):
        return before.cohort - after.cohort
    if isinstance(event, phases.Insufficient | phases.Stop | phases.Broken):
        return phases.NOBODY
    return before.cohort - before.reported - _arrived(before.cohort, event)


def _gives_no_scores(before: Summing, event: Event, after: Phase) -> bool:
    """Whether a sum of own scores has ended without what it needs to be opened; its round is not abandoned for that."""
    goes_on, stopped = isinstance(after, Summing), isinstance(event, phases.Stop | phases.Broken)
    if before.subject is not Subject.SCORES or goes_on or stopped:
        return False
    revealed = before.reported | _arrived(before.cohort, event) if before.step is SUM_STEPS[-1] else phases.NOBODY
    return isinstance(event, phases.Insufficient) or len(revealed) < before.threshold


def _failure(before: Summing, event: Event) -> SumFailure:
    if isinstance(event, phases.Insufficient):
        return SumFailure.UNUSABLE
    return SumFailure.LEFT if summing.is_whole(before) else SumFailure.TOO_FEW


def _arrived(cohort: Sites, event: Event) -> frozenset[SiteId]:
    return frozenset({event.site}) & cohort if isinstance(event, phases.Arrived) else phases.NOBODY
