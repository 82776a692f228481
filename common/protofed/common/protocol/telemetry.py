"""What heartbeats may tell of a site's machine and daemon: a closed list, from which the site's policy chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from protofed.common.errors import ProtocolError

MOST = 32  # numbers in a heartbeat; there is room for those of newer clients


class Telemetry(StrEnum):
    """One number of a site's daemon. There is none for examples, batches or labels, and there will be none."""

    GPU_MEMORY_BYTES = "gpu_memory_bytes"
    DISK_FREE_BYTES = "disk_free_bytes"
    STEP_SECONDS = "step_seconds"
    POLICY_REFUSALS = "policy_refusals"
    BYTES_RELEASED = "bytes_released"

    @property
    def discloses(self) -> str:
        """What a site tells by sending it, in a sentence for whoever has to allow it."""
        return _DISCLOSES[self]


_DISCLOSES = {
    Telemetry.GPU_MEMORY_BYTES: "GPU memory that the daemon holds: examples lie there if they fit, so that it tells "
    "roughly how many there are.",
    Telemetry.DISK_FREE_BYTES: "What is free on the disk of the state folder, in whole 100 MB; others may write there.",
    Telemetry.STEP_SECONDS: "How long a training step takes: with the duration of a round, roughly how many examples "
    "there are.",
    Telemetry.POLICY_REFUSALS: "How often the site's policy kept something; not what, nor why.",
    Telemetry.BYTES_RELEASED: "How much left the site in updates, which the server has received anyway.",
}


def told(said: Mapping[str, float]) -> dict[str, float]:
    """Of a heartbeat's numbers, those that this version knows; a newer client may say more.

    Raises:
        ProtocolError: there are too many, or a known one is negative or not finite.
    """
    if len(said) > MOST:
        raise ProtocolError(f"{len(said)} numbers of telemetry: expected at most {MOST}")
    known = {name.value: said[name] for name in Telemetry if name in said}
    for name, value in known.items():
        if not (math.isfinite(value) and value >= 0):
            raise ProtocolError(f"telemetry {name} is {value}: expected a finite number, 0 or more")
    return known
