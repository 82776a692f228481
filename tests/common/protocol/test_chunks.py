"""A blob in chunks: whole or not at all, whatever order, repetition, damage, full disk or death comes in between."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import value as crc32c
from tests.conftest import Mount
from tests.support.fsyncs import watch_fsyncs

from protofed.common.codec import digest
from protofed.common.errors import (
    CodecError,
    ConflictError,
    DiskFailureError,
    IncompleteUploadError,
    OutOfSpaceError,
    StateError,
)
from protofed.common.protocol.chunks import PartialBlob, chunk_count
from protofed.common.protocol.messages import CHUNK_BYTES

DATA = random.Random(0).randbytes(2 * CHUNK_BYTES + 1000)  # three chunks  # noqa: S311
ADDRESS = digest(DATA)
TOTAL = len(DATA)


@pytest.fixture
def partial(tmp_path: Path) -> PartialBlob:
    return PartialBlob(tmp_path / "data")


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], PartialBlob]:
    """Another process, of the same file."""
    return lambda: PartialBlob(tmp_path / "data")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "whole"


@pytest.fixture
def full(partial: PartialBlob) -> PartialBlob:
    """All chunks have been sent."""
    partial.begin(TOTAL)
    send(partial, 0, 1, 2)
    return partial


def piece(index: int) -> bytes:
    return DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def send(partial: PartialBlob, *indices: int) -> None:
    for index in indices:
        partial.write(index, piece(index), crc32c(piece(index)))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fails(code: int) -> Callable[..., Any]:
    """A system call on a disk that answers so."""

    def call(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("total", "count"),
    [(0, 0), (1, 1), (CHUNK_BYTES - 1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (2 * CHUNK_BYTES, 2)],
)
def test_chunks_are_counted(total: int, count: int) -> None:
    assert chunk_count(total) == count


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 1, 0, 2, 0)])
def test_chunks_in_any_order_make_it(
    partial: PartialBlob, target: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    assert partial.begin(TOTAL) == frozenset()
    assert partial.total == TOTAL
    send(partial, *order)
    assert partial.check(ADDRESS) == DATA
    assert partial.seal(ADDRESS, target) == DATA
    assert target.read_bytes() == DATA
    assert (files(tmp_path), partial.total) == ({"whole"}, 0)
    with pytest.raises(IncompleteUploadError):
        send(partial, 0)
    assert target.read_bytes() == DATA


def test_an_empty_blob_is_sealed_and_dropping_leaves_nothing(
    partial: PartialBlob, target: Path, tmp_path: Path
) -> None:
    assert partial.begin(0) == frozenset()
    assert bytes(partial.seal(digest(b""), target)) == target.read_bytes() == b""
    partial.begin(TOTAL)
    send(partial, 0)
    for _ in range(2):
        partial.drop()
    assert files(tmp_path) == {"whole"}
    with pytest.raises(IncompleteUploadError):
        send(partial, 1)


@pytest.mark.parametrize("sent", [(), (0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_it_goes_on_where_another_ended(reopen: Callable[[], PartialBlob], target: Path, sent: tuple[int, ...]) -> None:
    first = reopen()
    first.begin(TOTAL)
    send(first, *sent)
    second = reopen()
    assert second.total == TOTAL
    assert second.begin(TOTAL) == set(sent)
    send(second, *{0, 1, 2} - set(sent))
    assert second.seal(ADDRESS, target) == DATA


@pytest.mark.parametrize("sent", [(), (0,), (0, 2), (1, 2)])
def test_a_hole_is_named_and_what_is_there_is_kept(partial: PartialBlob, target: Path, sent: tuple[int, ...]) -> None:
    """A hole that the disk fills with zeros is not taken for data."""
    partial.begin(TOTAL)
    send(partial, *sent)
    missing = sorted({0, 1, 2} - set(sent))
    for address in (ADDRESS, digest(b"".join(piece(n) if n in sent else bytes(len(piece(n))) for n in range(3)))):
        with pytest.raises(IncompleteUploadError, match=f"{len(missing)} chunks .*, the first is {missing[0]}"):
            partial.seal(address, target)
    assert not target.exists()
    assert partial.begin(TOTAL) == set(sent)


def test_another_size_begins_anew(partial: PartialBlob, target: Path) -> None:
    partial.begin(TOTAL)
    send(partial, 0, 1)
    assert partial.begin(TOTAL + 1) == frozenset()
    with pytest.raises(IncompleteUploadError, match="3 chunks are missing, the first is 0"):
        partial.seal(ADDRESS, target)


@pytest.mark.parametrize("index", [-1, 3, 2**32 - 1])
@pytest.mark.parametrize("data", [piece(0), piece(2), b""], ids=["full", "last", "empty"])
def test_an_index_out_of_range_writes_nothing(partial: PartialBlob, tmp_path: Path, index: int, data: bytes) -> None:
    partial.begin(TOTAL)
    with pytest.raises(CodecError, match="does not belong"):
        partial.write(index, data, crc32c(data))
    assert (tmp_path / "data").stat().st_size == TOTAL
    assert partial.begin(TOTAL) == frozenset()


@pytest.mark.parametrize(
    ("index", "size"),
    [(0, 0), (0, 1000), (0, CHUNK_BYTES - 1), (0, CHUNK_BYTES + 1), (2, 999), (2, 1001), (2, CHUNK_BYTES)],
)
def test_a_chunk_of_the_wrong_size_is_refused(partial: PartialBlob, index: int, size: int) -> None:
    partial.begin(TOTAL)
    data = bytes(size)
    with pytest.raises(CodecError, match="does not belong"):
        partial.write(index, data, crc32c(data))
    assert partial.begin(TOTAL) == frozenset()


def test_a_chunk_that_was_damaged_is_refused_and_can_be_sent_again(partial: PartialBlob, target: Path) -> None:
    partial.begin(TOTAL)
    damaged = bytearray(piece(1))
    damaged[7] ^= 1
    with pytest.raises(CodecError, match="chunk 1 arrived damaged"):
        partial.write(1, bytes(damaged), crc32c(piece(1)))
    assert partial.begin(TOTAL) == frozenset()
    send(partial, 0, 1, 2)
    assert partial.seal(ADDRESS, target) == DATA


@pytest.mark.parametrize("at", [0, 1, CHUNK_BYTES - 1])
def test_other_bytes_for_a_chunk_are_a_conflict_and_kept_out(
    reopen: Callable[[], PartialBlob], target: Path, at: int
) -> None:
    partial = reopen()
    partial.begin(TOTAL)
    send(partial, 0, 1, 2)
    other = bytearray(piece(1))
    other[at] ^= 1
    for one in (partial, reopen()):
        with pytest.raises(ConflictError, match="sent before with other bytes"):
            one.write(1, bytes(other), crc32c(bytes(other)))
    assert partial.seal(ADDRESS, target) == DATA


def test_another_digest_is_dropped_and_can_begin_again(full: PartialBlob, target: Path, tmp_path: Path) -> None:
    partial = full
    with pytest.raises(CodecError, match="another digest than announced"):
        partial.seal(digest(b"another"), target)
    assert files(tmp_path) == set()
    for late in (lambda: send(partial, 0), lambda: partial.seal(ADDRESS, target)):
        with pytest.raises(IncompleteUploadError, match="begin it again"):
            late()
    assert partial.begin(TOTAL) == frozenset()
    send(partial, 0, 1, 2)
    assert partial.seal(ADDRESS, target) == DATA


def test_what_a_crash_tore_is_found_by_the_digest(full: PartialBlob, target: Path, tmp_path: Path) -> None:
    with (tmp_path / "data").open("r+b") as file:  # the mark reached the disk, and half of its chunk did not
        file.seek(CHUNK_BYTES + 100)
        file.write(bytes(1000))
    with pytest.raises(CodecError):
        full.seal(ADDRESS, target)
    assert not target.exists()
    assert full.begin(TOTAL) == frozenset()


def test_what_was_never_started_is_incomplete(partial: PartialBlob, target: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        send(partial, 0)
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        partial.seal(ADDRESS, target)
    assert (files(tmp_path), partial.total, partial.last_chunk_at) == (set(), 0, 0.0)


def test_files_that_go_away_under_it_make_it_begin_again(partial: PartialBlob, target: Path, tmp_path: Path) -> None:
    for path in ("data", "data.held"):
        for late in (lambda: send(partial, 0), lambda: partial.seal(ADDRESS, target)):
            assert partial.begin(TOTAL) == frozenset()
            send(partial, 0, 1, 2)
            (tmp_path / path).unlink()
            with pytest.raises(IncompleteUploadError, match="begin it again"):
                late()


@pytest.mark.parametrize("left", ["data", "data.held"])
def test_half_of_a_beginning_is_started_again(reopen: Callable[[], PartialBlob], target: Path, left: str) -> None:
    """Killed between the two files, with a mark that belongs to nothing."""
    target.with_name(left).write_bytes(b"\1\1\1" if left == "data.held" else bytes(TOTAL))
    partial = reopen()
    assert partial.begin(TOTAL) == frozenset()
    send(partial, 0, 1, 2)
    assert partial.seal(ADDRESS, target) == DATA


def test_it_says_when_it_was_touched_last(partial: PartialBlob, tmp_path: Path) -> None:
    partial.begin(TOTAL)
    for touch in (lambda: send(partial, 1), lambda: partial.begin(TOTAL)):
        os.utime(tmp_path / "data", (1000.0, 1000.0))
        assert partial.last_chunk_at == 1000.0
        touch()
        assert partial.last_chunk_at > 1000.0


def test_chunks_may_come_on_many_threads(partial: PartialBlob, target: Path) -> None:
    partial.begin(TOTAL)
    threads = [threading.Thread(target=send, args=(partial, *order)) for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert partial.seal(ADDRESS, target) == DATA


FULL = [(errno.ENOSPC, OutOfSpaceError), (errno.EDQUOT, OutOfSpaceError), (errno.EIO, DiskFailureError)]


@pytest.mark.parametrize(("code", "kind"), FULL)
def test_no_room_leaves_nothing(
    partial: PartialBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StateError]
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", fails(code))
        with pytest.raises(kind):
            partial.begin(TOTAL)
    assert (files(tmp_path), partial.total) == (set(), 0)
    assert partial.begin(TOTAL) == frozenset()


@pytest.mark.parametrize(("code", "kind"), FULL)
def test_after_a_failed_fsync_nothing_is_linked(
    full: PartialBlob, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StateError]
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fails(code))
        with pytest.raises(kind):
            full.check(ADDRESS)
    for late in (lambda: full.check(ADDRESS), lambda: full.link(target)):
        with pytest.raises(IncompleteUploadError):  # a second fsync would say that all is well
            late()
    assert files(tmp_path) == set()


@pytest.fixture
def small_disk(tmp_path: Path, mount: Mount) -> Path:
    """A real disk of 5 MiB."""
    mount(tmp_path / "disk", "size=5m")
    return tmp_path / "disk"


def test_a_full_disk_is_out_of_space_and_the_same_again_succeeds_when_there_is_room(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(2 << 20))
    partial = PartialBlob(small_disk / "data")
    with pytest.raises(OutOfSpaceError):
        partial.begin(TOTAL)
    assert files(small_disk) == {"other"}
    (small_disk / "other").unlink()
    partial.begin(TOTAL)
    send(partial, 0, 1, 2)
    assert partial.seal(ADDRESS, small_disk / "whole") == DATA


def test_data_are_durable_and_then_their_name(
    partial: PartialBlob, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = watch_fsyncs(
        monkeypatch, lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name + f" {target.exists()}"
    )
    partial.begin(TOTAL)
    send(partial, 0, 1, 2)
    assert synced == []  # never once a chunk
    partial.check(ADDRESS)
    partial.link(target)
    assert synced == ["data False"]  # the folder, too, is the caller's: blobs that are sealed together share it


def test_what_was_linked_is_still_there_for_another_process(
    full: PartialBlob, reopen: Callable[[], PartialBlob], target: Path, tmp_path: Path
) -> None:
    """Who dies between the name and the note of it has lost nothing, and the blob is not written to."""
    assert full.check(ADDRESS) == DATA
    full.link(target)
    target.unlink()
    second = reopen()
    assert second.begin(TOTAL) == {0, 1, 2}
    second.check(ADDRESS)
    second.link(target)
    second.link(target)
    assert files(tmp_path) == {"data", "data.held", "whole"}
    second.drop()
    assert (files(tmp_path), target.read_bytes()) == ({"whole"}, DATA)


def test_what_was_not_checked_or_was_started_anew_is_not_linked(full: PartialBlob, target: Path) -> None:
    target.write_bytes(b"rotten")
    with pytest.raises(IncompleteUploadError):
        full.link(target)
    full.check(ADDRESS)
    full.link(target)
    assert target.read_bytes() == DATA, "it takes the place of what has the name"
    full.begin(TOTAL + 1)
    with pytest.raises(IncompleteUploadError):
        full.link(target)


def test_what_is_started_anew_while_it_is_read_is_not_taken_for_checked(tmp_path: Path, target: Path) -> None:
    def read(path: Path) -> memoryview:
        one.begin(TOTAL + 1)  # nobody waits for it
        return memoryview(DATA)

    one = PartialBlob(tmp_path / "data", read)
    one.begin(TOTAL)
    send(one, 0, 1, 2)
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        one.check(ADDRESS)
    with pytest.raises(IncompleteUploadError):
        one.link(target)
    assert one.total == TOTAL + 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_there_are_no_hard_links_it_is_moved_and_where_there_is_no_room_it_is_an_error(
    full: PartialBlob, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    full.check(ADDRESS)
    monkeypatch.setattr(os, "link", fails(errno.ENOSPC))
    with pytest.raises(OutOfSpaceError):
        full.link(target)
    monkeypatch.setattr(os, "link", fails(code))
    full.link(target)
    assert (files(tmp_path), target.read_bytes(), full.total) == ({"whole"}, DATA, 0)
