"""The wall clock, which may jump: for the dates of certificates, never for how long something takes."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """What the machine's clock says."""
    return datetime.now(UTC)


def stamp(when: datetime) -> str:
    """UTC in RFC 3339, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
