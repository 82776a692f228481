"""Processes that decode images into the arrays of a cache, each row where it belongs.

They import no PyTorch, unless the dataset of a plug-in does. An array is a file of rows. An image is written into the
array of its depth; the other has a hole there.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeAlias, TypeVar

import structlog
from google_crc32c import value as crc32c

from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.pictures import Facts, StoredPicture
from protofed.common import plugins
from protofed.common.config.tables import Input
from protofed.common.errors import DataError
from protofed.common.storage import files

ARRAYS: Mapping[int, str] = {8: "8.bin", 16: "16.bin"}
DecodingJob: TypeAlias = tuple[str, StoredPicture, int]  # name, picture, row
DecodingResult: TypeAlias = tuple[int, int, Facts] | str  # bits and checksum of what was written; or why it is not
T = TypeVar("T")
R = TypeVar("R")


def decode_onto(
    folder: Path, input_: Input, chunks: Sequence[Sequence[DecodingJob]], processes: int
) -> Iterator[list[DecodingResult]]:
    """Decode pictures into the arrays of a folder; the results of each chunk, in their order.

    Raises:
        DataError: something is missing that all pictures need, or a process was killed.
        OSError: the disk is full, or cannot be written.
    """
    return _in_processes(_decode_all, chunks, processes, (str(folder), input_.model_dump_json()))


def read_contents(chunks: Sequence[Sequence[StoredPicture]], processes: int) -> Iterator[list[str]]:
    """The content of each picture, for those whose content is read by foreign code.

    Raises:
        DataError: as `decode_onto`.
    """
    return _in_processes(_contents, chunks, processes, None)


def _in_processes(
    work: Callable[[Sequence[T]], list[R]],
    chunks: Sequence[Sequence[T]],
    processes: int,
    arrays: tuple[str, str] | None,
) -> Iterator[list[R]]:
    waiting = deque[Future[list[R]]]()
    # Not by fork: this process may have threads, and a GPU.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(chunks)), context, _begin, (plugins.allowed(), arrays))
    try:
        for chunk in chunks:
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that decodes images was killed, as one is that needs more memory than there is. Lower "
            "cache.processes; what was decoded is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def open_array(folder: Path, bits: int) -> int:
    """A handle on the array of this depth, which is made if it is missing."""
    return os.open(folder / ARRAYS[bits], os.O_RDWR | os.O_CREAT, files.PRIVATE)


class _DecodingProcess:
    """What a process that decodes knows."""

    input: Input
    handles: Mapping[int, int]


def _begin(allowed: frozenset[str], arrays: tuple[str, str] | None) -> None:
    """Start of a process that decodes: it ends with the one that started it, and says nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the one that started it decides
    warnings.simplefilter("ignore")  # decoders' warnings quote the files' content
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plugins.allow(allowed)  # a preparation or a dataset may be a plug-in
    if arrays is not None:
        folder, input_ = arrays
        _DecodingProcess.input = Input.model_validate_json(input_)
        _DecodingProcess.handles = {bits: open_array(Path(folder), bits) for bits in ARRAYS}


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _contents(pictures: Sequence[StoredPicture]) -> list[str]:
    return [picture.content() for picture in pictures]


def _decode_all(jobs: Sequence[DecodingJob]) -> list[DecodingResult]:
    return [_decode(picture, row) for _, picture, row in jobs]


def _decode(picture: StoredPicture, row: int) -> DecodingResult:
    try:
        pixels, facts = picture.decode(_DecodingProcess.input)
    except UnreadableImageError as error:
        return str(error)
    data, bits = pixels.tobytes(), 8 * pixels.itemsize
    written = os.pwrite(_DecodingProcess.handles[bits], data, row * len(data))
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return bits, crc32c(data), facts
