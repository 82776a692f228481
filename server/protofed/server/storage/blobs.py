"""Content-addressed blobs. A digest that was answered for is on disk, and is checked again at every read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from protofed.common import failpoint
from protofed.common.codec import Digest, digest, is_digest
from protofed.common.errors import IncompleteUploadError, OutOfSpaceError, StateError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.common.storage import files as archive
from protofed.server.storage.uploads import Quota, Upload, Uploads


class Blobs(Protocol):
    """Byte strings by digest."""

    def put(self, data: bytes) -> Digest:
        """Keep data durably; its address."""

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address.

        Raises:
            StateError: it is not there, or is no longer what it was; OutOfSpace: it cannot be opened now.
        """

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""

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

    def has(self, address: Digest) -> bool:
        """Whether it is there."""
        return address in self._data

    def discard(self, address: Digest) -> None:
        """Forget data."""
        self._data.pop(address, None)


class FolderBlobs:
    """Blobs as files of a folder, with the uploads that become some of them beside them."""

    def __init__(self, folder: Path, quota: Quota = Quota()) -> None:  # noqa: B008  (frozen)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        archive.sweep([folder])
        self.uploads = Uploads(folder / "uploads", quota)

    def put(self, data: bytes) -> Digest:
        """Keep data durably."""
        address = digest(data)
        if self.damaged(address):
            archive.write(self._path(address), data)
        return address

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""
        try:
            data = self._path(address).read_bytes()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # nothing is wrong with the blob
                raise OutOfSpaceError(
                    f"blob {address} cannot be read now: {error.strerror}; raise the limit"
                ) from error
            raise StateError(f"blob {address} cannot be read: {error.strerror}; restore it from a backup") from error
        if digest(data) != address:
            raise StateError(f"blob {address} has changed on disk; restore it from a backup")
        return data

    def damaged(self, address: Digest) -> bool:
        """Whether it is not there, cannot be read, or is no longer what it was."""
        try:
            self.get(address)
        except StateError:
            return True
        return False

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""
        return self._path(address).exists()

    def addresses(self) -> list[Digest]:
        """All that is there."""
        return [Digest(path.name) for path in self._folder.iterdir() if path.is_file() and is_digest(path.name)]

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

    def seal(self, upload: Upload) -> bytes:
        """Turn a complete upload into a blob, durably; its data, again if it was sealed before.

        Raises:
            Incomplete: chunks are missing, or the upload was never begun.
            CodecError: the whole is not what was announced; it is dropped.
        """
        target = self._path(upload.address)
        try:
            data = self.uploads.seal(upload, target)
        except IncompleteUploadError:
            if upload in self.uploads or not target.exists():
                raise
        else:
            failpoint.reach("upload-sealed")
            return data
        try:
            archive.sync_folder(self._folder)
        except OSError as error:
            raise archive.write_error(target, error) from error
        return self.get(upload.address)

    def _path(self, address: Digest) -> Path:
        return self._folder / address
