"""What the report says of the machine: names and versions."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from tests.checkout import ROOT

_DRIVER = Path("/proc/driver/nvidia/version")
_UNKNOWN = "unknown"


def facts(device: torch.device) -> dict[str, str]:
    """Names and versions by what they are of, in the order of the report."""
    own = {
        "protofed": metadata.version("protofed"),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
    }
    if device.type != "cuda":
        return {"device": "cpu", **own}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB",
        "driver": _driver(),
        **own,
        "CUDA": torch.version.cuda or _UNKNOWN,
        "cuDNN": _or_unknown(_cudnn),
        "NCCL": _or_unknown(nccl),
    }


def nccl() -> str:
    """NCCL's version."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _cudnn() -> str:
    return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def _driver() -> str:
    asked = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if asked != _UNKNOWN:
        return asked.splitlines()[0]
    return _or_unknown(lambda: _DRIVER.read_text(encoding="utf-8").splitlines()[0])


def _said(*command: str) -> str:
    done = _or_unknown(
        lambda: subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    )
    return done or _UNKNOWN


def _or_unknown(read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return _UNKNOWN
