"""Content-addressed blobs and the uploads that become them. A digest that was answered for is on disk, and is checked
again at every read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from google_crc32c import value as crc32c

from protofed.common import archive
from protofed.common.codec import Digest, digest
from protofed.common.errors import CodecError, Incomplete, StateError
from protofed.common.task import CHUNK_BYTES


class Blobs(Protocol):
    """Byte strings by digest."""

    def put(self, data: bytes) -> Digest:
        """Keep data durably; its address."""

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address.

        Raises:
            StateError: it is not there, or is no longer what it was.
        """

    def discard(self, address: Digest) -> None:
        """Forget data, if it is there."""


class MemoryBlobs:
    """Blobs of a simulation."""

    def __init__(self) -> None:
        self._data: dict[Digest, bytes] = {}

    def put(self, data: bytes) -> Digest:
        """Keep data."""
        address = digest(data)
        self._data[address] = data
        return address

    def get(self, address: Digest) -> bytes:
        """The data."""
        if address not in self._data:
            raise StateError(f"blob {address} is not in memory")
        return self._data[address]

    def discard(self, address: Digest) -> None:
        """Forget data."""
        self._data.pop(address, None)


class FolderBlobs:
    """Blobs as files of a folder, with the uploads that are not yet complete beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads = folder / "uploads"
        self._uploads.mkdir(parents=True, exist_ok=True)
        archive.sweep([folder])

    def put(self, data: bytes) -> Digest:
        """Keep data durably."""
        address = digest(data)
        if not self._path(address).exists():
            archive.write(self._path(address), data)
        return address

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""
        try:
            data = self._path(address).read_bytes()
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}; restore it from a backup") from error
        if digest(data) != address:
            raise StateError(f"blob {address} has changed on disk; restore it from a backup")
        return data

    def discard(self, address: Digest) -> None:
        """Forget data."""
        self._path(address).unlink(missing_ok=True)

    def chunk(self, address: Digest, index: int) -> bytes:
        """The `index`-th 2 MiB of a blob; empty behind its end."""
        try:
            with self._path(address).open("rb") as file:
                return os.pread(file.fileno(), CHUNK_BYTES, index * CHUNK_BYTES)
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}") from error

    def begin(self, upload: str, total: int) -> frozenset[int]:
        """Prepare an upload of `total` bytes; the chunks that are held already, from an earlier try."""
        data, held = self._upload(upload)
        try:
            if held.exists() and data.exists() and data.stat().st_size == total:
                return frozenset(i for i, mark in enumerate(held.read_bytes()) if mark)
            held.write_bytes(bytes(chunks(total)))
            with data.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, total)
        except OSError as error:
            self.drop(upload)
            raise StateError(f"no room for an upload of {total} bytes: {error.strerror}") from error
        return frozenset()

    def write(self, upload: str, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk. Not yet durable: the whole is checked when it is sealed.

        Raises:
            CodecError: the chunk does not belong there, or its CRC-32C is wrong.
            Incomplete: the upload was never begun.
        """
        path, held = self._upload(upload)
        try:
            total = path.stat().st_size
            if not 0 <= index < chunks(total) or len(data) != min(CHUNK_BYTES, total - index * CHUNK_BYTES):
                raise CodecError(f"chunk {index} of {len(data)} bytes does not belong to an upload of {total} bytes")
            if crc32c(data) != checksum:
                raise CodecError(f"chunk {index} arrived damaged")
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), data, index * CHUNK_BYTES)
            with held.open("r+b") as file:
                os.pwrite(file.fileno(), b"\1", index)
        except FileNotFoundError as error:
            raise Incomplete("no such upload; begin it again") from error
        except OSError as error:
            raise StateError(f"cannot keep a chunk: {error.strerror}") from error

    def seal(self, upload: str, address: Digest) -> bytes:
        """Turn a complete upload into the blob of that address, durably; its data.

        Raises:
            Incomplete: chunks are missing, or the upload was never begun.
            CodecError: the whole is not what was announced; it is dropped.
        """
        path, held = self._upload(upload)
        if self._path(address).exists() and not path.exists():
            return self.get(address)
        try:
            if missing := [i for i, mark in enumerate(held.read_bytes()) if not mark]:
                raise Incomplete(f"{len(missing)} chunks are missing, the first is {missing[0]}")
            data = path.read_bytes()
            if digest(data) != address:
                self.drop(upload)
                raise CodecError("the upload's digest is not the one that was announced")
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, self._path(address))
            archive.sync_folder(self._folder)
        except FileNotFoundError as error:
            raise Incomplete("no such upload; begin it again") from error
        except OSError as error:
            raise StateError(f"cannot keep an upload: {error.strerror}") from error
        held.unlink(missing_ok=True)
        return data

    def drop(self, upload: str) -> None:
        """Forget an upload."""
        for path in self._upload(upload):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _path(self, address: Digest) -> Path:
        return self._folder / address

    def _upload(self, upload: str) -> tuple[Path, Path]:
        return self._uploads / upload, self._uploads / f"{upload}.held"


def chunks(total: int) -> int:
    """How many chunks a blob of `total` bytes has."""
    return -(-total // CHUNK_BYTES)
