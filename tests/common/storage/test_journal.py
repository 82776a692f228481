"""The journal: durable line by line, every change of it found, and whole again after a crash at any byte."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.fsyncs import watch_fsyncs

from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError
from protofed.common.storage import journal
from protofed.common.storage.journal import HalfLineError, Journal, TamperedError, records, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of five records."""
    written = Journal(tmp_path / "kept" / "journal.jsonl")
    for number in range(5):
        written.append("verdict", site=f"site-{number}", round=number)
    written.close()
    return tmp_path / "kept" / "journal.jsonl"


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_appended_is_read_back_in_order_with_its_time(tmp_path: Path) -> None:
    kept = Journal(tmp_path / "journal.jsonl")
    facts: dict[str, Any] = {"text": "ä\n\r\u2028\ud800", "number": 0.1, "whole": 2**70, "no": False, "none": None}
    kept.append("all", **facts, listed=["a", 1, [None, 0.5]])
    kept.append("bare")
    first, second = records(tmp_path / "journal.jsonl")
    assert first.facts == {**facts, "listed": ["a", 1, [None, 0.5]]}
    assert [(r.seq, r.event) for r in (first, second)] == [(1, "all"), (2, "bare")]
    assert (first.prev, second.prev) == ("", first.hash)
    at = datetime.fromisoformat(first.at)
    assert first.at.endswith("Z")
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o077 == 0


def test_it_goes_on_where_the_last_process_ended(path: Path) -> None:
    for number in range(3):
        again = Journal(path)
        again.append("again", number=number)
        again.close()
    assert [record.event for record in records(path)] == ["verdict"] * 5 + ["again"] * 3
    assert verify(path) == 8


def test_a_line_is_durable_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Journal(path)
    seen = watch_fsyncs(monkeypatch, lambda _: path.read_bytes())
    kept.append("published")
    assert len(seen) == 1
    assert b'"published"' in seen[0]


def edited(found: list[bytes]) -> list[bytes]:
    return [line.replace(b"site-2", b"site-9") for line in found]


def resealed(found: list[bytes]) -> list[bytes]:
    """Edited by somebody who knows how hashes are made."""
    record = journal.Record(**json.loads(found[2]))
    changed = journal.Record(record.seq, record.at, "other", record.facts, record.prev).sealed()
    return [*found[:2], changed.line(), *found[3:]]


def put_in(found: list[bytes]) -> list[bytes]:
    before = json.loads(found[1])
    new = journal.Record(3, before["at"], "verdict", {}, before["hash"]).sealed()
    return [*found[:2], new.line(), *found[2:]]


def renumbered(found: list[bytes]) -> list[bytes]:
    record = journal.Record(**json.loads(found[4]))
    return [*found[:4], journal.Record(9, record.at, record.event, record.facts, record.prev).sealed().line()]


TAMPERINGS: list[tuple[Callable[[list[bytes]], list[bytes]], int]] = [
    (edited, 3),
    (resealed, 4),  # its successor no longer follows
    (put_in, 4),
    (renumbered, 5),
    (lambda found: [*found[:2], *found[3:]], 3),
    (lambda found: found[1:], 1),
    (lambda found: [found[0], found[2], found[1], *found[3:]], 2),
    (lambda found: [found[1], found[0], *found[2:]], 1),
    (lambda found: [*found[:3], found[2], *found[3:]], 4),
    (lambda found: [*found[:2], found[2].replace(b":", b": ", 1), *found[3:]], 3),  # says the same
    (lambda found: [*found[:2], b'{"seq":3,' + found[2][1:], *found[3:]], 3),  # a key twice
    (lambda found: [*found[:2], b"\n", *found[2:]], 3),
    (lambda found: [*found[:2], b"\xff\x00\n", *found[2:]], 3),
    (lambda found: [*found[:2], found[2][:50] + b"\n", *found[3:]], 3),
    (lambda found: [*found, b"x" * (journal.LONGEST + 1)], 6),  # does not end
]


@pytest.mark.parametrize(("tamper", "named"), TAMPERINGS)
def test_the_first_bad_record_is_named(path: Path, tamper: Callable[[list[bytes]], list[bytes]], named: int) -> None:
    path.write_bytes(b"".join(tamper(lines(path))))
    with pytest.raises(TamperedError, match=rf"line {named}: record {named}\b"):
        verify(path)


@pytest.mark.parametrize("key", ["seq", "at", "event", "facts", "prev", "hash"])
def test_no_field_can_be_changed_nor_left_out(path: Path, key: str) -> None:
    found = lines(path)
    for table in (json.loads(found[2]) | {key: "x"}, {k: v for k, v in json.loads(found[2]).items() if k != key}):
        path.write_bytes(b"".join([*found[:2], json.dumps(table).encode() + b"\n", *found[3:]]))
        with pytest.raises(StateError, match="record 3 "):
            verify(path)


def test_a_line_torn_at_any_byte_is_cut_off_and_told(path: Path) -> None:
    found = lines(path)
    whole = b"".join(found[:4])
    for kept in range(len(found[4]) + 1):
        path.write_bytes(whole + found[4][:kept])
        Journal(path).close()
        told = list(records(path))
        assert [r.event for r in told[:4]] == ["verdict"] * 4
        match kept:
            case 0:
                assert len(told) == 4
            case full if full == len(found[4]):
                assert [r.event for r in told[4:]] == ["verdict"]
            case _:
                assert [(r.event, dict(r.facts)) for r in told[4:]] == [("torn", {"bytes": kept})]


@pytest.mark.parametrize("half", [b"{", b"\0" * 5000, b"\xff\n", b"a\rb", b'{"seq": 1}\n'])
def test_half_a_line_is_cut_off_whatever_it_is_and_even_if_it_is_the_first(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(half)
    Journal(path).close()
    (only,) = records(path)
    assert (only.event, dict(only.facts)) == ("torn", {"bytes": len(half)})


@pytest.mark.parametrize("tamper", [lambda last: last.replace(b"site-4", b"site-1"), lambda last: last + b"{"])
def test_a_last_line_that_was_changed_is_no_torn_one(path: Path, tamper: Callable[[bytes], bytes]) -> None:
    found = lines(path)
    path.write_bytes(b"".join([*found[:3], tamper(found[3].replace(b"site-3", b"site-1"))]))
    before = path.read_bytes()
    with pytest.raises(StateError, match="last line"):
        Journal(path)
    assert path.read_bytes() == before


class Disk:
    """Takes `room` bytes, then fails."""

    def __init__(self, room: int, number: int) -> None:
        self.room, self.number, self.write = room, number, os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(self.number, os.strerror(self.number))
        written = self.write(file, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 100])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OutOfSpaceError), (errno.EIO, DiskFailureError)])
def test_a_write_that_fails_adds_nothing_and_then_succeeds(
    path: Path, room: int, number: int, kind: type[StateError]
) -> None:
    kept, before = Journal(path), path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", Disk(room, number))
        with pytest.raises(kind, match=os.strerror(number)):
            kept.append("verdict", site="late")
    assert path.read_bytes() == before
    kept.append("verdict", site="late")
    assert verify(path) == 6


@pytest.mark.parametrize("kind", [OSError(errno.EIO, "it is broken"), KeyboardInterrupt()])
def test_an_fsync_that_fails_adds_nothing(path: Path, kind: BaseException) -> None:
    kept, before, real, calls = Journal(path), path.read_bytes(), os.fsync, []

    def fail_once(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise kind
        real(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail_once)
        with pytest.raises(DiskFailureError if isinstance(kind, OSError) else type(kind)):
            kept.append("verdict")
    assert path.read_bytes() == before
    kept.append("verdict")
    assert verify(path) == 6


def test_when_not_even_the_half_line_can_be_cut_off_nothing_more_is_added(path: Path) -> None:
    kept = Journal(path)

    def broken(file: int, size: int) -> None:
        raise OSError(errno.EIO, "it is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", Disk(20, errno.ENOSPC))
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(DiskFailureError, match="half a line"):
            kept.append("verdict")
    half = path.read_bytes()
    with pytest.raises(DiskFailureError, match="Start this process again"):
        kept.append("verdict")
    assert path.read_bytes() == half
    Journal(path).close()
    assert [record.event for record in records(path)][5:] == ["torn"]


def test_a_second_writer_is_noticed(path: Path) -> None:
    one, other = Journal(path), Journal(path)
    other.append("verdict")
    with pytest.raises(DiskFailureError, match="was changed"):
        one.append("verdict")
    assert verify(path) == 6


@pytest.mark.parametrize("fact", [float("nan"), b"bytes", {1, 2}, "x" * journal.LONGEST])
def test_what_json_does_not_have_is_refused_and_keeps_all_out(path: Path, fact: Any) -> None:
    kept, before = Journal(path), path.read_bytes()
    with pytest.raises((ValueError, TypeError)):
        kept.append("verdict", fact=fact)
    with pytest.raises((ValueError, TypeError)):
        kept.append_all([*three(), ("bad", {"fact": fact})])
    assert path.read_bytes() == before
    kept.append("verdict")
    assert verify(path) == 6


def test_a_line_is_bounded(path: Path) -> None:
    kept = Journal(path)
    with pytest.raises(ValueError, match="expected at most"):
        kept.append("verdict", text="x" * journal.LONGEST)
    kept.append("verdict", text="x" * (journal.LONGEST - 1000))
    kept.close()
    again = Journal(path)
    again.append("verdict")
    assert verify(path) == 7


def test_threads_share_it(path: Path) -> None:
    kept = Journal(path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: kept.append("verdict", number=number), range(100)))
    assert {record.facts["number"] for record in list(records(path))[5:]} == set(range(100))


def test_reading_holds_one_line_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    for _ in range(40):
        kept.append("verdict", text="x" * 100_000)
    tracemalloc.start()
    try:
        assert verify(path) == 40
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 < path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["folder", "file/journal.jsonl"])
def test_a_file_that_cannot_be_had_is_an_error_of_ours(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailureError):
        Journal(tmp_path / path)
    with pytest.raises(StateError, match="expected a journal"):
        verify(tmp_path / path)


def three(number: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return [("call", {"number": number + more}) for more in range(3)]


def test_several_lines_share_one_fsync_and_follow_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Journal(path)
    synced = watch_fsyncs(monkeypatch, lambda _: path.read_bytes())
    kept.append_all(three())
    assert len(synced) == 1
    assert synced[0].count(b'"call"') == 3
    kept.append("one more")
    kept.append_all([])
    assert len(synced) == 2, "nothing to write needs no fsync"
    told = list(records(path))
    expected = [*(("call", number) for number in range(3)), ("one more", None)]
    assert [(r.event, r.facts.get("number")) for r in told[5:]] == expected


@pytest.mark.parametrize("room", [0, 1, 300, 500])
def test_of_several_lines_that_cannot_all_be_written_none_is(path: Path, room: int) -> None:
    kept, before = Journal(path), path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", Disk(room, errno.ENOSPC))
        with pytest.raises(OutOfSpaceError):
            kept.append_all(three())
    assert path.read_bytes() == before
    kept.append_all(three())
    assert verify(path) == 8


def test_several_lines_torn_at_any_byte_leave_the_first_ones(path: Path) -> None:
    kept, before = Journal(path), path.read_bytes()
    kept.append_all(three())
    kept.close()
    added = path.read_bytes()[len(before) :]
    for cut in range(0, len(added), 7):
        path.write_bytes(before + added[:cut])
        Journal(path).close()
        whole = added[:cut].count(b"\n")
        torn = cut - (added[:cut].rfind(b"\n") + 1)
        assert [r.event for r in list(records(path))[5:]] == ["call"] * whole + ["torn"] * bool(torn)


@pytest.mark.parametrize("left", [1, 9, 100])
def test_half_a_line_at_the_end_is_no_tampering(path: Path, left: int) -> None:
    found = lines(path)
    path.write_bytes(b"".join(found[:4]) + found[4][:left])
    told: list[journal.Record] = []
    with pytest.raises(HalfLineError, match=rf"line 5: only {left} bytes of record 5\. Its writer .* was killed"):
        told.extend(records(path))
    assert [record.seq for record in told] == [1, 2, 3, 4], "what is whole is good"


def test_a_flipped_bit_before_the_last_line_is_found_at_the_start(path: Path) -> None:
    written = bytearray(path.read_bytes())
    written[written.index(b"site-2") + 5] ^= 1
    path.write_bytes(written)
    with pytest.raises(TamperedError, match="record 3 is not what was written there"):
        Journal(path)
    assert path.read_bytes() == bytes(written)


def test_a_file_that_is_moved_or_replaced_takes_no_line(path: Path) -> None:
    kept = Journal(path)
    path.rename(path.with_name("moved"))
    for there in (False, True):
        if there:
            path.write_bytes(path.with_name("moved").read_bytes())
        with pytest.raises(DiskFailureError, match="moved, removed or replaced"):
            kept.append("more")
        with pytest.raises(DiskFailureError, match="moved, removed or replaced"):
            kept.check()
    assert verify(path.with_name("moved")) == 5
