"""What a site keeps on disk, by (run, round): memory and personal model, written with the update that they belong to,
and counted only once the server's receipt is there.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from protofed.client.privacy.approval import FOLDER as APPROVALS
from protofed.client.privacy.approval import Approvals
from protofed.client.privacy.site_secret import own_secret
from protofed.client.state.downloads import DiskDownloads
from protofed.client.state.store import COUNTED
from protofed.client.state.store import FitOutcome as FitOutcome
from protofed.client.state.store import MemoryStore as MemoryStore
from protofed.client.state.store import SiteState as SiteState
from protofed.client.state.store import Store as Store
from protofed.common import codec
from protofed.common.errors import CodecError, StateError
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Receipt, Task, TaskKind
from protofed.common.storage import files
from protofed.common.version import VERSION

_ROUND = re.compile(r"[0-9]{6,}")  # the folder of a round; no other name is ever moved or removed
_LEFT = re.compile(re.escape(files.TEMPORARY) + _ROUND.pattern + r"(-[0-9a-f]{8})?")  # of a process that was killed
INCOMING = ".incoming"


class DiskStore:
    """One folder a round: update, memory and personal model appear in it together, the receipt makes them count.

    Args:
        folder: of this site alone; a lock file keeps a second daemon out.
        secret: in place of the folder's own, in a simulation.

    Attributes:
        incoming: what the site fetches, beside what it keeps; no run's name begins with a dot.
    """

    def __init__(self, folder: Path, secret: bytes | None = None) -> None:
        self._folder, self._secret = folder, secret
        self._keep: int | None = 3  # counted rounds, the newest among them; None: all
        self._lock = files.Lock(folder)
        self.incoming = DiskDownloads(folder / INCOMING)
        self.approvals: Approvals | None = Approvals(folder / APPROVALS)
        for run in folder.iterdir():
            for left in run.glob(f"{files.TEMPORARY}*") if run.is_dir() else ():
                if _LEFT.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)

    def secret(self) -> bytes:
        """Made when it is first asked for."""
        return self._secret or own_secret(self._folder)

    def received(self, task: Task) -> Payload:
        """As it was staged."""
        path = self._round(task.run, task.round) / "received.safetensors"
        return _read(path) if path.exists() else {}

    def held(self, run: str, before: int) -> SiteState:
        """What counted last; damaged files are an error, never a fresh start."""
        rounds = [number for number in self._rounds(run) if number < before and self._counts(run, number)]
        if not rounds:
            return SiteState()
        here = self._round(run, max(rounds))
        return SiteState(max(rounds), _read(here / "memory.safetensors"), _read(here / "personal.safetensors"))

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """Updates without a receipt, the oldest first."""
        return [_staged(self._round(run, number)) for number in self._rounds(run) if not self._counts(run, number)]

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """Write the whole folder under a temporary name, then rename it.

        What this site has of that round and of later ones goes: the server was rolled back, or begins again.
        """
        here = self._round(task.run, task.round)
        temporary = here.with_name(f"{files.TEMPORARY}{here.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        update = outcome.update
        scalars = {"site": update.site, "metrics": dict(update.metrics), "weight": update.weight}
        facts = {"task": asdict(task), "update": scalars}
        parts = [("update", update.payload), ("memory", outcome.memory), ("personal", outcome.personal)]
        parts += [("received", outcome.received)] if outcome.received else []
        try:
            files.write(temporary / "task.json", json.dumps(facts).encode())
            for name, payload in parts:
                files.write(temporary / f"{name}.safetensors", codec.encode(payload))
        except StateError:  # a full disk is not kept full by what it had no room for
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            self._discard(task.run, [number for number in self._rounds(task.run) if number >= task.round])
            os.replace(temporary, here)
            files.sync_folder(here.parent)
        except OSError as error:
            raise files.write_error(here, error) from error

    def settle(self, task: Task, receipt: Receipt) -> None:
        """The receipt first; then what is no longer needed goes."""
        here = self._round(task.run, task.round)
        if receipt.verdict not in COUNTED:
            self._discard(task.run, [task.round])
            return
        files.write(here / "receipt.json", json.dumps(asdict(receipt)).encode())
        for name in ("update", "received"):
            (here / f"{name}.safetensors").unlink(missing_ok=True)
        rounds = self._rounds(task.run)
        counted = [number for number in rounds if self._counts(task.run, number)]
        if self._keep is not None and len(counted) >= self._keep:
            self._discard(task.run, [number for number in rounds if number < counted[-self._keep]])

    def settled(self, run: str) -> frozenset[str]:
        """The task_ids of the counted rounds that are kept."""
        counted = [number for number in self._rounds(run) if self._counts(run, number)]
        return frozenset(_task(self._round(run, number)).task_id for number in counted)

    def retain(self, rounds: int) -> None:
        """Keep so many counted rounds behind the newest; 0: all."""
        self._keep = rounds + 1 if rounds else None

    def close(self) -> None:
        """Let another daemon have the folder."""
        self._lock.release()

    def _rounds(self, run: str) -> list[int]:
        folder = self._folder / run
        names = [here.name for here in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if _ROUND.fullmatch(name))

    def _counts(self, run: str, number: int) -> bool:
        return (self._round(run, number) / "receipt.json").exists()

    def _discard(self, run: str, rounds: Iterable[int]) -> None:
        """Rename, then remove: whoever dies in between leaves nothing that looks like a round."""
        for number in rounds:
            here = self._round(run, number)
            gone = here.with_name(f"{files.TEMPORARY}{here.name}-{secrets.token_hex(4)}")
            os.replace(here, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _round(self, run: str, number: int) -> Path:
        return self._folder / run / f"{number:06d}"


def _staged(here: Path) -> tuple[Task, Update]:
    task = _task(here)
    return task, Update(payload=_read(here / "update.safetensors"), **_facts(here, "update"))


def _task(here: Path) -> Task:
    facts = _facts(here, "task")
    return Task(**{**facts, "kind": TaskKind(facts["kind"])})


def _facts(here: Path, about: str) -> dict[str, Any]:
    """Of `task.json`: the task, or the scalars of the update."""
    path = here / "task.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))[about]
        if "nonce" in facts:  # as 0.1 called a task's id
            raise StateError(
                f"{here} was written by protofed 0.1, which {VERSION} does not read; let 0.1 end its runs, then start "
                "with an empty state folder"
            )
        known = {field.name for field in fields(Task if about == "task" else Update)} - {"payload"}
        if set(facts) != known:
            raise ValueError(f"{about} has other fields than {', '.join(sorted(known))}")
        return dict(facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> Payload:
    try:
        return codec.decode(path.read_bytes())
    except (OSError, CodecError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(f"{path} cannot be read ({error}); restore it, or remove its folder to start over")
