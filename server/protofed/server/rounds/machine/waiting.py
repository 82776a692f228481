"""Why a run does not go on: a pure function of its phase and of who is there, for screens, log and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, assert_never

from protofed.common.errors import nearest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import PauseReason
from protofed.common.secure_aggregation.groups import members
from protofed.server.rounds.machine import phases, secure_steps
from protofed.server.rounds.machine.rules import RoundRules, stuck

LONG_S = 86_400.0  # of waiting, until people are asked whether a site has left: to regroup costs privacy
NAMED = 5  # missing sites in a text; the fields have all of them
UNKNOWN, NO_TRAINER = "unknown", "no trainer"
CANNOT_COME = frozenset({NO_TRAINER, "certificate revoked"})  # named only where the recipe requires them
# Why a site is not there, by its name, in a few words that do not change while it stays so: see `presence.absences`.
Absences: TypeAlias = Mapping[SiteId, str]


class WaitReason(StrEnum):
    """What a run waits for; a label of the metric and the field `reason` of `--json`."""

    TRAINERS = "trainers"  # fewer are there than a round needs
    REQUIRED_SITES = "required-sites"  # the recipe's `required_sites` are not all there
    PAUSED = "paused"
    QUEUED = "queued"
    BACK_OFF = "back-off"  # until the next attempt
    DISK = "disk"  # the server's is full
    UPDATES = "updates"  # of the open round
    SUM = "sum"  # a step of the open round's secure aggregation
    EVALUATOR = "evaluator"  # none is there that could refine the open round
    REFINEMENT = "refinement"  # of the open round, by the evaluator that was asked
    SCORES = "scores"


BLOCKED = frozenset(
    {WaitReason.TRAINERS, WaitReason.REQUIRED_SITES, WaitReason.EVALUATOR, WaitReason.BACK_OFF, WaitReason.DISK}
)


@dataclass(frozen=True)
class MissingSite:
    """A site that is waited for.

    Attributes:
        why: it is not there; empty: it is, and works.
        similar: the known site of the nearest name, if nobody knows this one.
        required: the recipe's `required_sites` names it.
    """

    site: SiteId
    why: str = ""
    similar: str = ""
    required: bool = False

    def __str__(self) -> str:
        why = f"no such site is known{f'; did you mean {self.similar}?' if self.similar else ''}"
        parts = [*(["required"] if self.required else []), why if self.why == UNKNOWN else self.why]
        return f"{self.site} ({', '.join(filter(None, parts))})" if any(parts) else self.site


@dataclass(frozen=True)
class Waiting:
    """Why a run does not go on; two of them are equal while nothing but time has passed.

    Attributes:
        needed, has: trainers, evaluators, or updates of the quorum; with BACK_OFF, attempts in all and the next one's
            number.
        asked, reported: sites of the open round, or of its step of secure aggregation; of those reported, `has` are in
            whole groups.
        missing: sites that the run waits for, or that would be enough if they came.
        behind: the run that goes on; with QUEUED only.
        step: of the secure aggregation; with SUM only.
        group: sites of the run's groups at least, if some that are there do not count for want of others; or else 1.
        newcomers: sites that are there, and too few for their own group.
        why: why the first group with some sites there cannot be aggregated; empty: there is none, or enough others.
        regroup: its site that has been away for so long that people may ask whether it has left for good; or one of a
            group that is too small.
        seconds_left: until the next attempt or the deadline, or until the run fails; None: there is no such time.
    """

    reason: WaitReason
    round: int
    needed: int = 0
    has: int = 0
    missing: tuple[MissingSite, ...] = ()
    requested: int = 0
    reported: int = 0
    behind: str = ""
    step: str = ""
    group: int = 1
    newcomers: tuple[SiteId, ...] = ()
    why: str = ""
    regroup: str = ""
    seconds_left: float | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """All but the time in a line."""
        what = self._what
        if self.why:
            what = f"{what}; {self.why}"
        if self.regroup:
            what = f"{what} (for good? `protofed sites regroup {self.regroup}`)"
        if any(site.why == PauseReason.PARTNERS for site in self.missing):
            what = f"{what}; `protofed consortium` has the next step"
        if not self.newcomers:
            return what
        more, wait = self.group - len(self.newcomers), "wait" if len(self.newcomers) > 1 else "waits"
        others = f"{more} more new site{'s' * (more != 1)}: sums are over groups of {self.group}"
        return f"{what}; {', '.join(self.newcomers)} {wait} for {others}"

    @property
    def _what(self) -> str:
        missing = f"; missing: {name_some(self.missing)}" if self.missing else ""
        match self.reason:
            case WaitReason.REQUIRED_SITES if self.has >= self.needed:
                return f"needs each of its required sites{missing}"
            case WaitReason.TRAINERS | WaitReason.REQUIRED_SITES:
                groups = f" in whole groups of {self.group} or more" if self.group > 1 else ""
                return f"needs {self.needed} trainer{'s' * (self.needed != 1)}{groups}, has {self.has}{missing}"
            case WaitReason.PAUSED:
                return "paused by the operator"
            case WaitReason.QUEUED:
                return f"waits behind run {self.behind}"
            case WaitReason.BACK_OFF:
                return f"tries round {self.round} again, attempt {self.has} of {self.needed}"
            case WaitReason.DISK:
                return "waits for space on the server's disk"
            case WaitReason.UPDATES:
                return f"waits for updates of {name_some(self.missing)}; {self._counts}, the quorum is {self.needed}"
            case WaitReason.SUM:
                step = f"in step {self.step} of a secure aggregation"
                return f"waits for {name_some(self.missing)} {step}; {self._counts}, needs {self.needed}"
            case WaitReason.EVALUATOR:
                return "needs an evaluator with images to refine the model on, has none"
            case WaitReason.REFINEMENT:
                return f"waits for {name_some(self.missing)} to refine the model"
            case WaitReason.SCORES:
                return f"waits for scores of {name_some(self.missing)}"
            case _:
                assert_never(self.reason)

    @property
    def _counts(self) -> str:
        if self.reported == self.has:
            return f"has {self.has}"
        return f"has {self.reported} of {self.requested}, {self.has} in whole groups"


def name_some(sites: Sequence[object]) -> str:
    """The first ones by name, and how many more there are."""
    more = f" and {len(sites) - NAMED} more" if len(sites) > NAMED else ""
    return ", ".join(map(str, sites[:NAMED])) + more


def waiting(
    rules: RoundRules, phase: phases.Phase, tick: phases.Tick, absences: Callable[[], Absences], *, disk_full: bool
) -> Waiting | None:
    """What the run that goes on waits for; None: for nothing, or it has ended.

    Args:
        tick: of now.
        absences: of all known trainers that `tick` does not have, and of the awaited sites that are not alive; asked
            for only where sites are named.
        disk_full: the last attempt to store something failed.
    """
    match phase:
        case phases.Idle():
            return _idle(rules, phase, tick, absences, disk_full)
        case phases.Collecting():
            seconds_left = max(0.0, phase.opened + rules.federation.deadline_s - tick.now)
            missing = _awaited(phase.awaited, phase.required, absences())
            at = WaitReason.UPDATES, phase.round, phase.quorum, len(phase.counted), missing
            wait = Waiting(*at, len(phase.cohort), len(phase.reported), seconds_left=seconds_left)
            return _with_newcomers(rules, wait, tick, phase.cohort)
        case phases.Summing():
            seconds_left = max(0.0, phase.opened + rules.federation.sum_step_s - tick.now)
            missing = _awaited(phase.awaited, phase.required, absences())
            counts = secure_steps.needed(phase), len(secure_steps.counted(phase, phase.reported))
            wait = Waiting(WaitReason.SUM, phase.round, *counts, missing, len(phase.cohort), len(phase.reported))
            wait = replace(wait, step=phase.step, seconds_left=seconds_left)
            return _with_newcomers(rules, wait, tick, phase.roster)
        case phases.Aggregating():
            return Waiting(WaitReason.DISK, phase.round) if disk_full else None
        case phases.Refining():
            return _refining(rules, phase, tick, absences, disk_full)
        case phases.Evaluating():
            seconds_left = max(0.0, phase.opened + rules.federation.score_deadline_s - tick.now)
            missing = _awaited(phase.awaited, phases.NOBODY, absences())
            return Waiting(WaitReason.SCORES, phase.round, missing=missing, seconds_left=seconds_left)
        case phases.FinishedPhase():
            return None
        case _:
            assert_never(phase)


def _refining(
    rules: RoundRules, phase: phases.Refining, tick: phases.Tick, absences: Callable[[], Absences], disk_full: bool
) -> Waiting | None:
    federation = rules.federation
    if phase.requested:
        seconds_left = max(0.0, phase.opened + federation.deadline_s - tick.now)
        missing = _awaited(phase.requested - phase.reported, phases.NOBODY, absences())
        return (
            Waiting(WaitReason.REFINEMENT, phase.round, missing=missing, seconds_left=seconds_left) if missing else None
        )
    if tick.now < phase.again_at:
        attempts = federation.max_attempts, phase.tries + 1
        return Waiting(WaitReason.BACK_OFF, phase.round, *attempts, seconds_left=phase.again_at - tick.now)
    if not tick.evaluators:
        seconds_left = max(0.0, phase.opened + federation.site_wait_timeout_s - tick.now)
        return Waiting(WaitReason.EVALUATOR, phase.round, needed=1, seconds_left=seconds_left)
    return Waiting(WaitReason.DISK, phase.round) if disk_full else None


def _idle(
    rules: RoundRules, phase: phases.Idle, tick: phases.Tick, absences: Callable[[], Absences], disk_full: bool
) -> Waiting | None:
    if tick.paused:
        return Waiting(WaitReason.PAUSED, phase.round)
    if tick.now < phase.again_at:
        attempts = rules.federation.max_attempts, phase.tries + 1
        return Waiting(WaitReason.BACK_OFF, phase.round, *attempts, seconds_left=phase.again_at - tick.now)
    enrolled, trainers = tick.enrolled, tick.trainers
    if phase.round:  # the first model is no sum
        enrolled, trainers = (rules.countable(tick.groups, sites) for sites in (enrolled, trainers))
    needed = rules.trainers_needed(phase.round, enrolled)
    required = frozenset(rules.federation.required_sites) - tick.trainers
    lacks_required = phase.round > 0 and not trainers.issuperset(rules.federation.required_sites)
    if lacks_required or len(trainers) < needed:
        reason = WaitReason.REQUIRED_SITES if lacks_required else WaitReason.TRAINERS
        missing = _missing(required, absences(), tick.trainers)
        since = tick.now if phase.since is None else phase.since
        seconds_left = max(0.0, since + rules.federation.site_wait_timeout_s - tick.now)
        group = rules.fewest if trainers < tick.trainers else 1
        wait = Waiting(reason, phase.round, needed, len(trainers), missing, group=group, seconds_left=seconds_left)
        return _with_newcomers(rules, _with_stuck(wait, tick, since), tick, phases.NOBODY)
    return Waiting(WaitReason.DISK, phase.round) if disk_full else None


def _with_stuck(wait: Waiting, tick: phases.Tick, since: float) -> Waiting:
    """What is waited for since then, with what keeps the first group that cannot be whole."""
    stuck_sites = stuck(tick.groups, tick.trainers, wait.group) if wait.group > 1 else ()
    if not stuck_sites:
        return wait
    long = not stuck_sites[0].lacking or tick.now - since >= LONG_S
    return replace(wait, why=stuck_sites[0].why, regroup=stuck_sites[0].site if long else "")


def _with_newcomers(rules: RoundRules, wait: Waiting, tick: phases.Tick, requested: phases.Sites) -> Waiting:
    """What the run waits for, with sites that themselves wait for others of their group."""
    newcomers = tick.trainers - members(tick.groups) - requested
    if not tick.groups or not 0 < len(newcomers) < rules.fewest:
        return wait
    return replace(wait, group=rules.fewest, newcomers=tuple(sorted(newcomers)))


def _missing(required: phases.Sites, absences: Absences, here: phases.Sites) -> tuple[MissingSite, ...]:
    """The required sites first."""
    known = {*absences, *here}
    named = [
        MissingSite(site, absences.get(site, UNKNOWN), "" if site in known else nearest(site, known), required=True)
        for site in sorted(required)
    ]
    others = (site for site in sorted(absences.keys() - required) if absences[site] not in CANNOT_COME)
    return (*named, *(MissingSite(site, absences[site]) for site in others))


def _awaited(sites: phases.Sites, required: phases.Sites, absences: Absences) -> tuple[MissingSite, ...]:
    known = {site: why for site, why in absences.items() if why != NO_TRAINER}  # evaluators, which score
    return tuple(MissingSite(site, known.get(site, ""), required=site in required) for site in sorted(sites))
