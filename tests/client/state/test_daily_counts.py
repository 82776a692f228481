"""A day has as many tasks as the policy says, however often the daemon starts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.scripted_server import RULES, AgentHarness

from protofed.client.state.daily_counts import FILE, Counted, DailyCounts
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore
from protofed.common.errors import FailureReason, StateError
from protofed.common.protocol.messages import TaskKind

NOON = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
MIDNIGHT = datetime(2026, 6, 2, tzinfo=UTC)


def begun(folder: Path, task_id: str, kind: Counted = Counted.TASKS, most: int = 2, now: datetime = NOON) -> bool:
    """By a daemon that has just started."""
    return DailyCounts(folder / FILE, lambda: now).begin(kind, task_id, most) is None


def test_a_restart_is_no_new_day(tmp_path: Path) -> None:
    assert [begun(tmp_path, name) for name in ("one", "two", "three")] == [True, True, False]
    assert DailyCounts(tmp_path / FILE, lambda: NOON).begin(Counted.TASKS, "four", 2) == MIDNIGHT


def test_midnight_utc_is(tmp_path: Path) -> None:
    assert begun(tmp_path, "one", most=1)
    assert not begun(tmp_path, "two", most=1, now=MIDNIGHT - timedelta(seconds=1))
    assert begun(tmp_path, "two", most=1, now=MIDNIGHT)


def test_fits_and_scorings_are_counted_apart(tmp_path: Path) -> None:
    assert begun(tmp_path, "one", most=1)
    assert begun(tmp_path, "two", Counted.SCORINGS, most=1)
    assert not begun(tmp_path, "three", Counted.SCORINGS, most=1)
    assert not begun(tmp_path, "four", most=1)


def test_a_task_that_a_restarted_daemon_takes_up_again_counts_once(tmp_path: Path) -> None:
    assert begun(tmp_path, "one", most=1)
    assert begun(tmp_path, "one", most=1)
    assert not begun(tmp_path, "two", most=1)


def test_a_clock_that_is_set_back_gives_no_second_day(tmp_path: Path) -> None:
    assert begun(tmp_path, "one", most=1)
    assert not begun(tmp_path, "two", most=1, now=NOON - timedelta(days=3))


@pytest.mark.parametrize("text", ["", "{", '{"day": "2026-06-01", "begun": {"tasks_per_day": "many"}}', "[]"])
def test_a_count_that_cannot_be_read_begins_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StateError):
        begun(tmp_path, "one")


def test_a_simulation_counts_nothing() -> None:
    assert MemoryStore().daily_counts is None


@pytest.mark.parametrize("key", ["tasks_per_day", "scorings_per_day"])
def test_beyond_the_limit_a_site_declines_by_the_policy_also_after_a_restart(key: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    limits = {**RULES["limits"], key: 1}
    harness = AgentHarness(store=store, rules={**RULES, "limits": limits})
    kind = TaskKind.SCORE if key == "scorings_per_day" else TaskKind.INITIALISE

    def offer(number: int) -> str:
        task = harness.score(number) if kind is TaskKind.SCORE else harness.offer(kind, 0, task_id=f"first-{number}")
        return task.task_id

    offer(1)
    harness.agent().step(0.0)
    assert harness.declined() == []
    harness.restart(tmp_path)
    declined = offer(2)
    harness.agent().step(0.0)
    assert harness.declined() == [(declined, FailureReason.POLICY)]
    assert isinstance(harness.store, DiskStore)
    harness.store.close()
