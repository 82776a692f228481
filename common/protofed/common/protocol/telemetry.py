"""Numbers of a site's machine and daemon in heartbeats: a closed list, of which the site's policy allows some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from protofed.common.errors import ProtocolError

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
    Telemetry.GPU_MEMORY_BYTES: "GPU memory that the daemon holds: examples lie there if they fit, so that it tells "
    "roughly how many there are.",
    Telemetry.DISK_FREE_BYTES: "What is free on the disk of the state folder, in whole 100 MB; others may write there.",
    Telemetry.STEP_SECONDS: "How long a training step takes: with the duration of a round, roughly how many examples "
    "there are.",
    Telemetry.POLICY_REFUSALS: "How often the site's policy kept something; not what, nor why.",
    Telemetry.BYTES_RELEASED: "How much left the site in updates, which the server has received anyway.",
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
