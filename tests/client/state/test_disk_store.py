"""What a site keeps counts only with its receipt, survives the daemon's death, and is never half of anything."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google_crc32c import value as crc32c

from protofed.client.state import store as state_store
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import FitOutcome, MemoryStore, SiteState, Store
from protofed.common.codec import Digest, digest
from protofed.common.errors import OutOfSpaceError, ProtocolError, StateError
from protofed.common.ids import read_id
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.common.protocol.messages import Receipt, Task, TaskKind, Verdict
from protofed.common.storage import files

COUNTED = (Verdict.ACCEPTED, Verdict.DUPLICATE)
FORGOTTEN = (Verdict.LATE, Verdict.NOT_NEEDED, Verdict.REFUSED)
Open = Callable[[], DiskStore]


def task(round: int, task_id: str = "", run: str = "run") -> Task:
    return Task(TaskKind.FIT, run, round, task_id or f"task_id-{round}", Digest("b" * 64), 12, 30.5)


def outcome(value: float, **update: Any) -> FitOutcome:
    def payload(part: Part, shift: float) -> Payload:
        return {part: {"w": np.full((2, 2), value + shift), "seen": np.array(7)}}

    fields = {"metrics": {"loss": value}, "weight": 5.0, **update}
    return FitOutcome(
        Update("ann", payload(Part.BODY, 0.25), **fields), payload(Part.HEAD, 0.5), payload(Part.BODY, 0.75)
    )


def receipt(verdict: Verdict = Verdict.ACCEPTED) -> Receipt:
    return Receipt(verdict, "as it is", Digest("a" * 64), "seal")


def counted(store: Store, *rounds: int, run: str = "run") -> None:
    for number in rounds:
        store.stage(task(number, run=run), outcome(number))
        store.settle(task(number, run=run), receipt())


def number(held: SiteState) -> float | None:
    return None if held == SiteState() else float(held.client_state[Part.HEAD]["w"][0, 0]) - 0.5


def task_ids(store: Store, run: str = "run") -> list[str]:
    return [task.task_id for task, _ in store.unsettled(run)]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """The store of one folder; each call is a daemon that starts after the one before has died."""
    opened: list[DiskStore] = []

    def start() -> DiskStore:
        for store in opened:
            store.close()
        opened[:] = [DiskStore(tmp_path / "state")]
        return opened[0]

    yield start
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = MemoryStore() if request.param == "memory" else request.getfixturevalue("reopen")()
    return made


def test_nothing_is_held_before_the_first_round_and_a_staged_outcome_does_not_count_yet(store: Store) -> None:
    assert store.last_counted("run", 1) == SiteState(round=0, client_state={}, personal=None)
    assert store.unsettled("run") == []
    counted(store, 1)
    store.stage(task(2), outcome(2))
    assert number(store.last_counted("run", 3)) == 1


@pytest.mark.parametrize("weight", [5.0, None])
def test_what_has_no_receipt_can_be_handed_in_again(weight: float | None, store: Store) -> None:
    given = outcome(2, weight=weight)
    store.stage(task(2), given)
    ((again, update),) = store.unsettled("run")
    assert again == task(2)
    assert same_tensors(update.payload, given.update.payload)
    assert (update.site, update.metrics, update.weight) == ("ann", {"loss": 2}, weight)


@pytest.mark.parametrize("verdict", COUNTED)
def test_an_accepted_outcome_is_held_whole(verdict: Verdict, store: Store) -> None:
    given = outcome(2)
    store.stage(task(2), given)
    store.settle(task(2), receipt(verdict))
    held = store.last_counted("run", 3)
    assert (held.round, task_ids(store)) == (2, [])
    assert same_tensors(held.client_state, given.client_state)
    assert held.personal is not None
    assert same_tensors(held.personal, given.personal)


@pytest.mark.parametrize("verdict", FORGOTTEN)
def test_any_other_verdict_forgets_it(verdict: Verdict, store: Store) -> None:
    counted(store, 1)
    store.stage(task(2), outcome(2))
    store.settle(task(2), receipt(verdict))
    assert (number(store.last_counted("run", 3)), task_ids(store)) == (1, [])


def test_a_round_sees_nothing_of_its_own_or_a_later_number_and_replaces_what_it_gave(store: Store) -> None:
    counted(store, 2, 3)
    assert number(store.last_counted("run", 4)) == 3
    assert number(store.last_counted("run", 3)) == 2  # the round is opened again, or the server was rolled back by one
    assert number(store.last_counted("run", 2)) is None
    store.stage(task(3, "again"), outcome(3.5))
    assert task_ids(store) == ["again"]
    store.settle(task(3, "again"), receipt())
    assert number(store.last_counted("run", 4)) == 3.5
    assert number(store.last_counted("run", 3)) == 2
    assert store.newest_counted("run") == 3


def test_runs_do_not_see_each_other_and_a_method_without_memory_is_kept_too(store: Store) -> None:
    counted(store, 1)
    store.stage(task(2, run="other"), outcome(2))
    assert (store.last_counted("other", 9), task_ids(store)) == (SiteState(), [])
    store.settle(task(2, run="other"), receipt())
    assert (number(store.last_counted("other", 9)), number(store.last_counted("run", 9))) == (2, 1)
    store.stage(task(1), FitOutcome(Update("ann", {}), {}, outcome(1).personal))
    assert store.unsettled("run")[0][1].payload == {}
    store.settle(task(1), receipt())
    assert store.last_counted("run", 2).client_state == {}
    assert store.last_counted("run", 2).personal is not None


def test_death_loses_nothing(reopen: Open) -> None:
    before = reopen()
    counted(before, 1)
    before.stage(task(2), outcome(2))
    after = reopen()
    assert (number(after.last_counted("run", 9)), task_ids(after)) == (1, ["task_id-2"])
    after.settle(task(2), receipt())
    assert number(reopen().last_counted("run", 9)) == 2


def test_only_some_rounds_are_kept_and_what_never_got_a_receipt_goes_with_those_of_its_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    counted(store, 1, 2, 3)
    assert [number(store.last_counted("run", before)) for before in (4, 3, 2, 1)] == [3, 2, 1, None]
    store.retain(1)
    store.stage(task(4), outcome(4))
    counted(store, 5)
    store.stage(task(6), outcome(6))
    counted(store, 8)
    assert task_ids(store) == ["task_id-6"]
    counted(store, 9)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["000008", "000009"]
    assert [number(store.last_counted("run", before)) for before in (10, 9, 8)] == [9, 8, None]
    store.close()


def test_what_comes_after_a_rolled_back_round_never_happened(reopen: Open) -> None:
    store = reopen()
    counted(store, 5, 6, 7)
    store.stage(task(8), outcome(8))
    counted(store, 4)  # the server begins again, with less than what is kept here
    assert (number(store.last_counted("run", 5)), number(store.last_counted("run", 99)), task_ids(store)) == (4, 4, [])


def test_an_update_that_is_handed_in_late_takes_nothing_from_later_rounds(reopen: Open) -> None:
    store = reopen()
    store.stage(task(1), outcome(1))
    counted(store, 2, 3)
    store.settle(task(1), receipt(Verdict.DUPLICATE))
    assert [number(store.last_counted("run", before)) for before in (4, 3, 2)] == [3, 2, 1]


def test_an_update_leaves_the_disk_once_settled_and_what_is_fetched_outlives_the_daemon(
    reopen: Open, tmp_path: Path
) -> None:
    counted(reopen(), 1)
    left = {path.name for path in (tmp_path / "state" / "run" / "000001").iterdir()}
    assert left == {"client_state.safetensors", "personal.safetensors", "receipt.json", "task.json"}
    store = reopen()
    store.downloads.begin(digest(b"base"), 4)
    store.downloads.write(digest(b"base"), 0, b"base", crc32c(b"base"))
    assert reopen().downloads.begin(digest(b"base"), 4) == {0}
    counted(reopen(), 1)
    (hidden,) = (path.name for path in (tmp_path / "state").iterdir() if path.is_dir() and path.name != "run")
    with pytest.raises(ProtocolError):
        read_id(hidden)  # as which no run can be named


def test_a_folder_is_for_one_daemon(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(StateError, match="in use by another process"):
        DiskStore(tmp_path)
    store.close()
    DiskStore(tmp_path).close()


DAMAGED = ["client_state.safetensors", "personal.safetensors", "update.safetensors", "task.json"]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_what_is_damaged_is_an_error_and_no_fresh_start(name: str, damage: str, reopen: Open, tmp_path: Path) -> None:
    store, waits = reopen(), name in DAMAGED[2:]
    store.stage(task(2), outcome(2)) if waits else counted(store, 1, 2)
    path = tmp_path / "state" / "run" / "000002" / name
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-9])
        case "gone":
            path.unlink()
        case _:
            path.write_text('{"task": {}, "update": {}}')
    with pytest.raises(StateError, match=rf"000002/{name} cannot be read .*restore it, or remove its folder"):
        store.unsettled("run") if waits else store.last_counted("run", 3)


FILES = 4  # that a stage writes


@pytest.mark.parametrize("failing", range(1, FILES + 1))
@pytest.mark.parametrize("before", ["nothing", "staged", "counted"])
def test_a_stage_that_cannot_be_written_leaves_the_former_state(
    failing: int, before: str, reopen: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = reopen()
    counted(store, 1)
    if before != "nothing":
        store.stage(task(2), outcome(2))
    if before == "counted":
        store.settle(task(2), receipt())
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", full_at(failing))
        with pytest.raises(StateError, match="full"):
            store.stage(task(2, "again"), outcome(20))
    for now in (store, reopen()):
        assert task_ids(now) == (["task_id-2"] if before == "staged" else [])
        assert number(now.last_counted("run", 3)) == (2 if before == "counted" else 1)
    assert list((tmp_path / "state").rglob(f"{files.TEMPORARY}*")) == []
    store = reopen()
    monkeypatch.setattr(files, "write", full_at(FILES + 1))  # a stage writes no more files than are tried here
    store.stage(task(2, "again"), outcome(20))
    assert task_ids(store) == ["again"]


def full_at(call: int) -> Callable[[Path, bytes], None]:
    """`archive.write` on a disk that is full at its `call`th file."""
    write, calls = files.write, iter(range(1, call + 1))

    def written(path: Path, data: bytes) -> None:
        if next(calls) == call:
            raise StateError("the disk is full")
        write(path, data)

    return written


class DiedError(BaseException):
    """kill -9."""


REMOVALS: dict[str, Callable[[Store], None]] = {
    "forgetting": lambda store: store.settle(task(4), receipt(Verdict.LATE)),
    "pruning": lambda store: store.settle(task(4), receipt()),
    "replacing": lambda store: store.stage(task(3, "again"), outcome(30)),
    "rolling back": lambda store: store.stage(task(2, "again"), outcome(20)),
}


@pytest.mark.parametrize("first", ["task.json", "receipt.json", "client_state.safetensors", "update.safetensors"])
@pytest.mark.parametrize("during", REMOVALS)
def test_death_while_a_round_is_removed_leaves_no_half_of_it(
    first: str, during: str, reopen: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = reopen()
    counted(store, 1, 2, 3)
    store.stage(task(4), outcome(4))
    with monkeypatch.context() as process:
        process.setattr(shutil, "rmtree", dies_after(first))
        with pytest.raises(DiedError):
            REMOVALS[during](store)
    store = reopen()
    assert set(task_ids(store)) <= {"again", "task_id-4"}
    held = [store.last_counted("run", before) for before in (5, 4, 3, 2)]
    assert all(a.round >= b.round for a, b in pairwise(held))  # and all that is there can be read
    assert list((tmp_path / "state").rglob(f"{files.TEMPORARY}*")) == []


def dies_after(first: str) -> Callable[..., None]:
    def removed(path: Path, **_: Any) -> None:
        if path.exists():
            (path / first).unlink(missing_ok=True)
            raise DiedError

    return removed


# The site's secret


def test_a_secret_is_made_once_and_nobody_else_may_read_it(reopen: Open, tmp_path: Path) -> None:
    path = tmp_path / "state" / state_store.SECRET_FILE
    assert not path.exists()
    first = reopen().secret()
    assert len(first) == state_store.SECRET_BYTES
    assert first == path.read_bytes() == reopen().secret()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    assert reopen().secret() != first
    assert [left.name for left in path.parent.glob(f"{files.TEMPORARY}*")] == []


@pytest.mark.parametrize("text", [b"", b"x" * (state_store.SECRET_BYTES - 1), b"x" * (state_store.SECRET_BYTES + 1)])
def test_a_damaged_secret_is_an_error_and_never_another_one(text: bytes, reopen: Open, tmp_path: Path) -> None:
    store, path = reopen(), tmp_path / "state" / state_store.SECRET_FILE
    path.write_bytes(text)
    with pytest.raises(StateError, match=rf"holds {len(text)} bytes, not {state_store.SECRET_BYTES}"):
        store.secret()
    assert path.read_bytes() == text


def test_a_disk_that_keeps_no_secret_gives_none(reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = reopen()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutOfSpaceError):
            store.secret()
    assert not (tmp_path / "state" / state_store.SECRET_FILE).exists()
    assert list((tmp_path / "state").glob(f"{files.TEMPORARY}*")) == []


def test_stores_in_memory_have_secrets_of_their_own_and_no_place_for_approvals(reopen: Open) -> None:
    store = MemoryStore()
    assert len(store.secret()) == state_store.SECRET_BYTES
    assert store.secret() == store.secret() != MemoryStore().secret()
    assert store.approvals is None
    assert reopen().approvals is not None


# The last base that was accepted


def test_the_last_base_replaces_the_one_before_and_survives_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    assert store.last_base("run") is None
    for number in (3, 4, 2):  # the last one after a roll-back
        store.keep_base("run", number, outcome(number).personal)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [f"base-{number:06d}.safetensors"]
    store.close()
    left = tmp_path / "run" / files.temporary_name("base-000003.safetensors")
    left.write_bytes(b"half")  # by a process that was killed
    again = DiskStore(tmp_path)
    assert not left.exists()
    kept = again.last_base("run")
    assert kept is not None
    assert (kept[0], same_tensors(kept[1], outcome(2).personal)) == (2, True)
    (tmp_path / "run" / "base-000002.safetensors").write_bytes(b"half")
    with pytest.raises(StateError):
        again.last_base("run")


def test_a_folder_that_is_no_run_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the state folder is the root of a volume, `lost+found` is in it, which only root may read."""
    (tmp_path / "lost+found").mkdir()
    iterdir = Path.iterdir

    def refused(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    DiskStore(tmp_path).close()
