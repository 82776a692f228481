"""Sheds load before memory runs out: an upload that waits costs minutes, a killed server costs an aggregation."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import structlog

from protofed.common.errors import ConfigError
from protofed.common.malloc import give_back

log = structlog.get_logger()
SHARE = 0.9  # of what the control group allows
_UNLIMITED = 1 << 60  # version 1 of control groups has only a large number for it
_STATM, _CGROUPS, _OURS = Path("/proc/self/statm"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class MemoryGuard:
    """Whether the process has so little memory left that nothing more should be begun.

    Args:
        limit: bytes of resident memory; None: never.
        resident: how many there are now.
    """

    def __init__(self, limit: int | None, resident: Callable[[], int] | None = None) -> None:
        self._limit, self._resident = limit, resident or resident_bytes
        self._lock, self._told = threading.Lock(), False

    def short(self) -> bool:
        """Asked before an upload begins, on any thread; what was freed but kept (`keep_memory`) is given back first."""
        if self._limit is None:
            return False
        with self._lock:
            if over := self._resident() > self._limit:
                give_back()
                over = self._resident() > self._limit
            if over != self._told:
                self._told = over
                log.warning("memory is short" if over else "memory is free again", limit_mb=self._limit >> 20)
            return over


def memory_limit(said_mb: int | None, groups: Path = _CGROUPS, ours: Path = _OURS) -> int | None:
    """In bytes: what the settings say, or else `SHARE` of what the process's control group allows; None: no limit.

    Args:
        groups: where control groups are mounted.
        ours: says in which of them this process is.

    Raises:
        ConfigError: a limit is set where nobody can say how much memory the process has.
    """
    if said_mb is not None:
        resident_bytes()
        return said_mb << 20
    found = min(_limits(groups, ours), default=None)
    return None if found is None else int(SHARE * found)


def resident_bytes() -> int:
    """Of this process."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise ConfigError(f"memory_limit_mb needs {_STATM}: {error.strerror}; remove the setting") from error


def _limits(groups: Path, ours: Path) -> Iterator[int]:
    """Of this process's control group and those around it, in version 1 and 2 of them."""
    lines = ours.read_text(encoding="utf-8").splitlines() if ours.exists() else []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        match controllers.split(","):
            case [""]:
                top, name = groups, "memory.max"
            case names if "memory" in names:
                top, name = groups / "memory", "memory.limit_in_bytes"
            case _:
                continue
        here = PurePosixPath(path).relative_to("/")
        for group in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                if (limit := int((top / group / name).read_text(encoding="ascii"))) < _UNLIMITED:
                    yield limit
