"""Refuses uploads before memory runs out: a delayed upload costs minutes, a killed server costs an aggregation."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import structlog

from protofed.common.errors import ConfigError
from protofed.common.process import give_back

log = structlog.get_logger()
SHARE = 0.9  # of the control group's limit, above which the kernel kills the process
_UNLIMITED = 1 << 60  # control groups v1 write "no limit" as a large number
_STATM, _CGROUPS, _OWN_CGROUPS = Path("/proc/self/statm"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class MemoryGuard:
    """Whether too little memory is left to begin another upload.

    Args:
        limit: bytes of resident memory; None: there is no limit.
        resident: returns the process's resident bytes now.
    """

    def __init__(self, limit: int | None, resident: Callable[[], int] | None = None) -> None:
        self._limit, self._resident = limit, resident or resident_bytes
        self._lock, self._was_short = threading.Lock(), False

    def short(self) -> bool:
        """Asked before an upload begins, on any thread."""
        if self._limit is None:
            return False
        with self._lock:
            if over := self._resident() > self._limit:
                # `keep_memory` lets glibc keep freed memory, which still counts as resident until it is given back.
                give_back()
                over = self._resident() > self._limit
            if over != self._was_short:
                self._was_short = over
                log.warning("memory is short" if over else "memory is free again", limit_mb=self._limit >> 20)
            return over


def memory_limit(setting_mb: int | None, cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int | None:
    """The limit in bytes: the setting (in MiB), or else `SHARE` of what the process's control group allows.

    Args:
        cgroups: where control groups are mounted.
        own_cgroups: the file that lists this process's control groups.

    Returns:
        None: no limit is set, and none was found.

    Raises:
        ConfigError: a limit is set on a system that does not tell a process how much memory it uses.
    """
    if setting_mb is not None:
        resident_bytes()  # refuses the setting at the start, not at the first upload
        return setting_mb << 20
    lowest = min(_limits(cgroups, own_cgroups), default=None)
    return None if lowest is None else int(SHARE * lowest)


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise ConfigError(f"memory_limit_mb needs {_STATM}: {error.strerror}; remove the setting") from error


def _limits(cgroups: Path, own_cgroups: Path) -> Iterator[int]:
    """Limits of this process's control group and its ancestors: the lowest one holds. Reads v1 and v2."""
    lines = own_cgroups.read_text(encoding="utf-8").splitlines() if own_cgroups.exists() else []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        match controllers.split(","):
            case [""]:  # v2: one hierarchy without controllers' names
                top, name = cgroups, "memory.max"
            case names if "memory" in names:
                top, name = cgroups / "memory", "memory.limit_in_bytes"
            case _:
                continue
        own_group = PurePosixPath(path).relative_to("/")
        for group in (own_group, *own_group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                if (limit := int((top / group / name).read_text(encoding="ascii"))) < _UNLIMITED:
                    yield limit
