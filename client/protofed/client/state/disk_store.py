"""A site's state on disk: one folder for each run and round, which counts once it has the server's receipt.

Rounds that a roll-back left behind: moved aside, so that repeating an old round erases no later model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from protofed.client.policy.approval import FOLDER as APPROVALS_FOLDER
from protofed.client.policy.approval import Approvals
from protofed.client.policy.pause import FILE as PAUSE_FILE
from protofed.client.policy.pause import SitePause
from protofed.client.state.daily_counts import FILE as COUNTS_FILE
from protofed.client.state.daily_counts import DailyCounts
from protofed.client.state.downloads import DiskDownloads
from protofed.client.state.dp_ledger import FILE as LEDGER_FILE
from protofed.client.state.dp_ledger import DpLedger
from protofed.client.state.own_scores import FOLDER as SCORES_FOLDER
from protofed.client.state.own_scores import OwnScores
from protofed.client.state.store import COUNTED, FitOutcome, SiteState, TrainedBy, earlier, load_or_create_secret
from protofed.common import codec
from protofed.common.codec import digest
from protofed.common.errors import CodecError, StateError
from protofed.common.ids import is_id
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Receipt, SumOf, Task, TaskKind
from protofed.common.storage import files

_NAME = re.compile(r"(aside|moving)-([0-9]{6,})-[0-9a-f]{8}")  # the round that was staged in their place, its task


class ReplacedRounds:
    """Folders `aside-ROUND-TASK` beside the rounds of a run, each with the folders of the rounds that were moved there.

    It is called `moving-…` until all are: several cannot move at once, and a crash in between must move back the first.

    Args:
        folder: of the site's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, task: Task, rounds: Iterable[Path]) -> None:
        """Move rounds out of the way of this task's outcome, the earliest first."""
        if not (rounds := list(rounds)):
            return
        aside = self._of(task)
        # The same task staged once more moves what has counted meanwhile to what it moved before, which must stay.
        moving = aside if aside.exists() else aside.with_name(aside.name.replace("aside", "moving", 1))
        moving.mkdir(exist_ok=True)
        try:
            for path in rounds:
                os.replace(path, moving / path.name)
            os.replace(moving, aside)
        except OSError:
            if moving != aside:
                _restore(moving)
            raise

    def restore(self, task: Task) -> None:
        """Move back what was moved for this task: its update does not count."""
        _restore(self._of(task))

    def recover(self, run: str) -> None:
        """After a crash in `put`, or before the staging: move back what nothing has taken the place of."""
        for path in list((self._folder / run).glob("moving-*")):
            if _NAME.fullmatch(path.name):
                _restore(path)
        rounds = [int(path.name) for path in (self._folder / run).iterdir() if path.name.isdecimal()]
        for number, path in self._all(run):
            if max(rounds, default=-1) < number:
                _restore(path)

    def discard(self, run: str, counted: int) -> None:
        """Remove the rounds up to the round that has counted now."""
        for _, path in self._all(run):
            for moved in list(path.iterdir()):
                if moved.name.isdecimal() and int(moved.name) <= counted:
                    shutil.rmtree(moved, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty yet
                path.rmdir()

    def newest(self, run: str) -> int:
        """The newest round that was moved aside and has not counted again; 0: none."""
        moved = [int(moved.name) for _, path in self._all(run) for moved in path.iterdir() if moved.name.isdecimal()]
        return max(moved, default=0)

    def _of(self, task: Task) -> Path:
        return self._folder / task.run / f"aside-{task.round:06d}-{digest(task.task_id.encode())[:8]}"

    def _all(self, run: str) -> list[tuple[int, Path]]:
        folder = self._folder / run
        names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return [(int(name[2]), folder / name[0]) for name in names if name]


def _restore(folder: Path) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not (home := folder.parent / path.name).exists():
            os.replace(path, home)
    with contextlib.suppress(OSError):
        folder.rmdir()


_ROUND = re.compile(r"[0-9]{6,}")  # name of a round's folder; no other name is ever moved or removed
# What a killed process leaves of a round: a stage that was not renamed yet, or a removal that was not finished.
_TEMPORARY = re.compile(re.escape(files.TEMPORARY) + _ROUND.pattern + r"(-[0-9a-f]{8})?")
_TEMPORARY_BASE = re.compile(re.escape(files.TEMPORARY) + r"base-[0-9]{6,}\.safetensors-[0-9a-f]{8}")
_BASE = re.compile(r"base-([0-9]{6,})\.safetensors")  # the last base that was accepted, with its round
SCORED = "scored.json"  # by round, what was asked when its scores were given
_SCORED = TypeAdapter(dict[int, str])
DOWNLOADS_FOLDER = ".incoming"  # run names cannot begin with a dot, so no run's folder collides with it


class DiskStore:
    """The store of a daemon. The files of a round appear together by one rename; the receipt makes them count.

    Args:
        folder: this site's state folder, locked until `close`: a second daemon gets StateError.

    Attributes:
        downloads: blobs that the site fetches; they survive the daemon, too.
        approvals: the site's approvals of runs, in the same folder.
        pause: the pause that a person at the site set, in the same folder.
        own_scores: the site's own scores, in the same folder.
        daily_counts: how many tasks the site began today, in the same folder.
        dp_ledger: what the site has spent of its privacy, in the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keep: int | None = 3  # counted rounds, the newest included; None: all
        files.make_private(folder)
        self._lock = files.Lock(folder)
        self.downloads = DiskDownloads(folder / DOWNLOADS_FOLDER)
        self.run_approvals = Approvals(folder / APPROVALS_FOLDER)
        self.approvals: Approvals | None = self.run_approvals
        self.pause: SitePause | None = SitePause(folder / PAUSE_FILE)
        self.own_scores: OwnScores | None = OwnScores(folder / SCORES_FOLDER)
        self.daily_counts: DailyCounts | None = DailyCounts(folder / COUNTS_FILE)
        self.dp_ledger: DpLedger | None = DpLedger(folder / LEDGER_FILE)
        self._aside = ReplacedRounds(folder)
        files.sweep([folder / SCORES_FOLDER])
        # No other folder is looked into: in `lost+found`, at the root of a volume, only root may.
        for run in [path for path in folder.iterdir() if is_id(path.name) and path.is_dir()]:
            self._aside.recover(run.name)
            for path in run.glob(f"{files.TEMPORARY}*"):
                if _TEMPORARY.fullmatch(path.name):  # a user's own file with such a prefix stays
                    shutil.rmtree(path, ignore_errors=True)
                elif _TEMPORARY_BASE.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that the folder is still the folder that this process has locked.

        Raises:
            DiskFailureError: it was moved, removed or replaced.
        """
        self._lock.check()

    def secret(self) -> bytes:
        """The site's secret; the first call creates it in the folder."""
        return load_or_create_secret(self._folder)

    def last_counted(self, run: str, before: int) -> SiteState:
        """See `Store.last_counted`. Damaged files raise StateError: starting afresh would lose the site's memory."""
        rounds = [number for number in self.counted(run) if number < before]
        if not rounds:
            return SiteState()
        folder = self._round(run, max(rounds))
        client_state, personal = (
            _read_payload(folder / f"{name}.safetensors") for name in ("client_state", "personal")
        )
        return SiteState(max(rounds), client_state, personal, _read_trained(folder).withheld)

    def newest_counted(self, run: str) -> int:
        """See `Store.newest_counted`."""
        return max([*self.counted(run), self._aside.newest(run)], default=0)

    def counted(self, run: str) -> list[int]:
        """See `Store.counted`."""
        return [number for number in self._rounds(run) if self._is_counted(run, number)]

    def scored(self, run: str) -> Mapping[int, str]:
        """See `Store.scored`. A damaged file raises StateError: without it a round could be scored again."""
        path = self._folder / run / SCORED
        try:
            return _SCORED.validate_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            raise _damaged(path, error) from error

    def mark_scored(self, run: str, round: int, request: str) -> None:
        """See `Store.mark_scored`."""
        if (scored := self.scored(run)).get(round) != request:
            self._write_scored(run, {**scored, round: request})

    def _write_scored(self, run: str, scored: Mapping[int, str]) -> None:
        files.write(self._folder / run / SCORED, json.dumps(dict(scored)).encode())

    def last_base(self, run: str) -> tuple[int, Payload] | None:
        """See `Store.last_base`. A damaged file raises StateError: without it a server could send any model."""
        bases = self._bases(run)
        return None if not bases else (max(bases), _read_payload(bases[max(bases)]))

    def keep_base(self, run: str, round: int, base: Payload) -> None:
        """See `Store.keep_base`. The new file is durable before the old one goes."""
        path = self._folder / run / f"base-{round:06d}.safetensors"
        files.write(path, codec.encode(base))
        for stored in self._bases(run).values():
            if stored != path:
                stored.unlink(missing_ok=True)

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """See `Store.unsettled`."""
        rounds = [number for number in self._rounds(run) if not self._is_counted(run, number)]
        return [_read_staged(self._round(run, number)) for number in rounds]

    def trained_by(self, task: Task) -> TrainedBy:
        """See `Store.trained_by`."""
        return _read_trained(self._round(task.run, task.round))

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """See `Store.stage`. All files are written under a temporary name, then the folder is renamed.

        After a roll-back, this round and later rounds that have counted are moved aside, not removed. So are the rounds
        that the fit passed over. Otherwise a server that only repeats an old round could erase the models of later
        rounds. An outcome that never counted is removed.
        """
        folder = self._round(task.run, task.round)
        temporary = folder.with_name(f"{files.TEMPORARY}{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        update = outcome.update
        scalars = {"site": update.site, "metrics": dict(update.metrics), "weight": update.weight}
        record = {"task": asdict(task), "update": scalars, **asdict(outcome.trained)}
        payloads = [("update", update.payload), ("client_state", outcome.client_state), ("personal", outcome.personal)]
        try:
            files.write(temporary / "task.json", json.dumps(record).encode())
            for name, payload in payloads:
                files.write(temporary / f"{name}.safetensors", codec.encode(payload))
        except StateError:  # free the space again: the next attempt needs all of it
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            # Only now, so that a failed write leaves the former outcome in place.
            later, counted = [n for n in self._rounds(task.run) if n >= task.round], self.counted(task.run)
            self._discard(task.run, [number for number in later if number not in counted])
            self._aside.put(task, [self._round(task.run, n) for n in counted if n >= task.state_before])
            os.replace(temporary, folder)
            files.sync_folder(folder.parent)
        except OSError as error:
            raise files.write_error(folder, error) from error

    def settle(self, task: Task, receipt: Receipt) -> None:
        """See `Store.settle`. Also removes the rounds that `retain` no longer asks for.

        What `stage` moved aside comes back if the update does not count. If it counts, a round that was moved aside is
        removed once that round, or a later one, has counted again.
        """
        folder = self._round(task.run, task.round)
        if receipt.verdict not in COUNTED:
            self._discard(task.run, [task.round])
            self._aside.restore(task)
            return
        # The receipt before any removal: a crash in between leaves files too many, never a round too few.
        files.write(folder / "receipt.json", json.dumps(asdict(receipt)).encode())
        (folder / "update.safetensors").unlink(missing_ok=True)
        self._aside.discard(task.run, task.round)
        if (remaining := earlier(task.round, scored := self.scored(task.run))) != scored:
            self._write_scored(task.run, remaining)
        rounds, counted = self._rounds(task.run), self.counted(task.run)
        if self._keep is not None and len(counted) >= self._keep:
            self._discard(task.run, [number for number in rounds if number < counted[-self._keep]])

    def abandon(self, run: str) -> None:
        """See `Store.abandon`; what `stage` moved aside comes back."""
        for number in [number for number in self._rounds(run) if not self._is_counted(run, number)]:
            task = _read_task(self._round(run, number))
            try:
                self._discard(run, [number])
                self._aside.restore(task)
            except OSError as error:
                raise files.write_error(self._round(run, number), error) from error

    def settled(self, run: str) -> frozenset[str]:
        """See `Store.settled`."""
        return frozenset(_read_task(self._round(run, number)).task_id for number in self.counted(run))

    def retain(self, rounds: int) -> None:
        """See `Store.retain`; takes effect at the next `settle`."""
        self._keep = rounds + 1 if rounds else None

    def close(self) -> None:
        """Unlock the folder for another daemon."""
        self._lock.release()

    def _bases(self, run: str) -> dict[int, Path]:
        folder = self._folder / run
        names = [_BASE.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return {int(name[1]): folder / name[0] for name in names if name}

    def _rounds(self, run: str) -> list[int]:
        folder = self._folder / run
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if _ROUND.fullmatch(name))

    def _is_counted(self, run: str, number: int) -> bool:
        return (self._round(run, number) / "receipt.json").exists()

    def _discard(self, run: str, rounds: Iterable[int]) -> None:
        for number in rounds:
            folder = self._round(run, number)
            # rmtree is not atomic: after the rename, a crash in it leaves nothing that reads as a round.
            renamed = folder.with_name(f"{files.TEMPORARY}{folder.name}-{secrets.token_hex(4)}")
            os.replace(folder, renamed)
            shutil.rmtree(renamed, ignore_errors=True)

    def _round(self, run: str, number: int) -> Path:
        return self._folder / run / f"{number:06d}"


def _read_staged(folder: Path) -> tuple[Task, Update]:
    task = _read_task(folder)  # first: it refuses a folder of another version before its payload is parsed
    return task, Update(payload=_read_payload(folder / "update.safetensors"), **_read_record(folder, "update"))


def _read_task(folder: Path) -> Task:
    record = _read_record(folder, "task")
    sum_of = record["sum_of"]
    return Task(**{**record, "kind": TaskKind(record["kind"]), "sum_of": None if sum_of is None else SumOf(sum_of)})


def _read_trained(folder: Path) -> TrainedBy:
    path = folder / "task.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return TrainedBy(str(record.get("recipe", "")), bool(record.get("withheld", False)))
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error


def _read_record(folder: Path, section: str) -> dict[str, Any]:
    """One section of `task.json`: `task`, or `update`, the scalars of the update."""
    path = folder / "task.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))[section]
        expected = {field.name for field in fields(Task if section == "task" else Update)} - {"payload"}
        if set(record) != expected:
            raise ValueError(f"{section} has other fields than {', '.join(sorted(expected))}")
        return dict(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _read_payload(path: Path) -> Payload:
    try:
        return codec.decode(path.read_bytes())
    except (OSError, CodecError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(f"{path} cannot be read ({error}); restore it, or remove its folder to start over")
