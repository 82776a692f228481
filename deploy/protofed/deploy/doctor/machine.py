"""What `doctor` looks at on the machine itself: software, folders, disks, ports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import pwd
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path

from prometheus_client import CollectorRegistry

from protofed.common.config.settings import Monitoring
from protofed.common.monitoring.http import Monitor
from protofed.common.storage.files import TEMPORARY
from protofed.common.version import VERSION
from protofed.deploy.doctor.checks import CheckFailedError, CheckSkippedError

FULL_BYTES, LOW_BYTES = 1 << 30, 5 << 30  # free on the disk of a state folder: a finding, a warning
CLOCK = timedelta(seconds=60)  # how far two clocks may be apart
SOON = timedelta(days=30)  # before a certificate ends
_WANTED = re.compile(r"([\w.-]+)>=([\d.]+)(?:; extra == ['\"](\w+)['\"])?")


def software(extra: str | None, shown: Sequence[str]) -> str:
    """Versions; all libraries that this kind of install needs are there, and new enough."""
    for said in metadata.requires("protofed") or ():
        wanted = _WANTED.fullmatch(said)
        if wanted and wanted[3] in (None, extra):
            _check_library(wanted[1], wanted[2])
    python = ".".join(map(str, sys.version_info[:3]))
    return ", ".join((f"protofed {VERSION}", f"Python {python}", *(f"{name} {_version(name)}" for name in shown)))


def import_quietly(names: Sequence[str]) -> None:
    """Import what sites need; what that leaves on disk goes into a folder that is removed again."""
    try:
        made = tempfile.TemporaryDirectory()
    except OSError as error:
        raise CheckFailedError(
            "state-not-writable", "no folder for temporary files can be written; set TMPDIR"
        ) from error
    with made as scratch:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before or scratch
        try:
            for name in names:
                importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            raise CheckFailedError("library-missing", f"{name} cannot be imported: {_line(error)}") from error
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def writable(folder: Path, name: str = "state-not-writable") -> str:
    """A file can be made in a folder or, if the daemon will make that, in the one around it; it is removed again."""
    there = _existing(folder)
    made = "" if there == folder else f", where {folder} will be made"
    try:
        handle, probe = tempfile.mkstemp(prefix=f"{TEMPORARY}doctor-", dir=there)
        try:
            os.write(handle, b"protofed doctor\n")
            os.fsync(handle)
        finally:
            os.close(handle)
            Path(probe).unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckFailedError("disk-full", f"{there}: {error.strerror}") from error
        raise CheckFailedError(name, f"{there} cannot be written by {_user()}: {error.strerror}") from error
    return f"{there} can be written by {_user()}{made}"


def disk(folder: Path) -> str:
    """Room on its disk."""
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{_size(free)} free on the disk of {folder}"
    if free < FULL_BYTES:
        raise CheckFailedError("disk-full", f"{text}; at least {_size(FULL_BYTES)} are wanted")
    if free < LOW_BYTES:
        raise CheckFailedError("disk-low", f"{text}; {_size(LOW_BYTES)} would be better")
    return text


def held(folder: Path) -> bool:
    """Whether a daemon is running on a state folder. Looks at its lock, and makes none."""
    try:
        handle = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def port(address: str, taken: str, unusable: str) -> str:
    """Whether this machine could listen at an address, by listening there for a moment."""
    host, _, number = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_server((host, int(number)), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return f"{address} is free"
    except (ValueError, OverflowError) as error:
        raise CheckFailedError(unusable, f"'{address}': expected host:port") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CheckFailedError(taken, f"something else listens on {address}") from error
        raise CheckFailedError(unusable, f"cannot listen on {address}: {error.strerror}") from error


def metrics(where: Monitoring | None, *, running: bool) -> str:
    """Whether /metrics could be served.

    Raises:
        ConfigError: the address, the identity or the token cannot be used.
    """
    if where is None:
        raise CheckSkippedError("no metrics are asked for")
    Monitor(where, CollectorRegistry(), lambda: ())  # reads its files, and does not listen yet
    with _taken_by_ourselves(running, "metrics-port-taken"):
        return port(where.listen, "metrics-port-taken", "metrics-unusable")
    return f"{where.listen} is taken, as by the daemon that is running"


@contextlib.contextmanager
def _taken_by_ourselves(running: bool, name: str) -> Iterator[None]:
    try:
        yield
    except CheckFailedError as found:
        if not running or found.name != name:
            raise


def _check_library(name: str, least: str) -> None:
    try:
        there = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise CheckFailedError("library-missing", f"{name} is not installed; expected {least} or newer") from error
    if _numbers(there) < _numbers(least):
        raise CheckFailedError("library-old", f"{name} {there} is installed; expected {least} or newer")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _version(name: str) -> str:
    return metadata.version(name)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
