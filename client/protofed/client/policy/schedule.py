"""When a site takes tasks: weekly windows, in UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from protofed.common.config.tables import StrictModel


class Day(StrEnum):
    """A day of the week; the order is that of `datetime.weekday`."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


DAYS = tuple(Day)


class Window(StrictModel):
    """A daily window of time, which may last over midnight."""

    days: Annotated[frozenset[Day], Field(min_length=1)] = frozenset(DAYS)  # on which it begins
    begins: Annotated[time, Field(alias="from")]  # 20:00, in UTC
    until: time  # likewise; not later than `from`: of the next day

    @field_validator("begins", "until")
    @classmethod
    def _utc(cls, value: time) -> time:
        if value.tzinfo is not None:
            raise ValueError("expected a time without a zone, as 20:00: schedules are in UTC")
        return value

    def contains(self, now: datetime) -> bool:
        """Whether `now`, UTC, is in the window."""
        days = (now, now - timedelta(days=1))  # a window that began yesterday may last until today
        return any(begin <= now < end for begin, end in map(self._on, days) if begin)

    def next_begin(self, now: datetime) -> datetime:
        """When the window begins next, at `now` (UTC) at the earliest."""
        # Eight days: today's window may have begun already, and its day come again only in a week.
        days = (now + timedelta(days=ahead) for ahead in range(8))
        return min(begin for begin, _ in map(self._on, days) if begin and begin >= now)

    def _on(self, day: datetime) -> tuple[datetime | None, datetime]:
        """Begin and end of the window of this day; the begin is None if the day is not one of `days`."""
        begin, end = (datetime.combine(day, at, day.tzinfo) for at in (self.begins, self.until))
        end += timedelta(days=0 if end > begin else 1)
        return (begin if DAYS[day.weekday()] in self.days else None), end

    def __str__(self) -> str:
        days = "daily" if len(self.days) == len(DAYS) else ", ".join(day for day in DAYS if day in self.days)
        return f"{days} {self.begins:%H:%M} to {self.until:%H:%M}"


def is_open(schedule: Sequence[Window], now: datetime) -> bool:
    """Whether a site takes tasks at `now`, UTC; always, if the schedule is empty."""
    return not schedule or any(window.contains(now) for window in schedule)


def next_opening(schedule: Sequence[Window], now: datetime) -> datetime:
    """When a site that takes no tasks at `now`, UTC, takes them again; its schedule is not empty."""
    return min(window.next_begin(now) for window in schedule)
