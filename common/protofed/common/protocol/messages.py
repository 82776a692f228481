"""What server and client exchange, independent of protobuf: tasks, receipts, progress, scores, telemetry.

Numbers of a site's machine and daemon in heartbeats are a closed list; the site's policy allows some of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protofed.common.codec import Digest
from protofed.common.errors import FailureReason, ProtocolError
from protofed.common.payload import TensorSpec

PROTOCOL_VERSION = 2
CHUNK_BYTES = 2 << 20
MAX_BYTES = 4 << 30  # the largest model that sites accept
MAX_RECIPE_BYTES = 1 << 20
# Sites of one secure aggregation: of two each knows the other's; each shares with each other one.
MIN_SECURE_SITES, MAX_SECURE_SITES = 3, 50
LONGEST_S = 1e9  # seconds; bounds every duration that is read: thirty years


class Role(StrEnum):
    """What a client daemon does: train on its data; or, on public images, score the global model and refine it."""

    TRAINER = "trainer"
    EVALUATOR = "evaluator"


class PauseReason(StrEnum):
    """Why a connected daemon takes no task yet; a round does not count it among its sites."""

    NONE = ""
    APPROVAL = "awaiting approval"
    SCHEDULE = "outside its schedule"
    PAUSED = "paused by the site"
    WITHDRAWN = "takes no part in the run"  # the site denied it, or left it
    BUDGET = "privacy budget spent"  # one more round would cost more than the site's policy allows
    PARTNERS = "has not confirmed the list of partners"  # that the server offers, and secure aggregation is of
    POLICY = "its policy cannot be read"  # an edit of the file was wrong: a person at the site mends it


class SumOf(StrEnum):
    """What is securely aggregated."""

    UPDATE = "update"
    SCORES = "scores"


class TaskKind(StrEnum):
    """The work of a task."""

    INITIALISE = "initialise"  # round 0: draw the model from the run's seed, on a site: the server has no torch
    FIT = "fit"
    REFINE = "refine"  # an evaluator makes of a round's aggregate the state that is published: the server has no torch
    SCORE = "score"
    # Of a secure aggregation, in this order; FIT, or SCORE_SUM, begins it.
    SCORE_SUM = "score-sum"
    SHARE = "share"
    CONTRIBUTORS = "contributors"
    AGREE_CONTRIBUTORS = "agree-contributors"
    REVEAL_CONTRIBUTORS = "reveal-contributors"
    MASK = "mask"
    AGREE = "agree"
    REVEAL = "reveal"


TRAININGS = frozenset({TaskKind.FIT, TaskKind.REFINE})
SCORINGS = frozenset({TaskKind.SCORE, TaskKind.SCORE_SUM})  # what a site takes scores for
SUM_STEPS = (  # of a secure aggregation that has started, in their order
    TaskKind.SHARE,
    TaskKind.CONTRIBUTORS,
    TaskKind.AGREE_CONTRIBUTORS,
    TaskKind.REVEAL_CONTRIBUTORS,
    TaskKind.MASK,
    TaskKind.AGREE,
    TaskKind.REVEAL,
)
CONTRIBUTORS_STEPS = frozenset(
    {TaskKind.CONTRIBUTORS, TaskKind.AGREE_CONTRIBUTORS, TaskKind.REVEAL_CONTRIBUTORS}
)  # who has what


@dataclass(frozen=True)
class Task:
    """One piece of work for one site.

    Attributes:
        task_id: of this invitation: a round that is opened again has other task_ids.
        base_digest: of the blob to start from; None when there is none yet (INITIALISE).
        base_bytes: size of that blob.
        remaining_s: seconds until the round's deadline, by the server's monotonic clock.
        attempt: of the round, from 1.
        sum_of: what is aggregated; None: the task is not of a secure aggregation.
        state_round: of FIT, the newest round in which an update of this site stands: it was accepted for an attempt
            that published a state and was not rolled back; 0: none. None: of other tasks.
    """

    kind: TaskKind
    run: str
    round: int
    task_id: str
    base_digest: Digest | None
    base_bytes: int
    remaining_s: float
    attempt: int = 0
    sum_of: SumOf | None = None
    state_round: int | None = None

    @property
    def state_before(self) -> int:
        """The fit starts from what the site keeps of its newest counted round below this one."""
        return self.round if self.state_round is None else min(self.round, self.state_round + 1)


@dataclass(frozen=True)
class Wait:
    """No task now: the daemon asks again after this many seconds."""

    retry_after_s: float


@dataclass(frozen=True)
class Finished:
    """The run has ended.

    Attributes:
        reason: why, in words.
        last: whether no other run is queued, so that a daemon with `--until-finished` ends.
    """

    reason: str
    last: bool


@dataclass(frozen=True)
class Assignment:
    """The answer to Enroll when there is a run.

    Attributes:
        recipe: as JSON.
        keep_rounds: how many past rounds the run may be rolled back to: sites keep their memory of so many; 0: all.
        preprocessing_digest: the server's `Recipe.preprocessing_digest()`, which the site's must equal;
            empty only where an assignment is read from a site's own files.
        min_cohort: no round is aggregated from fewer sites' updates, as the server says.
    """

    run: str
    recipe: str
    keep_rounds: int = 2
    preprocessing_digest: str = ""
    min_cohort: int = 1


class Verdict(StrEnum):
    """What became of an update."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same digest again: the stored receipt
    LATE = "late"  # the round is closed; no error of the site's
    NOT_NEEDED = "not-needed"  # the round already had all the updates that it needed
    REFUSED = "refused"


@dataclass(frozen=True)
class Receipt:
    """The server's durable answer to a commit; `record_hash` is the BLAKE3 of the ledger row."""

    verdict: Verdict
    reason: str
    digest: Digest
    record_hash: str


@dataclass(frozen=True)
class Manifest:
    """What an upload will be, announced before its data."""

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
    """How far a site is with its task; `failure` is set when it cannot continue.

    Nothing in it depends on the number of the site's examples: batches or shares of an epoch would disclose it.
    `making_progress` says only whether training or scoring has started a batch lately.

    Attributes:
        epoch: of the current call of `train`, counted from 1; 0 before the first.
        epochs: of that call.
        bytes_moved: over the connection, since the daemon's start.
    """

    task_id: str
    activity: Activity
    epoch: int = 0
    epochs: int = 0
    making_progress: bool = False
    bytes_moved: int = 0
    failure: FailureReason | None = None
    telemetry: Mapping[str, float] = field(default_factory=dict, compare=False)  # changing numbers are no progress

    @property
    def share(self) -> float | None:
        """Completed share of the task by epochs, 0 to 1; None for a task without training."""
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
    ABORT = "abort"  # the server no longer waits for this task


Scores = Mapping[str, float]
QUALIFIED = "@"  # between a score and what more is said of it: an end of its interval, or a subgroup of the test set


def score_family(name: str) -> str:
    """`global.recall` of `global.recall.3@low`: without class and qualifier; a score with neither is its own family."""
    whole = name.partition(QUALIFIED)[0]
    stem, _, last = whole.rpartition(".")
    return stem if last.isdigit() else whole


MAX_NUMBERS = 32  # in a heartbeat; more than there are, for those of newer clients


class Telemetry(StrEnum):
    """A number that a daemon may send. None counts examples, batches or labels, and none ever will."""

    GPU_MEMORY_BYTES = "gpu_memory_bytes"
    DISK_FREE_BYTES = "disk_free_bytes"
    STEP_SECONDS = "step_seconds"
    POLICY_REFUSALS = "policy_refusals"
    BYTES_RELEASED = "bytes_released"

    @property
    def discloses(self) -> str:
        """What a site discloses by sending it: a sentence for those who decide about the policy."""
        return _DISCLOSES[self]


_DISCLOSES = {
    Telemetry.GPU_MEMORY_BYTES: "GPU memory that the daemon holds. Examples are kept there if they fit, so it tells "
    "roughly how many there are.",
    Telemetry.DISK_FREE_BYTES: "What is free on the disk of the state folder, in whole 100 MB. Other programs may use "
    "the same disk.",
    Telemetry.STEP_SECONDS: "How long a training step takes. With the duration of a round it tells roughly how many "
    "examples there are.",
    Telemetry.POLICY_REFUSALS: "How often the site's policy kept something back; not what, nor why.",
    Telemetry.BYTES_RELEASED: "How many bytes of updates the site sent. The server has received these updates anyway.",
}


def read_telemetry(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a heartbeat that this version knows; a newer client may send more.

    Raises:
        ProtocolError: there are more than MAX_NUMBERS, or a known one is negative or not finite.
    """
    if len(numbers) > MAX_NUMBERS:
        raise ProtocolError(f"{len(numbers)} numbers of telemetry: expected at most {MAX_NUMBERS}")
    known = {name.value: numbers[name] for name in Telemetry if name in numbers}
    for name, value in known.items():
        if not (math.isfinite(value) and value >= 0):
            raise ProtocolError(f"telemetry {name} is {value}: expected a finite number, 0 or more")
    return known
