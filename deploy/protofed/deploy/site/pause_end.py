"""When a pause ends, as a person types it: 18:00, 2026-11-24T06:00, or 2h30m."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta

from protofed.common.errors import ConfigError, short

_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m(?:in)?)?")
LONGEST = timedelta(days=366)


def pause_end(text: str, now: datetime) -> datetime:
    """The time that `text` means, UTC: a time of day (the next one), a date and time, or a duration from now.

    Args:
        text: without a zone, it is in UTC, as a policy's `schedule` is.
        now: the current time, UTC.

    Raises:
        ConfigError: it is none of these, or not in the coming year.
    """
    end = _after(text, now) or _time_of_day(text, now) or _date(text)
    if end is None:
        raise ConfigError(
            f"--until '{short(text)}': expected a time of day (18:00), a date and time (2026-11-24T06:00), both in "
            "UTC, or a duration (90m, 2h30m, 3d)"
        )
    if not now < end <= now + LONGEST:
        raise ConfigError(f"--until '{short(text)}' is {end:%Y-%m-%dT%H:%M:%SZ}: expected a time of the coming year")
    return end


def _after(text: str, now: datetime) -> datetime | None:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes = (int(number or 0) for number in match.groups())
    return now + timedelta(days=days, hours=hours, minutes=minutes)


def _time_of_day(text: str, now: datetime) -> datetime | None:
    if not re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
        return None
    try:
        at = datetime.combine(now.date(), time.fromisoformat(text.strip().zfill(5)), UTC)
    except ValueError:
        return None
    return at if at > now else at + timedelta(days=1)


def _date(text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text.strip())
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):  # the latter: in the first or last hours that there are
        return None
