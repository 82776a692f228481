"""When a site takes tasks: windows of the week, in UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from protofed.common.config.table import StrictModel


class Day(StrEnum):
    """Of the week, in its order."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


DAYS = tuple(Day)


class Window(StrictModel):
    """From one time of the day until another; `until` that is not later is one of the next day."""

    days: Annotated[frozenset[Day], Field(min_length=1)] = frozenset(DAYS)  # on which it begins
    begins: Annotated[time, Field(alias="from")]  # 20:00, in UTC
    until: time  # likewise; not later than `from`: of the next day

    @field_validator("begins", "until")
    @classmethod
    def _utc(cls, value: time) -> time:
        if value.tzinfo is not None:
            raise ValueError("expected a time without a zone, as 20:00: schedules are in UTC")
        return value

    def holds(self, now: datetime) -> bool:
        """Whether `now`, in UTC, lies in it."""
        return any(begin <= now < end for begin, end in map(self._of, (now, now - timedelta(days=1))) if begin)

    def next(self, now: datetime) -> datetime:
        """When it begins next."""
        days = (now + timedelta(days=ahead) for ahead in range(8))
        return min(begin for begin, _ in map(self._of, days) if begin and begin >= now)

    def _of(self, day: datetime) -> tuple[datetime | None, datetime]:
        """Begin and end of the one that begins on this day, if one does."""
        begin, end = (datetime.combine(day, at, day.tzinfo) for at in (self.begins, self.until))
        ends = end if end > begin else end + timedelta(days=1)
        return (begin if DAYS[day.weekday()] in self.days else None), ends

    def __str__(self) -> str:
        days = "daily" if len(self.days) == len(DAYS) else ", ".join(day for day in DAYS if day in self.days)
        return f"{days} {self.begins:%H:%M} to {self.until:%H:%M}"


def is_open(schedule: Sequence[Window], now: datetime) -> bool:
    """Whether a site takes tasks at this time, in UTC; always, if it has no schedule."""
    return not schedule or any(window.holds(now) for window in schedule)


def opens(schedule: Sequence[Window], now: datetime) -> datetime:
    """When a closed site takes tasks again."""
    return min(window.next(now) for window in schedule)
