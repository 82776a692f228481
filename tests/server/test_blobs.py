"""One suite over both stores of blobs, and the uploads of the one on disk."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google_crc32c import value as crc32c

from protofed.common.codec import Digest, digest
from protofed.common.errors import CodecError, Incomplete, StateError
from protofed.common.task import CHUNK_BYTES
from protofed.server.blobs import Blobs, FolderBlobs, MemoryBlobs, chunks

DATA = random.Random(0).randbytes(2 * CHUNK_BYTES + 1000)  # three chunks  # noqa: S311
ADDRESS = digest(DATA)
TOTAL = len(DATA)


@pytest.fixture(params=["memory", "folder"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else FolderBlobs(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path)


def piece(index: int) -> bytes:
    return DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def send(folder: FolderBlobs, *indices: int, upload: str = "u") -> None:
    for index in indices:
        folder.write(upload, index, piece(index), crc32c(piece(index)))


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk on which no file grows larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Both stores


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 1000, DATA], ids=["empty", "byte", "zeros", "large"])
def test_what_was_put_is_got_at_its_digest(blobs: Blobs, data: bytes) -> None:
    assert blobs.put(data) == digest(data)
    assert blobs.get(digest(data)) == data


def test_putting_twice_is_putting_once(blobs: Blobs) -> None:
    assert blobs.put(b"x") == blobs.put(b"x")
    blobs.discard(digest(b"x"))
    with pytest.raises(StateError):
        blobs.get(digest(b"x"))


def test_what_is_not_there_is_a_state_error_that_names_it(blobs: Blobs) -> None:
    with pytest.raises(StateError, match=digest(b"x")):
        blobs.get(digest(b"x"))


def test_discarding_leaves_the_others_and_may_be_repeated(blobs: Blobs) -> None:
    left, right = blobs.put(b"left"), blobs.put(b"right")
    for _ in range(2):
        blobs.discard(left)
    assert blobs.get(right) == b"right"
    with pytest.raises(StateError):
        blobs.get(left)
    assert blobs.put(b"left") == left
    assert blobs.get(left) == b"left"


# The folder


def test_a_blob_outlives_its_process(tmp_path: Path) -> None:
    address = FolderBlobs(tmp_path).put(DATA)
    assert FolderBlobs(tmp_path).get(address) == DATA


def flipped(data: bytearray) -> None:
    data[-1] ^= 1


def emptied(data: bytearray) -> None:
    data.clear()


def lengthened(data: bytearray) -> None:
    data.append(0)


@pytest.mark.parametrize("damage", [flipped, emptied, lengthened])
def test_a_blob_that_changed_on_disk_is_never_given(
    folder: FolderBlobs, tmp_path: Path, damage: Callable[[bytearray], None]
) -> None:
    address = folder.put(b"data")
    data = bytearray(b"data")
    damage(data)
    (tmp_path / address).write_bytes(data)
    with pytest.raises(StateError, match=f"{address} has changed on disk"):
        folder.get(address)


def test_temporaries_of_a_killed_process_are_swept_and_blobs_are_not(tmp_path: Path) -> None:
    address = FolderBlobs(tmp_path).put(b"data")
    (tmp_path / ".tmp-half-written").write_bytes(b"da")
    assert FolderBlobs(tmp_path).get(address) == b"data"
    assert files(tmp_path) == {address}


def test_chunks_of_a_blob_join_to_the_blob(folder: FolderBlobs) -> None:
    folder.put(DATA)
    parts = [folder.chunk(ADDRESS, index) for index in range(5)]
    assert b"".join(parts) == DATA
    assert [len(part) for part in parts] == [CHUNK_BYTES, CHUNK_BYTES, 1000, 0, 0]
    assert folder.chunk(ADDRESS, 2**32 - 1) == b""


def test_a_chunk_of_no_blob_is_a_state_error(folder: FolderBlobs) -> None:
    with pytest.raises(StateError, match=ADDRESS):
        folder.chunk(ADDRESS, 0)


@pytest.mark.parametrize(
    ("total", "count"),
    [(0, 0), (1, 1), (CHUNK_BYTES - 1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (2 * CHUNK_BYTES, 2)],
)
def test_chunks_are_counted(total: int, count: int) -> None:
    assert chunks(total) == count


# Uploads


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 1, 0, 2, 0)])
def test_chunks_in_any_order_and_twice_make_the_blob(
    folder: FolderBlobs, tmp_path: Path, order: tuple[int, ...]
) -> None:
    assert folder.begin("u", TOTAL) == frozenset()
    send(folder, *order)
    assert folder.seal("u", ADDRESS) == DATA
    assert folder.get(ADDRESS) == DATA
    assert files(tmp_path) == {ADDRESS}


def test_sealing_again_gives_the_data_again(folder: FolderBlobs) -> None:
    folder.begin("u", TOTAL)
    send(folder, 0, 1, 2)
    assert folder.seal("u", ADDRESS) == folder.seal("u", ADDRESS) == DATA


def test_an_upload_goes_on_where_another_process_left_it(tmp_path: Path) -> None:
    first = FolderBlobs(tmp_path)
    first.begin("u", TOTAL)
    send(first, 2, 0)
    second = FolderBlobs(tmp_path)
    assert second.begin("u", TOTAL) == {0, 2}
    send(second, 1)
    assert second.seal("u", ADDRESS) == DATA


def test_an_upload_of_another_size_begins_anew(folder: FolderBlobs) -> None:
    folder.begin("u", TOTAL)
    send(folder, 0, 1)
    assert folder.begin("u", TOTAL + 1) == frozenset()
    with pytest.raises(Incomplete, match="3 chunks are missing, the first is 0"):
        folder.seal("u", ADDRESS)


@pytest.mark.parametrize("sent", [(), (0,), (0, 2), (1, 2)])
def test_an_upload_with_a_hole_is_no_blob_and_keeps_what_it_has(
    folder: FolderBlobs, tmp_path: Path, sent: tuple[int, ...]
) -> None:
    folder.begin("u", TOTAL)
    send(folder, *sent)
    missing = sorted({0, 1, 2} - set(sent))
    with pytest.raises(Incomplete, match=f"{len(missing)} chunks are missing, the first is {missing[0]}"):
        folder.seal("u", ADDRESS)
    assert not (tmp_path / ADDRESS).exists()
    assert folder.begin("u", TOTAL) == set(sent)


def test_a_hole_filled_with_zeros_by_the_disk_is_not_taken_for_data(folder: FolderBlobs) -> None:
    zeros = bytes(CHUNK_BYTES + 5)
    folder.begin("z", len(zeros))
    with pytest.raises(Incomplete):
        folder.seal("z", digest(zeros))


@pytest.mark.parametrize("index", [-1, 3, 4, 2**31, 2**32 - 1])
def test_an_index_out_of_range_is_refused_and_writes_nothing(folder: FolderBlobs, tmp_path: Path, index: int) -> None:
    folder.begin("u", TOTAL)
    for data in (piece(0), piece(2), b""):
        with pytest.raises(CodecError, match="does not belong"):
            folder.write("u", index, data, crc32c(data))
    assert (tmp_path / "uploads" / "u").stat().st_size == TOTAL
    assert folder.begin("u", TOTAL) == frozenset()


@pytest.mark.parametrize(
    ("index", "size"),
    [(0, 0), (0, 1000), (0, CHUNK_BYTES - 1), (0, CHUNK_BYTES + 1), (2, 999), (2, 1001), (2, CHUNK_BYTES)],
)
def test_a_chunk_of_the_wrong_size_is_refused(folder: FolderBlobs, index: int, size: int) -> None:
    folder.begin("u", TOTAL)
    data = bytes(size)
    with pytest.raises(CodecError, match="does not belong"):
        folder.write("u", index, data, crc32c(data))
    assert folder.begin("u", TOTAL) == frozenset()


def test_a_chunk_that_was_damaged_on_its_way_is_refused_and_can_be_sent_again(folder: FolderBlobs) -> None:
    folder.begin("u", TOTAL)
    damaged = bytearray(piece(1))
    damaged[7] ^= 1
    with pytest.raises(CodecError, match="chunk 1 arrived damaged"):
        folder.write("u", 1, bytes(damaged), crc32c(piece(1)))
    assert folder.begin("u", TOTAL) == frozenset()
    send(folder, 0, 1, 2)
    assert folder.seal("u", ADDRESS) == DATA


def test_an_upload_of_another_digest_is_dropped(folder: FolderBlobs, tmp_path: Path) -> None:
    folder.begin("u", TOTAL)
    send(folder, 0, 1, 2)
    with pytest.raises(CodecError, match="digest is not the one"):
        folder.seal("u", digest(b"another"))
    assert files(tmp_path) == set()
    with pytest.raises(Incomplete, match="begin it again"):
        send(folder, 0)
    with pytest.raises(Incomplete, match="begin it again"):
        folder.seal("u", ADDRESS)
    assert folder.begin("u", TOTAL) == frozenset()


def test_what_was_never_begun_is_incomplete(folder: FolderBlobs, tmp_path: Path) -> None:
    with pytest.raises(Incomplete):
        send(folder, 0)
    with pytest.raises(Incomplete):
        folder.seal("u", ADDRESS)
    assert files(tmp_path) == set()


def test_two_uploads_at_once_do_not_mix(folder: FolderBlobs) -> None:
    other = bytes(reversed(DATA))
    for upload in ("ann", "bob"):
        folder.begin(upload, TOTAL)
    for index in range(3):
        send(folder, index, upload="ann")
        data = other[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        folder.write("bob", index, data, crc32c(data))
    assert folder.seal("ann", ADDRESS) == DATA
    assert folder.seal("bob", digest(other)) == other


def test_two_sites_may_send_the_same_bytes(folder: FolderBlobs, tmp_path: Path) -> None:
    for upload in ("ann", "bob"):
        folder.begin(upload, TOTAL)
        send(folder, 0, 1, 2, upload=upload)
        assert folder.seal(upload, ADDRESS) == DATA
    assert files(tmp_path) == {ADDRESS}


def test_a_dropped_upload_leaves_nothing(folder: FolderBlobs, tmp_path: Path) -> None:
    folder.begin("u", TOTAL)
    send(folder, 0)
    for _ in range(2):
        folder.drop("u")
    assert files(tmp_path) == set()


def test_an_upload_that_rotted_before_it_was_sealed_is_no_blob(tmp_path: Path) -> None:
    folder = FolderBlobs(tmp_path)
    folder.begin("u", TOTAL)
    send(folder, 0, 1, 2)
    with (tmp_path / "uploads" / "u").open("r+b") as file:
        file.write(b"rotten")
    with pytest.raises(CodecError):
        folder.seal("u", ADDRESS)
    assert not (tmp_path / ADDRESS).exists()


def test_an_upload_for_which_there_is_no_room_is_a_state_error_and_leaves_nothing(
    folder: FolderBlobs, tmp_path: Path
) -> None:
    address = folder.put(b"kept")
    with largest_file(1 << 20), pytest.raises(StateError, match="no room for an upload"):
        folder.begin("u", TOTAL)
    with pytest.raises(Incomplete):
        send(folder, 0)
    assert files(tmp_path) == {address}


def test_a_blob_for_which_there_is_no_room_is_a_state_error_and_leaves_nothing(
    folder: FolderBlobs, tmp_path: Path
) -> None:
    with largest_file(1 << 20), pytest.raises(StateError, match="free space"):
        folder.put(DATA)
    assert files(tmp_path) == set()
    assert folder.put(DATA) == ADDRESS


def test_an_interrupted_beginning_is_begun_again(folder: FolderBlobs, tmp_path: Path) -> None:
    (tmp_path / "uploads" / "u.held").write_bytes(b"\1\1\1")  # killed before the data file was there
    assert folder.begin("u", TOTAL) == frozenset()
    (tmp_path / "uploads" / "u.held").unlink()  # killed while it was dropped
    assert folder.begin("u", TOTAL) == frozenset()
    send(folder, 0, 1, 2)
    assert folder.seal("u", Digest(ADDRESS)) == DATA
