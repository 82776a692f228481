"""What the round's state machine is told of who is there: sites, their groups, the number of the next attempt."""

from __future__ import annotations

from dataclasses import replace

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Role
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.method import ServerMethod
from protofed.server.rounds import phases
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.round_rules import RoundRules
from protofed.server.rounds.scoring import Scoring
from protofed.server.rounds.sum_steps import SumRounds


class TickSource:
    """Makes the events of one run that say who is there; used on the coordinator's thread, but for `present`."""

    def __init__(
        self,
        recipe: Recipe,
        method: ServerMethod,
        context: ServerContext,
        rules: RoundRules,
        scoring: Scoring,
        sums: SumRounds | None,
    ) -> None:
        self._recipe, self._method, self._context, self._rules = recipe, method, context, rules
        self._scoring, self._sums = scoring, sums

    @property
    def groups(self) -> Groups:
        """Read anew: they are those of all runs, and an operator may dissolve one."""
        return () if self._rules.grouping is None else self._context.ledger.groups()

    def present(self, *, paused: bool) -> phases.Tick:
        """Who is there, without the ledger's number of attempts. May be called from any thread."""
        timeout_s, presence = self._recipe.federation.stall_timeout_s, self._context.presence
        trainers, evaluators = (presence.alive(role, timeout_s) for role in (Role.TRAINER, Role.EVALUATOR))
        return phases.Tick(
            self._context.clock(),
            presence.enrolled(Role.TRAINER),
            trainers,
            evaluators,
            paused=paused,
            standstill=self._scoring.standstill,
            groups=self.groups,
        )

    def tick(self, phase: phases.Phase, *, paused: bool) -> phases.Tick:
        """Who is there, with the number of the attempt that would open now."""
        return replace(self.present(paused=paused), attempt=self._next_attempt(phase))

    def aggregated(self, phase: phases.Phase, *, paused: bool) -> phases.Aggregated:
        """The event, with the sites that could score now."""
        tick = self.tick(phase, paused=paused)
        evaluators = tick.evaluators if self._method.global_model else phases.NOBODY
        number = 0 if isinstance(phase, phases.FinishedPhase) else phase.round
        trainers, groups = self._scoring.askable(tick.trainers, tick.groups, number), tick.groups
        if self._rules.grouping is not None:
            groups = self._rules.grouping.begun(groups, trainers)
        return phases.Aggregated(tick.now, evaluators, trainers, groups)

    def _next_attempt(self, phase: phases.Phase) -> int:
        """Number for the round that would open now. Attempts that were rolled back keep theirs, so rows stay unique."""
        if not isinstance(phase, phases.Idle):
            return 0
        last = self._context.ledger.newest_attempt(self._recipe.name, phase.round)
        return 1 + last if self._sums is None else self._sums.attempt_after(phase.round, last)
