"""Checks of the machine that server and site share: software, folders, disks, ports.

Each returns what it saw, in words, and raises `CheckFailedError`.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path

from prometheus_client import CollectorRegistry

from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode
from protofed.common.address import IdentityChoice, check_connection
from protofed.common.clock import stamp
from protofed.common.config.settings import Monitoring
from protofed.common.errors import ConfigError, count
from protofed.common.monitoring import Monitor
from protofed.common.pki.certificate import Certificate, read_certificate
from protofed.common.pki.identity import CERTIFICATE
from protofed.common.storage.files import temporary_name
from protofed.common.version import VERSION
from protofed.deploy.doctor.checks import CheckFailedError, CheckSkippedError

FULL_BYTES, LOW_BYTES = 1 << 30, 5 << 30  # free on the disk of a state folder: a finding, a warning
FEW_INODES = 100  # files that a disk still takes
PROXIES = frozenset({"grpc_proxy", "https_proxy", "http_proxy", "all_proxy"})
CLOCK = timedelta(seconds=60)  # by which two clocks may differ
SOON = timedelta(days=30)  # a certificate that ends within this time gives a warning
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)(?:; extra == ['\"](\w+)['\"])?")


def software(extra: str | None, libraries: Sequence[str]) -> str:
    """The versions of what is installed; all libraries must be there and new enough.

    Args:
        extra: the extra of pyproject.toml whose libraries are needed, too; None: the base install.
        libraries: libraries whose versions are returned.
    """
    for line in metadata.requires("protofed") or ():
        requirement = _REQUIREMENT.fullmatch(line)
        if requirement and requirement[3] in (None, extra):
            _check_library(requirement[1], requirement[2])
    python = ".".join(map(str, sys.version_info[:3]))
    return ", ".join(
        (f"protofed {VERSION}", f"Python {python}", *(f"{name} {metadata.version(name)}" for name in libraries))
    )


def import_quietly(names: Sequence[str]) -> None:
    """Import libraries; files that their import leaves on disk go into a folder that is removed again.

    Raises:
        CheckFailedError: one cannot be imported, or there is no folder for temporary files.
    """
    try:
        temporary = tempfile.TemporaryDirectory()
    except OSError as error:
        raise CheckFailedError(
            "state-not-writable", "no folder for temporary files can be written; set TMPDIR"
        ) from error
    with temporary as scratch:
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
    """Write a file in a folder or, if the daemon has yet to make it, in its nearest parent, and remove it again.

    Args:
        name: of the diagnosis if that fails.
    """
    existing = _existing(folder)
    missing = "" if existing == folder else f", where {folder} will be made"
    try:
        probe = existing / temporary_name("doctor")
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"protofed doctor\n")
            os.fsync(handle)  # a full disk or a spent quota may show only when the data reach the disk
        finally:
            os.close(handle)
            probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckFailedError("disk-full", f"{existing}: {error.strerror}{_inodes(existing)}") from error
        raise CheckFailedError(name, f"{existing} cannot be written by {_user()}: {error.strerror}") from error
    return f"{existing} can be written by {_user()}{missing}"


def disk(folder: Path) -> str:
    """Free space on the disk of a folder, which need not exist yet."""
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{_size(free)} free on the disk of {folder}"
    if few := _inodes(_existing(folder)):
        raise CheckFailedError("disk-full", f"{text}{few}")
    if free < FULL_BYTES:
        raise CheckFailedError("disk-full", f"{text}; at least {_size(FULL_BYTES)} are needed")
    if free < LOW_BYTES:
        raise CheckFailedError("disk-low", f"{text}; {_size(LOW_BYTES)} are recommended")
    return text


def _inodes(folder: Path) -> str:
    """The end of a sentence if a folder's disk takes hardly any new file, however small; else empty."""
    found = os.statvfs(folder)
    few = found.f_files > 0 and found.f_favail < FEW_INODES  # some file systems do not count them: 0
    left = f"{count(found.f_favail, 'inode')} left of {found.f_files:,}"
    return f"; {left} (`df -i`): the disk has too many files" if few else ""


def has_running_daemon(folder: Path) -> bool | None:
    """Whether a daemon is running on a state folder; None: not to be seen. Tries the folder's lock, makes no file.

    A daemon that starts in this moment is not refused: `files.Lock` tries again.
    """
    try:
        handle = os.open(folder / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # Refused while a daemon has its exclusive lock. Two that look share it, and see no daemon in each other.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def port(address: str, in_use: str, unusable: str) -> str:
    """Whether a daemon could listen on an address: listens there for a moment.

    Args:
        address: host:port; an IPv6 address in brackets.
        in_use: name of the diagnosis if another process listens there.
        unusable: likewise, if the address cannot be used at all.
    """
    host, _, number = address.rpartition(":")
    host = host.strip("[]")
    try:
        # `create_server` sets SO_REUSEADDR: connections of a daemon that just ended do not make the port look taken.
        with socket.create_server((host, int(number)), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return f"{address} is free"
    except (ValueError, OverflowError) as error:
        raise CheckFailedError(unusable, f"'{address}': expected host:port") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CheckFailedError(in_use, f"something else listens on {address}") from error
        raise CheckFailedError(unusable, f"cannot listen on {address}: {error.strerror}") from error


def metrics(where: Monitoring | None, *, running: bool) -> str:
    """Whether /metrics could be served.

    Args:
        running: a daemon runs on the same state folder, so the port may be taken by it.

    Raises:
        ConfigError: the address, the identity or the token cannot be used.
    """
    if where is None:
        raise CheckSkippedError("no metrics are asked for")
    Monitor(where, CollectorRegistry(), lambda: ())  # reads its files, and does not listen yet
    try:
        return port(where.listen, "metrics-port-taken", "metrics-unusable")
    except CheckFailedError as failed:
        if not running or failed.name != "metrics-port-taken":
            raise
    return f"{where.listen} is taken, as by the daemon that is running"


def transport(address: str, identity: IdentityChoice) -> str:
    """An identity for TLS, or plain text on request.

    Raises:
        ConfigError: neither was chosen, or plain text to another machine.
    """
    folder = check_connection(address, identity)
    return "plain text on this machine" if folder is None else f"TLS, identity {folder}"


def unused_proxies(setting: str) -> str:
    """The end of a sentence that names variables of the environment that lead to a proxy; empty: there are none.

    Names only: values may have a password.

    Args:
        setting: what names a proxy in their place.
    """
    names = sorted(name for name in os.environ if name.lower() in PROXIES and os.environ[name])
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    return f"; {', '.join(names)} of the environment {are} not used: {setting} alone names a proxy"


def _check_library(name: str, least: str) -> None:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise CheckFailedError("library-missing", f"{name} is not installed; expected {least} or newer") from error
    if _numbers(installed) < _numbers(least):
        raise CheckFailedError("library-old", f"{name} {installed} is installed; expected {least} or newer")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.9.1+cu128` as (2, 9, 1): a local version, such as PyTorch's builds have, is no newer or older."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a number without a name
        return f"user {os.getuid()}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def compare_clocks(here: datetime, server: datetime) -> str:
    """Compare this machine's clock with the server's; both times are aware, in UTC.

    Raises:
        CheckFailedError: they differ by more than `machine.CLOCK`.
    """
    offset = here - server
    if abs(offset) > CLOCK:
        direction = "ahead of" if offset > timedelta() else "behind"
        text = f"this clock says {stamp(here)}, the server's {stamp(server)}: {duration(abs(offset))} {direction} it"
        raise CheckFailedError("clock-wrong", text)
    return f"{stamp(here)}, within {max(1, round(abs(offset).total_seconds()))} s of the server's"


def check_clock_by_certificates(certificate: Certificate, server: ConnectionDiagnosis, here: datetime) -> None:
    """Detect a clock so far behind that TLS fails: by it, neither side's certificate is valid yet.

    Raises:
        CheckFailedError: that is so. One certificate alone proves nothing: it may really begin later.
    """
    if here < certificate.not_before and server.kind is DiagnosisCode.SERVER_DATES:
        raise CheckFailedError(
            "clock-wrong",
            f"this clock says {stamp(here)}: {duration(certificate.not_before - here)} before this site's certificate "
            "begins, and the server's is not valid yet either",
        )


def remaining(certificate: Certificate, at: datetime) -> str:
    """The time that a valid certificate has left, in words.

    Raises:
        CheckFailedError: a warning, if it is less than `machine.SOON`.
    """
    time_left = certificate.not_after - at
    text = f"{certificate}, valid until {stamp(certificate.not_after)}, {time_left.days} days"
    if time_left < SOON:
        raise CheckFailedError("certificate-ends-soon", text)
    return text


def valid_time(folder: Path, here: datetime) -> datetime:
    """The time nearest to `here` at which the certificate in an identity's folder is valid.

    With it, an identity can be read and its other properties checked although its certificate has expired.
    """
    try:
        certificate = read_certificate((folder / CERTIFICATE).read_bytes(), CERTIFICATE)
    except (OSError, ConfigError):
        return here  # `read_identity`, which follows, reports what is wrong with the file
    return min(max(here, certificate.not_before), certificate.not_after)


def duration(span: timedelta) -> str:
    """A duration in the largest unit that gives at least 2: `36 hours`, not `2 days`."""
    seconds = span.total_seconds()
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
