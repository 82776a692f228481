"""What a site fetches: chunks that outlive the daemon, so that one that starts again asks only for those it lacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import structlog

from protofed.common.codec import Digest, digest, is_digest
from protofed.common.errors import CodecError
from protofed.common.protocol.chunks import Partial, check_place, check_sum, chunks

log = structlog.get_logger()
TRIES = 3  # of bytes that arrived damaged
PART = ".part"  # ends the name of a blob that is not whole yet


class BlobDownloads(Protocol):
    """Blobs on their way to this site."""

    def whole(self, address: Digest) -> bytes | None:
        """A blob that came before, checked; None: fetch it."""

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """Make room for a blob; the chunks that are held already."""

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk, from any thread; CodecError if it does not belong there, or arrived damaged."""

    def seal(self, address: Digest) -> bytes:
        """The blob, whole; CodecError if it is not what was asked for, and all of it has to come again."""


class MemoryDownloads:
    """Of a daemon that keeps nothing; one blob at a time."""

    def __init__(self) -> None:
        self._total, self._chunks = 0, dict[int, bytes]()

    def whole(self, address: Digest) -> bytes | None:
        """Never."""
        return None

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """From the beginning."""
        self._total, self._chunks = total, {}
        return frozenset()

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk."""
        check_sum(index, data, checksum)
        check_place(index, len(data), self._total)
        self._chunks[index] = data

    def seal(self, address: Digest) -> bytes:
        """The blob."""
        data = b"".join(self._chunks[index] for index in sorted(self._chunks))
        self._chunks = {}
        if digest(data) != address:
            raise CodecError("the digest of all chunks is not the one that was asked for")
        return data


class DiskDownloads:
    """Files of a folder. Blobs that came whole stay for a daemon that is restarted in training; the newest ones only.

    Args:
        keep: how many.

    Raises:
        OutOfSpace, DiskFailure: from `begin`, `write` and `seal`.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep
        self._partials: dict[Digest, Partial] = {}

    def whole(self, address: Digest) -> bytes | None:
        """A blob that came before; one that is damaged is as good as none."""
        path = self._folder / address
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if digest(data) == address:
                os.utime(path)
                return data
        return None

    def begin(self, address: Digest, total: int) -> frozenset[int]:
        """Go on where an earlier daemon stopped."""
        return self._partials.setdefault(address, Partial(self._folder / f"{address}{PART}")).begin(total)

    def write(self, address: Digest, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk."""
        self._partials[address].write(index, data, checksum)

    def seal(self, address: Digest) -> bytes:
        """The blob. Older ones go, and whatever else was begun."""
        data = self._partials[address].seal(address, self._folder / address, durable=False)
        self._partials = {}
        with contextlib.suppress(OSError):  # what stays is in nobody's way
            ours = [path for path in self._folder.iterdir() if is_digest(path.name.partition(".")[0])]
            whole = [path for path in ours if not path.suffix]
            newest = sorted(whole, key=lambda path: path.stat().st_mtime_ns)[-self._keep :]
            for path in set(ours) - set(newest):
                path.unlink()
        return data


def receive(
    incoming: BlobDownloads, address: Digest, total: int, ask: Callable[[int], tuple[bytes, int]], pool: Executor
) -> bytes:
    """A blob, of which only the chunks that are not held yet are asked for.

    Args:
        total: its bytes.
        ask: a chunk and its CRC-32C, by index; called on the pool's threads.

    Raises:
        CodecError: it arrived damaged, again and again.
    """
    if (data := incoming.whole(address)) is not None:
        return data
    for _ in range(TRIES):
        held = incoming.begin(address, total)
        missing = [index for index in range(chunks(total)) if index not in held]
        list(pool.map(lambda index: _receive_chunk(incoming, address, index, ask), missing))
        try:
            return incoming.seal(address)
        except CodecError as error:
            log.warning("download damaged, fetching again", blob=address, why=str(error))
    raise CodecError(f"blob {address} arrived damaged {TRIES} times")


def _receive_chunk(
    incoming: BlobDownloads, address: Digest, index: int, ask: Callable[[int], tuple[bytes, int]]
) -> None:
    for _ in range(TRIES):
        data, checksum = ask(index)
        try:
            incoming.write(address, index, data, checksum)
        except CodecError as error:
            log.warning("chunk damaged, fetching again", blob=address, why=str(error))
        else:
            return
    raise CodecError(f"chunk {index} arrived damaged {TRIES} times")
