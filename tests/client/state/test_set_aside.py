"""A task of an old round erases no later model: what a roll-back leaves behind is moved aside until it is replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.client.state.test_disk_store import counted, number, outcome, receipt, task

from protofed.client.state.disk_store import SCORED, DiskStore
from protofed.client.state.store import MemoryStore, Store
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Verdict


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """Rounds 1 to 4 have counted; all are kept."""
    store = DiskStore(tmp_path)
    store.retain(0)
    counted(store, 1, 2, 3, 4)
    return store


def done(store: Store, round: int, task_id: str, verdict: Verdict = Verdict.ACCEPTED) -> None:
    store.stage(task(round, task_id), outcome(round))
    store.settle(task(round, task_id), receipt(verdict))


def aside(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("aside-*/*"))


def test_an_old_round_that_does_not_count_changes_nothing(store: DiskStore, tmp_path: Path) -> None:
    store.stage(task(2, "again"), outcome(7))
    assert store.last_counted("run", 9).round == 1
    assert aside(tmp_path) == ["000002", "000003", "000004"]
    store.settle(task(2, "again"), receipt(Verdict.LATE))
    assert store.last_counted("run", 9).round == 4
    assert aside(tmp_path) == []


def test_later_models_stay_aside_until_their_rounds_have_counted_again(store: DiskStore, tmp_path: Path) -> None:
    done(store, 2, "again")
    assert (store.last_counted("run", 9).round, store.newest_counted("run")) == (2, 4)
    assert aside(tmp_path) == ["000003", "000004"]
    for number_, left in ((3, ["000004"]), (4, [])):
        done(store, number_, f"again-{number_}")
        assert aside(tmp_path) == left
    assert not list((tmp_path / "run").glob("aside-*"))


def test_what_another_task_moved_aside_does_not_come_back_with_this_one(store: DiskStore, tmp_path: Path) -> None:
    done(store, 2, "again")
    done(store, 3, "then", Verdict.LATE)
    assert store.last_counted("run", 9).round == 2
    assert aside(tmp_path) == ["000003", "000004"]


def test_a_daemon_that_died_between_moving_and_staging_finds_its_models_again(store: DiskStore, tmp_path: Path) -> None:
    store._aside.put(task(2, "again"), [store._round("run", number) for number in (2, 3, 4)])
    store.close()
    again = DiskStore(tmp_path)
    assert again.last_counted("run", 9).round == 4
    assert aside(tmp_path) == []


def test_death_between_two_moves_loses_no_model(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several rounds has been moved: the others, which nothing has replaced either, must not hide it."""
    monkeypatch.setattr(os, "replace", ended_at("000003", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.stage(task(2, "again"), outcome(7))
    monkeypatch.undo()
    store.close()
    again = DiskStore(tmp_path)
    assert [again.last_counted("run", before).round for before in (3, 4, 5)] == [2, 3, 4]
    assert not [*(tmp_path / "run").glob("aside-*"), *(tmp_path / "run").glob("moving-*")]


def test_rounds_of_which_one_cannot_be_moved_stay(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", ended_at("000003", OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StateError):
        store.stage(task(2, "again"), outcome(7))
    assert [store.last_counted("run", before).round for before in (3, 4, 5)] == [2, 3, 4]


def ended_at(name: str, error: BaseException) -> Callable[[Path, Path], None]:
    """`os.replace`, which the move of a round ends."""
    replace = os.replace

    def move(source: Path, target: Path) -> None:
        if Path(source).name == name:
            raise error
        replace(source, target)

    return move


def test_a_restart_leaves_aside_what_was_replaced(store: DiskStore, tmp_path: Path) -> None:
    done(store, 2, "again")
    store.close()
    again = DiskStore(tmp_path)
    assert (again.last_counted("run", 9).round, again.newest_counted("run")) == (2, 4)
    assert aside(tmp_path) == ["000003", "000004"]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_round_that_was_trained_again_may_be_scored_again(kind: str, tmp_path: Path) -> None:
    store: Store = DiskStore(tmp_path) if kind == "disk" else MemoryStore()
    counted(store, 1, 2)
    store.mark_scored("run", 1, "a")
    store.mark_scored("run", 2, "b")
    assert dict(store.scored("run")) == {1: "a", 2: "b"}
    counted(store, 2)
    assert dict(store.scored("run")) == {1: "a"}
    assert dict(store.scored("other")) == {}
    assert store.newest_counted("run") == 2


def test_what_was_scored_survives_and_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.mark_scored("run", 3, "a")
    store.close()
    again = DiskStore(tmp_path)
    assert dict(again.scored("run")) == {3: "a"}
    (tmp_path / "run" / SCORED).write_bytes(b"half")
    with pytest.raises(StateError):
        again.scored("run")


# Rounds that do not stand, in which the site has trained and from which it starts no more


def test_a_fit_starts_from_no_memory_of_a_round_that_was_rolled_back(store: DiskStore, tmp_path: Path) -> None:
    """Rounds 3 and 4 were done again by other sites; the server says that of this one's updates round 2's stands."""
    fit = replace(task(5), state_round=2)
    assert number(store.last_counted("run", fit.state_before)) == 2
    store.stage(fit, outcome(5))
    assert aside(tmp_path) == ["000003", "000004"]
    store.settle(fit, receipt())
    assert (store.counted("run"), aside(tmp_path)) == ([1, 2, 5], [])


def test_what_a_fit_passed_over_comes_back_if_it_does_not_count(store: DiskStore, tmp_path: Path) -> None:
    fit = replace(task(5), state_round=2)
    store.stage(fit, outcome(5))
    store.settle(fit, receipt(Verdict.LATE))
    assert (store.counted("run"), aside(tmp_path)) == ([1, 2, 3, 4], [])
    store.retain(1)  # two rounds stay: what is passed over takes no place of one that stands
    again = replace(task(6), state_round=1)
    store.stage(again, outcome(6))
    store.settle(again, receipt())
    assert store.counted("run") == [1, 6]


@pytest.mark.parametrize(("state_round", "before"), [(None, 5), (0, 1), (2, 3), (4, 5), (9, 5)])
def test_a_server_can_name_no_later_memory_than_the_rounds(state_round: int | None, before: int) -> None:
    assert replace(task(5), state_round=state_round).state_before == before


def test_in_a_simulation_an_update_of_an_abandoned_attempt_is_passed_over() -> None:
    """Round 2's first attempt counted here and was abandoned; other sites did the second one."""
    store = MemoryStore()
    counted(store, 1, 2)
    fit = replace(task(3), state_round=1)
    assert number(store.last_counted("run", fit.state_before)) == 1
    store.stage(fit, outcome(3))
    store.settle(fit, receipt())
    assert (number(store.last_counted("run", 9)), store.counted("run")) == (3, [1, 3])
