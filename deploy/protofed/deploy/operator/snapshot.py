"""What `runs watch` shows at one moment: plain data, whose fields are also the keys of `--json`.

Fields that change by themselves (seconds, bytes, telemetry) do not count in comparisons: two snapshots differ only if
something happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from protofed.deploy.run_view import BestSnapshot
from protofed.deploy.tables import span
from protofed.server.rounds.machine.waiting import BLOCKED, MissingSite

ENDED = ("completed", "failed", "aborted")  # statuses of a run
FAILED = ("failed", "late", "rejected")  # task statuses
PUBLISHED = ("published", "degraded")  # outcomes of an attempt


class Attention(IntEnum):
    """How much attention a site needs; the least value is shown first."""

    BAD = 0  # its task failed, or it is silent or excluded
    HELD = 1  # its daemon takes no tasks, or none has called since the server started
    AWAITED = 2  # the round waits for it
    WELL = 3


@dataclass(frozen=True)
class TimeRemaining:
    """An estimate of the time that a run has left, in seconds, from the durations of its last rounds.

    Attributes:
        likely: if each round takes their median; `least` and `most`: if each takes the shortest, or the longest.
        by_rounds: the number of rounds that the estimate is from.
    """

    likely: float
    least: float
    most: float
    by_rounds: int


@dataclass(frozen=True)
class SiteSnapshot:
    """One site at one moment.

    Attributes:
        status: as in `sites list`; `doing` is the same in words.
        task_status: of its task in the newest attempt; empty if it was not invited. `reason`: why it failed.
        care: how much attention it needs.
        progress: share of its task that is done, 0 to 1; None: unknown.
        bytes_moved: by its daemon since the daemon's start, in both directions.
        still_s: seconds since its last progress; None: it has no daemon.
        telemetry: what its policy discloses of its machine, by name.
    """

    site: str
    status: str
    doing: str
    task_status: str
    reason: str
    care: Attention
    progress: float | None
    bytes_moved: int = field(compare=False)
    still_s: float | None = field(compare=False)
    telemetry: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a round.

    Attributes:
        outcome: open, published, degraded, abandoned, rolled-back, or unfinished if the run ended during it.
        seconds: its duration; None while it is open.
        reported: number of sites that reported, of those `invited`.
        failed: number of tasks by status: failed, late, rejected.
        missing: invited sites whose update is not in it, or not yet.
    """

    round: int
    attempt: int
    outcome: str
    reason: str
    seconds: float | None
    invited: int
    reported: int
    failed: Mapping[str, int]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ScoreSnapshot:
    """One score over sites.

    Attributes:
        std, worst: over all sites; None: from a secure aggregation, which tells of no site alone.
        mean_change, worst_change: since the scored round before; None: the watcher has not seen that.
    """

    name: str
    mean: float
    std: float | None
    worst: float | None
    sites: int
    mean_change: float | None
    worst_change: float | None
    lower_is_better: bool


@dataclass(frozen=True)
class Problem:
    """Something that went wrong in an attempt.

    Attributes:
        site: empty if the whole attempt failed.
        what: abandoned, refused, or the status of the task.
    """

    round: int
    attempt: int
    site: str
    what: str
    reason: str


@dataclass(frozen=True)
class WaitingSnapshot:
    """Why a run does not go on; the fields are those of `Waiting` in operator.proto.

    Attributes:
        seconds_left: until the next attempt or the deadline, or until the run fails; None: there is no such time.
    """

    reason: str
    text: str
    round: int
    needed: int
    has: int
    missing: tuple[MissingSite, ...]
    behind: str
    seconds_left: float | None = field(compare=False)

    @property
    def blocked(self) -> bool:
        """Whether the run stands still until somebody does something, or for a while."""
        return self.reason in BLOCKED

    @property
    def sentence(self) -> str:
        """The whole wait in a line, with the time that is left."""
        if self.seconds_left is None:
            return self.text
        remaining = span(self.seconds_left)
        match self.reason:
            case "back-off":
                return f"{self.text}, in {remaining}"
            case "updates" | "sum" | "refinement" | "scores":
                return f"{self.text}; {remaining} left"
            case _:
                return f"{self.text}; the run fails in {remaining} if that stays so"

    @property
    def cell(self) -> str:
        """For a table's cell; empty for what other columns say: what the open round is waiting for."""
        redundant = self.reason in ("updates", "sum", "refinement", "scores", "paused")
        return "" if redundant else self.text.partition("; missing")[0]


@dataclass(frozen=True)
class WarningSnapshot:
    """Something that speaks against a model; the fields are those of `ModelWarning` in operator.proto."""

    code: str
    round: int
    site: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        at: Unix time.
        queue: the run's place in the queue, in words; empty if it does not wait.
        phase_s: seconds in this phase.
        deadline_s: seconds that a collecting round may take; None: unknown, or another phase.
        done: number of the newest published round.
        seconds: since the run's first attempt was opened; None: none was.
        rest: time that the run has left; None: it is too early to estimate, the run is paused, or it has ended.
        history: the newest attempts, oldest first.
        problems: of those attempts, newest first.
        best: the best round so far; None: no round has a score that judges it.
        keeping: sites that answered a request for scores of their own models and sent none, as a policy may have it.
        noisy: no score of the sites' own is there because the run has noise, which these have not.
        waiting: why the run does not go on; None: it does, or it has ended.
        unmet: what the run needs and the sites that may take part cannot give, in sentences.
        model_warnings: what speaks against the run's models now, the worst first.
        trouble: why the server does not answer, empty if it does; all other fields are `silent_s` seconds old.
    """

    at: float = field(compare=False)
    run: str
    method: str
    status: str
    reason: str
    queue: str
    phase: str
    phase_s: float | None = field(compare=False)
    deadline_s: float | None
    round: int
    rounds: int
    done: int
    invited: int
    reported: int
    degraded: int
    abandoned: int
    rolled_back: int
    received_bytes: int
    sent_bytes: int
    seconds: float | None = field(compare=False)
    rest: TimeRemaining | None = field(compare=False)
    sites: tuple[SiteSnapshot, ...]
    history: tuple[Attempt, ...]
    scored_round: int
    scores: tuple[ScoreSnapshot, ...]
    problems: tuple[Problem, ...]
    best: BestSnapshot | None = None
    keeping: int = 0
    noisy: bool = False
    waiting: WaitingSnapshot | None = None
    unmet: tuple[str, ...] = ()
    model_warnings: tuple[WarningSnapshot, ...] = ()
    trouble: str = ""
    silent_s: float = field(default=0.0, compare=False)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.status in ENDED
