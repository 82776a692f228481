"""The refinement of a round as a pure function `advanced`, as `state_machine` is of the whole round.

    nobody asked ──Tick[an evaluator is there]──▶ asked ──Arrived──▶ Refined
         ▲                                          │ Declined | Tick[deadline, or it is lost and another is there]
         └──────────────────────────────────────────┘ not more than `max_attempts` times
    nobody asked ──Tick[site_wait_timeout_s]──▶ NotRefined: the run ends, and the round before is its last

The aggregate is durable, so no training is done again: only the evaluator is asked again, or another one. One is asked
at a time, by the run's sampler; without one the run waits as it does for sites.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from protofed.server.rounds.phases import Arrived, Declined, Event, Refining, Sites, Tick
from protofed.server.rounds.round_rules import RoundRules


@dataclass(frozen=True)
class Refined:
    """What this evaluator made of the aggregate is durable."""

    evaluator: Sites


@dataclass(frozen=True)
class NotRefined:
    """The run cannot go on."""

    reason: str


Outcome: TypeAlias = Refining | Refined | NotRefined


def advanced(rules: RoundRules, phase: Refining, event: Event) -> Outcome:
    """The refinement after an event; the same phase if it changes nothing."""
    match event:
        case Arrived(site) if site in phase.asked:
            return Refined(phase.asked)
        case Declined(site, now, reason) if site in phase.asked - phase.reported:
            return again(rules, phase, now, f"{site} cannot do it{f' ({reason})' if reason else ''}")
        case Tick():
            return _ticked(rules, phase, event)
        case _:
            return phase


def again(rules: RoundRules, phase: Refining, now: float, why: str) -> Refining | NotRefined:
    """The refinement after an evaluator was asked in vain."""
    tries = phase.tries + 1
    if tries >= rules.federation.max_attempts:
        return NotRefined(f"round {phase.round} was not refined in {tries} attempts: {why}")
    again_at = now + rules.pause(phase.round, tries)
    passed = phase.passed | phase.asked
    return Refining(phase.round, phase.attempt, opened=now, passed=passed, tries=tries, again_at=again_at)


def candidates(phase: Refining, evaluators: Sites) -> Sites:
    """Who may be asked: those that were not asked in vain yet or, if all were, all that are there."""
    return evaluators - phase.passed or evaluators


def _ticked(rules: RoundRules, phase: Refining, tick: Tick) -> Outcome:
    if phase.reported:
        return Refined(phase.reported)
    if phase.asked:
        return _awaited(rules, phase, tick)
    if tick.now < phase.again_at:
        return phase
    if found := candidates(phase, tick.evaluators):
        return replace(phase, asked=rules.sampler(phase.round, sorted(found), 1), opened=tick.now)
    if tick.now >= phase.opened + rules.federation.site_wait_timeout_s:
        return NotRefined(f"waited {tick.now - phase.opened:.0f} s for an evaluator to refine round {phase.round}")
    return phase


def _awaited(rules: RoundRules, phase: Refining, tick: Tick) -> Refining | NotRefined:
    """A lost evaluator may come back with what it made: it is given up before the deadline only for another one."""
    asked = ", ".join(phase.asked)  # one
    if tick.now >= phase.opened + rules.federation.deadline_s:
        return again(rules, phase, tick.now, f"nothing came of {asked} by the deadline")
    if not phase.asked & tick.evaluators and tick.evaluators - phase.passed:
        return again(rules, phase, tick.now, f"{asked} was lost")
    return phase
