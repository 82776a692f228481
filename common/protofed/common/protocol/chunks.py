"""A blob that arrives in chunks, in any order, while its sender and its receiver may die and restart.

One file has the data, each chunk at its offset; a second one beside it has a byte a chunk that marks those received.
Nothing is made durable before the blob is whole: the digest detects what a crash tore, and the blob is sent again.
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
_GONE = "no upload was started, or it is gone; begin it again"


class PartialBlob:
    """One blob on its way; several threads may call all methods at once.

    Every method may raise OutOfSpaceError or DiskFailureError.

    Args:
        path: of the data. The chunks that an earlier process left there are reused.
        read: how the whole is read: `files.mapped` or, on the disk of another machine, `files.whole`.
    """

    def __init__(self, path: Path, read: Callable[[Path], memoryview] = files.mapped) -> None:
        self._read = read
        self._path, self._marks = path, path.with_name(f"{path.name}{MARKS}")
        self._lock = threading.Lock()
        self._total = path.stat().st_size if path.exists() else None
        self._generation = 0  # how many files there were: `check` reads one without the lock
        self._checked = False  # the file is whole, durable, and what was announced

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
            IncompleteUploadError: the blob was not started, or its file is gone.
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

    def seal(self, address: Digest, target: Path) -> memoryview:
        """Move the complete blob to `target` on the same disk, not durably; returns its data.

        Args:
            address: the digest that was announced.

        Raises:
            IncompleteUploadError: chunks are missing, the blob was not started, or its file is gone.
            CodecError: the data have another digest; they are dropped.
        """
        with self._lock, self._on_disk():
            self._check_complete()
            data = self._read(self._path)
            if digest(data) != address:
                raise self._not_announced()
            os.replace(self._path, target)
            self._remove()
            return data

    def check(self, address: Digest) -> memoryview:
        """Make the complete data durable, so that they may be linked; returns them. They stay what they are until then.

        Args:
            address: the digest that was announced.

        Raises:
            As `seal`.
        """
        with self._on_disk():
            with self._lock:
                self._check_complete()
                generation = self._generation
            # Without the lock: `link` must not wait while gigabytes are read, and of what is complete no chunk changes.
            data = self._read(self._path)
            is_sound = digest(data) == address
            if is_sound:
                self._sync()
            with self._lock:
                if self._generation != generation:
                    raise IncompleteUploadError(_GONE)
                if not is_sound:
                    raise self._not_announced()
                self._checked = True
            return data

    def link(self, target: Path) -> None:
        """Give checked data the name `target`, too, on the same disk; durable once the folder of `target` is synced.

        They stay here until they are dropped: who dies before he has noted down `target` finds them again. Only where
        the file system has no hard links are they moved.

        Raises:
            IncompleteUploadError: they were not checked since they were started, or are gone.
        """
        with self._lock, self._on_disk():
            if not self._checked:
                raise IncompleteUploadError(_GONE)
            if not files.link(self._path, target):
                os.replace(self._path, target)
                self._remove()

    def drop(self) -> None:
        """Remove the data and marks; a second call does nothing."""
        with self._lock, self._on_disk():
            self._remove()

    def _announced(self) -> int:
        if self._total is None:
            raise IncompleteUploadError(_GONE)
        return self._total

    def _check_complete(self) -> None:
        if missing := sorted(set(range(chunk_count(self._announced()))) - self._marked()):
            raise IncompleteUploadError(f"{len(missing)} chunks are missing, the first is {missing[0]}")

    def _not_announced(self) -> CodecError:
        self._remove()
        return CodecError("the uploaded chunks have another digest than announced; begin it again")

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
            with self._lock:
                self._remove()
            raise

    def _remove(self) -> None:
        """The marks first: marks without data would be taken for another blob's chunks."""
        self._total, self._checked = None, False
        self._generation += 1
        self._marks.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._total = None
            raise IncompleteUploadError(_GONE) from error
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
