"""Clocks and certificate dates. A wrong clock makes valid certificates look expired, so clocks are compared first."""

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
    left = certificate.not_after - at
    text = f"{certificate}, valid until {stamp(certificate.not_after)}, {left.days} days"
    if left < SOON:
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
    """In the largest unit of which there are at least two: `36 hours`, not `2 days`."""
    seconds = span.total_seconds()
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
