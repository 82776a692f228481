"""One suite over both stores of downloads, and what the one on disk keeps for the next daemon."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google_crc32c import value as crc32c

from protofed.client.state.downloads import BlobDownloads, DiskDownloads, MemoryDownloads, download
from protofed.common.codec import Digest, digest
from protofed.common.errors import CodecError, OutOfSpaceError
from protofed.common.protocol.messages import CHUNK_BYTES

Fetch = Callable[..., bytes]
Restart = Callable[[], DiskDownloads]
DATA = random.Random(0).randbytes(2 * CHUNK_BYTES + 1000)  # three chunks  # noqa: S311
ADDRESS = digest(DATA)


class Peer:
    """Gives chunks of `data`, and remembers which it was asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.asked = data, list[int]()
        self.damage: dict[int, int] = {}  # how often a chunk is still to arrive damaged
        self.lie: dict[int, int] = {}  # ... with a checksum that does not show it
        self.dies_at: int | None = None

    def __call__(self, index: int) -> tuple[bytes, int]:
        if self.dies_at is not None and index >= self.dies_at:
            raise ConnectionError
        self.asked.append(index)
        right = self.data[index * CHUNK_BYTES :][:CHUNK_BYTES]
        wrong = bytes([right[0] ^ 1]) + right[1:]
        for flaws in (self.damage, self.lie):
            if flaws.get(index, 0):
                flaws[index] -= 1
                return wrong, crc32c(right if flaws is self.damage else wrong)
        return right, crc32c(right)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture(params=["memory", "folder"])
def downloads(request: pytest.FixtureRequest, tmp_path: Path) -> BlobDownloads:
    return MemoryDownloads() if request.param == "memory" else DiskDownloads(tmp_path / "downloads")


@pytest.fixture
def fetch(pool: ThreadPoolExecutor) -> Fetch:
    def one(downloads: BlobDownloads, peer: Peer, address: Digest | None = None) -> bytes:
        return download(downloads, address or digest(peer.data), len(peer.data), peer, pool)

    return one


# Both stores


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 1000])
def test_a_blob_is_received_whole(downloads: BlobDownloads, fetch: Fetch, size: int) -> None:
    peer = Peer(DATA[:size])
    assert fetch(downloads, peer) == DATA[:size]
    assert peer.asked == list(range(-(-size // CHUNK_BYTES)))


def test_a_damaged_chunk_alone_is_asked_for_again_up_to_three_times(downloads: BlobDownloads, fetch: Fetch) -> None:
    peer = Peer()
    peer.damage = {1: 3}
    with pytest.raises(CodecError, match="chunk 1 arrived damaged 3 times"):
        fetch(downloads, peer)
    peer.damage, peer.asked = {1: 2}, []
    assert fetch(downloads, peer) == DATA
    assert peer.asked.count(1) == 3


def test_a_blob_of_another_digest_is_fetched_three_times_and_not_kept(downloads: BlobDownloads, fetch: Fetch) -> None:
    peer = Peer()
    peer.lie = {2: 3}
    with pytest.raises(CodecError, match=f"{ADDRESS} arrived damaged"):
        fetch(downloads, peer)
    assert downloads.cached(ADDRESS) is None
    peer.lie, peer.asked = {2: 2}, []
    assert fetch(downloads, peer) == DATA
    assert peer.asked == [0, 1, 2] * 3


# The folder


@pytest.fixture
def restart(tmp_path: Path) -> Restart:
    return lambda: DiskDownloads(tmp_path / "downloads")


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "downloads").iterdir()}


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_a_daemon_that_starts_again_asks_only_for_what_is_missing(restart: Restart, fetch: Fetch, dies_at: int) -> None:
    peer = Peer()
    peer.dies_at = dies_at
    with pytest.raises(ConnectionError):
        fetch(restart(), peer)
    peer.dies_at = None
    for _ in range(2):  # and what came whole is not asked for again
        assert fetch(restart(), peer) == DATA
    assert peer.asked == [0, 1, 2]  # in all


@pytest.mark.parametrize("damage", [b"", DATA[:-1], DATA[:-1] + b"x"])
def test_a_kept_blob_that_changed_is_fetched(restart: Restart, fetch: Fetch, tmp_path: Path, damage: bytes) -> None:
    peer = Peer()
    fetch(restart(), peer)
    (tmp_path / "downloads" / ADDRESS).write_bytes(damage)
    assert fetch(restart(), peer) == DATA
    assert peer.asked == [0, 1, 2, 0, 1, 2]
    assert restart().cached(ADDRESS) == DATA


def test_only_the_newest_are_kept_and_what_was_used_last_is_new(restart: Restart, fetch: Fetch, tmp_path: Path) -> None:
    blobs = [bytes([number]) * 10 for number in range(4)]
    for number, blob in enumerate(blobs[:2]):
        fetch(restart(), Peer(blob))
        os.utime(tmp_path / "downloads" / digest(blob), (number, number))
    assert restart().cached(digest(blobs[0])) == blobs[0]
    fetch(restart(), Peer(blobs[2]))
    assert names(tmp_path) == {digest(blobs[0]), digest(blobs[2])}


def test_what_was_started_goes_with_the_next_that_is_whole(restart: Restart, fetch: Fetch, tmp_path: Path) -> None:
    peer = Peer()
    peer.dies_at = 1
    downloads = restart()
    with pytest.raises(ConnectionError):
        fetch(downloads, peer)
    assert names(tmp_path) == {f"{ADDRESS}.part", f"{ADDRESS}.part.held"}
    fetch(downloads, Peer(b"next"))
    assert names(tmp_path) == {digest(b"next")}
    peer.dies_at = None
    assert fetch(downloads, peer) == DATA


def test_a_full_disk_is_said(restart: Restart, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    peer, downloads = Peer(), restart()
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfSpaceError):
            fetch(downloads, peer)
    assert (peer.asked, names(tmp_path)) == ([], set())
    assert fetch(downloads, peer) == DATA
