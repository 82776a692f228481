"""What kind of machine computed a job: what bits and times may depend on, without a name or a path of it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from protofed.deploy.console.processes import usable_cores

_CPUS = Path("/proc/cpuinfo")


def machine_class(device: torch.device) -> str:
    """Such as `Linux x86_64, Intel(R) Xeon(R) CPU @ 2.20GHz, 2 cores; device cpu`."""
    cores = usable_cores()
    where = f"{platform.system()} {platform.machine()}, {_processor()}, {cores} core{'s' * (cores != 1)}"
    of = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{where}; device {device.type}{of}"


def _processor() -> str:
    """The processor's model, as far as the system tells it."""
    lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUS.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "processor unknown"
