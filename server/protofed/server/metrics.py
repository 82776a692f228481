"""The server's metrics. Names, labels and meanings are a public contract: dashboards and alerts rely on them.

`ServerMetrics` counts events when they happen; gauges that can be read at any time come from `monitoring.collector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry

from protofed.common.monitoring import Metric
from protofed.common.payload import Part
from protofed.common.protocol.call_metadata import DeniedBecause
from protofed.common.protocol.messages import SUM_STEPS, TaskKind, Verdict
from protofed.server.verdicts import RefusalCode, RejectionCode

BUILD = Metric(
    "protofed_build_info",
    "gauge",
    ("version", "protocol"),
    "Always 1; its labels are the version of protofed and of its protocol.",
)
RUNS = Metric("protofed_runs", "gauge", ("state",), "Runs: queued, running, paused, completed, failed, aborted.")
ROUND = Metric("protofed_round", "gauge", ("run",), "The run's current round; round 0 makes the first model.")
PLANNED = Metric("protofed_rounds_planned", "gauge", ("run",), "Rounds that the run's recipe asks for.")
PHASE = Metric(
    "protofed_round_phase",
    "gauge",
    ("run", "phase"),
    "1 for the current phase, 0 for the others: idle, collecting, summing, aggregating, refining, "
    "evaluating, finished.",
)
WAITING = Metric(
    "protofed_run_waiting",
    "gauge",
    ("run", "reason"),
    "1 for what the active run waits for, 0 for the other reasons. Reasons: trainers (too few), required-sites, "
    "paused, queued, back-off (until the next attempt), disk (the server's is full), updates, sum (a step of secure "
    "aggregation), evaluator (none is there to refine the model), refinement (the evaluator refines it), scores.",
)
SECONDS = Metric("protofed_round_seconds", "histogram", ("phase",), "Seconds that a round's phase took.")
ROUND_SITES = Metric(
    "protofed_round_sites",
    "gauge",
    ("state",),
    "Sites invited to the newest round, each in one state. States: invited (has not started), started, reported, "
    "rejected (reported, but its update was rejected), failed, late, not-needed.",
)
OPENED = Metric(
    "protofed_round_opened_timestamp_seconds",
    "gauge",
    ("run",),
    "Unix time from which the open round's deadline counts: when the round was opened or, after a restart, when the "
    "server took it up. Absent while no round is open.",
)
DEADLINE = Metric("protofed_round_deadline_seconds", "gauge", ("run",), "Seconds a round waits for its sites.")
QUORUM = Metric("protofed_round_quorum", "gauge", ("run",), "Updates that the newest round needs, or is abandoned.")
ROUNDS = Metric(
    "protofed_rounds_total",
    "counter",
    ("outcome",),
    "Attempts at rounds that ended: committed, degraded (published without some of its updates) or abandoned.",
)
UPDATES = Metric(
    "protofed_updates_total",
    "counter",
    ("verdict", "reason"),
    "Verdicts on updates: accepted, duplicate, late, not-needed, refused (with the reason's code); rejected: "
    "left out after it was accepted (with that reason's code).",
)
SCORES_REFUSED = Metric(
    "protofed_scores_refused_total",
    "counter",
    (),
    "Reports of scores that were refused whole: a name or value that no score of the run has, or of another role.",
)
DENIED = Metric(
    "protofed_denied_calls_total",
    "counter",
    ("because",),
    "Refused calls by revoked certificates, or by sites that the operator has excluded. The log has a line for "
    "each call.",
)
COUNTED_STEPS = (TaskKind.FIT, *SUM_STEPS)  # FIT brings the keys: it fails only where too few sites have them
SUM_STEP = Metric(
    "protofed_sum_step",
    "gauge",
    ("run", "step"),
    "1 for the step of the open secure aggregation, 0 for the others. Steps: share, contributors, agree-contributors, "
    "reveal-contributors, mask, agree, reveal. Only for a run with secure aggregation.",
)
SUM_SITES = Metric(
    "protofed_sum_sites", "gauge", ("run",), "Sites whose numbers are in the newest sum that the server opened."
)
SUM_SECONDS = Metric(
    "protofed_sum_step_seconds", "histogram", ("step",), "Seconds that a step of a secure aggregation took."
)
SUM_DROPOUTS = Metric(
    "protofed_sum_dropouts_total",
    "counter",
    ("step",),
    "Sites that dropped out of a secure aggregation in this step: they were asked, and take no part in later steps.",
)
SUMS_ABANDONED = Metric(
    "protofed_sums_abandoned_total",
    "counter",
    ("step", "reason"),
    "Failed secure aggregations, by step and reason. Reasons: too-few (too few sites reported in time), left (a site "
    "dropped out after the contributors of classes were counted), unusable (what sites sent gives no sum).",
)
NORM = Metric("protofed_update_norm", "histogram", (), "Norms of accepted updates: how far each moved the model.")
BYTES = Metric(
    "protofed_transfer_bytes_total", "counter", ("direction", "part"), "Bytes of chunks from (in) and to (out) sites."
)
RESUMED = Metric(
    "protofed_transfer_resumed_chunks_total", "counter", (), "Chunks of broken uploads that sites need not send again."
)
SITES = Metric(
    "protofed_sites",
    "gauge",
    ("state",),
    "All sites that the server knows, each in one state, as in `sites list`. States: excluded (by the operator), away "
    "(no daemon has enrolled), held (the site waits for its own approval or hours, is paused, has no privacy budget "
    "left, or takes no part in the run), silent (no progress for longer than the run allows), working, idle.",
)
LAST_PROGRESS = Metric(
    "protofed_site_last_progress_timestamp_seconds", "gauge", ("site",), "Unix time of the site's last progress."
)
PROGRESS = Metric("protofed_site_progress_ratio", "gauge", ("site",), "Share of its task that a site has done, 0 to 1.")
COVERED = Metric(
    "protofed_prototype_classes_covered", "gauge", (), "Classes whose prototype the newest round's updates moved."
)
SHIFT = Metric(
    "protofed_prototype_shift",
    "gauge",
    (),
    "Mean cosine distance, 0 to 2, of the prototypes to those of the round before.",
)
MIN_DISTANCE = Metric(
    "protofed_prototype_min_distance", "gauge", (), "Smallest cosine distance between two classes' prototypes, 0 to 2."
)
SCORE = Metric(
    "protofed_score",
    "gauge",
    ("scope", "metric", "stat"),
    "Newest scores: mean, std and worst over sites; of a secure aggregation no worst.",
)
MODEL_WARNINGS = Metric(
    "protofed_model_warnings",
    "gauge",
    ("run", "scope", "code"),
    "Models that something speaks against now, the global one or sites' own: one-class, chance, diverging, "
    "worse-than-first, unchanged.",
)
CHECKPOINT = Metric("protofed_checkpoint_timestamp_seconds", "gauge", (), "Unix time of the newest published state.")
RECOVERIES = Metric(
    "protofed_recoveries_total", "counter", (), "Runs that this process resumed from the ledger when it started."
)
CERT_EXPIRY = Metric(
    "protofed_cert_expiry_timestamp_seconds",
    "gauge",
    ("role", "name"),
    "Unix time at which the last certificate of a name ends.",
)
EVENT_LOOP_LAG = Metric("protofed_event_loop_lag_seconds", "gauge", (), "Delay of the event loop, in seconds.")
STATE_DISK_FREE = Metric(
    "protofed_state_disk_free_bytes",
    "gauge",
    (),
    "Bytes free on the disk of the state, or of the blobs if less.",
)
NOTIFICATIONS = Metric(
    "protofed_notifications_total",
    "counter",
    ("channel", "outcome"),
    "Messages of [notify], by channel: delivered, failed (an attempt, which is repeated), dropped (a message that was "
    "given up).",
)
SITE_PHASE = Metric(
    "protofed_site_phase",
    "gauge",
    ("site", "phase"),
    "1 for what the site does, 0 for the others: idle, downloading, training, scoring, uploading, failed.",
)
SITE_EPOCH = Metric("protofed_site_epoch", "gauge", ("site",), "Epoch of the site's training.")
SITE_REGISTERED = Metric("protofed_site_registered", "gauge", ("site",), "1: its daemon is enrolled; 0: it is not.")
TELEMETRY = {  # by the heartbeat's names; absent for a site whose policy does not allow them
    "gpu_memory_bytes": Metric(
        "protofed_site_gpu_memory_bytes",
        "gauge",
        ("site",),
        "Bytes of GPU memory in use, if the site's policy allows telling.",
    ),
    "disk_free_bytes": Metric(
        "protofed_site_disk_free_bytes",
        "gauge",
        ("site",),
        "Bytes free on its disk, if the site's policy allows telling.",
    ),
    "step_seconds": Metric(
        "protofed_site_step_seconds",
        "gauge",
        ("site",),
        "Mean seconds of its recent training steps, if the site's policy allows telling.",
    ),
    "policy_refusals": Metric(
        "protofed_site_policy_refusals_total",
        "counter",
        ("site",),
        "Updates and runs that the site's policy refused, if it allows telling.",
    ),
    "bytes_released": Metric(
        "protofed_site_bytes_released_total",
        "counter",
        ("site",),
        "Bytes of tensors that the site's policy released, if it allows telling.",
    ),
}
METRICS: tuple[Metric, ...] = (
    BUILD, RUNS, ROUND, PLANNED, PHASE, SECONDS, ROUND_SITES, OPENED, DEADLINE, QUORUM, ROUNDS, UPDATES, NORM, BYTES,
    RESUMED, SCORES_REFUSED, DENIED, SITES, LAST_PROGRESS, PROGRESS, COVERED, SHIFT, MIN_DISTANCE, SCORE,
    MODEL_WARNINGS, CHECKPOINT, RECOVERIES, CERT_EXPIRY, EVENT_LOOP_LAG, STATE_DISK_FREE, SITE_PHASE, SITE_EPOCH,
    SITE_REGISTERED, WAITING, SUM_STEP, SUM_SITES, SUM_SECONDS, SUM_DROPOUTS, SUMS_ABANDONED, NOTIFICATIONS,
    *TELEMETRY.values(),
)  # fmt: skip
# Buckets of the histograms: from the 0.1 s of a simulated round to a day of training at a hospital.
PHASE_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400)
NORMS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
OUTCOMES = ("committed", "degraded", "abandoned")


class SumFailure(StrEnum):
    """Why a secure aggregation came to nothing."""

    TOO_FEW = "too-few"
    LEFT = "left"
    UNUSABLE = "unusable"


class SendOutcome(StrEnum):
    """What came of an attempt to send a message, or of the message."""

    DELIVERED = "delivered"
    FAILED = "failed"
    DROPPED = "dropped"


class ServerMetrics:
    """Counters of one server (or simulation) since its start, in a registry of its own; any thread may count.

    An event is counted once, by the process that made it durable. An action repeated after a restart or a full disk is
    counted when it succeeds. What a roll-back undoes stays counted, since a counter never falls.

    Attributes:
        lag: the delay of the event loop, in seconds; None: there is no loop.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lag: Callable[[], float | None] = lambda: None
        self._seconds = SECONDS.histogram(self.registry, PHASE_SECONDS)
        self._phase_began: dict[str, float] = {}  # by run, in monotonic seconds
        self._rounds, self._updates = ROUNDS.counter(self.registry), UPDATES.counter(self.registry)
        self._norms, self._bytes = NORM.histogram(self.registry, NORMS), BYTES.counter(self.registry)
        self._resumed, self._recoveries = RESUMED.counter(self.registry), RECOVERIES.counter(self.registry)
        self._scores_refused = SCORES_REFUSED.counter(self.registry)
        self._denied = DENIED.counter(self.registry)
        self._sum_seconds = SUM_SECONDS.histogram(self.registry, PHASE_SECONDS)
        self._sum_dropouts = SUM_DROPOUTS.counter(self.registry)
        self._sums_abandoned = SUMS_ABANDONED.counter(self.registry)
        self._notifications = NOTIFICATIONS.counter(self.registry)
        for step in COUNTED_STEPS:
            for failure in SumFailure:
                self._sums_abandoned.labels(step.value, failure.value)
            if step is not TaskKind.FIT:
                self._sum_dropouts.labels(step.value)
        for outcome in OUTCOMES:  # exported as 0: `increase()` misses the first event of a series that begins at 1
            self._rounds.labels(outcome)
        for verdict in Verdict:
            if verdict is not Verdict.REFUSED:
                self._updates.labels(verdict.value, "")
        for because in DeniedBecause:
            self._denied.labels(because.value)
        for code in RefusalCode:
            self._updates.labels(Verdict.REFUSED.value, code.value)
        for why in RejectionCode:
            self._updates.labels("rejected", why.value)

    def phase_changed(self, run: str, before: str, after: str, now: float) -> None:
        """Observe how long a phase took, if this process saw it begin; `now` in monotonic seconds."""
        if before == after:
            return
        began, self._phase_began[run] = self._phase_began.get(run), now
        if began is not None and before != "idle":
            self._seconds.labels(before).observe(now - began)

    def sum_step_ended(self, step: TaskKind, seconds: float, dropouts: int) -> None:
        """A step of a secure aggregation is over, and `dropouts` of the sites that were asked are out of this sum."""
        self._sum_seconds.labels(step.value).observe(seconds)
        self._sum_dropouts.labels(step.value).inc(dropouts)

    def sum_abandoned(self, step: TaskKind, failure: SumFailure) -> None:
        """A secure aggregation came to nothing at a step."""
        self._sums_abandoned.labels(step.value, failure.value).inc()

    def round_ended(self, outcome: str) -> None:
        """An attempt at a round ended; `outcome` is one of `OUTCOMES`."""
        self._rounds.labels(outcome).inc()

    def update_judged(self, verdict: Verdict, code: str = "") -> None:
        """A verdict on an update was recorded; `code` (of `RefusalCode`) with REFUSED only."""
        self._updates.labels(verdict.value, code).inc()

    def scores_refused(self) -> None:
        """A site's report of scores was refused."""
        self._scores_refused.inc()

    def call_denied(self, because: DeniedBecause) -> None:
        """A call of a revoked certificate, or of an excluded site, was refused."""
        self._denied.labels(because.value).inc()

    def update_norm(self, norm: float) -> None:
        """Observe the Euclidean norm of an accepted update less its base."""
        self._norms.observe(norm)

    def update_rejected(self, code: RejectionCode) -> None:
        """An accepted update was left out of its round's aggregation."""
        self._updates.labels("rejected", code.value).inc()

    def bytes_transferred(self, direction: str, shares: Mapping[Part, float], nbytes: int) -> None:
        """A chunk of `nbytes` came `in` or went `out`.

        A chunk does not say which tensors it carries, so its bytes are split by the parts' `shares` of the whole blob.
        """
        for part, share in shares.items():
            self._bytes.labels(direction, part.value).inc(share * nbytes)

    def chunks_resumed(self, chunks: int) -> None:
        """`chunks` of a resumed upload are there already and need not be sent again."""
        self._resumed.inc(chunks)

    def notifies(self, channels: Iterable[str]) -> None:
        """These channels exist: what was not sent yet is 0."""
        for channel in channels:
            for outcome in SendOutcome:
                self._notifications.labels(channel, outcome.value)

    def notification(self, channel: str, outcome: SendOutcome) -> None:
        """A message was taken, was not taken, or was given up."""
        self._notifications.labels(channel, outcome.value).inc()

    def run_recovered(self) -> None:
        """A run that an earlier process started goes on."""
        self._recoveries.inc()
