"""The rules of a run's rounds: what its recipe says, as the decisions of the state machine ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.common.config.recipe import Federation, Recipe
from protofed.common.errors import ConfigError
from protofed.common.secure_aggregation.groups import Groups, summable
from protofed.server.rounds.best_round import Standstill
from protofed.server.rounds.grouping import Grouping
from protofed.server.rounds.phases import Sites
from protofed.server.rounds.sampling import Sampler, Uniform, cohort_size, quorum_of

AGREEING = 2  # a first model that one site alone made would be whatever that site sent


@dataclass(frozen=True)
class RoundRules:
    """What stays the same for a whole run."""

    rounds: int
    federation: Federation
    sampler: Sampler
    in_time: bool = True  # a simulation's clock stands still
    summed: bool = False  # sites are asked for masked numbers, in place of updates
    holders: bool = False  # they count who holds which class before
    refined: bool = False  # an evaluator makes of each round's aggregate the state that is published
    grouping: Grouping | None = None  # of the sites of secure sums, a simulation's too

    @classmethod
    def of(cls, recipe: Recipe, *, simulated: bool, holders: bool, refined: bool) -> RoundRules:
        """The rules of a run; a simulation's clock stands still, and its sites are asked for updates."""
        rules, summed = recipe.federation, recipe.federation.secure and not simulated
        sampler = Uniform(recipe.seed)
        return cls(recipe.rounds, rules, sampler, not simulated, summed, holders, refined, Grouping.of_run(recipe))

    def pause(self, round: int, tries: int) -> float:
        """Seconds before the next attempt: exponential, so that sites that decline do not use up all attempts at once.

        Round 0 tries again at once the first time, since that attempt asks all sites in place of two. Its later pauses
        are twice a training round's, or its attempts would be used up sooner: 280 s in all by default, and not 150 s.
        """
        if not self.in_time or (round == 0 and tries == 1):
            return 0.0
        doublings = tries if round else tries + 1
        # 32: 2**doublings overflows no float, and any heartbeat times 2**32 is far beyond the deadline.
        return min(self.federation.heartbeat_s * 2.0 ** min(doublings, 32), self.federation.deadline_s)

    @property
    def first_models(self) -> int:
        """Sites that must make the same first model; one, where a single site may make up a round or a class."""
        return 1 if min(self.federation.min_sites, self.federation.min_contributors) == 1 else AGREEING

    def early_end(self, done: int, standstill: Standstill | None) -> str:
        """Why the run ends after round `done`, though the recipe has more; empty: it goes on."""
        rules = self.federation
        if rules.patience is None or standstill is None or standstill.rounds < rules.patience:
            return ""
        by = f" by {rules.min_improvement:g}" if rules.min_improvement else ""
        return f"stopped early after round {done}: {standstill.score} no better{by} since round {standstill.since}"

    def check_continues(self, done: int, standstill: Standstill | None) -> None:
        """Check that a run that is taken back to round `done` has a round before it.

        Raises:
            ConfigError: it would end there at once.
        """
        if done >= self.rounds:
            raise ConfigError(
                f"round {done} is the last of the run's recipe, and no round would follow it; to train on, go back to "
                "an earlier round; its model can be exported as it is"
            )
        if early := self.early_end(done, standstill):
            raise ConfigError(f"from round {done} the run would end again at once: {early}; go back to that round")

    @property
    def fewest(self) -> int:
        """Sites that come newly and count: a group of them."""
        return 1 if self.grouping is None else self.grouping.fewest

    def countable(self, groups: Groups, sites: Sites) -> Sites:
        """Those of the sites whose updates could count together now."""
        return summable(groups, sites, self.fewest)

    def trainers_needed(self, round: int, enrolled: Sites) -> int:
        """Trainers that must be alive before the round is opened; `enrolled` are those of whom it needs a share."""
        if round == 0:
            return self.first_models
        quorum = quorum_of(self.federation, cohort_size(self.federation, enrolled))
        return max(self.federation.min_sites, quorum, len(set(self.federation.required_sites)))

    def owns_due(self, round: int) -> bool:
        """Whether trainers take their own scores after this round."""
        every, personal = self.federation.score_every, self.federation.score_personal_every
        return self.due(round, every if personal is None else personal)

    def due(self, round: int, every: int) -> bool:
        """Whether scores are taken after this round; 0: only after the last one."""
        return round > 0 and (round == self.rounds or (every > 0 and round % every == 0))
