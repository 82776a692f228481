"""Heartbeats: as long as the daemon lives, whatever it does; they hear when a task is called off."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.scripted_server import RULES

from protofed.client.agent import heartbeat
from protofed.client.agent.heartbeat import Heartbeat, idle_heartbeat_s
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.site import DaemonStatus, TaskAbortedError
from protofed.client.training.context import FitProgress
from protofed.common.config.recipe import Federation
from protofed.common.protocol import wire
from protofed.common.protocol.messages import Activity, Progress, Signal
from protofed.protos.v1 import federation_pb2 as pb

pytestmark = pytest.mark.usefixtures("quick_heartbeats")
SOON = 5.0  # seconds after which a test gives up


class Ear:
    """The part of a link that a pulse uses: keeps what it hears, and answers what it was told to."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, Progress]] = queue.Queue()
        self.answer: Callable[[Progress], Signal] = lambda _: Signal.CONTINUE

    def beat(self, run: str, progress: Progress) -> Signal:
        self.heard.put((run, progress))
        return self.answer(progress)

    def hears(self, expected: Progress) -> None:
        """Fails unless this is said soon."""
        until = time.monotonic() + SOON
        while self.heard.get(timeout=SOON)[1] != expected:
            assert time.monotonic() < until, expected


@contextmanager
def beating(
    ear: Any, now: DaemonStatus, bytes_moved: Callable[[], int] = lambda: 0, **options: Any
) -> Iterator[Heartbeat]:
    pulse = Heartbeat(ear, now, bytes_moved, **options)
    pulse.start()
    try:
        yield pulse
    finally:
        pulse.stop()
        pulse.join(SOON)
        assert not pulse.is_alive()


def test_a_beat_says_what_the_daemon_does_at_that_time() -> None:
    ear, now, moved = Ear(), DaemonStatus(run="run", heartbeat_s=0.005), [10]
    with beating(ear, now, lambda: moved[0]):
        assert ear.heard.get(timeout=SOON) == ("run", Progress("", Activity.IDLE, bytes_moved=10))
        now.task_id, now.activity, now.fit_progress = "n1", Activity.TRAINING, FitProgress(2, 5)
        moved[0] = 99
        ear.hears(Progress("n1", Activity.TRAINING, 2, 5, False, 99))
        now.check()  # a batch is done
        ear.hears(Progress("n1", Activity.TRAINING, 2, 5, True, 99))
        now.fit_progress.epoch = 3  # written in place by the training loop
        ear.hears(Progress("n1", Activity.TRAINING, 3, 5, True, 99))


def test_while_the_agent_asks_for_work_few_beats_do() -> None:
    ear, now, clock = Ear(), DaemonStatus(run="run", heartbeat_s=0.005, idle_heartbeat_s=10.0), [0.0]
    now.clock = lambda: clock[0]
    with now.asking(), beating(ear, now):
        ear.hears(Progress("", Activity.IDLE))
        clock[0] = 9.9
        with pytest.raises(queue.Empty):
            ear.heard.get(timeout=0.2)
        clock[0] = 10.0
        ear.hears(Progress("", Activity.IDLE))
        now.activity = Activity.TRAINING  # cannot be while it asks; what was said last counts
        clock[0] = 20.0
        ear.hears(Progress("", Activity.TRAINING))
        now.activity = Activity.IDLE
        ear.hears(Progress("", Activity.IDLE))  # soon: else the server would show it at work for a minute


@pytest.mark.parametrize("numbers", [{}, {"disk_free_bytes": 7.0}], ids=["nothing to tell", "numbers"])
def test_a_beat_beside_a_call_that_waits_brings_something(numbers: dict[str, float]) -> None:
    ear, now, clock = Ear(), DaemonStatus(run="run", heartbeat_s=0.005, idle_heartbeat_s=60.0), [0.0]
    now.clock = lambda: clock[0]
    policy = Policy(PolicyRules.model_validate({**RULES, "telemetry": [*numbers]}))
    with now.asking(), beating(ear, now, telemetry=lambda: policy.release_telemetry({"disk_free_bytes": 7.0})):
        ear.hears(Progress("", Activity.IDLE, telemetry=numbers))
        clock[0] = 60.0
        if numbers:
            ear.hears(Progress("", Activity.IDLE, telemetry=numbers))
        else:
            with pytest.raises(queue.Empty):
                ear.heard.get(timeout=0.2)


def test_a_daemon_that_loads_its_data_beats_as_always_but_not_without_a_run() -> None:
    ear, now = Ear(), DaemonStatus(run="run", heartbeat_s=0.005, idle_heartbeat_s=60.0)
    with beating(ear, now):
        for _ in range(3):
            ear.hears(Progress("", Activity.IDLE))
    ear, now = Ear(), DaemonStatus(heartbeat_s=0.005)
    with beating(ear, now):
        with pytest.raises(queue.Empty):
            ear.heard.get(timeout=0.05)
        now.run = "run"
        assert ear.heard.get(timeout=SOON)[0] == "run"


@pytest.mark.parametrize(
    ("heartbeat_s", "stall_timeout_s", "expected"), [(5, 120, 60), (5, 600, 60), (5, 30, 15), (5, 4, 5), (90, 600, 90)]
)
def test_two_beats_come_before_a_daemon_is_lost(heartbeat_s: float, stall_timeout_s: float, expected: float) -> None:
    federation = Federation(heartbeat_s=heartbeat_s, stall_timeout_s=stall_timeout_s)
    assert idle_heartbeat_s(federation) == expected


@pytest.mark.parametrize(("activity", "moves_s"), [(Activity.TRAINING, 60.0), (Activity.SCORING, 300.0)])
def test_work_moves_for_a_while_after_each_batch(activity: Activity, moves_s: float) -> None:
    """So long that batches cannot be told apart, and no longer: what hangs is found."""
    time = [0.0]
    now = DaemonStatus(activity=activity, clock=lambda: time[0])
    assert not now.progress(0).making_progress
    for _ in range(3):
        now.check()
        time[0] += moves_s - 1
        assert now.progress(0) == Progress("", activity, making_progress=True)
    time[0] += 1
    assert not now.progress(0).making_progress


@pytest.mark.parametrize("activity", sorted(set(Activity) - {Activity.TRAINING, Activity.SCORING}))
def test_only_training_and_scoring_move(activity: Activity) -> None:
    now = DaemonStatus(activity=activity)
    now.check()
    assert not now.progress(0).making_progress


def test_a_task_that_is_called_off_ends_at_its_next_check() -> None:
    ear, now = Ear(), DaemonStatus(run="run", task_id="n1", heartbeat_s=0.005)
    now.check()
    ear.answer = lambda _: Signal.ABORT
    with beating(ear, now):
        for _ in range(3):  # the second beat comes after the first one's answer was heeded
            ear.heard.get(timeout=SOON)
        with pytest.raises(TaskAbortedError):
            now.check()


def test_calling_off_one_task_is_not_calling_off_the_next() -> None:
    ear, now = Ear(), DaemonStatus(run="run", task_id="n1", heartbeat_s=0.005)

    def slow(progress: Progress) -> Signal:
        now.task_id = "n2"  # while the answer is on its way
        return Signal.ABORT if progress.task_id == "n1" else Signal.CONTINUE

    ear.answer = slow
    with beating(ear, now):
        for _ in range(3):
            ear.heard.get(timeout=SOON)
    assert now.aborted_task_id == "n1"
    now.check()


@pytest.mark.parametrize("heartbeat_s", [1e-9, 0.001, 0.1])
def test_no_recipe_makes_a_daemon_beat_too_often(heartbeat_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DaemonStatus().heartbeat_s >= 1.0
    monkeypatch.setattr(heartbeat, "SHORTEST_S", 0.2)
    ear, times = Ear(), []
    began = time.monotonic()
    with beating(ear, DaemonStatus(run="run", heartbeat_s=heartbeat_s)):
        for _ in range(3):
            ear.heard.get(timeout=SOON)
            times.append(time.monotonic() - began)
    assert all(at >= 0.2 * beats for beats, at in enumerate(times, start=1))


def test_a_beat_tells_of_the_machine_what_the_policy_names_and_no_more() -> None:
    measured = {"disk_free_bytes": 7.0, "step_seconds": 0.5}
    ear, now, rules = Ear(), DaemonStatus(run="run", heartbeat_s=0.005), {**RULES, "telemetry": ["disk_free_bytes"]}
    named, closed = Policy(PolicyRules.model_validate(rules)), Policy(PolicyRules.model_validate(RULES))
    with beating(ear, now, telemetry=lambda: named.release_telemetry(measured)):
        assert ear.heard.get(timeout=SOON)[1].telemetry == {"disk_free_bytes": 7.0}
        measured["disk_free_bytes"] = 6.0
        until = time.monotonic() + SOON
        while ear.heard.get(timeout=SOON)[1].telemetry != {"disk_free_bytes": 6.0}:
            assert time.monotonic() < until
    beats = []
    for telemetry in (None, lambda: closed.release_telemetry(measured)):
        silent = Ear()
        with beating(silent, now, telemetry=telemetry):
            beats.append(wire.pack_progress(silent.heard.get(timeout=SOON)[1]))
    without = {name: value for name, value in beats[0].items() if name != "telemetry"}  # as before there was any
    said = [pb.HeartbeatRequest(run="run", **fields).SerializeToString(deterministic=True) for fields in beats]
    assert said == [pb.HeartbeatRequest(run="run", **without).SerializeToString(deterministic=True)] * 2


def test_it_ends_when_it_is_told_to_without_another_beat() -> None:
    ear, now = Ear(), DaemonStatus(run="run", heartbeat_s=60.0)
    with beating(ear, now) as pulse:
        pulse.stop()
        pulse.join(SOON)
        assert not pulse.is_alive()
    assert ear.heard.empty()
    assert pulse.daemon  # nor does it keep a process alive
