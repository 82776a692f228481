"""Content-addressed blobs. A digest that was answered for is on disk, and is checked again at every read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from protofed.common import failpoint
from protofed.common.codec import Buffer, Digest, digest, is_digest
from protofed.common.errors import OutOfSpaceError, StateError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.common.storage import files
from protofed.server.storage.filesystem import network_type_of
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.uploads import Quota, Upload, Uploads

log = structlog.get_logger()
B = TypeVar("B", bytes, memoryview)


class Blobs(Protocol):
    """Byte strings by digest."""

    def put(self, *data: Buffer) -> Digest:
        """Keep data durably, given whole or as pieces in order; its address."""

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address.

        Raises:
            StateError: it is not there, or is no longer what it was; OutOfSpace: it cannot be opened now.
        """

    def view(self, address: Digest) -> Buffer:
        """As `get`, without a copy where there can be one: data that are on disk stay there."""

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""

    def uncache(self, address: Digest) -> None:
        """Let go of memory that holds what is on disk, too: nobody needs it soon."""

    def discard(self, address: Digest) -> None:
        """Forget data, if it is there."""


class MemoryBlobs:
    """Blobs of a simulation."""

    def __init__(self) -> None:
        self._data: dict[Digest, bytes] = {}

    def put(self, *data: Buffer) -> Digest:
        """Keep data."""
        whole = b"".join(data)
        address = digest(whole)
        self._data[address] = whole
        return address

    def get(self, address: Digest) -> bytes:
        """The data."""
        if address not in self._data:
            raise StateError(f"blob {address} is not in memory")
        return self._data[address]

    def view(self, address: Digest) -> Buffer:
        """The data."""
        return self.get(address)

    def has(self, address: Digest) -> bool:
        """Whether it is there."""
        return address in self._data

    def uncache(self, address: Digest) -> None:
        """There is no other copy."""

    def discard(self, address: Digest) -> None:
        """Forget data."""
        self._data.pop(address, None)


class FolderBlobs:
    """Blobs as files of a folder, with the uploads that become some of them beside them.

    Attributes:
        repairs: how many blobs that had changed on disk were put again: what was read of them before is worth nothing.
    """

    def __init__(self, folder: Path, quota: Quota = Quota()) -> None:  # noqa: B008  (frozen)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep([folder])
        # A page of a file on another machine that cannot be read later would kill the process, not raise an error.
        self._read = files.whole if network_type_of(folder) else files.mapped
        self.uploads = Uploads(folder / "uploads", quota, self._read)
        self.repairs = 0

    def put(self, *data: Buffer) -> Digest:
        """Keep data durably."""
        address = digest(*data)
        if self.damaged(address):
            is_repair = self.has(address)
            files.write_pieces(self._path(address), data)
            if is_repair:
                self.repairs += 1
                log.error("a blob had changed on disk, and was written again; check the disk", digest=address)
        return address

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""
        return self._checked(address, Path.read_bytes)

    def view(self, address: Digest) -> memoryview:
        """The data, checked; on a local disk mapped into memory: its pages are the kernel's, not a copy of ours."""
        return self._checked(address, self._read)

    def _checked(self, address: Digest, read: Callable[[Path], B]) -> B:
        try:
            data = read(self._path(address))
        except OSError as error:
            if error.errno in files.PASSING:
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
            self.view(address)
        except StateError:
            return True
        return False

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""
        return self._path(address).exists()

    def addresses(self) -> list[Digest]:
        """All that is there."""
        return [Digest(path.name) for path in self._folder.iterdir() if path.is_file() and is_digest(path.name)]

    def uncache(self, address: Digest) -> None:
        """Give the memory of its cached pages to the next files: fresh pages cost many times a copy."""
        files.forget_pages(self._path(address))

    def discard(self, address: Digest) -> None:
        """Forget data."""
        self._path(address).unlink(missing_ok=True)

    def size(self, address: Digest) -> int:
        """Size of a blob in bytes."""
        try:
            return self._path(address).stat().st_size
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}") from error

    def chunk(self, address: Digest, index: int) -> bytes:
        """The `index`-th 2 MiB of a blob; empty behind its end."""
        try:
            with self._path(address).open("rb") as file:
                return os.pread(file.fileno(), CHUNK_BYTES, index * CHUNK_BYTES)
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}") from error

    def check(self, upload: Upload) -> memoryview:
        """The data of a complete upload, durable as such: it may be sealed.

        Raises:
            IncompleteUploadError: chunks are missing, or the upload was never begun.
            CodecError: the whole is not what was announced; it is dropped.
        """
        return self.uploads.check(upload)

    def seal(self, upload: Upload) -> None:
        """Turn a checked upload into a blob, durable after the next `sync`.

        The upload stays until it is dropped, which is after the blob has its row: a server that dies in between sweeps
        the blob, and the site finds its chunks.

        Raises:
            IncompleteUploadError: it was not checked since it was begun, or is gone.
        """
        self.uploads.link(upload, self._path(upload.address))
        failpoint.reach("upload-sealed")

    def sync(self) -> None:
        """Make all blobs that were sealed so far durable, with one sync.

        Raises:
            DiskFailureError: what is on the disk is uncertain.
        """
        try:
            files.sync_folder(self._folder)
        except OSError as error:
            raise files.write_error(self._folder, error) from error

    def _path(self, address: Digest) -> Path:
        return self._folder / address


BLOBS = "blobs"  # of the state folder


def open_blobs(state: Path, elsewhere: Path | None, ledger: LedgerReader, held: ExitStack) -> FolderBlobs:
    """The blobs of this very ledger, which this process alone has until `held` is closed.

    Whoever opens blobs removes those that no row names: with another ledger that would be all of them.

    Args:
        elsewhere: a folder outside of the state folder, which then leads there; None: as it was before.

    Raises:
        StateError: the folder is not there, another server's, or not the one that this ledger's blobs are in.
    """
    folder = state / BLOBS
    if elsewhere is None and not folder.is_symlink():
        return FolderBlobs(folder)
    target = (elsewhere or folder).resolve()
    if not target.is_dir():  # a folder that is made where nothing is mounted would look like lost blobs
        raise StateError(f"the folder of the blobs, {target}, is not there; mount it, or make it")
    held.callback(files.Lock(target).release)
    if not folder.is_symlink() and any(path.is_file() for path in folder.rglob("*")):
        raise StateError(f"{folder} holds blobs of its own; move what is in it to {target}, or unset `blobs`")
    _check(target, ledger)
    _lead(folder, target)
    return FolderBlobs(folder)


def _lead(folder: Path, target: Path) -> None:
    """Whoever reads a state folder finds the blobs in it, wherever they are."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        _remove_empty(folder)
    folder.symlink_to(target)


def _remove_empty(folder: Path) -> None:
    """Remove a folder of nothing but empty folders: `rmdir` cannot take a file that came in the meantime."""
    try:
        for path in (*(path for path in folder.iterdir() if path.is_dir()), folder):
            path.rmdir()
    except OSError as error:
        raise StateError(f"{folder} is not empty; move what is in it away, or unset `blobs`") from error


def _check(folder: Path, ledger: LedgerReader) -> None:
    """The blobs and the ledger belong together, as far as can be told before the first state."""
    there, named = {path.name for path in folder.iterdir() if is_digest(path.name)}, ledger.named()
    if named and not named & there:
        raise StateError(f"none of the ledger's blobs is in {folder}; is it mounted, and is it this ledger's?")
    if there and not named and not ledger.runs():
        raise StateError(f"{folder} holds {len(there)} blobs, and the ledger knows none; is it another server's?")
