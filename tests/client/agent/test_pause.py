"""A hospital pauses its site: no new task, the one in hand is finished, and a restart changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.scripted_server import RULES, AgentHarness, work

from protofed.client.policy.pause import FILE, SitePause
from protofed.client.state.disk_store import DiskStore
from protofed.common.protocol.messages import PauseReason, Task


@pytest.fixture
def harness(tmp_path: Path) -> AgentHarness:
    return AgentHarness(store=DiskStore(tmp_path), rules=RULES)


@pytest.fixture
def pause(tmp_path: Path) -> SitePause:
    return SitePause(tmp_path / FILE)


def test_the_task_in_hand_is_finished_and_no_other_started(harness: AgentHarness, pause: SitePause) -> None:
    tasks = [harness.fit(1), harness.fit(2)]

    def paused(_: Task) -> None:
        pause.begin("ann")

    harness.link.before_push = paused
    work(daemon := harness.agent(), 3)
    assert [task for task, _ in harness.link.pushed] == tasks[:1]
    assert harness.link.pause_reasons == [PauseReason.NONE, PauseReason.PAUSED, PauseReason.PAUSED]
    assert harness.declined() == []
    pause.end()
    work(daemon, 1)
    assert [task for task, _ in harness.link.pushed] == tasks


def test_a_pause_survives_the_daemon(harness: AgentHarness, pause: SitePause, tmp_path: Path) -> None:
    pause.begin()
    harness.fit(1)
    work(harness.agent(), 1)
    harness.restart(tmp_path)
    work(harness.agent(), 2)
    assert harness.link.pause_reasons == [PauseReason.PAUSED] * 3
    assert (harness.link.calls["next_task"], harness.link.pushed) == (0, [])


def test_a_pause_ends_at_its_time(tmp_path: Path) -> None:
    now = [datetime(2026, 6, 1, 12, 0, tzinfo=UTC)]
    pause = SitePause(tmp_path / FILE, lambda: now[-1])
    pause.begin("ann", now[0] + timedelta(hours=2))
    assert (current := pause.current()) is not None
    assert (current.at, current.by, current.until) == ("2026-06-01T12:00:00Z", "ann", now[0] + timedelta(hours=2))
    now.append(now[0] + timedelta(hours=2))
    assert pause.current() is None


@pytest.mark.parametrize("text", [b"", b"{", b'{"at": "x", "until": "18:00"}', b"\xff"])
def test_a_pause_that_cannot_be_read_is_one(text: bytes, pause: SitePause, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert pause.current() is not None
    assert pause.end() is not None
    assert pause.end() is None
    assert pause.current() is None
