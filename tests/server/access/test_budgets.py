"""How much work of its own kind a site may ask for."""

from __future__ import annotations

import pytest
import structlog
from tests.server.conftest import Clock

from protofed.server.access import rate_limits
from protofed.server.access.rate_limits import DAY_S, HOUR_S, Budget, Budgets, OverBudgetError

CALLS, BYTES = Budget("calls", 10, 0, HOUR_S), Budget("bytes", 100, 2, DAY_S)


@pytest.fixture
def held(clock: Clock) -> Budgets:
    return Budgets(clock)


def spent(held: Budgets, site: str, budget: Budget, amount: float = 1.0, **options: int | str) -> int:
    """How many times one after another."""
    for count in range(10_000):
        try:
            held.spend(site, budget, amount, **options)  # type: ignore[arg-type]
        except OverBudgetError:
            return count
    raise AssertionError("without end")


def test_a_budget_is_there_at_once_comes_back_within_its_period_and_goes_by_the_size(
    held: Budgets, clock: Clock
) -> None:
    assert spent(held, "ann", CALLS) == 10
    assert spent(held, "bob", CALLS) == 10
    clock.now += HOUR_S / 10
    assert spent(held, "ann", CALLS) == 1
    clock.now += 1e9
    assert spent(held, "ann", CALLS) == 10
    assert spent(held, "cyd", BYTES, 50, key="one", size=50) == 4
    assert spent(held, "cyd", BYTES, 50, key="two", size=500) == 22  # the next task
    assert spent(held, "cyd", CALLS) == 10  # another budget


def test_a_refusal_says_when_and_takes_nothing(held: Budgets, clock: Clock) -> None:
    spent(held, "ann", CALLS)
    with pytest.raises(OverBudgetError, match="above its calls of 10 in one hour") as refused:
        held.spend("ann", CALLS)
    wait_s = refused.value.retry_after_s
    assert wait_s == pytest.approx(HOUR_S / 10)
    assert wait_s is not None
    clock.now += wait_s - 1
    for _ in range(5):
        with pytest.raises(OverBudgetError):
            held.spend("ann", CALLS)
    clock.now += 1.001
    held.spend("ann", CALLS)


def test_what_is_remembered_is_bounded_and_forgets_no_site_in_use(
    held: Budgets, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "_MAX_BUCKETS", 10)
    for number in range(100):
        clock.now += 1.0
        assert spent(held, "ann", CALLS) == (10 if number == 0 else 0)
        held.spend(f"site-{number}", CALLS)
        assert len(held._buckets) <= 10


def test_a_flood_is_logged_once_a_minute(held: Budgets, clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(120):
            clock.now += 1.0
            for _ in range(20):
                spent(held, "ann", CALLS)
    assert [(line["site"], line["budget"]) for line in logs] == [("ann", "calls")] * 2


@pytest.mark.parametrize("size", [0, 1 << 10, 100 << 20, 4 << 30])
@pytest.mark.parametrize("budget", [rate_limits.DOWNLOADED, rate_limits.UPLOADED, rate_limits.EXAMINED])
def test_an_honest_daemon_on_a_bad_line_has_room(budget: Budget, size: int) -> None:
    assert budget.capacity(size) >= 16 * size
    assert budget.capacity(size) >= 16 * (2 << 20)  # a chunk, however small the model


@pytest.mark.parametrize(
    ("budget", "every_s"),
    [(rate_limits.ENROLLMENTS, 5.0), (rate_limits.BEGINNINGS, 30.0)],  # PAUSED_RETRY_S of clients, MEMORY_RETRY_S
)
def test_an_honest_daemon_never_enrolls_or_begins_too_often(budget: Budget, every_s: float) -> None:
    assert budget.capacity(0) / budget.period_s > 1 / every_s
