"""A day has as many tasks as the policy says, however often the daemon starts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
from tests.support.scripted_server import RULES, AgentHarness

from protofed.client.state.daily_counts import FILE, KEPT, Counted, DailyCounts, Exhausted
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore
from protofed.common.clock import utc_now
from protofed.common.errors import FailureReason, StateError
from protofed.common.protocol.messages import TaskKind

NOON = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
MIDNIGHT = datetime(2026, 6, 2, tzinfo=UTC)


def started(folder: Path, task_id: str, kind: Counted = Counted.TASKS, most: int = 2, now: datetime = NOON) -> bool:
    folder.mkdir(exist_ok=True)
    return DailyCounts(folder / FILE, lambda: now).begin(kind, task_id, most) is None


def test_a_restart_is_no_new_day_and_a_task_that_is_taken_up_again_counts_once(tmp_path: Path) -> None:
    assert [started(tmp_path, name) for name in ("one", "two", "three", "two")] == [True, True, False, True]
    assert DailyCounts(tmp_path / FILE, lambda: NOON).begin(Counted.TASKS, "four", 2) == Exhausted(MIDNIGHT, False)
    assert not started(tmp_path, "five", now=MIDNIGHT - timedelta(seconds=1))
    assert started(tmp_path, "five", now=MIDNIGHT)
    assert MemoryStore().daily_counts is None  # a simulation counts nothing


def test_fits_and_scorings_are_counted_apart(tmp_path: Path) -> None:
    assert started(tmp_path, "one", most=1)
    assert started(tmp_path, "two", Counted.SCORINGS, most=1)
    assert not started(tmp_path, "three", Counted.SCORINGS, most=1)
    assert not started(tmp_path, "four", most=1)


def test_a_clock_that_is_set_gives_no_day_twice_and_stops_nothing_once_it_is_right(tmp_path: Path) -> None:
    assert started(tmp_path, "one", most=1)
    before = DailyCounts(tmp_path / FILE, lambda: NOON - timedelta(days=1))
    assert before.begin(Counted.TASKS, "two", 1) == Exhausted(MIDNIGHT, True)
    assert started(tmp_path / "1", "one", now=NOON + timedelta(days=3650), most=1)
    for day in range(3):
        now = NOON + timedelta(days=day)
        assert started(tmp_path / "1", f"first {day}", now=now)
        assert started(tmp_path / "1", f"second {day}", now=now)
        assert not started(tmp_path / "1", f"third {day}", now=now)
    days = [NOON + timedelta(days=offset) for offset in (0, 10, -10, 3650)]
    tasks = [(now, f"{turn} {now:%Y-%m-%d} {n}") for turn in range(3) for now in days for n in range(3)]
    assert sum(started(tmp_path / "2", task_id, now=now) for now, task_id in tasks) == 2 * len(days)
    for day in range(3 * KEPT):
        assert started(tmp_path / "3", str(day), now=NOON + timedelta(days=day))
    assert len(json.loads((tmp_path / "3" / FILE).read_bytes())["others"]) == KEPT


@pytest.mark.parametrize("text", ["", "{", '{"day": "2026-06-01", "started": {"tasks_per_day": "many"}}', "[]"])
def test_a_count_that_cannot_be_read_begins_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StateError):
        started(tmp_path, "one")


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


def test_a_refusal_by_tomorrows_count_says_what_to_do(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    tomorrow = utc_now() + timedelta(days=1)
    store.daily_counts = DailyCounts(tmp_path / FILE, lambda: tomorrow)
    assert store.daily_counts.begin(Counted.TASKS, "one", 1) is None
    store.daily_counts = DailyCounts(tmp_path / FILE, lambda: tomorrow - timedelta(days=1))
    limits = {**RULES["limits"], "tasks_per_day": 1}
    harness = AgentHarness(store=store, rules={**RULES, "limits": limits})
    harness.offer(TaskKind.INITIALISE, 0, task_id="two")
    with structlog.testing.capture_logs() as logs:
        harness.agent().step(0.0)
    assert harness.declined() == [("two", FailureReason.POLICY)]
    assert any("clock was ahead" in str(entry) for entry in logs)
    store.close()
