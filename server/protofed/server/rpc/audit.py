"""What came to the server and what it answered: a record for every call, durable before the answer is given.

Calls that come while one group of records is written wait for the next one, so that they share an fsync; hashing and
writing have a thread of their own. Memory is bounded by the calls in flight, since each waits for its record.

Health checks are not recorded: they carry nothing, and come every few seconds from whatever watches the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from protofed.common.codec import digest
from protofed.common.errors import StateError
from protofed.common.protocol import wire
from protofed.common.storage import files
from protofed.common.storage.journal import Fact, Journal
from protofed.server.access.authorization import Peer

log = structlog.get_logger()
AUDIT_FILE = "audit.jsonl"  # of the state folder
ROOM = 256 << 10  # bytes that must be free before calls act again
NAMES = 100  # of calls that are counted apart
FULL = "RESOURCE_EXHAUSTED"  # gRPC's code for what `ready` refuses
CALL = "call"
RESUMED = "resumed"  # what could not be recorded while there was no room; before the first record after it


@dataclass(frozen=True)
class AuditEntry:
    """A call that was answered, or is about to be.

    Attributes:
        call: as in the service: `CommitUpload`.
        request: as it came.
        message: the same, parsed; None where it could not be.
        code: of gRPC: `OK`, `INVALID_ARGUMENT`.
        reply: as it will go; empty with any code but `OK`.
    """

    call: str
    peer: Peer
    request: bytes
    message: Any
    code: str
    reply: bytes

    def facts(self) -> dict[str, Fact]:
        """What the record says."""
        peer: dict[str, Fact] = {"fingerprint": self.peer.fingerprint, "party": self.peer.party, "name": self.peer.name}
        told: dict[str, Fact] = {
            "peer": peer,
            "call": self.call,
            "facts": {} if self.message is None else wire.facts(self.message),
            "bytes": len(self.request),
            "digest": digest(self.request),
            "code": self.code,
            "answer_bytes": len(self.reply),
        }
        verdict = wire.verdict_of(self.call, self.reply)
        return {**told, "verdict": verdict} if verdict else told


@dataclass
class _Gap:
    """Calls since the last record that could be written: of none of them an answer was given."""

    unrecorded: Counter[str] = field(default_factory=Counter)  # that may have acted
    refused: Counter[str] = field(default_factory=Counter)  # before they acted

    def add(self, entry: AuditEntry) -> None:
        to = self.refused if entry.code == FULL else self.unrecorded
        to[entry.call if entry.call in to or len(to) < NAMES else "others"] += 1  # a peer may call what it likes

    def record(self) -> tuple[str, Mapping[str, Fact]]:
        return RESUMED, {"unrecorded": {**self.unrecorded}, "refused": {**self.refused}}


@dataclass(eq=False)
class _QueuedEntries:
    """A call until its record is durable; without an entry it only asks whether there is room again."""

    entry: AuditEntry | None
    done: asyncio.Future[None]


class ServerAudit:
    """The one writer of an audit log; used from one event loop.

    Raises:
        StateError: the log is not as it was left, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._journal, self._thread = Journal(path), ThreadPoolExecutor(1, "audit")
        self._trial = path.resolve().with_name(f"{path.stem}.trial")
        self._queue: list[_QueuedEntries] = []
        self._writer: asyncio.Task[None] | None = None
        self._gap: _Gap | None = None

    @property
    def missing(self) -> str:
        """Why calls are refused; nothing while they can be recorded."""
        return "" if self._gap is None else "calls cannot be recorded, and are refused until they can; make room"

    async def note(self, entry: AuditEntry) -> None:
        """Record a call; the answer may be given when this returns. Recorded even if the waiting is cancelled.

        Raises:
            OutOfSpace: it was not recorded, and calls are refused by `ready` until records can be written again.
            DiskFailure: nobody knows what is on the disk: the server has to end.
        """
        await self._put(entry)

    async def ready(self, call: str) -> None:
        """Before a call acts: whether it could be recorded, as far as is known. One that is refused is noted, too.

        Raises:
            OutOfSpace, DiskFailure: the last record could not be written, nor can one now. The call must not act.
        """
        if self._gap is not None:
            log.debug("looking for room again", call=call)
            await self._put(None)

    def close(self) -> None:
        """Write what waits (its calls were cut short), then release the file. The event loop may have ended."""
        self._thread.shutdown()
        left, self._queue = [waiting.entry for waiting in self._queue if waiting.entry is not None], []
        try:
            self._append(left)
        except StateError as error:
            log.error("calls were not recorded", calls=[entry.call for entry in left], why=str(error))
        self._journal.close()

    async def _put(self, entry: AuditEntry | None) -> None:
        loop = asyncio.get_running_loop()
        self._queue.append(waiting := _QueuedEntries(entry, loop.create_future()))
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write())
        await waiting.done

    async def _write(self) -> None:
        """Group by group, until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            group, self._queue = self._queue, []
            error = None
            try:
                entries = [waiting.entry for waiting in group if waiting.entry is not None]
                await asyncio.shield(loop.run_in_executor(self._thread, self._append, entries))
            except Exception as failed:  # whatever it is: those who wait must know
                error = failed.with_traceback(None)  # which would keep the messages alive
            self._tell(group, error)

    def _append(self, entries: Sequence[AuditEntry]) -> None:
        records: list[tuple[str, Mapping[str, Fact]]] = []
        if self._gap is not None:
            self._try_room()
            records.append(self._gap.record())
        records += [(CALL, entry.facts()) for entry in entries]
        self._journal.append_all(records)

    def _try_room(self) -> None:
        """Whether there is room for many records: one might just fit, and the next call act without another."""
        files.write(self._trial, secrets.token_bytes(ROOM))  # nothing that a file system could compress
        self._trial.unlink()

    def _tell(self, group: Sequence[_QueuedEntries], error: Exception | None) -> None:
        if error is None:
            self._gap = None
        else:
            self._note_gap(group, error)
        for waiting in group:
            if waiting.done.done():
                continue  # its call was cut short
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(type(error)(*error.args))

    def _note_gap(self, group: Sequence[_QueuedEntries], error: Exception) -> None:
        if self._gap is None:
            log.error("calls are refused: they cannot be recorded", why=str(error))
            self._gap = _Gap()
        for waiting in group:
            if waiting.entry is not None:
                self._gap.add(waiting.entry)
