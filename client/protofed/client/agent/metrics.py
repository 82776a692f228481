"""What a client daemon tells its site's Prometheus: names, labels and meanings are a public contract.

Nothing of it leaves the site but the numbers of `telemetry`, and those only as the site's policy says. A part is all
that is told of what was released or refused: never a tensor's name, nor a value.
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

from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.privacy.policy import PolicyRefusedError, Released
from protofed.common.errors import PolicyViolationError
from protofed.common.monitoring.metric import Metric
from protofed.common.payload import NOT_ON_THE_WIRE, Part, SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import Activity, Task
from protofed.common.protocol.telemetry import Telemetry
from protofed.common.version import VERSION

ANSWERED_WITHIN_S = 180.0  # an idle daemon asks every few seconds, one that works beats
WHOLE = "update"  # in place of a part: what concerns all of an update, or the run
COARSE = 10**8  # bytes: what others write on the disk cannot be followed from outside, file by file
PARTS = sorted(set(Part) - NOT_ON_THE_WIRE)
Values: TypeAlias = Mapping[tuple[str, ...], float]

PHASE = Metric("protofed_client_phase", "gauge", ("site", "phase"), f"1 of one: {', '.join(Activity)}.")
EPOCH = Metric("protofed_client_epoch", "gauge", ("site",), "Epoch of its training; 0 before the first.")
SAMPLES = Metric(
    "protofed_client_samples_total", "counter", ("site",), "Examples trained on, each as often as it was; never sent."
)
STEP = Metric("protofed_client_step_seconds", "summary", ("site",), "How long training steps took; never sent.")
GPU = Metric("protofed_client_gpu_memory_bytes", "gauge", ("site",), "GPU memory that it holds; absent on a CPU.")
REGISTERED = Metric(
    "protofed_client_registered",
    "gauge",
    ("site",),
    f"1: the server did what it asked for within the last {ANSWERED_WITHIN_S:.0f} s.",
)
REFUSALS = Metric(
    "protofed_client_policy_refusals_total",
    "counter",
    ("site", "part"),
    f"What the site's policy kept, by the first part that it refused; {WHOLE}: all of an update, or the run.",
)
RELEASED = Metric(
    "protofed_client_bytes_released_total", "counter", ("site", "part"), "Of tensors that its policy let out."
)
DISK_FREE = Metric("protofed_client_disk_free_bytes", "gauge", ("site",), "Free on the disk of its state folder.")
CERT_EXPIRY = Metric("protofed_client_cert_expiry_timestamp_seconds", "gauge", ("site",), "When its certificate ends.")
BUILD = Metric("protofed_client_build_info", "gauge", ("site", "version"), "1; which protofed this is.")
METRICS = (PHASE, EPOCH, SAMPLES, STEP, GPU, REGISTERED, REFUSALS, RELEASED, DISK_FREE, CERT_EXPIRY, BUILD)


class ClientMetrics:
    """What one daemon has counted since it started, and what can be read of it now, in a registry of its own.

    Args:
        now: what the daemon does.
        answered_at: when the server last did what a call asked for, in monotonic seconds.
        state: the folder whose disk is looked at; None: none is.
        device: where it trains; GPU memory is told of a GPU only.
        identity: whose certificate is looked at; None: plain text.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        site: SiteId,
        now: DaemonStatus | None = None,
        answered_at: Callable[[], float] = lambda: -math.inf,
        state: Path | None = None,
        device: torch.device | None = None,
        identity: LiveIdentity | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._site, self._now, self._answered_at, self._clock = site, now or DaemonStatus(), answered_at, clock
        self._state, self._device, self._identity = state, device, identity
        self._counting = threading.Lock()
        self._refusals, self._bytes = Counter(dict.fromkeys([*PARTS, WHOLE], 0)), Counter(dict.fromkeys(PARTS, 0))
        self._last = ("", "")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def refused(self, why: PolicyViolationError) -> None:
        """Something did not leave."""
        part = why.part if isinstance(why, PolicyRefusedError) else None
        with self._counting:
            self._refusals[part or WHOLE] += 1

    def released(self, task: Task, released: Released) -> None:
        """Something leaves; the same again, because an answer was lost, is not counted again."""
        with self._counting:
            if (update := (task.task_id, released.manifest.digest)) == self._last:
                return
            self._last = update
            for spec in released.manifest.tensors:
                self._bytes[spec.part] += spec.nbytes

    def answered(self) -> bool:
        """Whether the server did what a call asked for, and not long ago."""
        return self._clock() - self._answered_at() < ANSWERED_WITHIN_S

    def telemetry(self) -> dict[str, float]:
        """What may be measured of the machine and the daemon; what of it is sent is for the policy to say."""
        with self._counting:
            counted = {
                Telemetry.POLICY_REFUSALS: float(self._refusals.total()),
                Telemetry.BYTES_RELEASED: float(self._bytes.total()),
            }
        measured = {
            Telemetry.GPU_MEMORY_BYTES: self._gpu_memory(),
            Telemetry.DISK_FREE_BYTES: _coarse(self._disk_free()),
            Telemetry.STEP_SECONDS: self._now.pace.step_seconds,
        }
        return {name.value: value for name, value in (counted | measured).items() if value is not None}

    def collect(self) -> Iterator[Family]:
        """For the registry."""
        for metric, values in self._values().items():
            yield metric.family({(self._site, *labels): value for labels, value in values.items()})
        yield STEP.summary({(self._site,): (self._now.pace.steps, self._now.pace.seconds)})

    def describe(self) -> Iterator[Family]:
        """For the registry: names, without looking at anything."""
        return (metric.summary({}) if metric is STEP else metric.family({}) for metric in METRICS)

    def _values(self) -> dict[Metric, Values]:
        """Gauges and counters by the labels behind the site's."""
        now = self._now
        with self._counting:
            refusals, released = dict(self._refusals), dict(self._bytes)
        return {
            PHASE: {(phase,): float(phase is now.activity) for phase in Activity},
            EPOCH: {(): now.steps.epoch},
            SAMPLES: {(): now.pace.examples},
            GPU: _there(self._gpu_memory()),
            REGISTERED: {(): float(self.answered())},
            REFUSALS: {(part,): count for part, count in refusals.items()},
            RELEASED: {(part,): count for part, count in released.items()},
            DISK_FREE: _there(self._disk_free()),
            CERT_EXPIRY: _there(self._certificate_end()),
            BUILD: {(VERSION,): 1.0},
        }

    def _gpu_memory(self) -> float | None:
        if self._device is None or self._device.type != "cuda":
            return None
        with contextlib.suppress(RuntimeError):  # a GPU that is lost has none to tell
            return float(torch.cuda.memory_reserved(self._device))
        return None

    def _disk_free(self) -> float | None:
        with contextlib.suppress(OSError):
            return None if self._state is None else float(shutil.disk_usage(self._state).free)
        return None

    def _certificate_end(self) -> float | None:
        return None if self._identity is None else self._identity.now().certificate.not_after.timestamp()


def _coarse(size: float | None) -> float | None:
    return None if size is None else size // COARSE * COARSE


def _there(value: float | None) -> Values:
    return {} if value is None else {(): value}
