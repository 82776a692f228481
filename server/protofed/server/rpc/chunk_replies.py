"""Answers to GetChunk, made once for all sites: a cohort fetches the same model at about the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import CodecError, ProtocolError
from protofed.common.payload import Part
from protofed.common.protocol import wire
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.server.storage.blobs import FolderBlobs

KEPT_BYTES = 32 << 20  # of answers: sites of a cohort are woken together, each with four chunks in flight
KEPT_SIZES = 256  # blobs whose size and parts are remembered


@dataclass(frozen=True)
class BlobParts:
    """A blob's size in bytes and each part's share of them, for metrics; no shares where its header is damaged."""

    size: int
    shares: Mapping[Part, float]


class ChunkReplies:
    """Serialised `Chunk` messages, the newest `KEPT_BYTES` of them; used on the event loop only.

    An address has one content, so what is kept goes stale only when a blob that had rotted was written again.
    """

    def __init__(self, blobs: FolderBlobs, threads: Executor, kept_bytes: int = KEPT_BYTES) -> None:
        self._blobs, self._threads = blobs, threads
        self._most = max(1, kept_bytes // CHUNK_BYTES)
        self._replies: OrderedDict[tuple[Digest, int], asyncio.Future[bytes]] = OrderedDict()
        self._parts: OrderedDict[Digest, BlobParts] = OrderedDict()
        self._repairs = blobs.repairs

    async def parts(self, address: Digest) -> BlobParts:
        """A blob's size and parts.

        Raises:
            StateError: it cannot be read.
        """
        self._forget_rotten()
        if (known := self._parts.get(address)) is None:
            known = await asyncio.get_running_loop().run_in_executor(self._threads, self._read_parts, address)
            self._parts[address] = known
            if len(self._parts) > KEPT_SIZES:
                self._parts.popitem(last=False)
        return known

    async def get(self, address: Digest, index: int) -> bytes:
        """The answer with the `index`-th chunk of a blob; calls that wait for the same one share it.

        Raises:
            ProtocolError: the blob has no such chunk.
            StateError: it cannot be read.
        """
        self._forget_rotten()
        key = (address, index)
        if (reply := self._replies.get(key)) is None:
            reply = asyncio.get_running_loop().run_in_executor(self._threads, self._made, address, index)
            self._replies[key] = reply
            reply.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._replies) > self._most:
                self._replies.popitem(last=False)  # whoever waits for it has it still
        self._replies.move_to_end(key)
        return await asyncio.shield(reply)  # a call that is cut short leaves it to the others

    def _made(self, address: Digest, index: int) -> bytes:
        data = self._blobs.chunk(address, index)
        if not data:
            raise ProtocolError(f"chunk {index} is past the end of the blob")
        return wire.pack_chunk(index, data)

    def _forget_rotten(self) -> None:
        """Forget all, which costs a read each, if any of it may have been read of a rotten blob."""
        if self._repairs != self._blobs.repairs:
            self._repairs = self._blobs.repairs
            self._replies.clear()
            self._parts.clear()

    def _forget_failed(self, key: tuple[Digest, int], done: asyncio.Future[bytes]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and self._replies.get(key) is done:
            del self._replies[key]

    def _read_parts(self, address: Digest) -> BlobParts:
        size = self._blobs.size(address)
        try:
            beginning = self._blobs.chunk(address, 0) + self._blobs.chunk(address, 1)  # longer than any header
            return BlobParts(size, codec.shares(codec.header_specs(beginning)))
        except CodecError:
            return BlobParts(size, {})
