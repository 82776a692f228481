"""What people at the site decided, on its way into the site's audit log, which only one process writes.

The command line leaves each decision as a file. Whoever has the state folder's lock, usually the daemon, writes its
line and removes the file. An empty folder therefore says that the daemon has noticed all decisions.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.common.storage import files

FOLDER = ".decisions"  # in the state folder; run names cannot begin with a dot
SUFFIX = ".json"


class Act(StrEnum):
    """What was decided; the event of its line in the audit log."""

    APPROVE = "approved"
    DENY = "denied"
    WITHDRAW = "withdrawn"
    PAUSE = "paused"
    RESUME = "resumed-by-site"  # a server's log has "resumed" for another event
    CONFIRM = "partners-confirmed"
    FORGET_GROUP = "group-forgotten"


@dataclass(frozen=True)
class Decision:
    """One decision of a person.

    Attributes:
        at: UTC, RFC 3339.
        by: user name on the site's machine; empty: not known.
        run, recipe: the run and its recipe's digest; empty of a pause.
        partners, code: the sites of a list of partners, and its code; of CONFIRM alone.
        group: the sites of this site's group in secure aggregation; of FORGET_GROUP alone.
        reason: of a pause, as the person typed it; it stays at the site.
        until: when a pause ends by itself; empty: it does not.
    """

    act: Act
    at: str
    by: str = ""
    run: str = ""
    recipe: str = ""
    until: str = ""
    partners: str = ""
    code: str = ""
    group: str = ""
    reason: str = ""

    def facts(self) -> dict[str, str]:
        """The fields of its line in the audit log; `decided_at`, because a line's own time is that of its writing."""
        fields = {"decided_at": self.at, "by": self.by, "run": self.run, "recipe": self.recipe, "until": self.until}
        fields |= {"partners": self.partners, "code": self.code, "group": self.group}
        fields |= {"reason": self.reason}
        return {name: value for name, value in fields.items() if value}


_DECISION = TypeAdapter(Decision)


class Decisions:
    """The decisions of one site that its audit log does not have yet.

    Args:
        folder: `FOLDER` of the site's state folder; created by the first decision.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved = set[str]()  # whose file could not be removed: it is recorded once

    def add(self, decision: Decision) -> Path:
        """Leave a decision for the writer of the audit log; StateError if it cannot be written."""
        name = f"{decision.at.translate({ord('-'): '', ord(':'): ''})}-{secrets.token_hex(4)}{SUFFIX}"
        files.write(self._folder / name, json.dumps(asdict(decision)).encode())
        return self._folder / name

    def waiting(self) -> list[Path]:
        """The files of the decisions that are not recorded yet, the earliest first."""
        return sorted(self._folder.glob(f"[!.]*{SUFFIX}"))

    def move(self, waiting: Iterable[Path], record: Callable[[Decision], None]) -> None:
        """Record decisions, each before its file is removed; for the lock's holder only.

        Args:
            waiting: as `waiting` gave them.
            record: writes a line durably; what it raises ends the move, and the rest waits for the next one.
        """
        for path in waiting:
            with contextlib.suppress(OSError, ValidationError):  # not a file of ours, or not readable: it stays
                if path.name not in self._moved:
                    record(_DECISION.validate_json(path.read_bytes()))
                    self._moved.add(path.name)
                path.unlink(missing_ok=True)
