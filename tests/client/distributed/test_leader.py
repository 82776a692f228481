"""What ranks are to do next, without processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import pytest

from protofed.client.distributed import leader as ranks_work
from protofed.client.distributed.leader import END, FIT, PREPARE, Call, CallBoard
from protofed.client.distributed.rendezvous import start_name
from protofed.client.distributed.team import RankLostError


class Keys(dict[str, bytes]):
    """A store of torchrun's, as far as it is used."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Slow(Keys):
    """One in which rank 0 writes late, and after which there is no more of it."""

    looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        if self.looks == 5:
            board(self, "run").write(Call(PREPARE, {"recipe": "{}"}))
        if self.looks == 9:
            raise RuntimeError("the connection was closed")
        return super().check(keys)


def board(store: Keys, name: str) -> CallBoard:
    return CallBoard(cast("Any", store), name)


def test_calls_are_waited_for_without_an_end_and_a_lost_launcher_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_work, "POLL_S", 0.0)
    store = Slow()
    calls = board(store, "run").calls()
    assert next(calls) == Call(PREPARE, {"recipe": "{}"})
    assert store.looks == 5
    with pytest.raises(RankLostError):
        next(calls)
    assert store.looks == 9


def test_calls_come_in_order_until_the_end_and_nothing_of_another_start() -> None:
    store = Keys()
    leader = board(store, "this")
    leader.write(Call(FIT, {"round": 1}))
    others = board(store, "this").calls()
    assert next(others).fields == {"round": 1}
    for call in (Call(FIT, {"round": 2}), Call(END, {})):
        leader.write(call)
    assert [call.fields["round"] for call in others] == [2]
    assert not store.check(["this/1"])  # what was done does not stay
    board(store, "next").write(Call(END, {}))
    assert list(board(store, "next").calls()) == []


def test_ranks_that_died_leave_nothing_that_the_next_ones_take_for_an_answer() -> None:
    store: Any = Keys()
    names = []
    for _ in range(3):  # starts of all ranks, over a store that stays
        with ThreadPoolExecutor(3) as ranks:
            late = [ranks.submit(start_name, store, rank, 3) for rank in (0, 2)]
            too_early = wait(late[:1], timeout=0.5).done  # without rank 1, although there was one
            (name,) = {found.result(60) for found in [*late, ranks.submit(start_name, store, 1, 3)]}
            names.append(name)
            assert not too_early
    assert len(set(names)) == 3


def test_a_single_rank_starts_at_once() -> None:
    store: Any = Keys()
    assert start_name(store, 0, 1) != start_name(store, 0, 1)
