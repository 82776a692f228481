"""Who is asked for scores, what becomes of them when a round's are all there, or late, and how long none was better."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from protofed.common.config.recipe import Recipe
from protofed.common.errors import SecureSumError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SUMMED, TaskKind, score_family
from protofed.common.protocol.score_names import LOSS
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.groups import Groups, members, whole
from protofed.common.statistics import Spread, spreads
from protofed.server.metrics import SumFailure
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.phases import Standstill
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.rounds.scores.best_round import judged
from protofed.server.rounds.scores.history import ScoreMemory
from protofed.server.rounds.secure_aggregation.steps import SumRounds
from protofed.server.rounds.secure_aggregation.totals import score_names
from protofed.server.storage.rows import one_a_site

log = structlog.get_logger()


class Scoring:
    """Called from the coordinator's thread.

    Args:
        sums: None: sites report their own scores one by one. A simulation under secure sums has them summed here.

    Attributes:
        standstill: how long no round was better; read at every change of the scores, since every tick carries it.
    """

    def __init__(
        self, recipe: Recipe, context: ServerContext, memory: ScoreMemory, sums: SumRounds | None, rules: RoundRules
    ) -> None:
        self._rules = rules
        self._run, self._ledger, self._memory, self._sums = recipe.name, context.ledger, memory, sums
        self._names = score_names(recipe) if recipe.federation.secure else ()
        self._metrics = context.metrics
        self._asks_all = context.simulated  # sites that are never drawn score what they have installed
        self.forget()

    def standstill_of(self, until: int | None) -> Standstill | None:
        """How long no round was better; rounds after `until` are left out. None: as of `phases.Tick`."""
        rules = self._rules.federation
        if rules.patience is None:
            return None
        rounds = judged(lambda name: self._memory.ranking(name).means, rules.best_by, until)
        return None if rounds is None else rounds.standstill(rules.min_improvement)

    def forget(self) -> None:
        """Read the ledger again: rounds were rolled back."""
        self._memory.forget()
        self._trained, self._since = phases.NOBODY, 1  # sites with updates of the rounds up to this one
        self.standstill = self.standstill_of(None)

    def askable(self, trainers: phases.Sites, groups: Groups, round: int) -> phases.Sites:
        """Of these, those whose own scores can be had: the policy of a site that has trained in no round refuses.

        Under secure sums whole groups of them, as many as a sum takes.
        """
        if (grouping := self._rules.grouping) is not None:
            available = self._have_trained(trainers)
            if grouping.fewest > 1:
                available &= members(groups)
            return grouping.drawn(groups, available, phases.NOBODY, MAX_SUMMED, self._rules.sampler, round)
        return trainers if self._asks_all else self._have_trained(trainers)

    def _have_trained(self, trainers: phases.Sites) -> phases.Sites:
        newest = self._ledger.newest(self._run, published=True)
        rounds = range(self._since, 1 if newest is None else newest.round + 1)
        self._trained |= self._ledger.contributors(self._run, rounds)
        self._since = max(self._since, rounds.stop - 1)
        return trainers & self._trained

    def close(self, phase: phases.Phase) -> None:
        """Nobody is asked for a round's scores any more.

        Args:
            phase: the last in which they were waited for.
        """
        assert isinstance(phase, phases.Evaluating | phases.Summing)  # noqa: S101  (`phases.is_scoring`)
        if self._names:
            self._sum(phase)
        self._ledger.mark_scored(self._run, phase.round)
        by_site, sums = self._memory.closed(phase.round)
        families = spreads(by_site, sums).items()
        # One number a family: a recall for each of a hundred classes would drown the log.
        means = {name: round(spread.mean, 4) for name, spread in families if score_family(name) == name}
        if means:
            sites = max(len(by_site), *(spread.sites for _, spread in families))
            log.info("round scored", run=self._run, round=phase.round, sites=sites, scores=means)
        else:  # answered, or not in time: no number of sites is claimed
            log.info("no score of this round was sent", run=self._run, round=phase.round)
        self.standstill = self.standstill_of(None)

    def _sum(self, phase: phases.Evaluating | phases.Summing) -> None:
        """Record what the sum of the sites' own scores says; without it the round has none, and goes on."""
        at = phase.round, phase.attempt
        try:
            found = self._opened(phase) if self._sums is not None else self._simulated(phase)
        except (SecureSumError, StateError) as error:
            log.warning("no sum of own scores", run=self._run, round=phase.round, why=str(error))
            if not (isinstance(error, SecureSumError) and error.code == "too-few-shares"):  # counted with the step
                self._metrics.sum_abandoned(TaskKind.REVEAL, SumFailure.UNUSABLE)
            return
        if found is not None:
            self._ledger.sum_scores(self._run, *at, self._names, found)

    def _opened(self, phase: phases.Evaluating | phases.Summing) -> Mapping[str, Spread] | None:
        if isinstance(phase, phases.Summing) and phase.step is TaskKind.REVEAL:
            assert self._sums is not None  # noqa: S101  (asked for runs with sums)
            return self._sums.opened_scores(phase.round, phase.attempt)
        if isinstance(phase, phases.Summing) or phase.reported:
            log.warning(
                "no sum of own scores", run=self._run, round=phase.round, why="too few sites were there to the end"
            )
        return None

    def _simulated(self, phase: phases.Evaluating | phases.Summing) -> Mapping[str, Spread] | None:
        """The same sum of what simulated sites reported; None: they reported nothing, or it was summed before."""
        reported: dict[SiteId, dict[str, float]] = {
            site: dict(scores)
            for site, scores in self._ledger.scores(self._run, phase.round).get(phase.round, {}).items()
        }
        own = {site: scores for site, scores in reported.items() if scores.keys() & set(self._names)}
        if not own:
            return None
        assert self._rules.grouping is not None  # noqa: S101  (of secure sums)
        there = whole(self._rules.grouping.begun(self._ledger.groups(), own), own)
        if len(there) < score_sums.HOLDERS:
            return {}
        for row in one_a_site(self._ledger.updates(self._run, phase.round, phase.attempt)):
            if row.task.site in own and LOSS in row.metrics:
                own[row.task.site][LOSS] = row.metrics[LOSS]
        return score_sums.opened(self._names, score_sums.total_of(self._names, [own[site] for site in sorted(there)]))
