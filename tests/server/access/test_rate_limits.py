"""How much and how often one certificate may ask."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import structlog
from tests.server.conftest import Clock

from protofed.server.access import rate_limits
from protofed.server.access.authorization import PLAINTEXT, Peer
from protofed.server.access.rate_limits import (
    BURST,
    IN_FLIGHT,
    LOG_BURST,
    LOG_LINES_PER_S,
    RATE_PER_S,
    RateLimitError,
    RateLimits,
)

ANN, BOB = Peer("a" * 64, "site", "ann"), Peer("b" * 64, "site", "bob")


@pytest.fixture
def held(clock: Clock) -> RateLimits:
    return RateLimits(clock)


def calls(rate_limits: RateLimits, peer: Peer, call: str, most: int = 10_000) -> int:
    """How many one after another are let in."""
    for count in range(most):
        try:
            with rate_limits.admit(peer, call):
                pass
        except RateLimitError:
            return count
    return most


@pytest.mark.parametrize("call", ["Heartbeat", "PutChunk"])
def test_so_many_are_in_flight_and_no_more_and_others_are_not_touched(held: RateLimits, call: str) -> None:
    with ExitStack() as open_calls:
        for _ in range(IN_FLIGHT):
            open_calls.enter_context(held.admit(ANN, call))
        with pytest.raises(RateLimitError, match="16 calls of this certificate are in flight; try again later"):
            open_calls.enter_context(held.admit(ANN, "GetChunk"))
        with held.admit(BOB, call):
            pass
    for _ in range(2 * IN_FLIGHT):  # a call that fails is no longer in flight
        with pytest.raises(ValueError, match="broken"), held.admit(ANN, "PutChunk"):
            raise ValueError("broken")
    with held.admit(ANN, call):
        pass


def test_control_calls_have_a_rate_and_room_for_a_burst(held: RateLimits, clock: Clock) -> None:
    assert calls(held, ANN, "Heartbeat") == BURST
    with pytest.raises(RateLimitError, match="more than 32 calls a second"), held.admit(ANN, "Heartbeat"):
        pass
    clock.now += 1.0
    assert calls(held, ANN, "Heartbeat") == RATE_PER_S
    clock.now += 1000.0
    assert calls(held, ANN, "Heartbeat") == BURST


def test_a_refusal_says_when_the_next_call_may_come(held: RateLimits, clock: Clock) -> None:
    calls(held, ANN, "Heartbeat")
    for _ in range(64):
        held.charge(ANN)
    with pytest.raises(RateLimitError) as error, held.admit(ANN, "Heartbeat"):
        pass
    assert error.value.retry_after_s == 65 / RATE_PER_S
    clock.now += 65 / RATE_PER_S
    assert calls(held, ANN, "Heartbeat") == 1
    clock.now += 1.0
    with ExitStack() as open_calls:
        for _ in range(IN_FLIGHT):
            open_calls.enter_context(held.admit(ANN, "PutChunk"))
        with pytest.raises(RateLimitError) as error:
            open_calls.enter_context(held.admit(ANN, "PutChunk"))
    assert error.value.retry_after_s is not None
    assert 0.0 < error.value.retry_after_s < 1.0


def test_the_log_gets_some_lines_of_one_certificates_refusals_and_the_number_of_others(
    held: RateLimits, clock: Clock
) -> None:
    counts = [held.unlogged(ANN) for _ in range(1000)]
    assert counts == [0] * int(LOG_BURST) + [None] * (1000 - int(LOG_BURST))
    assert held.unlogged(BOB) == held.unlogged(PLAINTEXT) == 0
    clock.now += 1 / LOG_LINES_PER_S
    assert [held.unlogged(ANN) for _ in range(2)] == [1000 - int(LOG_BURST), None]


def test_chunks_have_no_rate_unless_nobody_wants_them(held: RateLimits) -> None:
    assert calls(held, ANN, "PutChunk") == 10_000
    assert calls(held, ANN, "GetChunk") == 10_000
    for _ in range(int(BURST)):
        held.charge(ANN)
    assert calls(held, ANN, "PutChunk") == 0
    assert calls(held, BOB, "PutChunk") == 10_000
    held.charge(PLAINTEXT)  # in which nobody is told apart
    assert calls(held, PLAINTEXT, "Heartbeat") == 10_000


def test_refusals_are_told_once_a_minute_with_their_number(held: RateLimits, clock: Clock) -> None:
    told = 0
    with structlog.testing.capture_logs() as logs:
        for _ in range(120):  # half a second each
            clock.now += 0.5
            for _ in range(100):
                try:
                    with held.admit(ANN, "Heartbeat"):
                        pass
                except RateLimitError as error:
                    told += error.is_logged
    assert told == len(logs) == 1
    clock.now += 30.0
    calls(held, ANN, "Heartbeat")
    with structlog.testing.capture_logs() as logs, pytest.raises(RateLimitError), held.admit(ANN, "Heartbeat"):
        pass
    assert logs == []  # it was told by the call before


def test_what_is_remembered_of_certificates_is_bounded(
    held: RateLimits, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "_MAX_CERTIFICATES", 10)
    with held.admit(ANN, "PutChunk"):
        for number in range(100):
            clock.now += 5.0
            calls(held, Peer(f"{number:064}", "site", "x"), "Heartbeat")
        assert len(held._usages) <= 10
        assert held._usages[ANN.fingerprint].calls == 1
