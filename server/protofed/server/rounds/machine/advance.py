"""The round as one pure function `advance`: no clock, socket, tensor or random generator in it.

    Idle ──Tick[enough sites]──▶ Collecting ──Arrived × cohort | Tick[quorum, deadline]──▶ Aggregating
      ▲                              │ Tick[deadline, no quorum] → the same round again         │ Aggregated
      ├──────────────────────────────┴──── Insufficient: updates were rejected ────────────────┤
      └── Idle(round + 1) or Finished ◀── Scored × sites | Tick ── Evaluating ◀─[every n rounds]┘
    Idle ──Tick[no better score for `patience` scored rounds]──▶ Finished(reason, completed)
    any ──Stop | Broken──▶ Finished(reason, outcome)
    Where an evaluator refines the states: Aggregating ─Aggregated▶ Refining ─Tick[an evaluator is there]▶ it is asked
    ─Arrived▶ Aggregating, of what it sent, and on as above; Declined | Tick[deadline, or lost]: another one is asked
    Secure aggregation: Collecting ─▶ Summing, step by step (`secure_steps`) ─▶ Aggregating; and of trainers' own scores
    Evaluating (evaluators' scores) ─▶ Evaluating (trainers take theirs) ─▶ Summing ─▶ Idle(round + 1) or Finished

Round 0 makes the model: sites are asked for it, because the server runs without PyTorch, and it counts when two of them
made the same one bit for bit.

Where a restarted server continues, `resumed` says: a run's phase as a pure function of its ledger rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

from protofed.common.errors import FailureReason, count
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MIN_SECURE_SITES, SUM_STEPS, SumOf, TaskKind
from protofed.common.secure_aggregation.groups import Groups, whole
from protofed.server.rounds.machine import secure_steps
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Abandon,
    Aggregate,
    Aggregated,
    Aggregating,
    Arrived,
    AskRefinement,
    AskScores,
    AskStep,
    Broken,
    Collecting,
    Declined,
    Effect,
    Evaluating,
    Event,
    Finish,
    FinishedPhase,
    Idle,
    Insufficient,
    Open,
    Phase,
    Recall,
    Refine,
    Refining,
    ScoresArrived,
    Sites,
    Stop,
    Summing,
    Tick,
)
from protofed.server.rounds.machine.rules import Grouping, RoundRules, cohort_size, compute_quorum
from protofed.server.rounds.machine.waiting import name_some
from protofed.server.storage.rows import OPEN, RoundRow, TaskRow
from protofed.server.verdicts import RoundOutcome

Step: TypeAlias = tuple[Phase, list[Effect]]
# All events but the two that end a run from any phase.
Within: TypeAlias = Tick | Arrived | Declined | Aggregated | Insufficient | ScoresArrived


def advance(rules: RoundRules, phase: Phase, event: Event) -> Step:
    """The next phase and what is to be done; every pair (phase, event) is answered."""
    if isinstance(phase, FinishedPhase):
        return phase, []
    if isinstance(event, Stop):
        return _finish(event.reason, RoundOutcome.ABORTED)
    if isinstance(event, Broken):
        return _finish(event.reason, RoundOutcome.FAILED)
    match phase:
        case Idle():
            return _open_if_enough(rules, phase, event) if isinstance(event, Tick) else (phase, [])
        case Collecting():
            return _collect(rules, phase, event)
        case Summing():
            return _summed(rules, phase, secure_steps.advanced(phase, event, rules.federation.sum_step_s))
        case Aggregating():
            return _after_aggregation(rules, phase, event)
        case Refining():
            return _refine(rules, phase, event)
        case Evaluating():
            return _evaluate(rules, phase, event)
        case _:
            assert_never(phase)


def _open_if_enough(rules: RoundRules, phase: Idle, tick: Tick) -> Step:
    if phase.round and (reason := rules.early_end(phase.round - 1, tick.plateau)):
        return _finish(reason, RoundOutcome.COMPLETED)
    if tick.paused:
        return replace(phase, since=tick.now), []
    if tick.now < phase.again_at:
        return phase, []
    opened = _cohort(rules, phase, tick) if phase.round else _makers_of_the_model(rules, phase, tick)
    if opened is not None:
        return opened, [Open(opened)]
    since = tick.now if phase.since is None else phase.since
    if tick.now >= since + rules.federation.site_wait_timeout_s:
        return _finish(
            f"waited {tick.now - since:.0f} s for enough sites to open round {phase.round}", RoundOutcome.FAILED
        )
    return replace(phase, since=since), []


def _cohort(rules: RoundRules, phase: Idle, tick: Tick) -> Collecting | None:
    required = frozenset(rules.federation.required_sites)
    enrolled, trainers = (rules.countable(tick.groups, sites) for sites in (tick.enrolled, tick.trainers))
    share = cohort_size(rules.federation, enrolled)
    quorum = compute_quorum(rules.federation, share)
    # A quorum that is a count may exceed the share: a cohort of the share alone could then never close.
    size = max(share, quorum, len(required))
    if len(trainers) < rules.trainers_needed(phase.round, enrolled) or not required <= trainers:
        return None
    invited = math.ceil(round(size * rules.federation.over_selection, 9))
    grouping = rules.grouping
    if grouping is None:
        cohort = required | rules.sampler(phase.round, sorted(trainers - required), invited - len(required))
    else:
        cohort = grouping.drawn(tick.groups, trainers, required, invited, rules.sampler, phase.round)
    return Collecting(
        phase.round,
        tick.attempt,
        cohort,
        size,
        quorum,
        tick.now,
        required=required,
        tries=phase.tries,
        groups=tick.groups,
        fewest=rules.fewest,
        enrolled=len(enrolled),
    )


def _makers_of_the_model(rules: RoundRules, phase: Idle, tick: Tick) -> Collecting | None:
    """As many trainers as must agree; all of them once an attempt has failed, so that those who agree are found."""
    needed, candidates = rules.first_models, sorted(tick.trainers)
    if len(candidates) < needed:
        return None
    retried = phase.tries > 0
    makers = frozenset(candidates) if retried else rules.sampler(0, candidates, needed)
    size = len(makers) if retried and needed > 1 else needed
    enrolled = len(tick.enrolled)
    return Collecting(0, tick.attempt, makers, size, needed, tick.now, tries=phase.tries, enrolled=enrolled)


def _collect(rules: RoundRules, phase: Collecting, event: Within) -> Step:
    match event:
        case Arrived(site, now) if site in phase.cohort - phase.reported:
            arrived = replace(phase, reported=phase.reported | {site}, failed=phase.failed - {site})
            if arrived.quorum_at is None and arrived.has_quorum:
                arrived = replace(arrived, quorum_at=now)
            return _close_if_due(rules, arrived, now, arrived.awaited)
        case Declined(site, now, reason, makers) if site in phase.awaited:
            declined = replace(phase, failed=phase.failed | {site})
            return _close_if_due(rules, declined, now, declined.awaited, _last(rules, reason, makers))
        case Tick():
            return _close_if_due(rules, phase, event.now, phase.awaited & (event.trainers | event.evaluators))
        case Arrived() | Declined() | Aggregated() | Insufficient() | ScoresArrived():
            return phase, []
        case _:
            assert_never(event)


def _close_if_due(rules: RoundRules, phase: Collecting, now: float, hoped_for: Sites, reason: str = "") -> Step:
    """Close when all updates are there, or when a quorum is and the wait for the rest is over.

    Args:
        hoped_for: awaited sites that are alive. With a quorum the round does not wait for a lost site. Without a
            quorum a lost site is no reason to abandon before the deadline, since it may come back with its update. The
            round does not wait for a site whose group cannot be whole.
        reason: why a site has just declined, as the end of a sentence.
    """
    deadline = rules.federation.deadline_s
    overdue = now >= phase.opened + deadline
    counted, possible = phase.counted, phase.hoped_for
    hoped_for &= possible
    complete = len(counted) >= min(phase.size, len(phase.cohort)) and phase.required <= counted
    if complete or (
        phase.quorum_at is not None
        and (overdue or not hoped_for or now >= phase.quorum_at + rules.federation.grace * deadline)
    ):
        return _close(rules, phase, now, complete)
    if overdue:
        whole = f", {len(counted)} of them in whole groups" if len(counted) < len(phase.reported) else ""
        too_few = f"{count(len(phase.reported), 'update')} at the deadline{whole}, quorum {phase.quorum}"
        return _abandon(rules, phase, f"{too_few}{missing(phase.required - counted)}")
    if len(possible) < phase.quorum or not phase.required <= possible:
        who = name_some(sorted(phase.failed))
        failed = f"{len(phase.failed)} of {len(phase.cohort)} sites cannot do the task: {who}{reason}"
        again_at = now + rules.pause(phase.round, phase.tries + 1)
        return _abandon(rules, phase, f"{failed}{missing(phase.required - possible)}", again_at)
    return phase, []


def _last(rules: RoundRules, reason: str, makers: Sites) -> str:
    """The code that a site declined with, in words; of a policy's rule a server learns no more than that it is one."""
    if not reason:
        return ""
    if reason != FailureReason.POLICY:
        return f" (last reason: {reason})"
    sums = "" if rules.federation.secure else "; policies standard and strict ask for federation.secure = true"
    blame = f"; if the rule is about the first model, {' and '.join(sorted(makers))} made it" if makers else ""
    return f" (last reason: {reason}; the site's log names the rule{blame}{sums})"


def _close(rules: RoundRules, phase: Collecting, now: float, complete: bool) -> Step:
    """The updates that are there are aggregated, or their sum begins; the first model is no sum."""
    grouping = rules.grouping if phase.round else None
    if grouping is not None and rules.secure:
        first = secure_steps.started(phase, now, grouping, contributors=rules.contributors)
        if isinstance(first, Summing):
            return first, [AskStep(first, complete)]
        return _abandon(rules, phase, first.reason)
    at = phase.round, phase.attempt, phase.counted, phase.quorum, phase.required
    closed = Aggregating(*at, tries=phase.tries, to_refine=rules.refined and phase.round > 0)
    groups = () if grouping is None else grouping.of(phase.groups, phase.counted)
    return closed, [Aggregate(closed, complete, groups)]


def _summed(rules: RoundRules, before: Summing, outcome: secure_steps.Outcome) -> Step:
    match outcome:
        case Summing():
            return outcome, [] if outcome.step is before.step else [AskStep(outcome)]
        case _ if before.sum_of is SumOf.SCORES:  # scores are for people: a round counts without them
            return _next(rules, before.round)
        case secure_steps.Summed(phase):
            at = phase.round, phase.attempt, phase.survivors, phase.quorum, phase.required
            closed = Aggregating(*at, tries=phase.tries, to_refine=rules.refined)
            return closed, [Aggregate(closed, outcome.complete)]
        case secure_steps.NotAggregated(reason, now, at_once):
            pause = 0.0 if at_once else rules.pause(before.round, before.tries + 1)
            return _abandon(rules, before, reason, now + pause if pause else 0.0)
        case _:
            assert_never(outcome)


def missing(required: Collection[SiteId]) -> str:
    """The end of a reason that names sites which must take part and do not."""
    return f"; without {', '.join(sorted(required))} no round counts" if required else ""


def _abandon(rules: RoundRules, phase: Collecting | Summing | Aggregating, why: str, again_at: float = 0.0) -> Step:
    given_up, tries = Abandon(phase.round, phase.attempt, why), phase.tries + 1
    if tries < rules.federation.max_attempts:
        return Idle(phase.round, tries, again_at=again_at), [given_up]
    finished, effects = _finish(f"round {phase.round} was abandoned {tries} times: {why}", RoundOutcome.FAILED)
    return finished, [given_up, *effects]


def _after_aggregation(rules: RoundRules, phase: Aggregating, event: Within) -> Step:
    match event:
        case Aggregated(now) if phase.to_refine:
            return Refining(phase.round, phase.attempt, opened=now), []
        case Aggregated():
            return _score_if_due(rules, phase, event)
        case Insufficient(reason, now) if phase.refines:
            refining = Refining(phase.round, phase.attempt, opened=now, requested=phase.sites, tries=phase.tries)
            return _refine_again(rules, refining, now, reason)
        case Insufficient(reason, now):
            return _abandon(rules, phase, reason, now + rules.pause(phase.round, phase.tries + 1))
        case Tick() | Arrived() | Declined() | ScoresArrived():
            return phase, []
        case _:
            assert_never(event)


def _refine(rules: RoundRules, phase: Refining, event: Within) -> Step:
    """One evaluator is asked at a time; the aggregate is durable, so no training is done again."""
    match event:
        case Arrived(site) if site in phase.requested:
            return _refined(phase, phase.requested)
        case Declined(site, now, reason) if site in phase.requested - phase.reported:
            return _refine_again(rules, phase, now, f"{site} cannot do it{f' ({reason})' if reason else ''}")
        case Tick() if phase.reported:
            return _refined(phase, phase.reported)
        case Tick() if phase.requested:
            return _recall_if_due(rules, phase, event)
        case Tick():
            return _ask_evaluator(rules, phase, event)
        case Arrived() | Declined() | Aggregated() | Insufficient() | ScoresArrived():
            return phase, []
        case _:
            assert_never(event)


def _refined(phase: Refining, evaluator: Sites) -> Step:
    """What this evaluator made of the aggregate is durable."""
    closed = Aggregating(phase.round, phase.attempt, evaluator, quorum=1, tries=phase.tries, refines=True)
    return closed, [Refine(closed)]


def _ask_evaluator(rules: RoundRules, phase: Refining, tick: Tick) -> Step:
    """One that was not asked in vain yet or, if all were, any; without one the run waits as it does for sites."""
    if tick.now < phase.again_at:
        return phase, []
    if evaluators := tick.evaluators - phase.passed or tick.evaluators:
        next_phase = replace(phase, requested=rules.sampler(phase.round, sorted(evaluators), 1), opened=tick.now)
        return next_phase, [AskRefinement(next_phase)]
    if tick.now >= phase.opened + rules.federation.site_wait_timeout_s:
        waited = f"waited {tick.now - phase.opened:.0f} s for an evaluator to refine round {phase.round}"
        return _finish(waited, RoundOutcome.FAILED)
    return phase, []


def _recall_if_due(rules: RoundRules, phase: Refining, tick: Tick) -> Step:
    """A lost evaluator may come back with what it made: it is given up before the deadline only for another one."""
    evaluator = ", ".join(phase.requested)  # one
    if tick.now >= phase.opened + rules.federation.deadline_s:
        why = f"nothing came of {evaluator} by the deadline"
    elif not phase.requested & tick.evaluators and tick.evaluators - phase.passed:
        why = f"{evaluator} was lost"
    else:
        return phase, []
    after, effects = _refine_again(rules, phase, tick.now, why)
    return after, effects or [Recall("it did not refine the round in time")]


def _refine_again(rules: RoundRules, phase: Refining, now: float, why: str) -> Step:
    """An evaluator was asked in vain, and another one is, or the same, not more than `max_attempts` times."""
    tries = phase.tries + 1
    if tries >= rules.federation.max_attempts:
        return _finish(f"round {phase.round} was not refined in {tries} attempts: {why}", RoundOutcome.FAILED)
    again_at, passed = now + rules.pause(phase.round, tries), phase.passed | phase.requested
    return Refining(phase.round, phase.attempt, opened=now, passed=passed, tries=tries, again_at=again_at), []


def _score_if_due(rules: RoundRules, phase: Aggregating, event: Aggregated) -> Step:
    every = rules.federation.score_every
    scorers = event.evaluators if rules.due(phase.round, every) else NOBODY
    trainers = event.trainers if rules.owns_due(phase.round) else NOBODY
    if not rules.secure:
        scorers, trainers = scorers | trainers, NOBODY
    evaluating = Evaluating(phase.round, scorers, event.now, trainers, phase.attempt, groups=event.groups)
    return (evaluating, [AskScores(evaluating)]) if scorers else _scored(rules, evaluating, event.now)


def _evaluate(rules: RoundRules, phase: Evaluating, event: Within) -> Step:
    match event:
        case Arrived(site, now) if phase.secure and site in phase.awaited:
            remaining = replace(phase, awaited=phase.awaited - {site}, reported=phase.reported | {site})
            return (remaining, []) if remaining.awaited else _scored(rules, remaining, now)
        case ScoresArrived(site, now) | Declined(site, now):
            remaining = replace(phase, awaited=phase.awaited - {site})
            return (remaining, []) if remaining.awaited else _scored(rules, remaining, now)
        case Tick():
            alive = phase.awaited & (event.trainers | event.evaluators)
            overdue = event.now >= phase.opened + rules.federation.score_deadline_s
            return _scored(rules, phase, event.now) if overdue or not alive else (phase, [])
        case Arrived() | Aggregated() | Insufficient():
            return phase, []
        case _:
            assert_never(event)


def _scored(rules: RoundRules, phase: Evaluating, now: float) -> Step:
    """Nobody is waited for any more: trainers are asked for a sum, or its steps begin, or the round is over."""
    if phase.then:
        trainers_turn = replace(phase, awaited=phase.then, opened=now, then=NOBODY, secure=True)
        return trainers_turn, [AskScores(trainers_turn)]
    if phase.secure and (first := secure_steps.started_scores(phase, now)) is not None:
        return first, [AskStep(first)]
    return _next(rules, phase.round)


def _next(rules: RoundRules, done: int) -> Step:
    if done >= rules.rounds:
        return _finish("completed", RoundOutcome.COMPLETED)
    return Idle(done + 1), []


def _finish(reason: str, outcome: RoundOutcome) -> Step:
    finished = FinishedPhase(reason, outcome)
    return finished, [Finish(finished)]


def resumed(
    last: RoundRow,
    tasks: Sequence[TaskRow],
    now: float,
    tries: int,
    required: Sites,
    *,
    contributors: bool = False,
    scorers: Sites = NOBODY,
) -> Phase:
    """The phase after a restart.

    Args:
        last: the newest attempt.
        tasks: its invitations, those to score its model among them.
        now: seconds of the new process's monotonic clock; deadlines begin again.
        tries: attempts at its round that were abandoned.
        required: sites without which no round counts, round 0 excepted.
        contributors: as of `phases.Summing`.
        scorers: trainers whose own scores are aggregated after this round.
    """
    if last.state is not None:
        return _published(last, tasks, now, scorers)
    if last.abandoned is not None:
        return Idle(last.round, tries)
    if last.aggregate is not None:
        return _refining(last, tasks, now)
    if steps := [task for task in tasks if task.kind in SUM_STEPS and task.sum_of is SumOf.UPDATE]:
        size = min(last.size, sum(task.asks_for_update for task in tasks))
        summing = _summing(last, steps, SumOf.UPDATE, size, last.quorum, now, contributors=contributors)
        return replace(summing, required=required, tries=tries)
    collecting = Collecting(
        last.round,
        last.attempt,
        _sites(tasks),
        last.size,
        last.quorum,
        opened=now,
        reported=_sites(tasks, "reported", "rejected"),  # rejected: the aggregation had started, all had come
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
            next_phase = replace(phase, groups=groups, fewest=grouping.fewest)
            since = phase.opened if phase.quorum_at is None else phase.quorum_at
            return replace(next_phase, quorum_at=since if next_phase.has_quorum else None)
        case Summing():
            of_sum = tuple(group for group in grouping.started(groups, phase.roster) if phase.roster.issuperset(group))
            return replace(phase, groups=of_sum, survivors=whole(of_sum, phase.survivors))
        case Evaluating():
            candidates = phase.awaited | phase.reported if phase.secure else phase.then
            return replace(phase, groups=grouping.started(groups, candidates))
        case _:
            return phase


def _published(last: RoundRow, tasks: Sequence[TaskRow], now: float, scorers: Sites) -> Phase:
    """Where the scoring of a published model goes on."""
    scorings, keyed = ([task for task in tasks if task.kind is kind] for kind in (TaskKind.SCORE, TaskKind.SCORE_SUM))
    steps = [task for task in tasks if task.kind in SUM_STEPS and task.sum_of is SumOf.SCORES]
    if last.scored:
        return Evaluating(last.round, NOBODY, now)
    if steps:
        roster = frozenset(task.site for task in steps if task.kind is SUM_STEPS[0])
        return _summing(last, steps, SumOf.SCORES, len(roster), MIN_SECURE_SITES, now, contributors=True)
    if keyed:
        awaited, reported = _sites(keyed, *OPEN), _sites(keyed, "reported")
        return Evaluating(last.round, awaited, now, attempt=last.attempt, secure=True, reported=reported)
    if scorings:
        return Evaluating(last.round, _sites(scorings, *OPEN), now, then=scorers, attempt=last.attempt)
    # The process died before it asked for scores.
    return Aggregating(last.round, last.attempt, frozenset(), refines=last.aggregate is not None)


def _refining(last: RoundRow, tasks: Sequence[TaskRow], now: float) -> Refining:
    """Where the refinement of an aggregate goes on."""
    refinements = [task for task in tasks if task.kind is TaskKind.REFINE]
    failed = [task for task in refinements if task.task_status not in (*OPEN, "reported")]
    evaluators = _sites(refinements, *OPEN, "reported")
    reported, passed = _sites(refinements, "reported"), _sites(failed)
    return Refining(last.round, last.attempt, now, evaluators, reported, passed, tries=len(failed))


def _summing(
    last: RoundRow, steps: Sequence[TaskRow], sum_of: SumOf, size: int, quorum: int, now: float, *, contributors: bool
) -> Summing:
    """The newest step of a sum; those before it are over, for they are closed as it is opened."""
    by_kind = {kind: [task for task in steps if task.kind is kind] for kind in SUM_STEPS}
    step = [kind for kind in SUM_STEPS if by_kind[kind]][-1]
    newest = by_kind[step]
    return Summing(
        last.round,
        last.attempt,
        sum_of,
        step,
        _sites(by_kind[SUM_STEPS[0]]),
        _sites(newest),
        size,
        quorum,
        contributors,
        opened=now,
        reported=_sites(newest, "reported"),
        failed=_sites(newest, "failed"),
        survivors=_sites(by_kind[TaskKind.MASK], "reported") if step is not TaskKind.MASK else NOBODY,
    )


def _sites(tasks: Sequence[TaskRow], *statuses: str) -> Sites:
    """The sites of the invitations that have one of the statuses (none: any)."""
    return frozenset(task.site for task in tasks if not statuses or task.task_status in statuses)
