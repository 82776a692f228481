"""How many tasks the site began today, kept on disk: a restart is no new day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.common.clock import utc_now
from protofed.common.errors import StateError
from protofed.common.storage import files

FILE = ".today.json"  # in the state folder; run names cannot begin with a dot
# A clock that was set back by no more than this goes on in the later day. One that was ahead by years must not stop the
# site for as long.
SLACK = timedelta(days=1)
KEPT = 31  # other days


class Counted(StrEnum):
    """What is counted, by the policy's key."""

    TASKS = "tasks_per_day"
    SCORINGS = "scorings_per_day"


@dataclass(frozen=True)
class _Day:
    """Tasks started on a day, UTC.

    Attributes:
        started: number by kind.
        last: the newest one, which a restarted daemon takes up without counting it again.
        others: numbers of other days, in the order in which the clock left them. If it comes back to one, its number
            goes on.
    """

    day: date
    started: dict[Counted, int] = field(default_factory=dict)
    last: str = ""
    others: dict[date, dict[Counted, int]] = field(default_factory=dict)


_DAY = TypeAdapter(_Day)


@dataclass(frozen=True)
class Exhausted:
    """All tasks of a kind that a day has were started.

    Attributes:
        until: when more may begin, UTC.
        tomorrow: they were counted as tomorrow's: the clock was ahead then, or is behind now.
    """

    until: datetime
    tomorrow: bool

    def text(self, kind: Counted, most: int) -> str:
        """For people, of a kind of which a day has so many."""
        text = (
            f"{most} were started today, as many as limits.{kind} allows. The next one starts at "
            f"{self.until:%Y-%m-%d %H:%M} UTC at the earliest"
        )
        if self.tomorrow:
            text += (
                ". They were counted on tomorrow's date: this machine's clock was ahead, or is behind now. Set "
                "the clock right, for example by NTP"
            )
        return text


class DailyCounts:
    """The counts of one site, owned by its agent.

    Args:
        path: of `FILE`.
        now: the current time, UTC.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._path, self._now = path, now

    def begin(self, kind: Counted, task: str, most: int) -> Exhausted | None:
        """Count a task, durably, before it is worked on; None: it may begin.

        Args:
            task: the same for the same task.

        Returns:
            What is said if there were `most` of its kind today.

        Raises:
            StateError: the count cannot be read or written.
        """
        today = self._today()
        if today.last == task:
            return None
        if (none := self.exhausted(kind, most)) is not None:
            return none
        counted = replace(today, started={**today.started, kind: today.started.get(kind, 0) + 1}, last=task)
        files.write(self._path, _DAY.dump_json(counted))
        return None

    def exhausted(self, kind: Counted, most: int) -> Exhausted | None:
        """Whether the day has no further task of a kind, and until when; None: it has. Writes nothing.

        Raises:
            StateError: the count cannot be read.
        """
        today = self._today()
        if today.started.get(kind, 0) < most:
            return None
        now = self._now()
        midnight = datetime.combine(today.day, datetime.min.time(), now.tzinfo)
        return Exhausted(midnight + timedelta(days=1), today.day > now.date())

    def _today(self) -> _Day:
        now = self._now().date()
        try:
            day = _DAY.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Day(now)
        except (OSError, ValidationError) as error:
            raise StateError(f"cannot read {self._path}, which counts today's tasks; remove it") from error
        if now <= day.day <= now + SLACK:
            return day
        other_days = {**day.others, day.day: day.started}
        counts = other_days.pop(now, {})
        return _Day(now, counts, others=dict(list(other_days.items())[-KEPT:]))
