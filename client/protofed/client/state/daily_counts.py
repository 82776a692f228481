"""How many tasks the site began today, kept on disk: a restart is no new day."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.common.clock import utc_now
from protofed.common.errors import StateError
from protofed.common.storage import files

FILE = ".today.json"  # in the state folder; run names cannot begin with a dot


class Counted(StrEnum):
    """What is counted, by the policy's key."""

    TASKS = "tasks_per_day"
    SCORINGS = "scorings_per_day"


@dataclass(frozen=True)
class _Day:
    """Tasks begun on a day, UTC.

    Attributes:
        begun: number by kind.
        last: the newest one, which a restarted daemon takes up without counting it again.
    """

    day: date
    begun: dict[Counted, int] = field(default_factory=dict)
    last: str = ""


_DAY = TypeAdapter(_Day)


class DailyCounts:
    """The counts of one site, owned by its agent.

    Args:
        path: of `FILE`.
        now: the current time, UTC.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._path, self._now = path, now

    def begin(self, kind: Counted, asked: str, most: int) -> datetime | None:
        """Count a task, durably, before it is worked on; None: it may begin.

        Args:
            asked: the same for the same task.

        Returns:
            When tasks of its kind may begin again, UTC, if there were `most` of them today.

        Raises:
            StateError: the count cannot be read or written.
        """
        today = self._today()
        if today.last == asked:
            return None
        count = today.begun.get(kind, 0)
        if count >= most:
            midnight = datetime.combine(today.day, datetime.min.time(), self._now().tzinfo)
            return midnight + timedelta(days=1)
        counted = replace(today, begun={**today.begun, kind: count + 1}, last=asked)
        files.write(self._path, json.dumps(asdict(counted), default=str).encode())
        return None

    def _today(self) -> _Day:
        now = self._now().date()
        try:
            day = _DAY.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Day(now)
        except (OSError, ValidationError) as error:
            raise StateError(f"cannot read {self._path}, which counts today's tasks; remove it") from error
        # A clock that was set back gives no second day.
        return day if day.day >= now else _Day(now)
