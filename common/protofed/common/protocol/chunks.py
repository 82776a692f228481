"""A blob that arrives in chunks, in any order, while its sender and its receiver may die and start again.

The data lie at their place in one file; a second one beside it has a byte a chunk that says which are held. Nothing is
made durable before the whole is sealed: what a crash tore is found by the digest, and the blob begins again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from google_crc32c import value as crc32c

from protofed.common.codec import Digest, digest
from protofed.common.errors import CodecError, ConflictError, IncompleteUploadError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.common.storage import files

MARKS = ".held"  # ends the name of the file that says which chunks are held


class Partial:
    """One blob on its way; all methods may be called by several threads at once.

    Each but the properties raises OutOfSpace or DiskFailure when the disk says so.

    Args:
        path: of the data. What an earlier process left there is taken up.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._marks = path, path.with_name(f"{path.name}{MARKS}")
        self._lock = threading.Lock()
        self._total = path.stat().st_size if path.exists() else None

    @property
    def total(self) -> int:
        """Bytes that were announced; 0 once it is sealed or dropped."""
        return self._total or 0

    @property
    def touched(self) -> float:
        """When a chunk came last, in seconds of the wall clock; 0.0 once it is sealed or dropped."""
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_mtime
        return 0.0

    def begin(self, total: int) -> frozenset[int]:
        """Make room for `total` bytes; the chunks that an earlier try of the same size left."""
        with self._lock, self._on_disk():
            held = self._held(total)
            if held is None:
                held = self._allocate(total)
            os.utime(self._path)
            self._total = total
            return held

    def write(self, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk; the same one again changes nothing.

        Raises:
            CodecError: it does not belong there, or its CRC-32C is wrong.
            ConflictError: other bytes were sent for it before.
            Incomplete: nothing was begun, or it is gone.
        """
        check_sum(index, data, checksum)
        with self._lock, self._on_disk():
            check_place(index, len(data), self._begun())
            if self._has(index):
                self._compare(index, data)
                return
            with self._path.open("r+b") as file:
                file.seek(index * CHUNK_BYTES)
                file.write(data)
            with self._marks.open("r+b") as marks:  # only now: a chunk is marked when its bytes are there
                marks.seek(index)
                marks.write(b"\1")

    def seal(self, address: Digest, target: Path, *, durable: bool = True) -> bytes:
        """Move the whole to `target` of the same disk; its data.

        Args:
            durable: it outlives a power cut; False where it can be had again, and is checked when it is read.

        Raises:
            Incomplete: chunks are missing; or nothing was begun, or it is gone.
            CodecError: it is not what was announced; it is dropped.
        """
        with self._lock, self._on_disk():
            if missing := sorted(set(range(chunks(self._begun()))) - self._marked()):
                raise IncompleteUploadError(f"{len(missing)} chunks are missing, the first is {missing[0]}")
            data = self._path.read_bytes()
            if digest(data) != address:
                self._remove()
                raise CodecError("the digest of all chunks is not the one that was announced; begin it again")
            if durable:
                self._sync()
            os.replace(self._path, target)
            self._remove()
            if durable:
                files.sync_folder(target.parent)
            return data

    def drop(self) -> None:
        """Forget it; may be repeated."""
        with self._lock, self._on_disk():
            self._remove()

    def _begun(self) -> int:
        if self._total is None:
            raise IncompleteUploadError("nothing was begun, or it is gone; begin it again")
        return self._total

    def _held(self, total: int) -> frozenset[int] | None:
        """None: there is nothing that could be gone on with."""
        try:
            held = self._marked()
            return held if self._path.stat().st_size == total else None
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
        """The data first: nothing is marked that has no room."""
        self._remove()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb") as file:
                if total:
                    os.posix_fallocate(file.fileno(), 0, total)
            self._marks.write_bytes(bytes(chunks(total)))
        except OSError:
            self._remove()
            raise
        return frozenset()

    def _sync(self) -> None:
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError:
            self._remove()  # nobody knows what is on the disk now, and a second fsync would not tell
            raise

    def _remove(self) -> None:
        """The marks first: none is left that another blob's chunks could be taken for."""
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


def chunks(total: int) -> int:
    """How many chunks a blob of `total` bytes has."""
    return -(-total // CHUNK_BYTES)


def check_sum(index: int, data: bytes, checksum: int) -> None:
    """Whether a chunk came as it was sent, or CodecError."""
    if crc32c(data) != checksum:
        raise CodecError(f"chunk {index} arrived damaged; send it again")


def check_place(index: int, size: int, total: int) -> None:
    """Whether a chunk of this index and size is part of a blob of `total` bytes, or CodecError."""
    if not 0 <= index < chunks(total) or size != min(CHUNK_BYTES, total - index * CHUNK_BYTES):
        raise CodecError(f"chunk {index} of {size} bytes does not belong to a blob of {total} bytes")
