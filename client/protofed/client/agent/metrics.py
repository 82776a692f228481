"""A client daemon's metrics for its site's Prometheus; names, labels and meanings are a public contract.

They stay on the site, but for the numbers of `telemetry`, which the site's policy may release. Updates are counted by
part only: no metric has the name or a value of a tensor.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family

from protofed.client.policy.policy import PolicyRefusedError, Released
from protofed.client.site import DaemonStatus
from protofed.common.errors import PolicyViolationError
from protofed.common.monitoring import Metric
from protofed.common.payload import NOT_ON_THE_WIRE, Part, SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import Activity, Task, TaskKind, Telemetry
from protofed.common.version import VERSION

ANSWERED_WITHIN_S = 180.0  # generous: an idle daemon asks every few seconds, a working one sends heartbeats
WHOLE = "update"  # label in place of a part: a refusal of the whole update, or of the run
COARSE = 10**8  # bytes; free space is rounded down to it, so that nobody outside can follow single files of others
PARTS = sorted(set(Part) - NOT_ON_THE_WIRE)
SECURE_AGGREGATION = (
    "secure-aggregation."  # begins the rule of a refused step of a secure aggregation; its code follows
)
# What an honest server and honest sites never give a site reason for.
ATTACKS = (
    "changed-identity", "unendorsed", "replaced-keys", "not-in-roster", "second-roster", "second-shares", "other-base",
    "other-survivors", "second-survivors", "other-group", "small-group", "broken-group",
)  # fmt: skip
SUM_CODES = (
    *ATTACKS, "bad-keys", "bad-shares", "bad-signature", "bad-vector", "false-shares", "no-count", "other-form",
    "other-numbers", "no-number", "too-few-sites", "too-few-shares", "out-of-order", "attempt-over",
)  # fmt: skip
OTHER_CODE = "other"  # of a code that this list does not have: labels are a closed set
Values: TypeAlias = Mapping[tuple[str, ...], float]

PHASE = Metric(
    "protofed_client_phase",
    "gauge",
    ("site", "phase"),
    f"1 for what the daemon is doing, else 0: {', '.join(Activity)}.",
)
EPOCH = Metric("protofed_client_epoch", "gauge", ("site",), "Epoch of the current training; 0 before the first.")
SAMPLES = Metric(
    "protofed_client_samples_total", "counter", ("site",), "Examples trained on, counted in every epoch; never sent."
)
STEP = Metric(
    "protofed_client_step_seconds",
    "summary",
    ("site",),
    "Duration of training steps, with the time between them; never sent.",
)
GPU = Metric(
    "protofed_client_gpu_memory_bytes", "gauge", ("site",), "GPU memory that PyTorch has reserved; absent on a CPU."
)
REGISTERED = Metric(
    "protofed_client_registered",
    "gauge",
    ("site",),
    f"1 if a call to the server succeeded within the last {ANSWERED_WITHIN_S:.0f} s, else 0.",
)
REFUSALS = Metric(
    "protofed_client_policy_refusals_total",
    "counter",
    ("site", "part"),
    f"Refusals by the site's policy, by the first part that the policy refused; {WHOLE}: the whole update, or the run.",
)
WITHHELD = Metric(
    "protofed_client_withheld_updates_total",
    "counter",
    ("site",),
    "Updates that were not sent because of this site's images. The site sent random numbers in their place. This "
    "number is never sent.",
)
RELEASED = Metric(
    "protofed_client_bytes_released_total",
    "counter",
    ("site", "part"),
    "Bytes of tensors that the site's policy released.",
)
SUMS = Metric(
    "protofed_client_sums_total",
    "counter",
    ("site",),
    "Secure aggregations into which the site has sent its masked numbers.",
)
SUM_REFUSALS = Metric(
    "protofed_client_sum_refusals_total",
    "counter",
    ("site", "code"),
    "Steps of secure aggregation that the site refused, by the code in its audit log (`secure-aggregation.CODE`): "
    f"{', '.join((*SUM_CODES, OTHER_CODE))}.",
)
DISK_FREE = Metric("protofed_client_disk_free_bytes", "gauge", ("site",), "Free bytes on the disk of the state folder.")
CERT_EXPIRY = Metric(
    "protofed_client_cert_expiry_timestamp_seconds", "gauge", ("site",), "When the site's certificate ends, Unix time."
)
SCORE = Metric(
    "protofed_client_score",
    "gauge",
    ("site", "score"),
    "Newest of the site's own scores of its run, without those of single classes: loss, personal.*, *.local.*. The "
    "site sends a score only if its policy names it.",
)
PRIVACY_SPENT = Metric(
    "protofed_client_privacy_epsilon_spent",
    "gauge",
    ("site",),
    "Epsilon that all fits with noise have spent, over all runs, at the policy's delta (1e-5 without a budget). It "
    "follows from the recipes and rounds alone. Absent until the first run with [plan.dp] since the daemon's start.",
)
PRIVACY_BUDGET = Metric(
    "protofed_client_privacy_epsilon_budget",
    "gauge",
    ("site",),
    "Most epsilon that the site's policy allows (dp.epsilon). Absent without a budget, and until the first run "
    "with [plan.dp].",
)
BUILD = Metric("protofed_client_build_info", "gauge", ("site", "version"), "1; the version is the label.")
METRICS = (
    PHASE, EPOCH, SAMPLES, STEP, GPU, REGISTERED, REFUSALS, WITHHELD, RELEASED, SUMS, SUM_REFUSALS, DISK_FREE,
    CERT_EXPIRY, SCORE, PRIVACY_SPENT, PRIVACY_BUDGET, BUILD,
)  # fmt: skip


class ClientMetrics:
    """The counters of one daemon since its start, and gauges read at each scrape, in a registry of their own.

    Args:
        status: what the daemon is doing; None: idle.
        answered_at: monotonic time of the last successful call to the server.
        state: folder whose disk is measured; None: no disk metric.
        device: where the daemon trains; a CPU has no memory metric.
        identity: whose certificate's end is exported; None: plain text.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        site: SiteId,
        status: DaemonStatus | None = None,
        answered_at: Callable[[], float] = lambda: -math.inf,
        state: Path | None = None,
        device: torch.device | None = None,
        identity: LiveIdentity | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._site, self._status, self._answered_at, self._clock = site, status or DaemonStatus(), answered_at, clock
        self._state, self._device, self._identity = state, device, identity
        self._lock = threading.Lock()  # the agent's thread counts, Prometheus's and the heartbeat's read
        # All labels from the start: a counter that appears with its first event hides that event from `increase`.
        self._refusals, self._bytes = Counter(dict.fromkeys([*PARTS, WHOLE], 0)), Counter(dict.fromkeys(PARTS, 0))
        self._sum_refusals = Counter(dict.fromkeys([*SUM_CODES, OTHER_CODE], 0))
        self._withheld = 0
        self._sums, self._last_sum = 0, ""  # task_id
        self._last_released = ("", "")  # task_id and digest
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count_refusal(self, violation: PolicyViolationError) -> None:
        """Count an update, or a run, that the site's policy refused."""
        part = violation.part if isinstance(violation, PolicyRefusedError) else None
        rule = violation.rule if isinstance(violation, PolicyRefusedError) else ""
        with self._lock:
            self._refusals[part or WHOLE] += 1
            if rule.startswith(SECURE_AGGREGATION):
                code = rule.removeprefix(SECURE_AGGREGATION)
                self._sum_refusals[code if code in SUM_CODES else OTHER_CODE] += 1

    def count_withheld(self) -> None:
        """Count an update that stayed here without the server's knowing."""
        with self._lock:
            self._withheld += 1

    def count_release(self, task: Task, released: Released) -> None:
        """Count the bytes of an update that is about to be uploaded; a repeated upload of it is not counted again."""
        with self._lock:
            if (update := (task.task_id, released.manifest.digest)) == self._last_released:
                return
            self._last_released = update
            if task.kind is TaskKind.MASK and task.task_id != self._last_sum:
                self._sums, self._last_sum = self._sums + 1, task.task_id
            for spec in released.manifest.tensors:
                self._bytes[spec.part] += spec.nbytes

    def answered(self) -> bool:
        """Whether a call to the server succeeded within `ANSWERED_WITHIN_S`."""
        return self._clock() - self._answered_at() < ANSWERED_WITHIN_S

    def telemetry(self) -> dict[str, float]:
        """Numbers of the machine and the daemon by name; `Policy.release_telemetry` decides which of them are sent."""
        with self._lock:
            counted = {
                Telemetry.POLICY_REFUSALS: float(self._refusals.total()),
                Telemetry.BYTES_RELEASED: float(self._bytes.total()),
            }
        measured = {
            Telemetry.GPU_MEMORY_BYTES: self._gpu_memory(),
            Telemetry.DISK_FREE_BYTES: _rounded(self._disk_free()),
            Telemetry.STEP_SECONDS: self._status.throughput.step_seconds,
        }
        return {name.value: value for name, value in (counted | measured).items() if value is not None}

    def collect(self) -> Iterator[Family]:
        """Called by the registry at each scrape."""
        for metric, values in self._values().items():
            yield metric.family({(self._site, *labels): value for labels, value in values.items()})
        yield STEP.summary({(self._site,): (self._status.throughput.steps, self._status.throughput.seconds)})

    def describe(self) -> Iterator[Family]:
        """Called by the registry when this collector is registered; without it, the registry would call `collect`."""
        return (metric.summary({}) if metric is STEP else metric.family({}) for metric in METRICS)

    def _values(self) -> dict[Metric, Values]:
        """Gauges and counters, by the labels that follow `site`; empty where there is nothing to measure."""
        status = self._status
        with self._lock:
            refusals, withheld, released = dict(self._refusals), self._withheld, dict(self._bytes)
            sums, sum_refusals = self._sums, dict(self._sum_refusals)
        return {
            PHASE: {(phase,): float(phase is status.activity) for phase in Activity},
            EPOCH: {(): status.fit_progress.epoch},
            SAMPLES: {(): status.throughput.examples},
            GPU: _if_known(self._gpu_memory()),
            REGISTERED: {(): float(self.answered())},
            REFUSALS: {(part,): count for part, count in refusals.items()},
            WITHHELD: {(): withheld},
            RELEASED: {(part,): count for part, count in released.items()},
            SUMS: {(): sums},
            SUM_REFUSALS: {(code,): count for code, count in sum_refusals.items()},
            DISK_FREE: _if_known(self._disk_free()),
            CERT_EXPIRY: _if_known(self._certificate_end()),
            PRIVACY_SPENT: _if_known(None if status.privacy is None else status.privacy[0]),
            PRIVACY_BUDGET: _if_known(None if status.privacy is None else status.privacy[1]),
            SCORE: {(name,): value for name, value in status.own_scores.items()},
            BUILD: {(VERSION,): 1.0},
        }

    def _gpu_memory(self) -> float | None:
        if self._device is None or self._device.type != "cuda":
            return None
        with contextlib.suppress(RuntimeError):  # the GPU was lost; readiness says so
            return float(torch.cuda.memory_reserved(self._device))
        return None

    def _disk_free(self) -> float | None:
        with contextlib.suppress(OSError):
            return None if self._state is None else float(shutil.disk_usage(self._state).free)
        return None

    def _certificate_end(self) -> float | None:
        return None if self._identity is None else self._identity.current().certificate.not_after.timestamp()


def _rounded(size: float | None) -> float | None:
    return None if size is None else size // COARSE * COARSE


def _if_known(value: float | None) -> Values:
    return {} if value is None else {(): value}
