"""What the server tells Prometheus: names, labels and meanings are a public contract. Here is what is counted when it
happens; what can be read when somebody asks is in `monitoring.collector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from protofed.common.monitoring.metric import Metric
from protofed.common.payload import Part
from protofed.common.protocol.messages import Verdict
from protofed.server.verdicts import RejectionCode

BUILD = Metric("protofed_build_info", "gauge", ("version", "protocol"), "1; which protofed this is.")
RUNS = Metric("protofed_runs", "gauge", ("state",), "Runs: queued, running, paused, completed, failed, aborted.")
ROUND = Metric("protofed_round", "gauge", ("run",), "The run's round; 0 makes the first model.")
PLANNED = Metric("protofed_rounds_planned", "gauge", ("run",), "Rounds of its recipe.")
PHASE = Metric(
    "protofed_round_phase", "gauge", ("run", "phase"), "1 of one: idle, collecting, aggregating, evaluating, finished."
)
SECONDS = Metric(
    "protofed_round_seconds", "histogram", ("phase",), "How long it took to collect, aggregate and evaluate."
)
ROUND_SITES = Metric(
    "protofed_round_sites",
    "gauge",
    ("state",),
    "Sites invited to the newest round, each in one state: invited (has not begun), started, reported, set-aside "
    "(reported, its update was left out), failed, late, not-needed.",
)
OPENED = Metric(
    "protofed_round_opened_timestamp_seconds",
    "gauge",
    ("run",),
    "When the open round was opened; absent if none is.",
)
DEADLINE = Metric("protofed_round_deadline_seconds", "gauge", ("run",), "How long a round waits for its sites.")
QUORUM = Metric("protofed_round_quorum", "gauge", ("run",), "Updates without which the newest round does not count.")
ROUNDS = Metric(
    "protofed_rounds_total",
    "counter",
    ("outcome",),
    "Attempts at rounds that ended: committed, degraded (with fewer updates than wanted) or abandoned.",
)
UPDATES = Metric(
    "protofed_updates_total",
    "counter",
    ("verdict", "reason"),
    "Verdicts on updates: accepted, duplicate, stale, not-needed, invalid (with the reason's code); set-aside: "
    "left out after it was accepted.",
)
NORM = Metric("protofed_update_norm", "histogram", (), "Norms of accepted updates: how far each moved the model.")
BYTES = Metric(
    "protofed_transfer_bytes_total", "counter", ("direction", "part"), "Bytes of chunks from (in) and to (out) sites."
)
RESUMED = Metric(
    "protofed_transfer_resumed_chunks_total", "counter", (), "Chunks of broken uploads that need not be sent again."
)
SITES = Metric(
    "protofed_sites",
    "gauge",
    ("state",),
    "All sites that the server knows, each in one state, as in `sites list`: excluded (by the operator), away (no "
    "daemon has enrolled), held (waits for its own approval or hours), silent (no progress for longer than the run "
    "allows), working, idle.",
)
LAST_PROGRESS = Metric(
    "protofed_site_last_progress_timestamp_seconds", "gauge", ("site",), "When the site last made progress."
)
PROGRESS = Metric("protofed_site_progress_ratio", "gauge", ("site",), "Share of its task that a site has done.")
COVERED = Metric(
    "protofed_prototype_classes_covered", "gauge", (), "Classes whose prototype the newest round's updates moved."
)
SHIFT = Metric(
    "protofed_prototype_shift", "gauge", (), "Mean cosine distance of the prototypes to those of the round before."
)
MIN_DISTANCE = Metric(
    "protofed_prototype_min_distance", "gauge", (), "Smallest cosine distance between two classes' prototypes."
)
SCORE = Metric("protofed_score", "gauge", ("scope", "metric", "stat"), "Newest scores: mean, std and worst over sites.")
CHECKPOINT = Metric("protofed_checkpoint_timestamp_seconds", "gauge", (), "When the newest state was published.")
RECOVERIES = Metric(
    "protofed_recoveries_total", "counter", (), "Runs that this process took up from the ledger when it started."
)
CERT_EXPIRY = Metric(
    "protofed_cert_expiry_timestamp_seconds", "gauge", ("role", "name"), "When the last certificate of a name ends."
)
EVENT_LOOP_LAG = Metric("protofed_event_loop_lag_seconds", "gauge", (), "How late the event loop is.")
STATE_DISK_FREE = Metric("protofed_state_disk_free_bytes", "gauge", (), "Free on the disk of the state folder.")
SITE_PHASE = Metric(
    "protofed_site_phase",
    "gauge",
    ("site", "phase"),
    "1 of one: idle, downloading, training, scoring, uploading, failed.",
)
SITE_EPOCH = Metric("protofed_site_epoch", "gauge", ("site",), "Epoch of its training.")
SITE_REGISTERED = Metric("protofed_site_registered", "gauge", ("site",), "1: its daemon is enrolled; 0: it is not.")
TELEMETRY = {  # by the names of a heartbeat; only what the site's policy allows is there
    "gpu_memory_bytes": Metric(
        "protofed_site_gpu_memory_bytes", "gauge", ("site",), "GPU memory in use; if its policy tells it."
    ),
    "disk_free_bytes": Metric(
        "protofed_site_disk_free_bytes", "gauge", ("site",), "Free on its disk; if its policy tells it."
    ),
    "step_seconds": Metric(
        "protofed_site_step_seconds", "gauge", ("site",), "Mean of its recent training steps; if its policy tells it."
    ),
    "policy_refusals": Metric(
        "protofed_site_policy_refusals_total", "counter", ("site",), "What its policy kept; if its policy tells it."
    ),
    "bytes_released": Metric(
        "protofed_site_bytes_released_total", "counter", ("site",), "What left it; if its policy tells it."
    ),
}
METRICS: tuple[Metric, ...] = (
    BUILD, RUNS, ROUND, PLANNED, PHASE, SECONDS, ROUND_SITES, OPENED, DEADLINE, QUORUM, ROUNDS, UPDATES, NORM, BYTES,
    RESUMED, SITES, LAST_PROGRESS, PROGRESS, COVERED, SHIFT, MIN_DISTANCE, SCORE, CHECKPOINT, RECOVERIES, CERT_EXPIRY,
    EVENT_LOOP_LAG, STATE_DISK_FREE, SITE_PHASE, SITE_EPOCH, SITE_REGISTERED, *TELEMETRY.values(),
)  # fmt: skip
PHASE_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400)
NORMS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
OUTCOMES = ("committed", "degraded", "abandoned")


class ServerMetrics:
    """What one server (or simulation) has counted since it started, in a registry of its own.

    Each thing is counted where it has become durable, by the process that made it so, once: what is done again after a
    restart or a full disk is counted when it succeeds, and what a roll-back puts aside stays counted. Any thread may
    count.

    Attributes:
        lag: of the event loop, in seconds; None: there is none.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lag: Callable[[], float | None] = lambda: None
        self._seconds = SECONDS.histogram(self.registry, PHASE_SECONDS)
        self._began: dict[str, float] = {}  # the phase of each run
        self._rounds, self._updates = ROUNDS.counter(self.registry), UPDATES.counter(self.registry)
        self._norms, self._bytes = NORM.histogram(self.registry, NORMS), BYTES.counter(self.registry)
        self._resumed, self._recoveries = RESUMED.counter(self.registry), RECOVERIES.counter(self.registry)
        for outcome in OUTCOMES:  # from 0 on: Prometheus does not see the increase of what comes as 1
            self._rounds.labels(outcome)
        for verdict in (*(known.value for known in Verdict if known is not Verdict.INVALID), "set-aside"):
            self._updates.labels(verdict, "")
        for code in RejectionCode:
            self._updates.labels(Verdict.INVALID.value, code.value)

    def phase_changed(self, run: str, before: str, after: str, now: float) -> None:
        """Tell how long a phase took that this process saw begin; `now` in seconds of a monotonic clock."""
        if before == after:
            return
        began, self._began[run] = self._began.get(run), now
        if began is not None and before != "idle":
            self._seconds.labels(before).observe(now - began)

    def round_ended(self, outcome: str) -> None:
        """An attempt at a round, as one of `OUTCOMES`."""
        self._rounds.labels(outcome).inc()

    def judged(self, verdict: Verdict, code: str = "") -> None:
        """A verdict was given; `code` is that of a refusal."""
        self._updates.labels(verdict.value, code).inc()

    def moved_model(self, norm: float) -> None:
        """The norm of an accepted update."""
        self._norms.observe(norm)

    def set_aside(self) -> None:
        """An accepted update was left out."""
        self._updates.labels("set-aside", "").inc()

    def moved(self, direction: str, shares: Mapping[Part, float], nbytes: int) -> None:
        """Bytes of a chunk came `in` or went `out`; its blob's parts have them by their shares of all its numbers."""
        for part, share in shares.items():
            self._bytes.labels(direction, part.value).inc(share * nbytes)

    def resumed(self, chunks: int) -> None:
        """Chunks need not be sent again."""
        self._resumed.inc(chunks)

    def recovered(self) -> None:
        """A run goes on that an earlier process had begun."""
        self._recoveries.inc()
