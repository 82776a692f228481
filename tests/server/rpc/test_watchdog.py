"""A blocked event loop is noticed, told with what blocks it, and forgotten when it runs again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from protofed.server.rpc import watchdog
from protofed.server.rpc.watchdog import Watchdog

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def no_dog_is_left() -> Iterator[None]:
    """What one still says would be heard by the next test."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.stop()
            thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    monkeypatch.setattr(watchdog, "TOLERATED_S", 0.2)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


def blocking_the_loop(dog: Watchdog) -> None:
    """Until the dog has noticed."""
    end = time.monotonic() + PATIENCE_S
    while not dog.blocked and time.monotonic() < end:
        time.sleep(0.01)


def blocking_it_further(dog: Watchdog) -> float:
    """The lag after that."""
    time.sleep(0.3)
    return dog.lag_s


def test_a_blocked_loop_is_told_with_its_stack_and_that_it_runs_again() -> None:
    async def main() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        dog.start()
        blocking_the_loop(dog)
        assert dog.blocked
        await until(lambda: not dog.blocked)
        dog.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    told: dict[str, Any] = {entry["event"]: entry for entry in logs}
    assert list(told) == ["the event loop is blocked", "the event loop runs again"]
    assert "blocking_the_loop" in told["the event loop is blocked"]["where"]


def test_while_it_stays_blocked_the_lag_grows_and_it_is_told_once() -> None:
    lags: list[float] = []

    async def main() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        dog.start()
        blocking_the_loop(dog)
        lags.extend(blocking_it_further(dog) for _ in range(2))
        dog.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    assert 0.2 < lags[0] < lags[1]
    assert [entry["event"] for entry in logs].count("the event loop is blocked") == 1


def test_a_loop_that_runs_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TOLERATED_S", PATIENCE_S)

    async def main() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        dog.start()
        await until(lambda: dog.lag_s > 0.0)
        assert not dog.blocked
        dog.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    assert logs == []


@pytest.mark.parametrize("how", ["told to", "loop closed"])
def test_its_thread_ends(how: str) -> None:
    loop = asyncio.new_event_loop()
    dog = Watchdog(loop)
    dog.start()
    if how == "told to":
        dog.stop()
    else:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    dog.join(PATIENCE_S)
    assert dog not in threading.enumerate()
    if not loop.is_closed():
        loop.close()
