"""Which calls get a line of their own in the audit log, and which are counted: so that no caller can fill the disk.

Counted are a chunk that the same caller moved before, and whatever a caller does above `DAY_BYTES` of lines a day.
Always written are accepted updates and an operator's calls that succeeded: these are few, or made by who keeps the log.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protofed.common.storage.journal import Fact
from protofed.server.access.authorization import PLAINTEXT, Peer

if TYPE_CHECKING:
    from protofed.server.rpc.audit import AuditEntry

# Of lines, there at once and again within a day. An honest daemon has some 12 MB a day; with a heartbeat a second, 55.
DAY_BYTES = 128 << 20
DAY_S = 86_400.0
EVERY_S = 60.0  # between two lines with counts
MAX_CHUNKS = 16_384  # that are remembered
MAX_PEERS = 4096  # in memory; above it, the one that called longest ago is forgotten
MAX_NAMES = 100  # of calls that are counted each under its name
OK, ACCEPTED, OPERATOR = "OK", "accepted", "operator"


@dataclass
class Counts:
    """Calls of one peer without a line of their own.

    Attributes:
        calls: by name and code.
        size: bytes of their requests.
        since: seconds of the monotonic clock.
    """

    peer: Peer
    since: float
    calls: Counter[str] = field(default_factory=Counter)
    size: int = 0

    def facts(self) -> Mapping[str, Fact]:
        """The fields of their common line."""
        peer: dict[str, Fact] = {"fingerprint": self.peer.fingerprint, "party": self.peer.party, "name": self.peer.name}
        return {"peer": peer, "calls": {**self.calls}, "bytes": self.size}


@dataclass
class _Bucket:
    left: float
    updated_at: float


class LineBudget:
    """Decides call by call; used on the event loop only.

    In plain text callers cannot be distinguished, and only repeated chunks are counted.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # by fingerprint, the one used last at the end
        self._chunks: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._counts: dict[Peer, Counts] = {}

    def admits(self, call: AuditEntry) -> bool:
        """Whether the call gets a line of its own; otherwise it has been counted."""
        if self._is_repeated(call) or (self._left(call.peer) <= 0 and not _is_kept(call)):
            self._count(call)
            return False
        return True

    def charge(self, peer: Peer, size: int) -> None:
        """Take a line that was written, in bytes, from the peer's budget."""
        if peer is not PLAINTEXT:
            self._bucket(peer).left -= size

    @property
    def is_counting(self) -> bool:
        """Whether counts wait to be written."""
        return bool(self._counts)

    def take(self, older_than_s: float = EVERY_S) -> list[Counts]:
        """The counts that are due; the next ones begin at 0."""
        due = [counts for counts in self._counts.values() if self._clock() - counts.since >= older_than_s]
        for counts in due:
            del self._counts[counts.peer]
        return due

    def give_back(self, taken: list[Counts]) -> None:
        """Keep counts that could not be written for the next line."""
        for counts in taken:
            newer = self._counts.get(counts.peer)
            if newer is not None:
                counts.calls += newer.calls
                counts.size += newer.size
            self._counts[counts.peer] = counts

    def _is_repeated(self, call: AuditEntry) -> bool:
        """Whether the peer moved this very chunk before; remembers it."""
        if call.code != OK or call.call not in ("PutChunk", "GetChunk"):
            return False
        message = call.message
        # A chunk that is there already is the same one: other bytes for it are refused.
        blob = (message.upload,) if call.call == "PutChunk" else (message.run, message.digest)
        chunk = (call.peer.fingerprint, message.caller.site, call.call, *blob, message.index)
        is_repeated = chunk in self._chunks
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk)
        if len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)
        return is_repeated

    def _count(self, call: AuditEntry) -> None:
        counts = self._counts.setdefault(call.peer, Counts(call.peer, self._clock()))
        name = f"{call.call} {call.code}"
        counts.calls[name if name in counts.calls or len(counts.calls) < MAX_NAMES else "others"] += 1
        counts.size += len(call.request)

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
