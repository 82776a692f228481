"""What server and client say to each other, without the wire: tasks, receipts, progress, scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protofed.common.codec import Digest
from protofed.common.errors import FailureReason
from protofed.common.payload import TensorSpec

PROTOCOL_VERSION = 1
CHUNK_BYTES = 2 << 20
MOST_BYTES = 4 << 30  # of a model, as large as sites take one
MOST_RECIPE_BYTES = 1 << 20
LONGEST_S = 1e9  # of any time that is told: thirty years


class Role(StrEnum):
    """What a client daemon offers: to train on its data, or to score the global model on a public test set."""

    TRAINER = "trainer"
    EVALUATOR = "evaluator"


class PauseReason(StrEnum):
    """Why a daemon that is there takes no task yet; it is not counted among the sites of a round."""

    NONE = ""
    APPROVAL = "awaiting approval"
    SCHEDULE = "outside its schedule"


class TaskKind(StrEnum):
    """What a task asks for."""

    INITIALISE = "initialise"  # round 0: make the model from the run's seed; the server has no torch
    FIT = "fit"
    SCORE = "score"


@dataclass(frozen=True)
class Task:
    """One piece of work for one site.

    Attributes:
        task_id: names this very invitation: a round that is opened again has other task_ids.
        base: the blob to start from; None when there is nothing yet (INITIALISE).
        base_bytes: its size.
        remaining_s: seconds until the round's deadline, by the server's monotonic clock.
    """

    kind: TaskKind
    run: str
    round: int
    task_id: str
    base_digest: Digest | None
    base_bytes: int
    remaining_s: float


@dataclass(frozen=True)
class Wait:
    """Nothing to do now: ask again after this many seconds."""

    retry_after_s: float


@dataclass(frozen=True)
class Finished:
    """The run has ended.

    Attributes:
        reason: why, in words.
        last: the server has no other run queued.
    """

    reason: str
    last: bool


@dataclass(frozen=True)
class Assignment:
    """What Enroll answers when there is a run.

    Attributes:
        recipe: as JSON.
        keep_rounds: rounds to which the run may be rolled back, so that sites keep their memory of them; 0: all.
        preprocessing_digest: the server's `Recipe.preprocessing_digest()`, which the site's must equal;
            empty only where an assignment is read from a site's own files.
    """

    run: str
    recipe: str
    keep_rounds: int = 2
    preprocessing_digest: str = ""


class Verdict(StrEnum):
    """What became of an update."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same digest again: the stored receipt
    STALE = "stale"  # the round is closed: polite, never fatal
    NOT_NEEDED = "not-needed"  # the cohort was already complete
    INVALID = "invalid"


@dataclass(frozen=True)
class Receipt:
    """The server's durable answer to a commit; `record_hash` is the BLAKE3 of the ledger row."""

    verdict: Verdict
    reason: str
    digest: Digest
    record_hash: str


@dataclass(frozen=True)
class Manifest:
    """What an upload will be, said before a byte of it is sent."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    digest: Digest


class Activity(StrEnum):
    """What a client daemon is doing, for its heartbeat."""

    IDLE = "idle"
    DOWNLOADING = "downloading"
    TRAINING = "training"
    SCORING = "scoring"
    UPLOADING = "uploading"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """How far a site is with its task; `failure` is set when it cannot go on.

    Nothing in it depends on how many examples the site has: there are no batches, nor shares of an epoch, which would
    tell how many batches there are. `making_progress` says no more than that training got on lately.
    """

    task_id: str
    activity: Activity
    epoch: int = 0
    epochs: int = 0
    making_progress: bool = False
    bytes_moved: int = 0
    failure: FailureReason | None = None
    telemetry: Mapping[str, float] = field(default_factory=dict, compare=False)  # numbers that change are no progress

    @property
    def share(self) -> float | None:
        """Of the training that goes on, the epochs that are done, 0 to 1; None: this daemon's task has none."""
        match self.activity:
            case Activity.DOWNLOADING:
                return 0.0
            case Activity.TRAINING if self.epochs:
                return min(max(self.epoch - 1, 0) / self.epochs, 1.0)
            case Activity.UPLOADING:
                return 1.0
        return None


class Signal(StrEnum):
    """The server's answer to a heartbeat."""

    CONTINUE = "continue"
    ABORT = "abort"  # nobody waits for this task any more


Scores = Mapping[str, float]


def score_family(name: str) -> str:
    """`global.recall` of `global.recall.3`: what is told of every class has one name; others are their own family."""
    stem, _, last = name.rpartition(".")
    return stem if last.isdigit() else name
