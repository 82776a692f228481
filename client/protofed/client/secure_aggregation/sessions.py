"""Sessions of sums on disk: one file an attempt; for each run what stays of those over; and the site's group."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from protofed.client.secure_aggregation.session import Session
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import SecureAggregationError, StateError
from protofed.common.ids import check_id, is_id
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import SumOf
from protofed.common.secure_aggregation.groups import Group
from protofed.common.secure_aggregation.keys import Vector
from protofed.common.storage import files

FOLDER = ".sums"  # in the state folder; run names cannot begin with a dot
GROUP = ".group.json"  # in this folder
MAX_ROUNDS = 200  # of which is remembered who was summed; sums of earlier ones are refused


@dataclass(frozen=True)
class Past:
    """What stays of the attempts at one sum.

    Attributes:
        over: attempts up to this one are over, their secrets wiped: none of them begins again.
        opened: the survivors for whom this site has revealed VALUES; None: it has not.
    """

    over: int = 0
    opened: tuple[SiteId, ...] | None = None


@dataclass(frozen=True)
class Pinned:
    """The group that the site is aggregated in, in all runs.

    Attributes:
        at: since when, UTC, RFC 3339.
        run: in which the group was first used.
    """

    group: Group
    at: str
    run: str


class _Sum(NamedTuple):
    """Which sum of a run a file is of: its name says so, whatever has become of its bytes."""

    round: int
    attempt: int
    sum_of: SumOf


T = TypeVar("T")
_SESSION = TypeAdapter(Session)
_PAST = TypeAdapter(dict[str, Past])
_PINNED = TypeAdapter(Pinned)
_NAME = re.compile(rf"([0-9]{{6,}})-([0-9]+)-({'|'.join(SumOf)})\.json")  # no other file is ever removed


class Sessions:
    """The sessions of one site. Every write replaces a file at once, and is durable before the method returns.

    Args:
        folder: `FOLDER` of the site's state folder; created by the first write.
        now: the current time, UTC.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder, self._now = folder, now
        files.sweep([folder, *(path for path in folder.glob("*") if path.is_dir())])

    def find(self, run: str, round: int, attempt: int, sum_of: SumOf) -> Session | None:
        """The session of a sum; None: none was started.

        Raises:
            SecureAggregationError: the attempt is over.
            StateError: a file is damaged: without it the site could promise a second time.
        """
        if self.is_over(run, round, attempt, sum_of):
            raise SecureAggregationError(
                "attempt-over",
                f"attempt {attempt} of the secure aggregation of round {round} is over here, and its secrets "
                "are deleted",
            )
        path = self._path(run, round, attempt, sum_of)
        return _read(path, _SESSION) if path.exists() else None

    def is_over(self, run: str, round: int, attempt: int, sum_of: SumOf) -> bool:
        """Whether an attempt is over, its secrets wiped."""
        past = self._past(run)
        forgotten = round < min(map(_round, past), default=0) and len(set(map(_round, past))) >= MAX_ROUNDS
        return forgotten or attempt <= past.get(_key(round, sum_of), Past()).over

    def opened(self, session: Session) -> tuple[SiteId, ...] | None:
        """For whom the site has revealed VALUES of this round and sum_of, in whichever attempt; None: it has not."""
        return self._of(session.run, session.round, session.sum_of).opened

    def group(self) -> Pinned | None:
        """The group that the site is aggregated in, whatever the run; None: it was in none yet, except alone.

        Only a person has it forgotten: of sums over another one, too, what no run changes is the difference.

        Raises:
            StateError: the file is damaged: without it the site could be put into another group.
        """
        return pinned_in(self._folder)

    def save(self, session: Session) -> None:
        """Store a session, and its group first. What it decrypts is recorded before it is decrypted, and stays recorded
        after the secrets are wiped.

        Raises:
            OutOfSpaceError, DiskFailureError: nothing may be sent of it.
        """
        path = self._path(session.run, session.round, session.attempt, session.sum_of)
        joins = len(session.group) > 1 and not (path.exists() and _read(path, _SESSION).group)
        if joins and self.group() is None:  # at the step that joins it alone: not after it was forgotten meanwhile
            pinned = Pinned(session.group, stamp(self._now()), session.run)
            files.write(self._folder / GROUP, _PINNED.dump_json(pinned))
        if Vector.VALUES in session.revealed and self.opened(session) is None:
            past = self._of(session.run, session.round, session.sum_of)
            past = replace(past, opened=session.survivors[Vector.VALUES])
            self._remember(session.run, session.round, session.sum_of, past)
        files.write(path, _SESSION.dump_json(session))

    def wipe_before(self, run: str, round: int, attempt: int, sum_of: SumOf) -> None:
        """Wipe the sums of a run that are over, as a task of this one tells: those of other rounds, and before.

        The scores of a round are aggregated after its updates.
        """
        for entry in self._all(run):
            later = entry.round == round and (entry.sum_of is sum_of or sum_of is SumOf.UPDATE)
            if not (later and entry.attempt >= attempt):
                self._wipe(run, entry)

    def wipe_one(self, run: str, round: int, attempt: int, sum_of: SumOf) -> None:
        """Wipe one sum: its server has all that it is given."""
        self._wipe(run, _Sum(round, attempt, sum_of))

    def wipe(self, run: str) -> None:
        """Wipe all sums of a run: it is over, or the site has left it."""
        for entry in self._all(run):
            self._wipe(run, entry)

    def wipe_all_but(self, run: str) -> None:
        """Wipe the sums of all other runs."""
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.is_dir() and path.name != run and is_id(path.name):
                self.wipe(path.name)

    def _wipe(self, run: str, entry: _Sum) -> None:
        """By the file's name: a session that is damaged must not stay, nor end the daemon, when its sum is over."""
        past, path = self._of(run, entry.round, entry.sum_of), self._path(run, *entry)
        self._remember(run, entry.round, entry.sum_of, replace(past, over=max(past.over, entry.attempt)))
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise files.write_error(path, error) from error

    def _remember(self, run: str, round: int, sum_of: SumOf, past: Past) -> None:
        sums = {**self._past(run), _key(round, sum_of): past}
        newest = sorted(set(map(_round, sums)))[-MAX_ROUNDS:]  # whole rounds: what is summed of one has entries each
        path = self._folder / f"{check_id('run', run)}.json"
        files.write(path, _PAST.dump_json({key: past for key, past in sums.items() if _round(key) in newest}))

    def _of(self, run: str, round: int, sum_of: SumOf) -> Past:
        return self._past(run).get(_key(round, sum_of), Past())

    def _past(self, run: str) -> dict[str, Past]:
        path = self._folder / f"{check_id('run', run)}.json"  # no id has a dot, so no run's folder has this name
        return _read(path, _PAST) if path.exists() else {}

    def _all(self, run: str) -> list[_Sum]:
        paths = sorted((self._folder / check_id("run", run)).glob("*.json"))
        return [
            _Sum(int(name[1]), int(name[2]), SumOf(name[3]))
            for path in paths
            if (name := _NAME.fullmatch(path.name)) is not None
        ]

    def _path(self, run: str, round: int, attempt: int, sum_of: SumOf) -> Path:
        return self._folder / check_id("run", run) / f"{round:06d}-{attempt}-{sum_of}.json"


def pinned_in(folder: Path) -> Pinned | None:
    """As `Sessions.group`; nothing is written."""
    path = folder / GROUP
    return _read(path, _PINNED) if path.exists() else None


def forget_group(folder: Path) -> None:
    """Forget the group: the site joins whichever group it is put into next; the daemon may run.

    Raises:
        OutOfSpaceError, DiskFailureError: it is not forgotten.
    """
    try:
        (folder / GROUP).unlink(missing_ok=True)
        files.sync_folder(folder)
    except OSError as error:
        raise files.write_error(folder / GROUP, error) from error


def _key(round: int, sum_of: SumOf) -> str:
    return f"{round}/{sum_of}"


def _round(key: str) -> int:
    return int(key.partition("/")[0])


def _read(path: Path, adapter: TypeAdapter[T]) -> T:
    try:
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        remedy = (
            "`protofed client consortium --forget-group`" if path.name == GROUP else "remove it once the run is over"
        )
        raise StateError(f"{path} cannot be read ({why}); restore it, or {remedy}") from error
