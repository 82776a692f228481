"""`protofed audit archive`: what is moved and compressed is still one chain, and no kill makes a gap in it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.audit.test_rotation import ROUNDS, rounds, send

from protofed.common.errors import StateError
from protofed.common.storage import files
from protofed.common.storage.journal import Journal, records, segments
from protofed.deploy.audit import archive as archives
from protofed.deploy.audit.reader import handed_in

LOG = "audit.jsonl"
Protofed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def names(folder: Path) -> list[str]:
    return [segment.path.name for segment in segments(folder / LOG)]


def whole(state: Path, folder: Path) -> list[str]:
    """The hashes of state folder and archive together."""
    return [record.hash for record in records(state / LOG, archive=folder)]


def test_all_but_the_newest_file_are_moved_and_both_are_one_chain(
    protofed: Protofed, state: Path, folder: Path
) -> None:
    before = whole(state, folder)
    code, out, _ = protofed("archive", state, "--into", folder)
    assert code == 0
    assert f"{folder}/audit.000003.jsonl.gz" in "".join(out.split())
    assert names(folder) == ["audit.jsonl.gz", "audit.000002.jsonl.gz", "audit.000003.jsonl.gz"]
    assert names(state) == ["audit.000004.jsonl"]
    assert whole(state, folder) == before
    code, out, _ = protofed("verify", state, "--archive", folder, "--expect", before[0])
    assert (code, f"good, {len(before)} records" in out, "is record 1:" in out, "not here" in out) == (
        0,
        True,
        True,
        False,
    )
    assert rounds(protofed("show", state, "--archive", folder, "--json")[1]) == list(range(1, ROUNDS + 1))


def test_without_the_archive_verify_says_from_which_record_on_the_log_is_good(
    protofed: Protofed, state: Path, folder: Path
) -> None:
    archives.archive(state / LOG, folder)
    last = list(records(folder / LOG))[-1]
    code, out, _ = protofed("verify", state)
    assert code == 0
    assert f"records 1 to {last.seq} are not here, of segments 1 to 3" in " ".join(out.split())
    assert last.hash in out
    assert protofed("verify", folder, "--expect", last.hash)[0] == 0


def test_the_log_goes_on_and_is_archived_again_while_its_writer_runs(state: Path, folder: Path) -> None:
    journal = Journal(state / LOG, 1700)
    for number in range(40):
        send(journal, number)
        archives.archive(state / LOG, folder)
        journal.check()
    newest = journal.newest
    journal.close()
    assert whole(state, folder)[-1] == newest.hash
    assert len(whole(state, folder)) == newest.seq
    assert len(names(state)) == 1


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("harm", ["edited", "cut", "other bytes", "removed"])
def test_an_archive_that_was_tampered_with_is_found(
    protofed: Protofed, state: Path, folder: Path, number: int, harm: str
) -> None:
    archives.archive(state / LOG, folder)
    path = segments(folder / LOG)[number].path
    packed = path.read_bytes()
    match harm:
        case "edited":
            path.write_bytes(gzip.compress(gzip.decompress(packed).replace(b'"round":', b'"ground":', 1)))
        case "cut":
            path.write_bytes(packed[:-40])
        case "other bytes":
            path.write_bytes(packed[:60] + b"\0\0\0\0" + packed[64:])
        case "removed":
            path.unlink()
    code, out, err = protofed("verify", state, "--archive", folder)
    if harm == "removed" and number == 0:  # as if it were in another archive
        assert (code, "are not here, of segment 1:" in out) == (0, True)
    else:
        assert (code, path.name.removesuffix(".gz") in err) == (1, True)


def test_a_log_that_was_tampered_with_is_not_archived(protofed: Protofed, state: Path, folder: Path) -> None:
    second = segments(state / LOG)[1].path
    second.write_bytes(second.read_bytes().replace(b'"round":', b'"ground":', 1))
    code, _, err = protofed("archive", state, "--into", folder)
    assert (code, second.name in err, names(folder), len(names(state))) == (1, True, [], 4)


class Killed(BaseException):
    """In place of a SIGKILL: nothing cleans up after it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int, *, after: bool) -> None:
    """Let the process die before or after its n-th step that changes or syncs what is on the disk."""
    steps = iter(range(step + 1))

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any, **options: Any) -> Any:
            is_last = next(steps, step) == step
            if is_last and not after:
                raise Killed
            done = act(*arguments, **options)
            if is_last:
                raise Killed
            return done

        return one

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", dying(Path.unlink))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_leaves_no_gap_and_the_next_call_ends_the_work(
    state: Path, tmp_path: Path, *, after: bool
) -> None:
    expected, killed = whole(state, tmp_path / "none"), 0
    for step in range(100):
        here, there = tmp_path / f"state-{step}", tmp_path / f"archive-{step}"
        shutil.copytree(state, here)
        there.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step, after=after)
            try:
                archives.archive(here / LOG, there)
            except Killed:
                killed += 1
        assert whole(here, there) == expected, f"step {step}"
        archives.archive(here / LOG, there)
        assert whole(here, there) == expected, f"step {step}"
        assert (len(names(here)), len(names(there))) == (1, 3)
        assert not list(there.glob(".tmp-*"))
        if killed < step + 1:
            break
    assert killed == 3 * 5, "of each file: its bytes, its name, the folder; its removal, the folder"


def test_a_full_disk_moves_nothing_more(state: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    expected = whole(state, folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="No space left"):
            archives.archive(state / LOG, folder)
    assert (len(names(state)), names(folder)) == (4, [])
    assert whole(state, folder) == expected


def test_the_archive_of_another_log_is_refused_and_nothing_is_removed(
    protofed: Protofed, state: Path, folder: Path, tmp_path: Path
) -> None:
    other = Journal(tmp_path / "other" / LOG, 1700)
    while len(segments(tmp_path / "other" / LOG)) < 3:
        send(other, 1)
    other.close()
    archives.archive(tmp_path / "other" / LOG, folder)
    kept = {segment.path: segment.path.read_bytes() for segment in segments(folder / LOG)}
    code, _, err = protofed("archive", state, "--into", folder)
    assert (code, "of another log" in err, len(names(state))) == (1, True, 4)
    assert {segment.path: segment.path.read_bytes() for segment in segments(folder / LOG)} == kept


def test_a_log_that_does_not_follow_the_archive_is_refused(protofed: Protofed, state: Path, folder: Path) -> None:
    backup = folder.with_name("backup")
    shutil.copytree(state, backup)
    archives.archive(state / LOG, folder)
    (folder / "audit.000003.jsonl.gz").unlink()
    journal = Journal(state / LOG, 1700)
    while len(segments(state / LOG)) < 2:
        send(journal, 1)
    journal.close()
    code, _, err = protofed("archive", state, "--into", folder)
    assert (code, "does not follow" in err, len(names(state))) == (78, True, 2)
    for number in (4, 5):
        shutil.copy(state / f"audit.00000{number}.jsonl", folder)
    code, _, err = protofed("archive", backup, "--into", folder)
    assert (code, "restored from a backup" in " ".join(err.split())) == (78, True)


def test_an_archive_belongs_to_one_log_and_one_archiver_and_says_what_was_moved(
    protofed: Protofed, state: Path, folder: Path
) -> None:
    lock = files.Lock(folder)
    code, _, err = protofed("archive", state, "--into", folder)
    assert (code, "in use by another process" in err) == (74, True)
    lock.release()
    assert protofed("archive", state, "--into", state)[0] == 78
    assert len(names(state)) == 4
    code, _, err = protofed("verify", state, state, "--archive", folder)
    assert (code, "belongs to one log" in err) == (78, True)
    sizes = [segment.path.stat().st_size for segment in segments(state / LOG)[:-1]]
    moved = json.loads(protofed("archive", state, "--into", folder, "--json")[1])["moved"]
    assert [(one["number"], one["size"]) for one in moved] == list(enumerate(sizes, 1))
    assert [one["compressed"] for one in moved] == [one.path.stat().st_size for one in segments(folder / LOG)]
    assert json.loads(protofed("archive", state, "--into", folder, "--json")[1]) == {"moved": []}


def test_an_archive_is_private_closed_and_known_to_be_missing(state: Path, folder: Path) -> None:
    assert not handed_in(state / LOG, "run-1").gap
    archives.archive(state / LOG, folder)
    assert "first 3 files are in an archive" in handed_in(state / LOG, "run-1").gap
    archives.archive(state / LOG, folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert [segment.path.stat().st_mode & 0o777 for segment in segments(folder / LOG)] == [0o600] * 3
    archives.archive(state / LOG, folder)
    with pytest.raises(StateError, match="cannot be continued"):
        Journal(folder / LOG, 1700)
