"""Content-addressed blobs, and the uploads that become some of them.

A digest that was answered for is on disk, and is checked again at every read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from protofed.common import failpoint
from protofed.common.codec import Buffer, Digest, digest, is_digest
from protofed.common.errors import IncompleteUploadError, OutOfSpaceError, OverQuotaError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.chunks import MARKS, PartialBlob
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.common.storage import files
from protofed.server.storage.reader import LedgerReader

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


@dataclass(frozen=True)
class Quota:
    """What one site may have unfinished at a time."""

    uploads: int = 4  # an honest daemon has one; another each time it dies and computes its update anew
    total: int = 8 << 30  # bytes announced, of all of them


@dataclass(frozen=True)
class Upload:
    """A site's try to send one update; another try finds the chunks that are there."""

    site: SiteId
    task_id: str  # of the invitation
    address: Digest  # of the update

    def __str__(self) -> str:
        """Its id on the wire and its file's name; none of the three has a dot."""
        return f"{self.site}.{self.task_id}.{self.address}"


class Uploads:
    """The unfinished uploads, as files of a folder; those of an earlier process are taken up.

    Args:
        read: as of `PartialBlob`.

    `write`, `check`, `link` and `drop` raise what `PartialBlob` raises.
    """

    def __init__(self, folder: Path, quota: Quota, read: Callable[[Path], memoryview] = files.mapped) -> None:
        self._folder, self._quota, self._read = folder, quota, read
        self._lock = threading.Lock()  # of `_open`; a chunk needs only its own upload's
        folder.mkdir(parents=True, exist_ok=True)
        self._open = self._found()

    def __contains__(self, upload: Upload) -> bool:
        return upload in self._open

    def holds_any(self, site: SiteId, task_id: str) -> bool:
        """Whether anything is there that the site sent for an invitation."""
        return any((upload.site, upload.task_id) == (site, task_id) for upload in tuple(self._open))

    def begin(self, upload: Upload, total: int) -> frozenset[int]:
        """Make room for `total` bytes; the chunks that an earlier try left.

        Raises:
            OverQuotaError: the site has too much under way; nothing was allocated.
            OutOfSpaceError, DiskFailureError: there is no room; nothing is left of the upload.
        """
        with self._lock:
            self._check(upload, total)
            partial = self._open.setdefault(upload, PartialBlob(self._folder / str(upload), self._read))
            try:
                return partial.begin(total)
            finally:
                self._tidy()

    def write(self, upload: Upload, index: int, data: bytes, checksum: int) -> None:
        """Keep one chunk, not yet durably."""
        self._get(upload).write(index, data, checksum)
        failpoint.reach("chunk-written")

    def check(self, upload: Upload) -> memoryview:
        """The data of a complete upload, which are durable when this returns."""
        try:
            return self._get(upload).check(upload.address)
        finally:
            with self._lock:
                self._tidy()

    def link(self, upload: Upload, target: Path) -> None:
        """Give a checked upload the name `target`, too, durable once the folder of `target` is synced."""
        partial = self._get(upload)
        partial.link(target)
        if not partial.total:  # it was moved
            with self._lock:
                self._tidy()

    def drop(self, upload: Upload) -> None:
        """Forget an upload, if it is there."""
        self._drop(lambda other, _: other == upload)

    def drop_all(self, site: SiteId, task_id: str) -> int:
        """Forget what a site sent for an invitation that is closed; how many uploads that were."""
        return self._drop(lambda upload, _: (upload.site, upload.task_id) == (site, task_id))

    def drop_but(self, site: SiteId, task_id: str) -> int:
        """Forget what a site sent for any other invitation than its open one; how many uploads that were."""
        return self._drop(lambda upload, _: upload.site == site and upload.task_id != task_id)

    def collect(self, older_than_s: float, now: float) -> int:
        """Forget what was not touched for so long, `now` by the wall clock, in seconds; how many that were."""
        return self._drop(lambda _, partial: now - partial.last_chunk_at > older_than_s)

    def _drop(self, which: Callable[[Upload, PartialBlob], bool]) -> int:
        with self._lock:
            dropped = [partial for upload, partial in self._open.items() if which(upload, partial)]
            for partial in dropped:
                partial.drop()
            self._tidy()
        return len(dropped)

    def _check(self, upload: Upload, total: int) -> None:
        others = [partial.total for other, partial in self._open.items() if other.site == upload.site]
        if upload in self._open:
            others.remove(self._open[upload].total)
        if len(others) >= self._quota.uploads:
            raise OverQuotaError(f"{len(others)} uploads of this site are unfinished; commit one of them, or try later")
        if (announced := sum(others) + total) > self._quota.total:
            raise OverQuotaError(
                f"this site announces {announced} bytes, at most {self._quota.total} are taken at a time; "
                "commit another upload first, or send less"
            )

    def _get(self, upload: Upload) -> PartialBlob:
        partial = self._open.get(upload)
        if partial is None:
            raise IncompleteUploadError("no such upload; begin it again")
        return partial

    def _tidy(self) -> None:
        """Only what was dropped or moved leaves: two `PartialBlob`s of one file never write to it."""
        for upload in [upload for upload, partial in self._open.items() if not partial.total]:
            del self._open[upload]

    def _found(self) -> dict[Upload, PartialBlob]:
        paths = list(self._folder.iterdir())
        partials = {
            upload: PartialBlob(path, self._read) for path in paths if (upload := _upload_named(path.name)) is not None
        }
        for path in paths:  # marks without data; whatever else lies here is not ours to remove
            upload = _upload_named(path.name.removesuffix(MARKS))
            if path.name.endswith(MARKS) and upload is not None and upload not in partials:
                path.unlink()
        return partials


def _upload_named(name: str) -> Upload | None:
    match name.split("."):
        case [site, task_id, address] if is_digest(address):
            return Upload(site, task_id, Digest(address))
        case _:
            return None


class FolderBlobs:
    """Blobs as files of a folder, with the uploads that become some of them beside them.

    Attributes:
        repairs: how many blobs that had changed on disk were put again: what was read of them before is worth nothing.
    """

    def __init__(self, folder: Path, quota: Quota = Quota()) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep([folder])
        # A page of a file on another machine that cannot be read later would kill the process, not raise an error.
        self._read = files.whole if files.find_network_type(folder) else files.mapped
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
            IncompleteUploadError: chunks are missing, or the upload was never started.
            CodecError: the whole is not what was announced; it is dropped.
        """
        return self.uploads.check(upload)

    def seal(self, upload: Upload) -> None:
        """Turn a checked upload into a blob, durable after the next `sync`.

        The upload stays until it is dropped, after the blob has its row. If the server dies in between, it sweeps the
        blob, and the site finds its chunks.

        Raises:
            IncompleteUploadError: it was not checked since it was started, or is gone.
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
        StateError: the folder is not there, is another server's, or does not hold this ledger's blobs.
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
