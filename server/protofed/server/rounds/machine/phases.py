"""The alphabet of the round's state machine: phases, events that move them, effects that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protofed.common.payload import SiteId
from protofed.common.protocol.messages import SumOf, TaskKind
from protofed.common.secure_aggregation.groups import Groups, summable
from protofed.common.secure_aggregation.keys import threshold
from protofed.server.verdicts import RoundOutcome

Sites: TypeAlias = frozenset[SiteId]
NOBODY: Sites = frozenset()


@dataclass(frozen=True)
class Plateau:
    """So many scored rounds have not improved `score` on round `since`; 0: the newest one did."""

    score: str
    since: int
    rounds: int


# Phases


@dataclass(frozen=True)
class Idle:
    """Waiting for enough sites to open `round`.

    Attributes:
        tries: consecutive attempts at it that were abandoned.
        since: when the wait began, in seconds of the monotonic clock; None before the first tick.
        again_at: the round is not opened before, in seconds of the monotonic clock.
    """

    round: int
    tries: int = 0
    since: float | None = None
    again_at: float = 0.0


@dataclass(frozen=True)
class Collecting:
    """Waiting for the cohort's updates.

    Attributes:
        attempt: number of this try at the round; never reused, also not after a roll-back.
        size: updates after which nobody else is needed.
        quorum: fewest updates with which the round counts.
        opened, quorum_at: when it opened and got its quorum, in seconds of the coordinator's monotonic clock.
        failed: sites that declined the task.
        required: sites without which the round does not count.
        groups: that sites had when the round was opened; empty without secure aggregation.
        fewest: sites of a new group.
        enrolled: trainers that the run could invite when it was opened.
    """

    round: int
    attempt: int
    cohort: Sites
    size: int
    quorum: int
    opened: float
    reported: Sites = NOBODY
    failed: Sites = NOBODY
    quorum_at: float | None = None
    required: Sites = NOBODY
    tries: int = 0
    groups: Groups = ()
    fewest: int = 1
    enrolled: int = 0

    @property
    def counted(self) -> Sites:
        """Those that have reported, without sites whose group has not reported whole."""
        return summable(self.groups, self.reported, self.fewest)

    @property
    def hoped_for(self) -> Sites:
        """Sites that would count if all came that have not failed."""
        return summable(self.groups, self.cohort - self.failed, self.fewest)

    @property
    def has_quorum(self) -> bool:
        """Whether the round could close with the updates that it has."""
        counted = self.counted
        return len(counted) >= self.quorum and self.required <= counted

    @property
    def awaited(self) -> Sites:
        """Sites that may still report."""
        return self.cohort - self.reported - self.failed


@dataclass(frozen=True)
class Summing:
    """Waiting for one step of a secure aggregation; see `secure_steps`.

    Attributes:
        step: what the sites of `cohort` are asked for.
        roster: sites whose keys are in the sum: they had computed what is aggregated.
        size: sites with which the round is complete.
        quorum: fewest sites whose numbers are aggregated.
        contributors: whether sites count the contributors of each class before they send numbers.
        opened: when the step was, in seconds of the coordinator's monotonic clock.
        survivors: sites whose masked numbers are there; nobody before they were asked for.
        groups: of the roster; each is aggregated as a whole, or not at all.
    """

    round: int
    attempt: int
    sum_of: SumOf
    step: TaskKind
    roster: Sites
    cohort: Sites
    size: int
    quorum: int
    contributors: bool
    opened: float
    reported: Sites = NOBODY
    failed: Sites = NOBODY
    survivors: Sites = NOBODY
    required: Sites = NOBODY
    tries: int = 0
    groups: Groups = ()

    @property
    def threshold(self) -> int:
        """Sites that must agree and reveal."""
        return threshold(len(self.roster))

    @property
    def awaited(self) -> Sites:
        """Sites that may still report."""
        return self.cohort - self.reported - self.failed


@dataclass(frozen=True)
class Aggregating:
    """These sites' updates are being aggregated; `quorum` of them are needed, and those of all required sites.

    Attributes:
        to_refine: an evaluator makes of the result the state that is published.
        refines: it has: the one update is the evaluator's.
    """

    round: int
    attempt: int
    sites: Sites
    quorum: int = 0
    required: Sites = NOBODY
    tries: int = 0
    to_refine: bool = False
    refines: bool = False

    def is_short(self, used: Sites) -> bool:
        """Whether these sites' updates alone are too few: some were rejected after they had counted for the quorum."""
        return len(used) < self.quorum or not self.required <= used


@dataclass(frozen=True)
class Refining:
    """The round's aggregate is durable, and an evaluator refines it to the state that is published.

    Attributes:
        opened: when the evaluator was asked or, while none is, when the wait for one began; in seconds of the
            coordinator's monotonic clock.
        requested: the evaluator; nobody while none is there, or before `again_at`.
        reported: the evaluator, if what it made is durable: it came before a restart.
        passed: evaluators that could not do it, or not in time; asked again only where there is no other.
        tries: times that an evaluator was asked in vain.
    """

    round: int
    attempt: int
    opened: float
    requested: Sites = NOBODY
    reported: Sites = NOBODY
    passed: Sites = NOBODY
    tries: int = 0
    again_at: float = 0.0


@dataclass(frozen=True)
class Evaluating:
    """Waiting for scores of the model that `round` published; or for trainers that have taken theirs, for a sum.

    Attributes:
        then: trainers that are asked for a sum of their own scores when these are there.
        attempt: at the round, which gave the model; of a sum.
        secure: whether the round waits for trainers whose own scores are aggregated.
        reported: the trainers whose keys are there.
    """

    round: int
    awaited: Sites
    opened: float
    then: Sites = NOBODY
    attempt: int = 0
    secure: bool = False
    reported: Sites = NOBODY
    groups: Groups = ()


@dataclass(frozen=True)
class FinishedPhase:
    """The end, for good."""

    reason: str
    outcome: RoundOutcome

    @property
    def failed(self) -> bool:
        """Whether it ended neither by its recipe nor by the operator."""
        return self.outcome is RoundOutcome.FAILED


Phase: TypeAlias = Idle | Collecting | Summing | Aggregating | Refining | Evaluating | FinishedPhase
PHASES = ("idle", "collecting", "summing", "aggregating", "refining", "evaluating", "finished")


def is_scoring(phase: Phase) -> bool:
    """Whether the run waits for scores of a published model, or for their secure aggregation."""
    return isinstance(phase, Evaluating) or (isinstance(phase, Summing) and phase.sum_of is SumOf.SCORES)


def name(phase: Phase) -> str:
    """One of `PHASES`."""
    return type(phase).__name__.lower()


# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed.

    Attributes:
        now: seconds of the monotonic clock.
        enrolled: all trainers that the run may invite.
        trainers, evaluators: alive now.
        attempt: of the round that would be opened now.
        paused: no round is to be opened.
        plateau: of the score that the run's rounds are judged by; None: it has none, or the run has no patience.
        groups: that sites have, here as in other events and phases; empty without secure aggregation.
    """

    now: float
    enrolled: Sites
    trainers: Sites
    evaluators: Sites
    attempt: int = 1
    paused: bool = False
    plateau: Plateau | None = None
    groups: Groups = ()


@dataclass(frozen=True)
class Arrived:
    """A site's update is durable."""

    site: SiteId
    now: float


@dataclass(frozen=True)
class Declined:
    """A site said that it cannot do its task; `reason` is its code.

    Attributes:
        makers: of the first model, where the policy of a site refuses to train on it or for another cause.
    """

    site: SiteId
    now: float
    reason: str = ""
    makers: Sites = NOBODY


@dataclass(frozen=True)
class Aggregated:
    """The new state is durable. If a run's states are refined: first the aggregate, then the refined state.

    Attributes:
        evaluators: they can score the global model, if there is one.
        trainers: they can score their own models.
    """

    now: float
    evaluators: Sites
    trainers: Sites = NOBODY
    groups: Groups = ()


@dataclass(frozen=True)
class ScoresArrived:
    """A site's scores are durable."""

    site: SiteId
    now: float = 0.0


@dataclass(frozen=True)
class Insufficient:
    """So many updates were rejected that the rest is no quorum, or what sites sent gives no sum."""

    reason: str
    now: float


@dataclass(frozen=True)
class Broken:
    """The aggregation failed: going on would lose updates."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """The operator ends the run."""

    reason: str


Event: TypeAlias = Tick | Arrived | Declined | Aggregated | Insufficient | ScoresArrived | Broken | Stop


# Effects


@dataclass(frozen=True)
class Open:
    """Invite this cohort."""

    phase: Collecting


@dataclass(frozen=True)
class AskStep:
    """Ask this cohort for this step of a secure aggregation.

    Attributes:
        complete: the round got all updates that it wanted before; of the first step only.
    """

    phase: Summing
    complete: bool = False


@dataclass(frozen=True)
class Aggregate:
    """Aggregate the updates of the round's reporting sites, in site order.

    Attributes:
        complete: the round got `size` updates, all required ones among them.
        groups: of those sites, to be kept; empty where there are none, or they were kept with the sum's first step.
    """

    phase: Aggregating
    complete: bool
    groups: Groups = ()


@dataclass(frozen=True)
class Abandon:
    """Close an attempt without touching the state."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class AskRefinement:
    """Ask this evaluator to refine the round's aggregate."""

    phase: Refining


@dataclass(frozen=True)
class Recall:
    """Wait no longer for the evaluator that was asked to refine the round."""

    reason: str


@dataclass(frozen=True)
class Refine:
    """Make of the round's aggregate, and of what the evaluator sent, the state that is published."""

    phase: Aggregating


@dataclass(frozen=True)
class AskScores:
    """Send these sites a score task."""

    phase: Evaluating


@dataclass(frozen=True)
class Finish:
    """Record how the run ended and wake the sites."""

    phase: FinishedPhase


Effect: TypeAlias = Open | AskStep | Aggregate | AskRefinement | Recall | Refine | Abandon | AskScores | Finish
