"""The client's audit log: one line for every message, durable before it is sent, and one for every task that was given.

The chunks of a transfer share a line: it names the digest of the whole and is durable before the first of them is sent.
Never the data in a message; but the values of scores and other numbers, which are what was disclosed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from protofed.common.codec import Digest, digest
from protofed.common.errors import DiskFailureError, PolicyViolationError, StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage.journal import Fact

FILE = "audit.jsonl"  # in the state folder: the first segment
PLAINTEXT = "plaintext"  # in place of a certificate's fingerprint
Entry: TypeAlias = tuple[str, Mapping[str, Fact]]  # event, its fields


class AuditLines(Protocol):
    """Where the lines go: a `Journal`."""

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Append lines durably; on OutOfSpaceError or DiskFailureError none of them was added."""


@dataclass(eq=False)
class _QueuedLine:
    """A line that waits for the thread that writes."""

    entry: Entry
    written: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class ChunkedTransfer:
    """Chunk calls that share one line of the audit log.

    Attributes:
        call: `PutChunk` or `GetChunk`.
        facts: the messages' fields without those of a single chunk.
        digest: of the whole blob.
        calls, size: how many messages, and their bytes together; what a retry sends again is not counted.
        certificates: of the chunks that were sent, so that each certificate has its line; `lock` guards it.
    """

    call: str
    facts: Mapping[str, Fact]
    digest: Digest
    calls: int
    size: int
    certificates: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class ClientAudit:
    """The audit log of one daemon. Threads share it, and lines that arrive together share an fsync.

    Every method returns once its line is durable.

    Args:
        check: called before each write; raises DiskFailureError if the state folder is this daemon's no more.

    Raises:
        OutOfSpaceError: from every method: nothing was written, and the same call may succeed later.
        DiskFailureError: from every method: the log cannot be trusted any more; end the process.
    """

    def __init__(self, lines: AuditLines, check: Callable[[], None] = lambda: None) -> None:
        self._lines, self._check, self._queue = lines, check, list[_QueuedLine]()
        # Two locks: while one thread waits for the disk, the others can queue their lines for the next fsync.
        self._queue_lock, self._write_lock = threading.Lock(), threading.Lock()

    def sent(self, server: str, certificate: str, call: str, facts: Mapping[str, Fact], message: bytes) -> None:
        """A message that is about to be sent; called before each attempt.

        Args:
            server: host:port.
            certificate: fingerprint of this site's, or `PLAINTEXT`.
            facts: the message's fields without its tensors, from `audit_fields`.
            message: the bytes to be sent; the line has their size and digest.
        """
        target: dict[str, Fact] = {"server": server, "certificate": certificate, "call": call}
        self._add("sent", {**target, "facts": dict(facts), "bytes": len(message), "digest": digest(message)})

    def moves(self, server: str, certificate: str, transfer: ChunkedTransfer) -> None:
        """Chunks that are about to be sent or fetched; called before the first of them.

        Args:
            server, certificate: as of `sent`.
        """
        target: dict[str, Fact] = {"server": server, "certificate": certificate, "call": transfer.call}
        size: dict[str, Fact] = {"bytes": transfer.size, "digest": transfer.digest, "calls": transfer.calls}
        self._add("sent", {**target, "facts": dict(transfer.facts), **size})

    def answered(self, call: str, digest: Digest, *, verdict: str = "", code: str = "") -> None:
        """The server's answer: the verdict of a receipt, or a gRPC status code.

        Args:
            digest: as the line of the message, or of its transfer, has it.
        """
        outcome = {"verdict": verdict} if verdict else {"code": code}
        self._add("answered", {"call": call, "digest": digest, **outcome})

    def task(self, facts: Mapping[str, Fact]) -> None:
        """A task that the server gave, before anything is done for it.

        Args:
            facts: its fields, from `audit_fields`: kind, run, round, task_id, the digest of the model to start from.
        """
        self._add("task", facts)

    def run(self, facts: Mapping[str, Fact]) -> None:
        """What the server says of the run that it offers, once, and again when it says something else.

        Args:
            facts: its fields, from `audit_fields`: run, digest of the recipe, least cohort.
        """
        self._add("run", facts)

    def policy(self, name: str, version: Digest) -> None:
        """The policy that counts from now on: at the daemon's start, and after each change of its file.

        Args:
            name: as the settings name it: a file, or a policy that comes with protofed.
            version: digest of the file's bytes.
        """
        self._add("policy", {"policy": name, "digest": version})

    def refused(self, task: Task, reason: PolicyViolationError) -> None:
        """An update that the site's own policy refused; nothing of it was sent."""
        self._add("refused", {"run": task.run, "round": task.round, "task_id": task.task_id, "why": str(reason)})

    def privacy(self, facts: Mapping[str, Fact]) -> None:
        """A fit with noise that is about to begin: the ledger has counted it.

        Args:
            facts: run, round, task_id, its mechanisms, epsilon and delta of all fits together, the policy's budget, and
                what stays because it has no noise.
        """
        self._add("privacy", facts)

    def decision(self, event: str, facts: Mapping[str, Fact]) -> None:
        """What a person at the site decided: who, when, on which run; it stays at the site."""
        self._add(event, facts)

    def secure_aggregation(self, event: str, facts: Mapping[str, Fact]) -> None:
        """What a site does in secure aggregation: `pinned`, on first use; `masked`, `aggregated`, beforehand.

        Args:
            facts: of `pinned`: site, code; of the others run, round, attempt and subject; of `masked` the scores that
                leave under masks, of `aggregated` the sites whose sum this site helps to open.
        """
        self._add(event, facts)

    def server(self, address: str, finding: str, fingerprint: str | None, why: str) -> None:
        """The certificate seen at the server's address; called when it changes, or is not to be trusted."""
        self._add("server", {"server": address, "finding": finding, "certificate": fingerprint, "why": why})

    def _add(self, event: str, fields: Mapping[str, Fact]) -> None:
        line = _QueuedLine((event, fields))
        with self._queue_lock:
            self._queue.append(line)
        with self._write_lock:
            if not line.written:  # another thread may have written it while this one waited for the lock
                self._write()
        if line.error is not None:
            raise line.error

    def _write(self) -> None:
        """Write all lines that were queued during the write before."""
        with self._queue_lock:
            batch, self._queue = self._queue, []
        # What the lines report if append_all ends by something that is not caught below, such as KeyboardInterrupt.
        error: Exception | None = DiskFailureError("the audit log's writer was interrupted; start this process again")
        try:
            self._check()
            self._lines.append_all([line.entry for line in batch])
            error = None
        except (StateError, ValueError, TypeError) as failure:
            error = failure
        finally:
            for line in batch:
                line.written, line.error = True, error
