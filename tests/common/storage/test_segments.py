"""A journal of several files: one chain through all of them, whatever becomes of a file or of the process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.common.storage.test_journal import Disk

from protofed.common import failpoint
from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError
from protofed.common.storage.journal import (
    HalfLineError,
    Journal,
    TamperedError,
    records,
    segment_path,
    segments,
    verify,
)

BYTES = 1000  # of a segment: four records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of twenty records, with those that begin a segment."""
    journal = Journal(tmp_path / "audit.jsonl", BYTES)
    while len(segments(tmp_path / "audit.jsonl")) < 4:
        journal.append("call", text="x" * 50)
    journal.close()
    return tmp_path / "audit.jsonl"


def test_a_segment_begins_with_the_hash_that_the_one_before_ended_with(path: Path) -> None:
    names = ["audit.jsonl", "audit.000002.jsonl", "audit.000003.jsonl", "audit.000004.jsonl"]
    assert [segment.path.name for segment in segments(path)] == names
    told = list(records(path))
    assert [record.seq for record in told] == list(range(1, len(told) + 1))
    started = [record for record in told if record.event == "segment"]
    assert [dict(record.facts) for record in started] == [{"number": 2}, {"number": 3}, {"number": 4}]
    for before, record in pairwise(told):
        assert record.prev == before.hash
    for segment in segments(path):
        assert segment.path.stat().st_size < BYTES + 300
        assert segment.path.stat().st_mode & 0o077 == 0


def test_a_journal_without_a_bound_stays_one_file_and_becomes_the_first_segment(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    old = Journal(path)
    for _ in range(20):
        old.append("call", text="x" * 50)
    old.close()
    before = path.read_bytes()
    new = Journal(path, BYTES)
    new.append("call")
    new.close()
    assert path.read_bytes() == before
    assert [segment.number for segment in segments(path)] == [1, 2]
    assert verify(path) == 22


def test_the_oldest_segments_may_be_elsewhere_and_the_log_goes_on(path: Path, tmp_path: Path) -> None:
    told = list(records(path))
    (tmp_path / "archive").mkdir()
    for segment in segments(path)[:2]:
        shutil.move(segment.path, tmp_path / "archive" / segment.path.name)
    here, away = list(records(path)), list(records(tmp_path / "archive" / path.name))
    assert [*away, *here] == told
    assert here[0].prev == away[-1].hash
    journal = Journal(path, BYTES)
    journal.append("again")
    journal.close()
    assert [*records(path)][-1].seq == told[-1].seq + 1
    assert '"again"' in segments(path)[-1].path.read_text(encoding="ascii")
    assert not path.exists()


def test_a_later_segment_can_be_read_alone(path: Path) -> None:
    third = segments(path)[2]
    assert next(records(third.path)).facts == {"number": 3}
    assert 1 < verify(third.path) < verify(path)


def test_progress_counts_the_bytes_of_all_segments(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.common.storage.journal.PROGRESS_EVERY", 1)
    told: list[int] = []
    list(records(path, told.append))
    assert told == sorted(set(told))
    assert told[-1] == sum(segment.path.stat().st_size for segment in segments(path))


def cut(file: Path, at: int) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:at]))


def remove(*paths: Path) -> None:
    for file in paths:
        file.unlink()


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def of_another_log(path: Path) -> None:
    """Its third segment is the third one of another journal."""
    other = path.parent / "other" / path.name
    journal = Journal(other, BYTES)
    while len(segments(other)) < 4:
        journal.append("call", text="y" * 50)
    journal.close()
    shutil.copy(segment_path(other, 3), segment_path(path, 3))


def without_the_beginning(path: Path) -> None:
    """The first segment is in an archive, and the second has lost its first record."""
    path.unlink()
    second = segment_path(path, 2)
    second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[1:]))


TAMPERINGS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: segment_path(path, 2).unlink(), r"audit\.000002\.jsonl is missing between audit\.jsonl"),
    (lambda path: remove(segment_path(path, 2), segment_path(path, 3)), r"000002\.jsonl to audit\.000003"),
    (lambda path: cut(segment_path(path, 2), 2), r"audit\.000002\.jsonl: records \d+ to \d+ are missing"),
    (lambda path: cut(segment_path(path, 2), 0), r"audit\.000002\.jsonl: line 1"),
    (lambda path: cut(path, 1), r"audit\.jsonl: records 2 to \d+ are missing"),
    (lambda path: os.truncate(segment_path(path, 2), 600), r"audit\.000002\.jsonl: line 3: record \d+ is not"),
    (lambda path: swap(segment_path(path, 2), segment_path(path, 3)), r"audit\.000002\.jsonl: line 1"),
    (lambda path: swap(path, segment_path(path, 2)), r"audit\.jsonl: line 1: record 1 is not"),
    (of_another_log, r"audit\.000003\.jsonl: record \d+ does not follow record \d+, the last one of audit\.000002"),
    (without_the_beginning, r"audit\.000002\.jsonl: line 1"),
]


@pytest.mark.parametrize(("tamper", "named"), TAMPERINGS)
def test_a_segment_missing_cut_or_exchanged_is_named(path: Path, tamper: Callable[[Path], object], named: str) -> None:
    tamper(path)
    with pytest.raises(TamperedError, match=named.replace("one of audit", "one of .*audit")):
        verify(path)


def test_half_a_line_is_no_tampering_in_the_newest_segment_alone(path: Path) -> None:
    newest = segments(path)[-1].path
    os.truncate(newest, newest.stat().st_size - 5)
    with pytest.raises(HalfLineError):
        verify(path)
    os.truncate(newest, 0)
    with pytest.raises(StateError, match="Restore the file"):
        Journal(path, BYTES)


@pytest.mark.parametrize("point", failpoint.JOURNAL)
def test_a_kill_while_a_segment_begins_loses_nothing(tmp_path: Path, point: str) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from protofed.common import failpoint; from protofed.common.storage.journal import Journal\n"
        "failpoint.arm(os.environ[failpoint.VARIABLE])\n"
        f"journal = Journal(Path(sys.argv[1]), {BYTES})\n"
        "for number in range(100): journal.append('call', number=number); print(number, flush=True)"
    )
    path = tmp_path / "audit.jsonl"
    for _ in range(2):  # the second process is killed where it would begin the next one
        ended = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True,
            env={**os.environ, failpoint.VARIABLE: f"{point}:2=kill"},
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    acknowledged = ended.stdout.split()
    journal = Journal(path, BYTES)
    journal.append("again")
    journal.close()
    told = list(records(path))
    last = [record.facts["number"] for record in told if record.event == "call"][-len(acknowledged) :]
    assert last == [int(number) for number in acknowledged]
    assert told[-1].event == "again"
    assert [segment.number for segment in segments(path)] == list(range(1, len(segments(path)) + 1))
    assert len(segments(path)) >= 4


def test_without_room_for_a_segment_nothing_is_added_and_then_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path, 1)  # every append begins a segment
    count = verify(path)

    def full(_path: Path, _data: bytes) -> None:
        raise OutOfSpaceError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("protofed.common.storage.files.write", full)
        with pytest.raises(OutOfSpaceError):
            journal.append("call")
    assert verify(path) == count
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Disk(0, 28))
        with pytest.raises(OutOfSpaceError):
            journal.append("call")
    assert verify(path) == count + 1, "only the new segment's first record"
    journal.append("call")
    assert verify(path) == count + 3


def test_a_segment_that_somebody_else_made_is_not_written_over(path: Path) -> None:
    one, other = Journal(path, 1), Journal(path, 1)
    other.append("call")
    made = segments(path)[-1].path.read_bytes()
    with pytest.raises(DiskFailureError):
        one.append("call")
    assert segments(path)[-1].path.read_bytes() == made
