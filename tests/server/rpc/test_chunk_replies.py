"""Answers with chunks are made once for all sites that fetch the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protofed.common.codec import Digest
from protofed.common.errors import ProtocolError, StateError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rpc.federation import ChunkReplies
from protofed.server.storage.blobs import FolderBlobs

DATA = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"


class CountingBlobs(FolderBlobs):
    """Counts what is read."""

    reads = 0

    def chunk(self, address: Digest, index: int) -> bytes:
        """The chunk, counted."""
        self.reads += 1
        return super().chunk(address, index)


@pytest.fixture
def blobs(tmp_path: Path) -> CountingBlobs:
    return CountingBlobs(tmp_path / "blobs")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_sites_that_fetch_the_same_chunk_share_one_answer(blobs: CountingBlobs, threads: ThreadPoolExecutor) -> None:
    address = blobs.put(DATA)
    replies = ChunkReplies(blobs, threads)

    async def scenario() -> list[list[bytes]]:
        return [list(await asyncio.gather(*(replies.get(address, index) for _ in range(8)))) for index in range(4)]

    answers = asyncio.run(scenario())
    assert blobs.reads == 4
    assert all(len(set(same)) == 1 for same in answers)
    chunks = [pb.Chunk.FromString(same[0]) for same in answers]
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert b"".join(chunk.data for chunk in chunks) == DATA


def test_a_failed_answer_is_not_kept(blobs: CountingBlobs, threads: ThreadPoolExecutor) -> None:
    replies = ChunkReplies(blobs, threads)

    async def scenario() -> bytes:
        address = Digest("1" * 64)
        with pytest.raises(StateError):
            await replies.get(address, 0)
        with pytest.raises(StateError):
            await replies.parts(address)
        (blobs._folder / address).write_bytes(b"there now")
        with pytest.raises(ProtocolError):
            await replies.get(address, 1)
        return await replies.get(address, 0)

    assert pb.Chunk.FromString(asyncio.run(scenario())).data == b"there now"


def test_a_call_that_is_cut_short_leaves_the_answer_to_the_others(
    blobs: CountingBlobs, threads: ThreadPoolExecutor
) -> None:
    address = blobs.put(DATA)
    replies = ChunkReplies(blobs, threads)

    async def scenario() -> bytes:
        first, second = (asyncio.ensure_future(replies.get(address, 0)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert pb.Chunk.FromString(asyncio.run(scenario())).data == DATA[:CHUNK_BYTES]
    assert blobs.reads == 1


def test_what_is_kept_is_bounded(blobs: CountingBlobs, threads: ThreadPoolExecutor) -> None:
    address = blobs.put(DATA)
    replies = ChunkReplies(blobs, threads, kept_bytes=2 * CHUNK_BYTES)

    async def scenario() -> None:
        for index in (0, 1, 2, 0, 2):
            await replies.get(address, index)

    asyncio.run(scenario())
    assert blobs.reads == 4, "the first went for the third, which is still there"
    assert len(replies._replies) == 2


def test_what_was_read_of_a_rotten_blob_is_not_kept_once_it_is_mended(
    blobs: CountingBlobs, threads: ThreadPoolExecutor
) -> None:
    address = blobs.put(DATA)
    replies = ChunkReplies(blobs, threads)

    async def scenario() -> tuple[bytes, bytes]:
        (blobs._folder / address).write_bytes(b"rotten")
        assert (await replies.parts(address)).size == len(b"rotten")
        rotten = await replies.get(address, 0)
        blobs.put(DATA)
        assert (await replies.parts(address)).size == len(DATA)
        return rotten, await replies.get(address, 0)

    rotten, sound = (pb.Chunk.FromString(reply).data for reply in asyncio.run(scenario()))
    assert (rotten, sound) == (b"rotten", DATA[:CHUNK_BYTES])
