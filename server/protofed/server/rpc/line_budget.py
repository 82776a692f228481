"""Which calls get a line of their own in the audit log, and which share one: so that no caller can fill the disk.

The chunks of a transfer share a line, which names the digest of the whole. The calls of a site that has nothing to do,
or takes no tasks at present, are counted, one line an hour. Whatever a caller does above `DAY_BYTES` of lines a day is
counted, too. Always written are accepted updates and an operator's calls that succeeded: these are few, or made by who
keeps the log.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from protofed.common.codec import Digest
from protofed.common.protocol import wire
from protofed.common.storage.journal import Fact
from protofed.server.access.authorization import PLAINTEXT, Peer

if TYPE_CHECKING:
    from protofed.server.rpc.audit import AuditEntry

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
class Transfer:
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
class _Bucket:
    left: float
    updated_at: float


class LineBudget:
    """Decides call by call; used on the event loop only.

    In plain text callers cannot be distinguished, and have no budget.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # by fingerprint, the one used last at the end
        self._transfers: OrderedDict[tuple[object, ...], Transfer] = OrderedDict()  # the oldest first
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
            self._bucket(peer).left -= size

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

    def take_transfers(self, callers: Collection[Caller], older_than_s: float = EVERY_S) -> list[Transfer]:
        """The transfers of these callers, and those that are due."""
        now = self._clock()
        due = [of for of in self._transfers.values() if of.caller in callers or now - of.since >= older_than_s]
        for transfer in due:
            del self._transfers[transfer.key]
        return due

    def give_back(self, counts: Collection[Counts], transfers: Collection[Transfer]) -> None:
        """Keep what could not be written for the next line."""
        for taken in counts:
            newer = self._counts.get(taken.peer)
            if newer is not None:
                taken.calls += newer.calls
                taken.size += newer.size
            self._counts[taken.peer] = taken
            self._due_at = min(self._due_at, taken.due_at)
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
        self._add(Transfer(call.peer, call.call, fields, address, self._clock(), **sizes))

    def _add(self, transfer: Transfer) -> None:
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
        return DAY_BYTES if peer is PLAINTEXT else self._bucket(peer).left

    def _bucket(self, peer: Peer) -> _Bucket:
        """The peer's, filled up to now."""
        now = self._clock()
        if peer.fingerprint not in self._buckets and len(self._buckets) >= MAX_PEERS:
            self._buckets.popitem(last=False)
        bucket = self._buckets.setdefault(peer.fingerprint, _Bucket(DAY_BYTES, now))
        self._buckets.move_to_end(peer.fingerprint)
        bucket.left = min(DAY_BYTES, bucket.left + (now - bucket.updated_at) * DAY_BYTES / DAY_S)
        bucket.updated_at = now
        return bucket


def _is_kept(call: AuditEntry) -> bool:
    return call.code == OK and (call.verdict == ACCEPTED or call.peer.party == OPERATOR)
