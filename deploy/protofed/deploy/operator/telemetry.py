"""What a site discloses of its machine, in words with units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rich.filesize import decimal

_WORDS: Final[Mapping[str, Callable[[float], str]]] = {  # the most important first: a screen cuts the end
    "gpu_memory_bytes": lambda value: f"GPU {decimal(int(value))}",
    "step_seconds": lambda value: f"{value:.3g} s a step",
    "policy_refusals": lambda value: f"{value:.0f} refused by policy",
    "disk_free_bytes": lambda value: f"disk {decimal(int(value))} free",
    "bytes_released": lambda value: f"{decimal(int(value))} released",
}


def machine_line(telemetry: Mapping[str, float]) -> str:
    """All of it in a line; zeros, and names that this version does not know, are left out."""
    return " · ".join(render(telemetry[name]) for name, render in _WORDS.items() if telemetry.get(name))
