"""One suite over both stores of blobs, and the uploads of the one on disk."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from google_crc32c import value as crc32c
from tests.support.fsyncs import watch_fsyncs

from protofed.common.codec import Buffer, digest
from protofed.common.errors import CodecError, DiskFailureError, IncompleteUploadError, OutOfSpaceError, StateError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.server.storage.blobs import Blobs, FolderBlobs, MemoryBlobs, Upload

DATA = random.Random(0).randbytes(2 * CHUNK_BYTES + 1000)  # three chunks  # noqa: S311
ADDRESS = digest(DATA)
TOTAL = len(DATA)
ANN, BOB = Upload("ann", "n1", ADDRESS), Upload("bob", "n2", ADDRESS)


@pytest.fixture(params=["memory", "folder"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else FolderBlobs(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path)


def send(folder: FolderBlobs, upload: Upload, *indices: int, begin: bool = False) -> None:
    """All chunks, if none is named."""
    folder.uploads.begin(upload, TOTAL)
    for index in indices or (() if begin else (0, 1, 2)):
        data = DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        folder.uploads.write(upload, index, data, crc32c(data))


def sealed(folder: FolderBlobs, upload: Upload) -> memoryview:
    """The data of an upload that is a blob from here on."""
    data = folder.check(upload)
    folder.seal(upload)
    return data


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# Both stores


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 1000, DATA], ids=["empty", "byte", "zeros", "large"])
def test_what_was_put_is_got_at_its_digest(blobs: Blobs, data: bytes) -> None:
    assert blobs.put(data) == digest(data)
    assert blobs.get(digest(data)) == data


def test_discarding_leaves_the_others_and_may_be_repeated(blobs: Blobs) -> None:
    left, right = blobs.put(b"left"), blobs.put(b"right")
    assert blobs.put(b"left") == left  # which is putting it once
    for _ in range(2):
        blobs.discard(left)
    assert blobs.get(right) == b"right"
    with pytest.raises(StateError, match=left):
        blobs.get(left)
    assert blobs.put(b"left") == left
    assert blobs.get(left) == b"left"


# The folder


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
    (tmp_path / ".tmp-half-0123abcd").write_bytes(b"da")
    assert FolderBlobs(tmp_path).get(address) == b"data"
    assert files(tmp_path) == {address}


def test_chunks_of_a_blob_join_to_the_blob(folder: FolderBlobs) -> None:
    folder.put(DATA)
    parts = [folder.chunk(ADDRESS, index) for index in range(5)]
    assert b"".join(parts) == DATA
    assert [len(part) for part in parts] == [CHUNK_BYTES, CHUNK_BYTES, 1000, 0, 0]
    assert folder.chunk(ADDRESS, 2**32 - 1) == b""
    folder.discard(ADDRESS)
    with pytest.raises(StateError, match=ADDRESS):
        folder.chunk(ADDRESS, 0)


def test_a_view_is_checked_and_outlives_what_is_removed(folder: FolderBlobs, tmp_path: Path) -> None:
    address = folder.put(DATA)
    view = folder.view(address)
    folder.uncache(address)
    assert folder.view(address) == view == DATA
    folder.discard(address)
    assert view == DATA
    folder.uncache(address)  # as quietly as it is discarded again
    with pytest.raises(StateError):
        folder.view(address)
    (tmp_path / address).write_bytes(b"rotten")
    with pytest.raises(StateError, match="changed on disk"):
        folder.view(address)
    assert bytes(folder.view(folder.put(b""))) == b""


# Uploads that become blobs


def test_the_names_of_sealed_blobs_are_made_durable_with_one_sync(
    folder: FolderBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = watch_fsyncs(monkeypatch, lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    for upload in (ANN, BOB):
        send(folder, upload)
        sealed(folder, upload)
    assert len(synced) == 2
    assert str(tmp_path) not in synced
    folder.sync()
    assert synced[2:] == [str(tmp_path)]


def test_a_folder_that_cannot_be_synced_is_an_error(folder: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    send(folder, ANN)
    sealed(folder, ANN)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fails)
        with pytest.raises(DiskFailureError):
            folder.sync()
    folder.sync()


def test_an_upload_can_be_sealed_again_also_after_a_restart_until_it_is_dropped(
    folder: FolderBlobs, tmp_path: Path
) -> None:
    send(folder, ANN)
    assert sealed(folder, ANN) == sealed(folder, ANN) == DATA
    folder.discard(ADDRESS)
    again = FolderBlobs(tmp_path)
    assert again.uploads.begin(ANN, TOTAL) == {0, 1, 2}
    assert sealed(again, ANN) == again.get(ADDRESS) == DATA
    again.uploads.drop(ANN)
    with pytest.raises(IncompleteUploadError):
        sealed(again, ANN)
    assert again.get(ADDRESS) == DATA


@pytest.mark.parametrize("sent", [(), (0,), (0, 2)])
def test_an_upload_with_a_hole_is_no_blob(folder: FolderBlobs, sent: tuple[int, ...]) -> None:
    send(folder, ANN, *sent, begin=True)
    with pytest.raises(IncompleteUploadError, match=f"{3 - len(sent)} chunks are missing"):
        sealed(folder, ANN)
    assert folder.damaged(ADDRESS)


def test_an_upload_becomes_the_blob_of_its_digest_and_nobody_hands_in_what_another_site_sent(
    folder: FolderBlobs, tmp_path: Path
) -> None:
    send(folder, ANN)
    with pytest.raises(IncompleteUploadError):  # it was not checked
        folder.seal(ANN)
    assert folder.damaged(ADDRESS)
    (tmp_path / ADDRESS).write_bytes(b"rotten")  # which a sound upload heals
    assert sealed(folder, ANN) == folder.get(ADDRESS) == DATA
    folder.uploads.begin(BOB, TOTAL)
    with pytest.raises(IncompleteUploadError, match="3 chunks are missing"):
        sealed(folder, BOB)
    send(folder, BOB)
    assert sealed(folder, BOB) == DATA
    for upload in (ANN, BOB):
        folder.uploads.drop(upload)
    assert files(tmp_path) == {ADDRESS}


def test_an_upload_that_rotted_before_it_was_sealed_is_no_blob(folder: FolderBlobs, tmp_path: Path) -> None:
    send(folder, ANN)
    with (tmp_path / "uploads" / str(ANN)).open("r+b") as file:
        file.write(b"rotten")
    with pytest.raises(CodecError):
        sealed(folder, ANN)
    assert files(tmp_path) == set()


def test_putting_heals_a_blob_that_changed_on_disk(folder: FolderBlobs, tmp_path: Path) -> None:
    address = folder.put(b"data")
    assert not folder.damaged(address)
    (tmp_path / address).write_bytes(b"date")
    assert folder.damaged(address)
    with structlog.testing.capture_logs() as logs:
        assert folder.put(b"data") == folder.put(b"data") == address
        folder.put(b"new")
    assert [line["digest"] for line in logs] == [address]
    assert folder.repairs == 1
    assert folder.get(address) == b"data"


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, OutOfSpaceError), (errno.EIO, DiskFailureError)])
def test_a_blob_that_cannot_be_written_leaves_nothing(
    folder: FolderBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StateError]
) -> None:
    def fails(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fails)
        with pytest.raises(kind):
            folder.put(DATA)
    assert files(tmp_path) == set()
    assert folder.put(DATA) == ADDRESS


def test_a_blob_that_cannot_be_opened_now_is_not_taken_for_a_damaged_one(
    folder: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put(DATA)

    def fails(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as limits:
        limits.setattr(Path, "read_bytes", fails)
        with pytest.raises(OutOfSpaceError, match="cannot be read now: Too many open files"):
            folder.get(ADDRESS)
    assert folder.get(ADDRESS) == DATA


def test_a_blob_that_cannot_be_mapped_now_is_not_taken_for_a_damaged_one(
    folder: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    send(folder, ANN)
    folder.put(DATA)
    looks: list[Callable[[], Buffer]] = [lambda: sealed(folder, ANN), lambda: folder.view(ADDRESS)]
    for look in looks:
        with monkeypatch.context() as limits:
            limits.setattr(mmap, "mmap", fails)
            with pytest.raises(OutOfSpaceError, match="Cannot allocate memory"):
                look()
        assert look() == DATA


def test_on_a_disk_of_another_machine_nothing_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(path: Path) -> memoryview:
        raise AssertionError(f"{path.name} is mapped")

    monkeypatch.setattr("protofed.common.storage.files.mapped", mapped)
    monkeypatch.setattr("protofed.common.storage.files.find_network_type", lambda _: "nfs4")
    folder = FolderBlobs(tmp_path)
    send(folder, ANN)
    assert sealed(folder, ANN) == folder.view(ADDRESS) == DATA
