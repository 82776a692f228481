"""The wall clock, and how its times are written. It may jump: it is for dates, never for durations."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """The wall clock's time, with the time zone UTC."""
    return datetime.now(UTC)


def stamp(when: datetime) -> str:
    """A time with time zone as text: RFC 3339 in UTC, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_stamp(text: str) -> datetime:
    """The time that `stamp` wrote."""
    return datetime.fromisoformat(text)
