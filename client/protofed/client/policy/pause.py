"""A pause of the site: a file in its state folder, which `protofed client pause` writes and `client resume` removes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from protofed.common.clock import stamp, utc_now
from protofed.common.errors import StateError
from protofed.common.storage import files

FILE = ".pause.json"  # in the state folder; run names cannot begin with a dot


@dataclass(frozen=True)
class Pause:
    """A pause that is in force.

    Attributes:
        at: when it began, UTC, RFC 3339; empty: its file cannot be read, and so it lasts.
        by: user name on the site's machine; it stays there.
        until: when it ends by itself; None: at `client resume`.
    """

    at: str
    by: str = ""
    until: AwareDatetime | None = None

    def end(self) -> str:
        """When it ends, in words."""
        return "until `protofed client resume`" if self.until is None else f"until {stamp(self.until)}"

    def __str__(self) -> str:
        since = f" since {self.at}" if self.at else ""
        who = f" by {self.by}" if self.by else ""
        return f"paused{since}{who}, {self.end()}"


_PAUSE = TypeAdapter(Pause)


class SitePause:
    """The pause of one site. The daemon and the command line may use it at the same time: every write is atomic.

    Args:
        path: of `FILE`.
        now: the current time, UTC.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._path, self._now = path, now

    def begin(self, by: str = "", until: datetime | None = None) -> Pause:
        """Pause the site, in place of a pause before; StateError if that cannot be written."""
        pause = Pause(stamp(self._now()), by, until)
        record = {**asdict(pause), "until": None if until is None else stamp(until)}
        files.write(self._path, json.dumps(record).encode())
        return pause

    def end(self) -> Pause | None:
        """End the pause, and return it.

        Raises:
            StateError: its file cannot be removed.
        """
        pause = self.current()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"cannot remove {self._path}: {error.strerror}; remove it by hand") from error
        return pause

    def current(self) -> Pause | None:
        """The pause that is in force now. One that cannot be read is in force: the site meant to take no task."""
        try:
            pause = _PAUSE.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            return Pause("")
        return None if pause.until is not None and pause.until <= self._now() else pause
