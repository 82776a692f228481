"""What `runs watch` shows at one moment: plain data, which is also the JSON of `--json`, key by key.

What only passes by itself (seconds, bytes under way, telemetry) is left out of comparisons: two scenes differ when
something happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

ENDED = ("completed", "failed", "aborted")
FAILED = ("failed", "late", "set-aside")  # task statuses


class Attention(IntEnum):
    """How much a site needs looking at; the worst is shown first."""

    BAD = 0  # it failed, is silent, or somebody keeps it out
    HELD = 1  # it is there and takes no task
    AWAITED = 2  # the round waits for it
    WELL = 3


@dataclass(frozen=True)
class TimeRemaining:
    """How long the rest of a run will take if its rounds go on as the last ones did, in seconds.

    Attributes:
        likely: by the median of those rounds; `least` and `most`: by the quickest and the slowest.
        by_rounds: from so many of them.
    """

    likely: float
    least: float
    most: float
    by_rounds: int


@dataclass(frozen=True)
class SiteSnapshot:
    """One site.

    Attributes:
        status: as in `sites list`; `doing` says it in words.
        task_status: in the newest round; empty if it was not invited. `reason` explains one that failed.
        progress: share of its task, 0 to 1; None: not known.
        bytes_moved: by its daemon since that started, both ways.
        still_s: seconds since it last got on; None: no daemon.
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
        outcome: open, published, degraded, abandoned, rolled-back, or unfinished where the run ended in it.
        seconds: that it took; None while it is open.
        reported: sites of those `invited`.
        failed: task statuses failed, late or set-aside, each with its number.
    """

    round: int
    attempt: int
    outcome: str
    reason: str
    seconds: float | None
    invited: int
    reported: int
    failed: Mapping[str, int]


@dataclass(frozen=True)
class ScoreSnapshot:
    """One score over sites; the changes are those since the scored round before, None if that was not seen."""

    name: str
    mean: float
    std: float
    worst: float
    sites: int
    mean_change: float | None
    worst_change: float | None
    lower_is_better: bool


@dataclass(frozen=True)
class Problem:
    """Something that went wrong; `site` is empty for a whole attempt."""

    round: int
    attempt: int
    site: str
    what: str
    reason: str


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        at: seconds of the Unix epoch.
        queue: its place in it, in words; empty when it is not waiting.
        done: rounds that were published.
        phase_s: how long it has been in this phase; `deadline_s`: of a round that is collecting, where it is known.
        seconds: since its first round was opened; None: none was.
        rest: None: it is too early to say, the run is paused, or it has ended.
        history: the newest attempts, the oldest first.
        problems: of those attempts, the newest first.
        trouble: why the server does not answer, empty if it does; all else is as it was `silent_s` ago.
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
    trouble: str = ""
    silent_s: float = field(default=0.0, compare=False)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED
