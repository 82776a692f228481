"""A blob that arrives in chunks, in any order, while its sender and its receiver may die and restart.

One file has the data, each chunk at its offset; a second one beside it has a byte a chunk that marks those received.
Nothing is made durable before the blob is sealed: the digest detects what a crash tore, and the blob is sent again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from google_crc32c import value as crc32c

from protofed.common.codec import Digest, digest
from protofed.common.errors import CodecError, ConflictError, IncompleteUploadError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.common.storage import files

MARKS = ".held"  # suffix of the file that marks which chunks are received


class PartialBlob:
    """One blob on its way; several threads may call all methods at once.

    Every method may raise OutOfSpaceError or DiskFailureError.

    Args:
        path: of the data. The chunks that an earlier process left there are reused.
        read: how `seal` reads the data: `files.mapped` or, on the disk of another machine, `files.whole`.
    """

    def __init__(self, path: Path, read: Callable[[Path], memoryview] = files.mapped) -> None:
        self._read = read
        self._path, self._marks = path, path.with_name(f"{path.name}{MARKS}")
        self._lock = threading.Lock()
        self._total = path.stat().st_size if path.exists() else None

    @property
    def total(self) -> int:
        """Announced size in bytes; 0 once the blob is sealed or dropped."""
        return self._total or 0

    @property
    def last_chunk_at(self) -> float:
        """When the last chunk arrived, in Unix time; 0.0 once the blob is sealed or dropped."""
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_mtime
        return 0.0

    def begin(self, total: int) -> frozenset[int]:
        """Allocate `total` bytes; the chunks that are there from an earlier upload of the same size."""
        with self._lock, self._on_disk():
            received = self._resumable(total)
            if received is None:
                received = self._allocate(total)
            os.utime(self._path)  # counts as activity: `last_chunk_at` decides when an upload is abandoned
            self._total = total
            return received

    def write(self, index: int, data: bytes, checksum: int) -> None:
        """Write one chunk; the same chunk again changes nothing.

        Args:
            checksum: CRC-32C of `data`, computed by the sender.

        Raises:
            CodecError: index or size are not of this blob, or the checksum is wrong.
            ConflictError: the chunk was sent before with other bytes.
            IncompleteUploadError: the blob was not begun, or its file is gone.
        """
        check_checksum(index, data, checksum)
        with self._lock, self._on_disk():
            check_position(index, len(data), self._announced())
            if self._has(index):
                self._compare(index, data)
                return
            with self._path.open("r+b") as file:
                file.seek(index * CHUNK_BYTES)
                file.write(data)
            with self._marks.open("r+b") as marks:  # after the bytes: a crash in between marks nothing
                marks.seek(index)
                marks.write(b"\1")

    def seal(self, address: Digest, target: Path, *, durable: bool = True) -> memoryview:
        """Move the complete blob to `target` on the same disk; returns its data.

        Args:
            address: the digest that was announced.
            durable: the data survive a power cut, and its name once `target`'s folder is synced, which blobs that are
                sealed together can share; False for a cache whose blobs are checked when they are read.

        Raises:
            IncompleteUploadError: chunks are missing, the blob was not begun, or its file is gone.
            CodecError: the data have another digest; they are dropped.
        """
        with self._lock, self._on_disk():
            if missing := sorted(set(range(chunk_count(self._announced()))) - self._marked()):
                raise IncompleteUploadError(f"{len(missing)} chunks are missing, the first is {missing[0]}")
            data = self._read(self._path)
            if digest(data) != address:
                self._remove()
                raise CodecError("the digest of all chunks is not the one that was announced; begin it again")
            if durable:
                self._sync()
            os.replace(self._path, target)
            self._remove()
            return data

    def drop(self) -> None:
        """Remove the data and marks; a second call does nothing."""
        with self._lock, self._on_disk():
            self._remove()

    def _announced(self) -> int:
        if self._total is None:
            raise IncompleteUploadError("nothing was begun, or it is gone; begin it again")
        return self._total

    def _resumable(self, total: int) -> frozenset[int] | None:
        """The chunks received earlier; None: there is no file of this size to continue."""
        try:
            received = self._marked()
            return received if self._path.stat().st_size == total else None
        except FileNotFoundError:
            return None

    def _marked(self) -> frozenset[int]:
        return frozenset(index for index, mark in enumerate(self._marks.read_bytes()) if mark)

    def _has(self, index: int) -> bool:
        with self._marks.open("rb") as marks:
            return os.pread(marks.fileno(), 1, index) == b"\1"

    def _compare(self, index: int, data: bytes) -> None:
        with self._path.open("rb") as file:
            if os.pread(file.fileno(), len(data), index * CHUNK_BYTES) != data:
                raise ConflictError(f"chunk {index} was sent before with other bytes")

    def _allocate(self, total: int) -> frozenset[int]:
        """Create both files. The data's first: a full disk must leave no marks."""
        self._remove()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb") as file:
                if total:
                    os.posix_fallocate(file.fileno(), 0, total)
            self._marks.write_bytes(bytes(chunk_count(total)))
        except OSError:
            self._remove()
            raise
        return frozenset()

    def _sync(self) -> None:
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError:
            # After a failed fsync the kernel may drop dirty pages, and a second fsync succeeds without them.
            self._remove()
            raise

    def _remove(self) -> None:
        """The marks first: marks without data would be taken for another blob's chunks."""
        self._total = None
        self._marks.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._total = None
            raise IncompleteUploadError("nothing was begun, or it is gone; begin it again") from error
        except OSError as error:
            raise files.write_error(self._path, error) from error


def chunk_count(total: int) -> int:
    """Number of chunks of a blob of `total` bytes."""
    return -(-total // CHUNK_BYTES)


def check_checksum(index: int, data: bytes, checksum: int) -> None:
    """Check that a chunk arrived as it was sent.

    Raises:
        CodecError: its CRC-32C is not `checksum`.
    """
    if crc32c(data) != checksum:
        raise CodecError(f"chunk {index} arrived damaged; send it again")


def check_position(index: int, size: int, total: int) -> None:
    """Check that a chunk of this index and size belongs to a blob of `total` bytes.

    Raises:
        CodecError: it does not.
    """
    if not 0 <= index < chunk_count(total) or size != min(CHUNK_BYTES, total - index * CHUNK_BYTES):
        raise CodecError(f"chunk {index} of {size} bytes does not belong to a blob of {total} bytes")
