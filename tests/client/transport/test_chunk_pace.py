"""On a slow link one chunk moves at a time, and may take longer; on a quick one several, as before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from protofed.client.transport.calls import CHUNK_S, IN_FLIGHT, LONGEST_S, PINGED_S, QUICK_S, ChunkPace

SOON = 10.0  # seconds after which a test gives up


@pytest.fixture
def pace() -> ChunkPace:
    return ChunkPace()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        yield pool


def deadline(pace: ChunkPace) -> float:
    with pace.turn() as turn:
        return turn.deadline_s


def room(pace: ChunkPace, pool: ThreadPoolExecutor) -> int:
    started, end = threading.Semaphore(0), threading.Event()

    def move() -> None:
        with pace.turn():
            started.release()
            end.wait(SOON)

    moves = [pool.submit(move) for _ in range(IN_FLIGHT)]
    count = 0
    while count < IN_FLIGHT and started.acquire(timeout=0.2):
        count += 1
    end.set()
    for one in moves:
        one.result(SOON)
    return count


def late(pace: ChunkPace) -> None:
    with pace.turn() as turn:
        pace.late(turn)


def test_several_chunks_move_at_once_until_a_deadline_passes(pace: ChunkPace, pool: ThreadPoolExecutor) -> None:
    assert room(pace, pool) == 1
    pace.arrived(QUICK_S)
    assert room(pace, pool) == IN_FLIGHT
    assert deadline(pace) == CHUNK_S
    pace.arrived(0.0)
    late(pace)
    assert room(pace, pool) == 1
    assert deadline(pace) == 2 * CHUNK_S


def test_the_deadline_doubles_up_to_a_bound_and_once_for_those_that_pass_together(pace: ChunkPace) -> None:
    found = []
    for _ in range(6):
        late(pace)
        found.append(deadline(pace))
    assert found == [2 * CHUNK_S, 4 * CHUNK_S, LONGEST_S, LONGEST_S, LONGEST_S, LONGEST_S]
    pace.arrived(0.0)
    with ExitStack() as together:
        for turn in [together.enter_context(pace.turn()) for _ in range(IN_FLIGHT)]:
            pace.late(turn)
    assert deadline(pace) == 2 * CHUNK_S


def test_a_quick_chunk_ends_the_pace_and_a_broken_connection_begins_it(
    pace: ChunkPace, pool: ThreadPoolExecutor
) -> None:
    late(pace)
    pace.arrived(QUICK_S + 1)
    assert (room(pace, pool), deadline(pace)) == (1, 2 * CHUNK_S)
    pace.arrived(QUICK_S)
    assert (room(pace, pool), deadline(pace)) == (IN_FLIGHT, CHUNK_S)
    pace.arrived(0.0)
    pace.broke(PINGED_S - 1)
    assert room(pace, pool) == IN_FLIGHT
    pace.broke(PINGED_S)
    assert (room(pace, pool), deadline(pace)) == (1, CHUNK_S)


def test_whoever_waits_goes_on_when_a_chunk_fails(pace: ChunkPace, pool: ThreadPoolExecutor) -> None:
    asking, waited = threading.Event(), list[float]()

    def ask() -> None:
        asking.set()
        with pace.turn() as turn:
            waited.append(turn.waited_s)

    def fail() -> None:
        with pace.turn():
            waiting.append(pool.submit(ask))
            asking.wait(SOON)
            assert not waited
            raise ConnectionError

    waiting: list[Future[None]] = []
    late(pace)
    with pytest.raises(ConnectionError):
        fail()
    waiting[0].result(SOON)
    assert 0 <= waited[0] < SOON
