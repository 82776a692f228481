"""Decoded images on a disk of the site, for data that are larger than memory should hold.

A folder for each preparation, which is all that decides what an image becomes:

    preparation.json   how the images were prepared
    index.sqlite       which file has which content, and which content which row
    8.bin, 16.bin      images of 8 and of 16 bits by row; a row that one of them lacks is a hole there
    used               when it was used last
    lock               held by the one process that adds images

An image is written and synced before the index names its row, so a process may be killed at any time: the next one
goes on where the index ends. Rows are given in the order of the files. Nothing that the index names is overwritten,
so other processes may read all the while.

A row belongs to the content of a picture: a file that was renamed or copied is not decoded again. Files are compared
by size and times; only where these differ is the content read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import structlog
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from protofed.client.data.decoding import deepened, silence_decoders
from protofed.client.data.decoding_processes import ARRAYS, DecodingJob, decode_onto, open_array, read_contents
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.pictures import Facts, StoredPicture, digest_module
from protofed.client.task import Target
from protofed.common.config.recipe import PREPROCESSING
from protofed.common.config.settings import Cache
from protofed.common.config.tables import Input
from protofed.common.config.transforms import is_shipped
from protofed.common.errors import DataError
from protofed.common.plugins import PluginKind, load
from protofed.common.storage import files

Report: TypeAlias = Callable[[int, int], None]  # how many of how many images are done

FORMAT = 2  # of what is in a folder
PREPARATION, INDEX, USED, LOCK, TAG = "preparation.json", "index.sqlite", "used", "lock", "CACHEDIR.TAG"
_DTYPES: Mapping[int, Any] = {8: np.uint8, 16: np.uint16}
_FLAGS = {8: 1, 16: 2}  # of `images.bits` in the index: which arrays have the row
_LIBRARIES = (
    *("pillow", "pydicom", "pylibjpeg", "pylibjpeg-openjpeg", "pylibjpeg-libjpeg"),
    *("nibabel", "openslide-python", "torchvision", "monai"),
)
_NAME = re.compile(r"[0-9]+x[0-9]+x[0-9]+-[0-9a-f]{16}")
CHUNK = 32  # images that a process gets at a time
COMMIT_BYTES = 256 << 20  # of images that are written between two commits
COMMIT_S = 30  # at most, between two commits: small images of a slow PACS come for hours before they are so many
SAMPLED = 64  # rows whose checksum is compared each time
_HASHERS = 8  # threads that read files
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Images that protofed can decode again; leave them out of backups.\n"
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, content TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images (picture TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, bits INTEGER NOT NULL,
    crc INTEGER NOT NULL, label INTEGER, "group" TEXT) WITHOUT ROWID;
"""
log = structlog.get_logger()


@dataclass(frozen=True)
class CachedImages:
    """Images [M, channels, H, W] in a file that only grows; other processes may open them, too."""

    path: Path
    bits: int
    shape: tuple[int, int, int, int]

    def open(self) -> NDArray[Any]:
        """[M, channels, H, W], uint8 or uint16, mapped from the file."""
        return np.memmap(self.path, _DTYPES[self.bits], "r", shape=self.shape)

    def read_ahead(self, rows: Iterable[int]) -> None:
        """Let the kernel read these rows from the disk, all at once.

        A mapping that is read here and there is read page by page, or with megabytes around each: on a disk of
        700 MB/s, 20 MB/s.
        """
        size = self.bits // 8 * prod(self.shape[1:])
        with suppress(FileNotFoundError):  # `cache clear` while a run goes on
            handle = os.open(self.path, os.O_RDONLY)
            try:
                for row in rows:
                    os.posix_fadvise(handle, row * size, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)


@dataclass(frozen=True)
class Prepared:
    """The pictures that were asked for.

    Attributes:
        images: where they are; M is more than the number of pictures where the cache has others, too.
        rows: the row of each picture, [n] int64; -1: it cannot be read.
        reasons: for each picture why it cannot be read, or None.
        facts: of each picture.
    """

    images: CachedImages
    rows: NDArray[np.int64]
    reasons: list[str | None]
    facts: list[Facts]


class _Row(NamedTuple):
    """Where an image is.

    Attributes:
        arrays: the `_FLAGS` of those that have it.
    """

    number: int
    arrays: int
    facts: Facts


_NO_ROW = _Row(-1, 0, Facts())
_IndexRow: TypeAlias = tuple[str, int, int, int, int | float | str | None, str | None]  # as the index has it


@dataclass(frozen=True)
class CacheEntry:
    """One preparation's images, as `protofed client cache list` shows them."""

    name: str
    preparation: Mapping[str, Any]
    images: int | None  # None: the index is damaged
    nbytes: int  # on the disk
    used: float  # seconds since 1970


def log_progress() -> Report:
    """Reports each ten seconds to the log."""
    started = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= 10 and done:
            last = now
            left_s = (now - started) / done * (total - done)
            log.info("images are decoded onto the disk", number=done, of=total, seconds_left=round(left_s))

    return report


def default_folder() -> Path:
    """Where simulations keep decoded images: `PROTOFED_CACHE`, or a folder of the user's cache."""
    if chosen := os.environ.get("PROTOFED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "protofed"


class ImageCache:
    """The images of one preparation.

    Attributes:
        input: what images become.
        report: called as images are decoded.
        processes: that decode at a time.
        folder: of this preparation.

    Args:
        settings: of the cache; `folder` None: `default_folder`.
    """

    def __init__(self, settings: Cache, input_: Input, report: Report | None = None) -> None:
        self.input, self.report = input_, report or log_progress()
        self.processes = settings.processes or len(os.sched_getaffinity(0))
        self._settings, self._root, self._preparation = settings, settings.folder or default_folder(), describe(input_)
        digest = hashlib.blake2b(_json(self._preparation), digest_size=8).hexdigest()
        self.folder = self._root / f"{'x'.join(map(str, input_.shape))}-{digest}"

    def contents(self, pictures: Sequence[StoredPicture]) -> list[str]:
        """The content of each picture, read only where it is new or changed; empty: it cannot be read.

        Raises:
            DataError: the cache cannot be written.
        """
        with self._open() as index:
            return self._contents(index, pictures)

    def prepare(self, pictures: Sequence[StoredPicture]) -> Prepared:
        """Decode what is missing, and say where all of it is.

        Raises:
            DataError: the disk, or `cache.disk_gb`, has no room for it; or something is missing that all need.
        """
        with self._open() as index:
            contents = self._contents(index, pictures)
            names = [f"{content or each.key}#{each.part}" for content, each in zip(contents, pictures, strict=True)]
            self._drop_damaged(index)
            known = _known(index)
            missing = {name: picture for name, picture in zip(names, pictures, strict=True) if name not in known}
            reasons = _Builder(self, index).build(missing) if missing else {}
            known = _known(index)
            rows = [known.get(name, _NO_ROW) for name in names]
            bits = 8 if all(row.arrays & _FLAGS[8] for row in rows if row is not _NO_ROW) else 16
            if bits == 16:
                self._deepen(index, {row.number for row in rows if row is not _NO_ROW and not row.arrays & _FLAGS[16]})
            (self.folder / USED).touch(files.PRIVATE)
        numbers = np.array([row.number for row in rows], np.int64)
        path = self.folder / ARRAYS[bits]
        count = path.stat().st_size // self.row_bytes(bits) if path.exists() else 0
        images = CachedImages(path, bits, (count, *self.input.shape))
        return Prepared(images, numbers, [reasons.get(name) for name in names], [row.facts for row in rows])

    def row_bytes(self, bits: int) -> int:
        """Bytes of an image."""
        return bits // 8 * prod(self.input.shape)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The index, while this process alone may add to it."""
        try:
            self._root.mkdir(0o700, parents=True, exist_ok=True)
            with _locked(self.folder, wait=True):
                for name, content in ((TAG, _TAG.encode()), (PREPARATION, _json(self._preparation))):
                    if not (self.folder / name).exists():
                        files.write(self.folder / name, content)
                with closing(_connect(self.folder)) as index:
                    yield index
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise _write_error(self.folder, OSError(errno.ENOSPC, "")) from error
            raise DataError(
                f"the index of decoded images in {self.folder} cannot be used ({error}): {_CLEAR}"
            ) from error
        except OSError as error:
            raise _write_error(self.folder, error) from error

    def _contents(self, index: sqlite3.Connection, pictures: Sequence[StoredPicture]) -> list[str]:
        keys = [picture.key for picture in pictures]
        once = dict(zip(keys, pictures, strict=True))  # a file of many frames is many pictures
        stamps = dict(zip(once, _each(lambda picture: picture.stamp(), list(once.values())), strict=True))
        known = {path: (stamp, content) for path, stamp, content in index.execute("SELECT * FROM files")}
        changed = [key for key, stamp in stamps.items() if not stamp or known.get(key, ("", ""))[0] != stamp]
        for first in range(0, len(changed), 4096):
            part = changed[first : first + 4096]
            contents = self._read_contents([once[key] for key in part])
            rows = [(key, stamps[key], content) for key, content in zip(part, contents, strict=True)]
            known.update({path: (stamp, content) for path, stamp, content in rows})
            with index:
                index.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", rows)
        return [known[key][1] for key in keys]

    def _read_contents(self, pictures: Sequence[StoredPicture]) -> list[str]:
        if not pictures[0].serial:
            return _each(lambda picture: picture.content(), pictures)
        chunks = [pictures[start : start + CHUNK] for start in range(0, len(pictures), CHUNK)]
        return [content for contents in read_contents(chunks, self.processes) for content in contents]

    def _drop_damaged(self, index: sqlite3.Connection) -> None:
        """Forget images whose bytes are others than those that were written; a few are compared, all if one differs."""
        rows = index.execute("SELECT number, bits, crc FROM images ORDER BY number").fetchall()
        step = max(1, len(rows) // SAMPLED)
        if self._damaged(rows[::step] + rows[-1:]):
            damaged = self._damaged(rows)
            log.warning("decoded images are damaged and are decoded again", count=len(damaged), folder=str(self.folder))
            with index:
                index.executemany("DELETE FROM images WHERE number = ?", [(number,) for number in damaged])

    def _damaged(self, rows: Iterable[tuple[int, int, int]]) -> list[int]:
        handles = {bits: open_array(self.folder, bits) for bits in ARRAYS}
        try:
            return [number for number, flags, crc in rows if crc32c(self._bytes(handles, number, flags)) != crc]
        finally:
            for handle in handles.values():
                os.close(handle)

    def _bytes(self, handles: Mapping[int, int], number: int, flags: int) -> bytes:
        bits = 8 if flags & _FLAGS[8] else 16
        return os.pread(handles[bits], self.row_bytes(bits), number * self.row_bytes(bits))

    def _deepen(self, index: sqlite3.Connection, shallow: Collection[int]) -> None:
        """Write these images of 8 bits in 16 bits, too, as some that they are used with: 255 becomes 65535."""
        if not shallow:
            return
        narrow, wide = (open_array(self.folder, bits) for bits in ARRAYS)
        try:
            for number in sorted(shallow):
                values = np.frombuffer(os.pread(narrow, self.row_bytes(8), number * self.row_bytes(8)), np.uint8)
                os.pwrite(wide, deepened(values).tobytes(), number * self.row_bytes(16))
            os.fdatasync(wide)
        finally:
            os.close(narrow)
            os.close(wide)
        with index:
            index.executemany("UPDATE images SET bits = 3 WHERE number = ?", [(number,) for number in shallow])

    def make_room(self, nbytes: int) -> None:
        """Refuse so many more bytes if the disk has no room; remove the longest unused of the other preparations.

        Raises:
            DataError: there is no room.
        """
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise DataError(
                f"decoded images need {_gb(nbytes)} more in {self._root}, whose disk has {_gb(free)} free. Free some, "
                "or set cache.folder to a folder on another disk"
            )
        if self._settings.disk_gb is None:
            return
        sizes = {entry.name: entry.nbytes for entry in list_caches(self._root)}
        limit, own = self._settings.disk_gb * 1e9, sizes.pop(self.folder.name, 0) + nbytes
        if own > limit:
            raise DataError(
                f"the decoded images of this run need {_gb(own)}, and cache.disk_gb allows "
                f"{self._settings.disk_gb:g}; raise it, or remove it"
            )
        for entry in sorted(list_caches(self._root), key=lambda entry: entry.used):
            if entry.name in sizes and own + sum(sizes.values()) > limit and clear_cache(self._root, entry.name):
                log.info("decoded images that were not used for longest are removed", name=entry.name)
                del sizes[entry.name]


class _Builder:
    """Adds images to a cache whose lock this process has."""

    def __init__(self, cache: ImageCache, index: sqlite3.Connection) -> None:
        self._cache, self._index, self._written, self._committed = cache, index, 0, time.monotonic()
        self._handles: list[int] = []
        self._reasons: dict[str, str] = {}

    def build(self, missing: Mapping[str, StoredPicture]) -> dict[str, str]:
        """Decode these pictures by name; why some of them cannot be read, by name."""
        cache = self._cache
        cache.make_room(len(missing) * cache.row_bytes(depth_of_first(missing.values(), cache.input)))
        (first,) = self._index.execute("SELECT coalesce(max(number) + 1, 0) FROM images").fetchone()
        jobs = [(name, picture, first + place) for place, (name, picture) in enumerate(missing.items())]
        for bits in ARRAYS:
            self._handles.append(open_array(cache.folder, bits))
            os.ftruncate(self._handles[-1], (first + len(jobs)) * cache.row_bytes(bits))  # holes take no room
        try:
            self._run(jobs)
        finally:
            for handle in self._handles:
                os.close(handle)
        return self._reasons

    def _run(self, jobs: Sequence[DecodingJob]) -> None:
        cache, total, done = self._cache, len(jobs), 0
        chunks = [jobs[start : start + CHUNK] for start in range(0, total, CHUNK)]
        rows = list[_IndexRow]()
        try:
            for chunk, results in zip(
                chunks, decode_onto(cache.folder, cache.input, chunks, cache.processes), strict=True
            ):
                for (name, _, number), result in zip(chunk, results, strict=True):
                    if isinstance(result, str):
                        self._reasons[name] = result
                    else:
                        bits, crc, facts = result
                        rows.append((name, number, _FLAGS[bits], crc, _stored_label(facts.label), facts.group))
                        self._written += cache.row_bytes(bits)
                done += len(chunk)
                if self._written >= COMMIT_BYTES or time.monotonic() - self._committed >= COMMIT_S:
                    self._commit(rows)
                cache.report(done, total)
        finally:
            self._commit(rows)

    def _commit(self, rows: list[_IndexRow]) -> None:
        for handle in self._handles:
            os.fdatasync(handle)
        with self._index:
            self._index.executemany("INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?, ?)", rows)
        rows.clear()
        self._written, self._committed = 0, time.monotonic()


def depth_of_first(pictures: Iterable[StoredPicture], input_: Input) -> int:
    """The bits, 8 or 16, of the first picture that can be read: by it is estimated what all of them need."""
    for picture in islice(pictures, CHUNK):
        with suppress(UnreadableImageError), silence_decoders():
            return 8 * picture.decode(input_).pixels.itemsize
    return 8


# Files and folders.

_CLEAR = "remove it with `protofed client cache clear`"


def describe(input_: Input) -> dict[str, Any]:
    """All that decides what an image becomes, as JSON can say it."""
    decides = input_.model_dump(mode="json", exclude={"mean", "std"}, exclude_defaults=True) | {"shape": input_.shape}
    code = {step.transform: _code(step.transform) for step in input_.prepare if not is_shipped(step.transform)}
    libraries = {name: _version(name) for name in _LIBRARIES}
    versions = {"format": FORMAT, "preprocessing": PREPROCESSING}
    return {**versions, "input": decides, "libraries": libraries, "code": code}


def _code(plugin: str) -> str:
    """Of the module of a plug-in transform: with other code images become others."""
    return digest_module(load(PluginKind.TRANSFORM, plugin, ()))


def list_caches(root: Path) -> list[CacheEntry]:
    """What is kept in a folder of caches, by name; what else is in it is somebody else's."""
    if not root.is_dir():
        return []
    folders = [folder for folder in sorted(root.iterdir()) if _NAME.fullmatch(folder.name)]
    return [_entry(folder) for folder in folders if (folder / PREPARATION).is_file()]


def clear_cache(root: Path, name: str) -> bool:
    """Remove one preparation's images; False: a process is adding to them. Others may go on reading what they have.

    A folder in which somebody has put another file stays, with that file.
    """
    folder = root / name
    try:
        with _locked(folder, wait=False):
            for file in (PREPARATION, INDEX, f"{INDEX}-journal", *ARRAYS.values(), USED, TAG, LOCK):
                (folder / file).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
    except BlockingIOError:
        return False
    return True


def _entry(folder: Path) -> CacheEntry:
    preparation, count = json.loads((folder / PREPARATION).read_text(encoding="utf-8")), None
    with suppress(sqlite3.Error), closing(_connect(folder)) as index:
        (count,) = index.execute("SELECT count(*) FROM images").fetchone()
    nbytes = sum(512 * file.stat().st_blocks for file in folder.iterdir())
    used = folder / USED
    return CacheEntry(folder.name, preparation, count, nbytes, (used if used.exists() else folder).stat().st_mtime)


def _connect(folder: Path) -> sqlite3.Connection:
    os.close(os.open(folder / INDEX, os.O_RDWR | os.O_CREAT, files.PRIVATE))
    index = sqlite3.connect(folder / INDEX, timeout=60)
    index.executescript("PRAGMA synchronous = FULL;" + _SCHEMA)
    return index


def _stored_label(label: Target | None) -> int | float | str | None:
    """A row of numbers as text: SQLite has no type for it."""
    return json.dumps(label) if isinstance(label, tuple) else label


def _read_label(stored: int | float | str | None) -> Target | None:
    return tuple(json.loads(stored)) if isinstance(stored, str) else stored


def _known(index: sqlite3.Connection) -> dict[str, _Row]:
    """The row of each picture."""
    found = index.execute('SELECT picture, number, bits, label, "group" FROM images')
    return {name: _Row(number, bits, Facts(_read_label(label), group)) for name, number, bits, label, group in found}


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if it is missing.

    Raises:
        BlockingIOError: another process holds it, and we do not wait.
    """
    handle = _lock(folder, wait=wait)
    while not _is_at(folder / LOCK, handle):  # who held it has removed the folder
        os.close(handle)
        handle = _lock(folder, wait=wait)
    try:
        yield
    finally:
        os.close(handle)


def _lock(folder: Path, *, wait: bool) -> int:
    folder.mkdir(0o700, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, files.PRIVATE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            os.close(handle)
            raise
        log.info("another process prepares images; waiting for it", folder=str(folder))
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is still the one of this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _each(work: Callable[[StoredPicture], str], pictures: Sequence[StoredPicture]) -> list[str]:
    """The result of each picture, by several threads unless they must be read one at a time."""
    if pictures and pictures[0].serial:
        return list(map(work, pictures))
    with ThreadPoolExecutor(_HASHERS) as pool:
        return list(pool.map(work, pictures))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _write_error(folder: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"the disk of {folder} is full; what was decoded is kept. Free some, or set cache.folder to a folder on "
            "another disk"
        )
    return DataError(f"decoded images cannot be written to {folder}: {error.strerror}; set cache.folder to another")
