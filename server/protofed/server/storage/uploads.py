"""What sites have begun to send: unfinished uploads, each of a known site, bounded for each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protofed.common import failpoint
from protofed.common.codec import Digest, is_digest
from protofed.common.errors import IncompleteUploadError, OverQuotaError
from protofed.common.payload import SiteId
from protofed.common.protocol.chunks import MARKS, PartialBlob
from protofed.common.storage import files


@dataclass(frozen=True)
class Quota:
    """What one site may have unfinished at a time."""

    uploads: int = 4  # an honest daemon has one; another each time it dies and computes its update anew
    total: int = 8 << 30  # bytes announced, of all of them


@dataclass(frozen=True)
class Upload:
    """A site's try to hand in one update; the same again finds the chunks that are there."""

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

    def has_of(self, site: SiteId, task_id: str) -> bool:
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

    def drop_of(self, site: SiteId, task_id: str) -> int:
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
            gone = [partial for upload, partial in self._open.items() if which(upload, partial)]
            for partial in gone:
                partial.drop()
            self._tidy()
        return len(gone)

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
        found = {upload: PartialBlob(path, self._read) for path in paths if (upload := _named(path.name)) is not None}
        for path in paths:  # marks without data; whatever else lies here is not ours to remove
            upload = _named(path.name.removesuffix(MARKS))
            if path.name.endswith(MARKS) and upload is not None and upload not in found:
                path.unlink()
        return found


def _named(name: str) -> Upload | None:
    match name.split("."):
        case [site, task_id, address] if is_digest(address):
            return Upload(site, task_id, Digest(address))
        case _:
            return None
