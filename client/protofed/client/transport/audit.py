"""What left this site: a line for every message before it is sent, durable before it is sent; never data themselves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from protofed.common.codec import digest
from protofed.common.errors import DiskFailureError, PolicyViolationError, StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage.journal import Fact

FILE = "audit.jsonl"  # of the state folder
PLAINTEXT = "plaintext"  # in place of a certificate's fingerprint
Entry: TypeAlias = tuple[str, Mapping[str, Fact]]  # event, facts


class AuditLines(Protocol):
    """Where the lines go: a `Journal`."""

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Add lines, all durable when it returns; OutOfSpace or DiskFailure, and none of them was added."""


@dataclass(eq=False)
class _QueuedLine:
    """A line until it is written."""

    entry: Entry
    done: bool = False
    error: Exception | None = None


class ClientAudit:
    """One daemon's; threads share it, and lines that come at the same time share an fsync.

    Every method raises OutOfSpace (nothing was written, the same again may succeed) or DiskFailure.
    """

    def __init__(self, lines: AuditLines) -> None:
        self._lines, self._queue = lines, list[_QueuedLine]()
        self._queueing, self._writing = threading.Lock(), threading.Lock()

    def sent(self, server: str, certificate: str, call: str, facts: Mapping[str, Fact], message: bytes) -> None:
        """Before each attempt to send a message.

        Args:
            server: its address.
            certificate: this site's, by its fingerprint; or `PLAINTEXT`.
            facts: what the message says, without data.
            message: as it is sent.
        """
        where: dict[str, Fact] = {"server": server, "certificate": certificate, "call": call}
        self._add("sent", {**where, "facts": dict(facts), "bytes": len(message), "digest": digest(message)})

    def answered(self, call: str, message: bytes, *, verdict: str = "", code: str = "") -> None:
        """A receipt's verdict, or the error that the server answered `message` with."""
        found = {"verdict": verdict} if verdict else {"code": code}
        self._add("answered", {"call": call, "digest": digest(message), **found})

    def refused(self, task: Task, why: PolicyViolationError) -> None:
        """What the site's own policy did not let out: nothing of it was sent."""
        self._add("refused", {"run": task.run, "round": task.round, "task_id": task.task_id, "why": str(why)})

    def server(self, address: str, finding: str, fingerprint: str | None, why: str) -> None:
        """Who answered at the server's address, if it is somebody else than before, or not the one that was meant."""
        self._add("server", {"server": address, "finding": finding, "certificate": fingerprint, "why": why})

    def _add(self, event: str, facts: Mapping[str, Fact]) -> None:
        waiting = _QueuedLine((event, facts))
        with self._queueing:
            self._queue.append(waiting)
        with self._writing:
            if not waiting.done:
                self._write()
        if waiting.error is not None:
            raise waiting.error

    def _write(self) -> None:
        """All that queued while the one before was written."""
        with self._queueing:
            batch, self._queue = self._queue, []
        error: Exception | None = DiskFailureError("the audit log's writer was interrupted; start this process again")
        try:
            self._lines.append_all([waiting.entry for waiting in batch])
            error = None
        except (StateError, ValueError, TypeError) as failed:
            error = failed
        finally:
            for waiting in batch:
                waiting.done, waiting.error = True, error
