"""Unfinished uploads: whose they are outlives the server, none is without bound, and those that nobody needs go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google_crc32c import value as crc32c

from protofed.common.codec import digest
from protofed.common.errors import IncompleteUploadError, OutOfSpaceError, OverQuotaError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.server.storage.blobs import Quota, Upload, Uploads

TOTAL = CHUNK_BYTES + 5
SMALL = Quota(uploads=2, total=3 * TOTAL)


def upload(site: str = "ann", task_id: str = "n1", number: int = 0) -> Upload:
    return Upload(site, task_id, digest(bytes([number])))


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], Uploads]:
    """Another server on the same folder."""
    return lambda: Uploads(tmp_path, SMALL)


@pytest.fixture
def uploads(reopen: Callable[[], Uploads]) -> Uploads:
    return reopen()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def send(uploads: Uploads, which: Upload, index: int = 0) -> None:
    data = bytes(min(CHUNK_BYTES, TOTAL - index * CHUNK_BYTES))
    uploads.write(which, index, data, crc32c(data))


def test_marks_without_data_go_and_files_that_are_no_upload_stay(reopen: Callable[[], Uploads], tmp_path: Path) -> None:
    reopen().begin(upload(), TOTAL)
    for name in ("n1-0123456789abcdef.held", "a.b.c", "x", f"{upload(number=1)}.held"):
        (tmp_path / name).write_bytes(b"x")
    reopen()
    assert files(tmp_path) == {str(upload()), f"{upload()}.held", "n1-0123456789abcdef.held", "a.b.c", "x"}


def test_what_was_never_started_is_incomplete(uploads: Uploads, tmp_path: Path) -> None:
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        send(uploads, upload())
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        uploads.check(upload())
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        uploads.link(upload(), tmp_path / "target")
    assert files(tmp_path) == set()


def test_two_uploads_at_once_do_not_mix(uploads: Uploads, tmp_path: Path) -> None:
    for number, site in enumerate(("ann", "bob")):
        data = bytes([number]) * 1000
        uploads.begin(Upload(site, "n", digest(data)), len(data))
    for number, site in enumerate(("ann", "bob")):
        data = bytes([number]) * 1000
        uploads.write(Upload(site, "n", digest(data)), 0, data, crc32c(data))
    for number, site in enumerate(("ann", "bob")):
        data = bytes([number]) * 1000
        assert uploads.check(Upload(site, "n", digest(data))) == data


# Quotas


def test_one_site_has_only_so_many_also_after_a_restart_and_the_others_are_not_affected(
    reopen: Callable[[], Uploads], tmp_path: Path
) -> None:
    earlier = reopen()
    earlier.begin(upload(number=0), TOTAL)
    earlier.begin(upload(number=1), TOTAL)
    send(earlier, upload(number=0))
    uploads, before = reopen(), files(tmp_path)
    assert uploads.begin(upload(number=0), TOTAL) == {0}
    with pytest.raises(OverQuotaError):
        uploads.begin(upload(number=2), 1)
    assert files(tmp_path) == before
    assert uploads.begin(upload(number=1), TOTAL) == frozenset()  # which it has
    uploads.begin(upload("bob"), TOTAL)
    uploads.drop(upload(number=0))
    uploads.begin(upload(number=2), TOTAL)


def test_one_site_announces_only_so_many_bytes(uploads: Uploads, tmp_path: Path) -> None:
    for total in (3 * TOTAL + 1, 100 * TOTAL, 2**62):
        with pytest.raises(OverQuotaError, match=rf"announces {total} bytes, at most {3 * TOTAL} .*send less"):
            uploads.begin(upload(), total)
    assert files(tmp_path) == set()
    uploads.begin(upload(), 2 * TOTAL)
    with pytest.raises(OverQuotaError):
        uploads.begin(upload(number=1), TOTAL + 1)
    with pytest.raises(OverQuotaError):
        uploads.begin(upload(), 3 * TOTAL + 1)  # the same again, grown
    uploads.begin(upload(number=1), TOTAL)


@pytest.mark.parametrize("finish", ["move", "drop", "drop of", "collect"])
def test_what_is_finished_counts_no_more(
    uploads: Uploads, tmp_path: Path, finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.common.storage.files.link", lambda *_: False)  # as without hard links
    data = b"data"
    for number in range(2 * SMALL.uploads):
        one = Upload("ann", f"n{number}", digest(data))
        uploads.begin(one, len(data))
        uploads.write(one, 0, data, crc32c(data))
        match finish:
            case "move":
                uploads.check(one)
                uploads.link(one, tmp_path / "sealed")
            case "drop":
                uploads.drop(one)
            case "drop of":
                uploads.drop_all("ann", f"n{number}")
            case _:
                uploads.collect(0.0, time.time() + 1)
        assert one not in uploads


def test_no_room_leaves_nothing_and_counts_nothing(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        for number in range(2 * SMALL.uploads):
            with pytest.raises(OutOfSpaceError):
                uploads.begin(upload(number=number), TOTAL)
    assert files(tmp_path) == set()
    uploads.begin(upload(), TOTAL)


# What goes


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_invitations_uploads_go_and_all_but_the_open_ones(uploads: Uploads, closed: bool) -> None:
    kept = [upload("ann", "n2"), upload("bob", "n1")]
    for one in (upload("ann", "n1"), *kept):
        uploads.begin(one, TOTAL)
    assert (uploads.drop_all("ann", "n1") if closed else uploads.drop_but("ann", "n2")) == 1
    assert [upload("ann", "n1") in uploads, *(one in uploads for one in kept)] == [False, True, True]


def test_what_was_not_touched_for_long_is_collected(
    reopen: Callable[[], Uploads], uploads: Uploads, tmp_path: Path
) -> None:
    now = 1_000_000.0
    for site, age in (("ann", 3601.0), ("bob", 3599.0), ("eve", -1e6)):
        uploads.begin(upload(site), TOTAL)
        os.utime(tmp_path / str(upload(site)), (now - age, now - age))
    after = reopen()  # the age outlives the server
    assert after.collect(3600.0, now) == 1
    assert [upload(site) in after for site in ("ann", "bob", "eve")] == [False, True, True]
    assert len(files(tmp_path)) == 4
    assert after.collect(3600.0, now) == 0
    with pytest.raises(IncompleteUploadError, match="begin it again"):
        send(after, upload("ann"))
