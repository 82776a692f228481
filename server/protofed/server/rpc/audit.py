"""The server's audit log: a record of each call and its answer, durable before the answer is sent.

The chunks of a transfer share one record, which names the digest of the whole. The record is written with the site's
next other call that has a record. So it is written before the receipt of an update, or within two minutes.

Calls that arrive while one group of records is written form the next group and share its fsync. Hashing and writing run
on their own thread. Memory is bounded by the calls in flight, since each waits for its record.

Health checks are not recorded: they carry nothing, and come every few seconds from whatever monitors the server. If a
caller exceeds its budget of lines, its calls are counted (`LineBudget`), and one record a minute has the numbers. Calls
of a site that has nothing to do, or takes no tasks at present, are counted in one record an hour. A kill loses the
counts since the last record, and the chunks that no record names yet.

So no caller can fill the disk: calls above `DAY_BYTES` of lines a day are counted. Accepted updates and successful
calls of an operator are always written: they are few, or come from the party that keeps the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from protofed.common.codec import Digest, digest
from protofed.common.errors import StateError, for_another
from protofed.common.protocol import wire
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.storage import files
from protofed.common.storage.journal import SEGMENT_BYTES, Fact, Journal, Record
from protofed.server.access.authorization import PLAINTEXT, Peer

# Of lines, there at once and again within a day. An honest daemon has some 12 MB a day; with a heartbeat a second, 55.
DAY_BYTES = 128 << 20
DAY_S = 86_400.0
EVERY_S = 60.0  # between two lines with counts
IDLE_EVERY_S = 3600.0  # the same, if only idle calls were counted: 10,000 sites make 500 a second
MAX_TRANSFERS = 4096  # in memory; above it, the chunks of the oldest are counted with its peer's other calls
MAX_PEERS = 16_384  # in memory; above it, the one that called longest ago is forgotten
MAX_NAMES = 100  # of calls that are counted each under its name
OK, ACCEPTED, OPERATOR = "OK", "accepted", "operator"
CHUNKS = ("PutChunk", "GetChunk")


Caller: TypeAlias = tuple[str, str]  # fingerprint, site


@dataclass(slots=True)
class Counts:
    """Calls of one peer without a line of their own.

    Attributes:
        calls: by name and code.
        size: bytes of their requests.
        due_at: when their line has to be written, in seconds of the monotonic clock.
    """

    peer: Peer
    due_at: float = math.inf
    calls: Counter[str] = field(default_factory=Counter)
    size: int = 0

    def facts(self) -> Mapping[str, Fact]:
        """The fields of their common line."""
        return {"peer": self.peer.facts(), "calls": {**self.calls}, "bytes": self.size}


@dataclass
class ChunkTransfer:
    """Chunks of one blob that one site sent or fetched since the last line that names them.

    Attributes:
        call: `PutChunk` or `GetChunk`.
        fields: of the messages, but those of a single chunk.
        digest: of the whole blob.
        calls: repeated chunks count again.
        size, answer_size: bytes of their requests and of the answers.
        since: seconds of the monotonic clock.
    """

    peer: Peer
    call: str
    fields: Mapping[str, Fact]
    digest: str
    since: float
    calls: int = 0
    size: int = 0
    answer_size: int = 0

    @property
    def caller(self) -> Caller:
        """The certificate and the site that it calls for; in plain text the site alone tells callers apart."""
        return self.peer.fingerprint, str(self.fields["site"])

    @property
    def key(self) -> tuple[object, ...]:
        """Whatever has it shares this transfer's line; another process of the same daemon has it, too."""
        return self.caller, self.call, self.fields.get("run"), self.fields.get("upload"), self.digest

    def facts(self) -> Mapping[str, Fact]:
        """The fields of a record `call` that stands for all of its calls."""
        return {
            "peer": self.peer.facts(),
            "call": self.call,
            "facts": {**self.fields},
            "calls": self.calls,
            "bytes": self.size,
            "digest": self.digest,
            "code": OK,
            "answer_bytes": self.answer_size,
        }


@dataclass(slots=True)
class _LineBucket:
    bytes_left: float
    updated_at: float


class LineBudget:
    """Decides call by call; used on the event loop only.

    In plain text callers cannot be distinguished, and have no budget.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _LineBucket] = OrderedDict()  # by fingerprint, the one used last at the end
        self._transfers: OrderedDict[tuple[object, ...], ChunkTransfer] = OrderedDict()  # the oldest first
        self._enrolled: OrderedDict[Caller, Digest] = OrderedDict()  # as what, the one that called last at the end
        self._counts: dict[Peer, Counts] = {}
        self._due_at = math.inf  # no counts are before

    def admits(self, call: AuditEntry) -> bool:
        """Whether the call gets a line of its own; otherwise it has been counted."""
        if not self._enrolls_anew(call) and call.is_idle:
            self._count(call.peer, f"{call.call} {call.code}", 1, len(call.request), IDLE_EVERY_S)
            return False
        if self._left(call.peer) <= 0 and not _is_kept(call):
            self._count(call.peer, f"{call.call} {call.code}", 1, len(call.request))
            return False
        if call.code == OK and call.call in CHUNKS:
            self._move(call)
            return False
        return True

    def charge(self, peer: Peer, size: int) -> None:
        """Take a line that was written, in bytes, from the peer's budget."""
        if peer is not PLAINTEXT:
            self._bucket(peer).bytes_left -= size

    @property
    def is_counting(self) -> bool:
        """Whether counts or transfers wait to be written."""
        return bool(self._counts or self._transfers)

    def take(self, *, everything: bool = False) -> list[Counts]:
        """The counts that are due; the next ones begin at 0."""
        now = math.inf if everything else self._clock()
        if now < self._due_at:  # asked with every group of lines, and there may be counts of thousands of peers
            return []
        due = [counts for counts in self._counts.values() if counts.due_at <= now]
        for counts in due:
            del self._counts[counts.peer]
        self._due_at = min((counts.due_at for counts in self._counts.values()), default=math.inf)
        return due

    def take_transfers(self, callers: Collection[Caller], older_than_s: float = EVERY_S) -> list[ChunkTransfer]:
        """The transfers of the given callers, and all that are due."""
        now = self._clock()
        due = [of for of in self._transfers.values() if of.caller in callers or now - of.since >= older_than_s]
        for transfer in due:
            del self._transfers[transfer.key]
        return due

    def give_back(self, counts: Collection[Counts], transfers: Collection[ChunkTransfer]) -> None:
        """Keep what could not be written for the next line."""
        for one in counts:
            newer = self._counts.get(one.peer)
            if newer is not None:
                one.calls += newer.calls
                one.size += newer.size
            self._counts[one.peer] = one
            self._due_at = min(self._due_at, one.due_at)
        for transfer in transfers:
            self._add(transfer)

    def _enrolls_anew(self, call: AuditEntry) -> bool:
        """Whether it is an Enroll with which its caller does more than to wait on; remembers it."""
        if call.call != "Enroll" or call.code != OK:
            return False
        enrolled = wire.enrolled_as(call.message, call.reply)
        is_new = self._enrolled.get(call.caller) != enrolled
        self._enrolled[call.caller] = enrolled
        self._enrolled.move_to_end(call.caller)
        if len(self._enrolled) > MAX_PEERS:
            self._enrolled.popitem(last=False)
        return is_new

    def _move(self, call: AuditEntry) -> None:
        """Count one chunk with the others of its transfer."""
        message = call.message
        fields: dict[str, Fact] = {"site": message.caller.site, "instance": message.caller.instance}
        if call.call == "PutChunk":  # its upload was announced, so the id is of our making
            fields, address = {**fields, "upload": message.upload}, message.upload.rpartition(".")[2]
        else:
            fields, address = {**fields, "run": message.run, "digest": message.digest}, message.digest
        sizes = {"calls": 1, "size": len(call.request), "answer_size": len(call.reply)}
        self._add(ChunkTransfer(call.peer, call.call, fields, address, self._clock(), **sizes))

    def _add(self, transfer: ChunkTransfer) -> None:
        known = self._transfers.setdefault(transfer.key, transfer)
        if known is not transfer:
            known.calls += transfer.calls
            known.size += transfer.size
            known.answer_size += transfer.answer_size
        if len(self._transfers) > MAX_TRANSFERS:
            _, oldest = self._transfers.popitem(last=False)
            self._count(oldest.peer, f"{oldest.call} {OK}", oldest.calls, oldest.size)

    def _count(self, peer: Peer, name: str, calls: int, size: int, within_s: float = EVERY_S) -> None:
        counts = self._counts.get(peer) or self._counts.setdefault(peer, Counts(peer))
        counts.due_at = min(counts.due_at, self._clock() + within_s)
        self._due_at = min(self._due_at, counts.due_at)
        counts.calls[name if name in counts.calls or len(counts.calls) < MAX_NAMES else "others"] += calls
        counts.size += size

    def _left(self, peer: Peer) -> float:
        return DAY_BYTES if peer is PLAINTEXT else self._bucket(peer).bytes_left

    def _bucket(self, peer: Peer) -> _LineBucket:
        """The peer's, filled up to now."""
        now = self._clock()
        if peer.fingerprint not in self._buckets and len(self._buckets) >= MAX_PEERS:
            self._buckets.popitem(last=False)
        bucket = self._buckets.setdefault(peer.fingerprint, _LineBucket(DAY_BYTES, now))
        self._buckets.move_to_end(peer.fingerprint)
        bucket.bytes_left = min(DAY_BYTES, bucket.bytes_left + (now - bucket.updated_at) * DAY_BYTES / DAY_S)
        bucket.updated_at = now
        return bucket


def _is_kept(call: AuditEntry) -> bool:
    return call.code == OK and (call.verdict == ACCEPTED or call.peer.party == OPERATOR)


log = structlog.get_logger()
AUDIT_FILE = "audit.jsonl"  # of the state folder: the first segment
TRIAL_BYTES = 256 << 10  # that must fit on the disk before calls act again
FULL = "RESOURCE_EXHAUSTED"  # gRPC's code for what `ready` refuses
CALL = "call"  # event: one call
COUNTED = "counted"  # event: calls of one peer without records of their own
RESUMED = "resumed"  # event: what could not be recorded on a full disk; precedes the first record after it


@dataclass(frozen=True)
class AuditEntry:
    """A call whose answer is about to be sent, or that was cut short.

    Attributes:
        call: the method's name, such as `CommitUpload`.
        request: the bytes received.
        message: the request parsed; None if it could not be.
        code: gRPC's status, such as `OK` or `INVALID_ARGUMENT`.
        reply: the bytes to be sent; empty with any code but `OK`.
    """

    call: str
    peer: Peer
    request: bytes
    message: Any
    code: str
    reply: bytes

    @property
    def verdict(self) -> str:
        """Of the receipt that answers it; empty if there is none."""
        return wire.read_verdict(self.call, self.reply)

    @property
    def is_idle(self) -> bool:
        """Whether it only said that a daemon is there and has nothing to do."""
        return self.code == OK and wire.is_idle(self.call, self.message, self.reply)

    @property
    def caller(self) -> Caller:
        """The peer's certificate and the site that it calls for; empty ones if there are none."""
        caller = getattr(self.message, "caller", None)
        return self.peer.fingerprint, "" if caller is None else caller.site

    def facts(self) -> dict[str, Fact]:
        """The fields of its record: the request's digest and identifying fields, never its content."""
        record: dict[str, Fact] = {
            "peer": self.peer.facts(),
            "call": self.call,
            "facts": {} if self.message is None else audit_fields(self.message),
            "bytes": len(self.request),
            "digest": digest(self.request),
            "code": self.code,
            "answer_bytes": len(self.reply),
        }
        return {**record, "verdict": self.verdict} if self.verdict else record


@dataclass
class _Gap:
    """Calls since the last record that could be written; none of them was answered."""

    unrecorded: Counter[str] = field(default_factory=Counter)  # calls that may have acted
    refused: Counter[str] = field(default_factory=Counter)  # calls refused before they acted

    def add(self, entry: AuditEntry) -> None:
        counts = self.refused if entry.code == FULL else self.unrecorded
        # Peers choose the names they call: without a bound, invented ones would fill memory and the record.
        counts[entry.call if entry.call in counts or len(counts) < MAX_NAMES else "others"] += 1

    def record(self) -> tuple[str, Mapping[str, Fact]]:
        return RESUMED, {"unrecorded": {**self.unrecorded}, "refused": {**self.refused}}


@dataclass(eq=False)
class _Queued:
    """A call that waits for its record to be durable; without an entry it only tests whether records can be written."""

    entry: AuditEntry | None
    done: asyncio.Future[None]


class ServerAudit:
    """The only writer of an audit log; used from one event loop.

    Raises:
        StateError: the log was changed since it was closed, or cannot be written.
    """

    def __init__(self, path: Path, lines: LineBudget | None = None) -> None:
        self._lines = lines or LineBudget()
        self._timer: asyncio.TimerHandle | None = None
        self._counting: asyncio.Task[None] | None = None  # the loop holds tasks weakly
        self._journal, self._thread = Journal(path, SEGMENT_BYTES), ThreadPoolExecutor(1, "audit")
        self._trial = path.resolve().with_name(f"{path.stem}.trial")
        self._queue: list[_Queued] = []
        self._writer: asyncio.Task[None] | None = None
        self._gap: _Gap | None = None  # None: the newest records could be written

    @property
    def missing(self) -> str:
        """Why calls are refused; empty while they can be recorded."""
        return "" if self._gap is None else "calls cannot be recorded, and are refused until they can; make room"

    async def note(self, entry: AuditEntry) -> None:
        """Record or count a call; its answer may be sent when this returns.

        A cancelled call's record is written all the same.

        Raises:
            OutOfSpaceError: it was not recorded, and `ready` refuses calls until records can be written again.
            DiskFailureError: what is on the disk is unknown: the server has to end.
        """
        if self._gap is None and not self._lines.admits(entry):
            self._write_counts_later()
        else:
            await self._put(entry)

    async def ready(self, call: str) -> None:
        """Check before a call acts that it could be recorded; a call that is refused here is recorded, too.

        Raises:
            OutOfSpaceError, DiskFailureError: the last record could not be written, nor can one now. The call must not
                act.
        """
        if self._gap is not None:
            log.debug("trying to write audit records again", call=call)
            await self._put(None)

    @property
    def newest(self) -> Record:
        """As `Journal.newest`."""
        return self._journal.newest

    def check(self) -> None:
        """Check that the log on the disk is the open log.

        Raises:
            DiskFailureError: it was moved, removed or replaced.
        """
        self._journal.check()

    def close(self) -> None:
        """Write the queued records (their calls were cut short), then close the file; the event loop may have ended."""
        self._thread.shutdown()
        unwritten, self._queue = [waiting.entry for waiting in self._queue if waiting.entry is not None], []
        try:
            self._append(unwritten, self._lines.take(everything=True), self._lines.take_transfers((), older_than_s=0.0))
        except StateError as error:
            log.error("calls were not recorded", calls=[entry.call for entry in unwritten], why=str(error))
        self._journal.close()

    def _write_counts_later(self) -> None:
        """Have due transfers written every `EVERY_S`, also if no call comes meanwhile."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() < loop.time():
            self._timer = loop.call_later(EVERY_S, self._begin_counts)

    def _begin_counts(self) -> None:
        self._counting = asyncio.get_running_loop().create_task(self._write_counts())

    async def _write_counts(self) -> None:
        with contextlib.suppress(StateError):  # they are kept, and the next call is told
            await self._put(None)
        if self._lines.is_counting:
            self._write_counts_later()

    async def _put(self, entry: AuditEntry | None) -> None:
        loop = asyncio.get_running_loop()
        self._queue.append(waiting := _Queued(entry, loop.create_future()))
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write())
        await waiting.done

    async def _write(self) -> None:
        """Write group after group until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            group, self._queue = self._queue, []
            entries = [waiting.entry for waiting in group if waiting.entry is not None]
            error, counted = None, self._lines.take()
            # What a site moved stands before its next call: an update's receipt is given after the update's chunks.
            transfers = self._lines.take_transfers({entry.caller for entry in entries})
            try:
                # Shielded: when the server ends meanwhile, a group that has left the queue is still written.
                work = loop.run_in_executor(self._thread, self._append, entries, counted, transfers)
                peers = [line.peer for line in transfers] + [entry.peer for entry in entries]
                for peer, size in zip(peers, await asyncio.shield(work), strict=True):
                    self._lines.charge(peer, size)
            except Exception as failed:  # any error: each waiting call must get it
                self._lines.give_back(counted, transfers)
                error = failed.with_traceback(None)  # a traceback would keep the calls' messages in memory
            self._resolve(group, error)

    def _append(
        self, entries: Sequence[AuditEntry], counted: Sequence[Counts], transfers: Sequence[ChunkTransfer]
    ) -> list[int]:
        """Write the records; about how many bytes those of the transfers and then of the entries have."""
        records: list[tuple[str, Mapping[str, Fact]]] = []
        if self._gap is not None:
            self._check_free_space()
            records.append(self._gap.record())
        records += [(COUNTED, counts.facts()) for counts in counted]
        facts = [*(line.facts() for line in transfers), *(entry.facts() for entry in entries)]
        self._journal.append_all([*records, *((CALL, fields) for fields in facts)])
        return [len(json.dumps(fields)) for fields in facts]

    def _check_free_space(self) -> None:
        """Check that many records fit: if only one did, the next call would act and then not be recorded."""
        files.write(self._trial, secrets.token_bytes(TRIAL_BYTES))  # random: no file system can compress it
        self._trial.unlink()

    def _resolve(self, group: Sequence[_Queued], error: Exception | None) -> None:
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
                waiting.done.set_exception(for_another(error))

    def _note_gap(self, group: Sequence[_Queued], error: Exception) -> None:
        if self._gap is None:
            log.error("calls are refused: they cannot be recorded", why=str(error))
            self._gap = _Gap()
        for waiting in group:
            if waiting.entry is not None:
                self._gap.add(waiting.entry)
