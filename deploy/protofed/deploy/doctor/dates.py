"""Clocks and dates: two clocks that differ, and certificates that are judged by the one that is right."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode
from protofed.common.clock import stamp
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import Certificate, read_certificate
from protofed.common.pki.identity import CERTIFICATE
from protofed.deploy.doctor.checks import CheckFailedError
from protofed.deploy.doctor.machine import CLOCK, SOON


def compare(here: datetime, server: datetime) -> str:
    """This machine's clock beside the server's."""
    off = here - server
    if abs(off) > CLOCK:
        way = "ahead of" if off > timedelta() else "behind"
        told = f"this clock says {stamp(here)}, the server's {stamp(server)}: {duration(abs(off))} {way} it"
        raise CheckFailedError("clock-wrong", told)
    return f"{stamp(here)}, within {max(1, round(abs(off).total_seconds()))} s of the server's"


def check_evidence(own: Certificate, server: ConnectionDiagnosis, here: datetime) -> None:
    """A clock that is so wrong that no connection can be made: both certificates begin later than it says."""
    if here < own.not_before and server.kind is DiagnosisCode.SERVER_DATES:
        raise CheckFailedError(
            "clock-wrong",
            f"this clock says {stamp(here)}: {duration(own.not_before - here)} before this site's certificate begins, "
            "and the server's is not valid yet either",
        )


def remaining(certificate: Certificate, at: datetime) -> str:
    """How long a certificate that is valid is so still."""
    left = certificate.not_after - at
    text = f"{certificate}, valid until {stamp(certificate.not_after)}, {left.days} days"
    if left < SOON:
        raise CheckFailedError("certificate-ends-soon", text)
    return text


def valid_time(folder: Path, here: datetime) -> datetime:
    """The time nearest to this clock's at which an identity's own dates are no reason to refuse it."""
    try:
        own = read_certificate((folder / CERTIFICATE).read_bytes(), CERTIFICATE)
    except (OSError, ConfigError):
        return here  # what is wrong with it is said by whoever reads it whole
    return min(max(here, own.not_before), own.not_after)


def duration(span: timedelta) -> str:
    """In the largest unit that fits."""
    seconds = span.total_seconds()
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
