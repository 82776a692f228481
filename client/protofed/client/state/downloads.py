"""Blobs that a site fetches in chunks. On disk, chunks survive the daemon: its successor fetches only the rest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import structlog

from protofed.common.codec import Digest, digest, is_digest
from protofed.common.errors import CodecError
from protofed.common.protocol.chunks import PartialBlob, check_checksum, check_position, chunk_count

log = structlog.get_logger()
MAX_ATTEMPTS = 3  # for a chunk, and for a whole blob, that arrives damaged
PART = ".part"  # suffix of a blob that is incomplete


class BlobDownloads(Protocol):
    """Where `download` stores the chunks of blobs. An address is the blob's BLAKE3-256 digest in hex."""

    def cached(self, address: Digest) -> bytes | None:
        """A blob that was downloaded earlier, its digest checked; None: download it."""

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """Reserve `total` bytes for a blob; returns the indices of the chunks that are already stored."""

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """Store one chunk, from any thread; CodecError if its place, size or CRC-32C is wrong."""

    def seal(self, address: Digest) -> bytes:
        """The complete blob; CodecError if its digest is not `address`, and then all chunks are dropped."""


class MemoryDownloads:
    """Downloads of a daemon without a state folder: one blob at a time, nothing cached."""

    def __init__(self) -> None:
        self._total, self._chunks = 0, dict[int, bytes]()

    def cached(self, address: Digest) -> bytes | None:
        """Always None."""
        return None

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """See `BlobDownloads.begin`; drops the chunks of the blob before."""
        self._total, self._chunks = total, {}
        return frozenset()

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """See `BlobDownloads.write`."""
        check_checksum(index, data, checksum)
        check_position(index, len(data), self._total)
        self._chunks[index] = data

    def seal(self, address: Digest) -> bytes:
        """See `BlobDownloads.seal`."""
        data = b"".join(self._chunks[index] for index in sorted(self._chunks))
        self._chunks = {}
        if digest(data) != address:
            raise CodecError("the downloaded chunks have another digest than the requested blob")
        return data


class DiskDownloads:
    """Downloads as files of a folder; complete blobs stay for a daemon that is restarted in the middle of training.

    Args:
        keep: how many complete blobs stay, the newest first.

    Raises:
        OutOfSpaceError, DiskFailureError: from `begin`, `write` and `seal`.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep
        self._partials: dict[Digest, PartialBlob] = {}

    def cached(self, address: Digest) -> bytes | None:
        """See `BlobDownloads.cached`; a damaged or unreadable file counts as absent."""
        path = self._folder / address
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if digest(data) == address:
                os.utime(path)  # `seal` keeps the blobs that were used last
                return data
        return None

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """See `BlobDownloads.begin`; continues what an earlier process left."""
        return self._partials.setdefault(address, PartialBlob(self._folder / f"{address}{PART}")).begin(total)

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """See `BlobDownloads.write`."""
        self._partials[address].write(index, data, checksum)

    def seal(self, address: Digest) -> bytes:
        """See `BlobDownloads.seal`. Removes older blobs and every other incomplete one."""
        # No fsync: after a power cut the digest check in `cached` finds a torn file, and it is fetched again.
        data = bytes(self._partials[address].seal(address, self._folder / address))
        self._partials = {}
        with contextlib.suppress(OSError):  # a failed clean-up costs only disk space
            blobs = [path for path in self._folder.iterdir() if is_digest(path.name.partition(".")[0])]
            complete = [path for path in blobs if not path.suffix]
            newest = sorted(complete, key=lambda path: path.stat().st_mtime_ns)[-self._keep :]
            for path in set(blobs) - set(newest):
                path.unlink()
        return data


def download(
    downloads: BlobDownloads,
    address: Digest,
    total: int,
    fetch_chunk: Callable[[int], tuple[bytes, int]],
    pool: Executor,
    announce: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> bytes:
    """Fetch a blob's missing chunks in parallel and return the whole blob.

    Args:
        total: the blob's size in bytes.
        fetch_chunk: chunk index -> (data, CRC-32C); called on the pool's threads.
        announce: called with the indices of the chunks that are about to be fetched, again if all of them are.

    Raises:
        CodecError: it arrived damaged `MAX_ATTEMPTS` times.
    """
    if (data := downloads.cached(address)) is not None:
        return data
    for _ in range(MAX_ATTEMPTS):
        stored = downloads.begin(address, total)
        missing = [index for index in range(chunk_count(total)) if index not in stored]
        announce(missing)
        list(pool.map(lambda index: _download_chunk(downloads, address, index, fetch_chunk), missing))
        try:
            return downloads.seal(address)
        except CodecError as error:  # every chunk matched its own CRC: no telling which one is wrong, so all again
            log.warning("download damaged, fetching again", blob=address, why=str(error))
    raise CodecError(f"blob {address} arrived damaged {MAX_ATTEMPTS} times")


def _download_chunk(
    downloads: BlobDownloads, address: Digest, index: int, fetch_chunk: Callable[[int], tuple[bytes, int]]
) -> None:
    for _ in range(MAX_ATTEMPTS):
        data, checksum = fetch_chunk(index)
        try:
            downloads.write(address, index, data, checksum)
        except CodecError as error:
            log.warning("chunk damaged, fetching again", blob=address, why=str(error))
        else:
            return
    raise CodecError(f"chunk {index} arrived damaged {MAX_ATTEMPTS} times")
