"""A site's daemon between task and update: rows 21 to 24, 29 to 33, 35 and 36 of the fault table."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from google_crc32c import value as crc32c
from tests.support.audit_logs import audit
from tests.support.scripted_server import RUN, AgentHarness, ScriptedServer, first_model, give_secret, site_data, work
from tests.support.waiting import wait_for

from protofed.client.agent.agent import REJECTED_PAUSE_S
from protofed.client.agent.heartbeat import Heartbeat
from protofed.client.data.examples import Examples
from protofed.client.data.site import load_site
from protofed.client.data.site_data import SiteData
from protofed.client.device import pick_device
from protofed.client.models.split import SplitModel
from protofed.client.site import DaemonStatus
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.downloads import MemoryDownloads, download
from protofed.client.training.progress import FOLDER, on_disk
from protofed.client.transport import calls
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, FailureReason, PolicyViolationError, ProtofedError, UnavailableError
from protofed.common.protocol.messages import CHUNK_BYTES, Activity, Progress, Role, Task, TaskKind, Wait
from protofed.deploy.daemons.client import run_client
from protofed.deploy.daemons.signals import stoppable

ROOT = Path(__file__).parents[2]
SOLO = {**RUN, "method": {"name": "solo"}, "plan": {**RUN["plan"], "momentum": 0.9, "checkpoint": True}}
DAY_S = 86_400.0


def in_folder(folder: Path, recipe: dict[str, Any] = SOLO, **changes: Any) -> AgentHarness:
    """A site with a state folder, whose first round has counted."""
    give_secret(folder)  # one for all sites: what they keep is compared
    harness = AgentHarness(store=DiskStore(folder), recipe=recipe, checkpoints=partial(on_disk, folder), **changes)
    harness.fit(1)
    harness.agent().step(0.0)
    return harness


def kept(harness: AgentHarness) -> tuple[int, bytes, bytes]:
    """What the site holds."""
    held = harness.store.last_counted("run", 9)
    return held.round, codec.encode(held.client_state), codec.encode(held.personal or {})


def said(harness: AgentHarness, task: Task, reason: FailureReason) -> None:
    """All that the server heard of the task is this code, and it got nothing else of the site."""
    assert harness.link.beats == [Progress(task.task_id, Activity.FAILED, failure=reason)]
    assert harness.link.calls["push"] == harness.link.calls["report"] == 0


def never() -> None:
    raise AssertionError("it trains")


# 21 to 24: tasks that this site does not do


def test_row_21_an_old_answer_sent_again_is_not_trained_on_again() -> None:
    harness = AgentHarness()
    old, daemon = harness.fit(1), harness.agent()
    daemon.step(0.0)
    harness.fit(2)
    daemon.step(0.0)
    before, trained = kept(harness), harness.now.check
    harness.now.check = never  # type: ignore[method-assign]
    harness.link.tasks.extend([old, replace(old, run="another")])
    assert [daemon.step(0.0), daemon.step(0.0)] == [Wait(0.0)] * 2
    assert harness.pauses == [REJECTED_PAUSE_S] * 2
    assert (kept(harness), harness.link.calls["push"], harness.declined()) == (before, 2, [])
    harness.now.check = trained  # type: ignore[method-assign]
    again = harness.fit(1, task_id="rolled-back")  # the round, opened again: that is work
    daemon.step(0.0)
    assert harness.link.pushed[-1][0] == again
    assert kept(harness)[0] == 1


def test_row_21_what_is_handed_in_after_a_restart_is_not_trained_on_either(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path))
    task = harness.fit(1)
    harness.link.failing["push"] = [UnavailableError("the connection was closed")]
    with pytest.raises(UnavailableError, match="connection was closed"):
        harness.agent().step(0.0)
    harness.restart(tmp_path)
    harness.now.check = never  # type: ignore[method-assign]
    harness.link.tasks.append(task)
    daemon = harness.agent()
    work(daemon, 1)
    assert (harness.pauses, harness.link.calls["push"]) == ([REJECTED_PAUSE_S], 2)


def test_what_a_restored_server_asks_for_again_is_trained_again(tmp_path: Path) -> None:
    """Its backup is older than the receipt: it insists, and gets the very same update."""
    harness = AgentHarness(store=DiskStore(tmp_path))
    task, daemon = harness.fit(1), harness.agent()
    daemon.step(0.0)
    harness.link.tasks.extend([task, task])
    assert daemon.step(0.0) == Wait(0.0)
    assert daemon.step(0.0) == task
    (_, first), (again, second) = harness.link.pushed
    assert (again, first.data) == (task, second.data)
    assert (harness.store.last_counted("run", 2).round, harness.store.unsettled("run"), harness.declined()) == (
        1,
        [],
        [],
    )


@dataclass
class OtherBytes(ScriptedServer):
    """A server that sends this site another model than the task names, its chunks in order."""

    def fetch(self, task: Task) -> bytes:
        other = codec.encode(first_model(seed=6))
        assert task.base_digest is not None
        assert len(other) <= CHUNK_BYTES
        with ThreadPoolExecutor(1) as pool:
            self.calls["fetch"] += 1
            return download(MemoryDownloads(), task.base_digest, len(other), lambda _: (other, crc32c(other)), pool)


def test_row_22_another_model_than_the_tasks_digest_is_refused() -> None:
    harness = AgentHarness()
    harness.link = OtherBytes(harness.link.recipe)
    task = harness.fit(1)
    harness.now.check = never  # type: ignore[method-assign]
    harness.agent().step(0.0)
    said(harness, task, FailureReason.REFUSED)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"epochs":2', '"epochs":0'),
        ('"batch_size":4', '"batch_size":-1'),
        ('"lr":0.1', '"lr":NaN'),
        ('"lr":0.1', '"lr":Infinity'),
        ('"momentum":0.0', '"momentum":1.5'),
        ('"optimizer":"sgd"', '"optimizer":"os.system"'),
        ('"checkpoint":false', '"checkpoint":"/etc/passwd"'),
        ('"hidden":[4]', '"hidden":[-4]'),
    ],
)
def test_row_23_a_plan_out_of_range_is_declined_by_a_code(good: str, bad: str) -> None:
    harness = AgentHarness()
    assert harness.link.recipe.count(good) == 1
    harness.link.recipe = harness.link.recipe.replace(good, bad)
    task = harness.fit(1)
    harness.agent().step(0.0)
    said(harness, task, FailureReason.REFUSED)
    assert harness.link.calls["fetch"] == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, PolicyViolationError),
        ("", ConfigError),
        ("methods = [", ConfigError),
        ('methods = ["fedavg"]\nparts = ["everything"]', ConfigError),
        ('methods = ["fedavg"]\nparts = ["body"]\nallow_all = true', ConfigError),
    ],
)
def test_row_24_without_a_policy_that_can_be_read_nothing_begins(
    text: str | None, error: type[ProtofedError], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    if text is not None:
        policy.write_text(text, encoding="utf-8")
    state = tmp_path / "state"
    settings = ClientSettings(site="ann", policy=policy, state=state, data=Data(source="digits"), identity="none")
    with pytest.raises(error, match=r"policy\.toml"):
        run_client(settings, until_finished=True, give_up_after_s=0.1)
    assert not state.exists()  # nor was a server looked for


def test_row_24_a_policy_that_names_nothing_lets_nothing_leave() -> None:
    harness = AgentHarness(rules={"methods": [], "parts": []})
    tasks = [harness.offer(TaskKind.INITIALISE, 0), harness.fit(1), harness.score(1)]
    work(harness.agent(), 3)
    assert harness.declined() == [(task.task_id, FailureReason.POLICY) for task in tasks]
    assert harness.link.calls == {"enroll": 1, "next_task": 3}


# 29: a full disk


@dataclass
class Disk:
    """Room for so many more files, through fsync."""

    room: int | None = None

    def fsync(self, handle: int) -> None:
        if self.room is not None:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= 1


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("room", [0, 1, 3, 5, 7])
def test_row_29_a_full_disk_declines_the_task_and_harms_nothing(
    room: int, checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    plans = {"calm": RUN["plan"], "full": {**RUN["plan"], "checkpoint": checkpoint}}
    calm, full = (in_folder(tmp_path / name, {**SOLO, "plan": plan}) for name, plan in plans.items())
    calm.fit(2)
    work(calm.agent(), 1)
    before, disk.room = kept(full), room
    task, daemon = full.fit(2), full.agent()
    daemon.step(0.0)
    assert full.declined() == [(task.task_id, FailureReason.DISK)]
    assert (kept(full), full.store.unsettled("run")) == (before, [])
    disk.room = None  # there is space again
    full.link.tasks.append(task)
    daemon.step(0.0)
    assert kept(full) == kept(calm)
    assert full.link.pushed[-1][1].data == calm.link.pushed[-1][1].data


# 30: kill -9


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of daemons that were killed before each batch of a fit; None: one that was not."""
    folder = tmp_path_factory.mktemp("lives")
    command = [sys.executable, "-m", "tests.support.killed_fits", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    outcomes: dict[str, dict[str, Any]] = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return outcomes


@pytest.mark.parametrize("batch", range(6))
def test_row_30_a_daemon_killed_before_any_batch_ends_with_the_same_bytes(
    batch: int, lives: dict[str, dict[str, Any]]
) -> None:
    found, calm = lives[str(batch)], lives["None"]
    assert (found["ends"], calm["ends"]) == ([-signal.SIGKILL, 0], [0])
    assert found["before"] == calm["before"]  # memory, after the kill
    done = int(batch >= 3)  # epochs of three batches
    assert (found["left"], found["trained"], found["after"]) == (done, 6 - 3 * done, 0)
    outcome = ("sent", "loss", "memory", "personal")
    assert [found[name] for name in outcome] == [calm[name] for name in outcome]


# 31: the device


def breaking(error: Exception, above: int = 0) -> Callable[[SplitModel], SplitModel]:
    """A model that fails on batches above this size."""

    def wrap(model: SplitModel) -> SplitModel:
        def fail(_model: Any, arguments: Any) -> None:
            if len(arguments[0]) > above and model.training:
                raise error

        model.register_forward_pre_hook(fail)
        return model

    return wrap


def test_row_31_a_batch_that_does_not_fit_is_split_and_trained_on() -> None:
    harness = AgentHarness(wrap=breaking(torch.OutOfMemoryError("simulated"), above=2))
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("simulated"), FailureReason.OUT_OF_MEMORY),
        (torch.AcceleratorError("simulated"), FailureReason.DEVICE),
    ],
)
def test_row_31_a_device_that_fails_declines_the_task_and_the_daemon_lives(
    error: Exception, reason: FailureReason
) -> None:
    harness = AgentHarness(wrap=breaking(error))
    task, daemon = harness.fit(1), harness.agent()
    daemon.step(0.0)
    said(harness, task, reason)
    harness.score(1)
    daemon.step(0.0)
    assert len(harness.link.scores) == 1


def test_row_31_a_gpu_that_is_not_there_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnavailableError, match="offers 0 GPUs") as caught:
        pick_device("cuda")
    assert caught.value.exit_code == 69  # systemd starts the daemon again: a driver may still load


# 32 and 33: numbers and data


def diverged(folder: Path, recipe: dict[str, Any]) -> tuple[AgentHarness, Task]:
    """A site whose second fit diverges: what it had before is unchanged, and no checkpoint of the fit is left."""
    harness = in_folder(folder, recipe)
    before = kept(harness)[1:]
    harness.link.pushed.clear()
    harness.link.calls.clear()
    harness.link.recipe = Recipe.model_validate({**recipe, "plan": {**recipe["plan"], "lr": 1e30, "epochs": 9}}).wire()
    task = harness.fit(2)
    harness.agent().step(0.0)
    assert kept(harness)[1:] == before
    assert not list((folder / FOLDER).glob("*"))
    return harness, task


def test_row_32_a_loss_that_is_no_number_ends_the_task_on_the_site(tmp_path: Path) -> None:
    harness, task = diverged(tmp_path, {**SOLO, "method": {"name": "fedavg"}})
    said(harness, task, FailureReason.NUMERIC)
    assert (kept(harness)[0], harness.store.unsettled("run")) == (1, [])


def test_row_32_where_that_would_tell_more_than_the_update_nothing_is_declined(tmp_path: Path) -> None:
    harness, task = diverged(tmp_path, SOLO)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]
    assert all(beat.failure is None for beat in harness.link.beats)


def spoilt(how: str, path: Path) -> None:
    """An .npz file of a site."""
    images, labels = np.zeros((8, 2, 2), np.uint8), np.arange(8) % 3
    if how == "empty":
        images, labels = images[:0], labels[:0]
    elif how == "labels":
        labels = labels + 1
    elif how == "shape":
        images = np.zeros((8, 3, 2), np.uint8)
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "garbage":
        path.write_bytes(b"\x80\x04no archive")
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["empty", "labels", "shape", "cut", "garbage", "missing"])
def test_row_33_data_that_cannot_be_used_are_told_by_a_code_only(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "patient-4711.npz"
    spoilt(how, path)
    source = Data(source="npz", root=path)
    harness = AgentHarness(load_data=lambda recipe: load_site(source, 0, recipe.input, recipe.classes))
    tasks, daemon = [harness.fit(1), harness.score(1)], harness.agent()
    work(daemon, 2)
    assert harness.link.beats == [Progress(task.task_id, Activity.FAILED, failure=FailureReason.DATA) for task in tasks]
    assert "4711" not in repr(vars(harness.link))
    assert "cannot take part" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fedavg", "solo"])
def test_row_33_a_site_of_one_class_is_a_site_like_others(method: str) -> None:
    def lonely(recipe: Recipe) -> SiteData:
        mine = site_data().train
        return replace(site_data(), train=Examples(mine.pixels(), torch.ones_like(mine.labels)))

    harness = AgentHarness(recipe={**RUN, "method": {"name": method}}, load_data=lonely, roles=frozenset(Role))
    harness.fit(1)
    harness.score(1)
    work(harness.agent(), 2)
    assert (harness.declined(), len(harness.link.pushed)) == ([], 1)
    assert all(np.isfinite(value) for value in harness.link.scores[0].values())


# 35: SIGTERM


@pytest.mark.parametrize("batch", range(6))
def test_row_35_a_daemon_told_to_end_keeps_its_last_epoch(batch: int, tmp_path: Path) -> None:
    calm, stopped = in_folder(tmp_path / "calm"), in_folder(tmp_path / "stopped")
    calm.fit(2)
    work(calm.agent(), 1)
    trained, before = itertools.count(), kept(stopped)

    def stop() -> None:
        if next(trained) == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped.now.check = stop  # type: ignore[method-assign]
    task, began = stopped.fit(2), time.monotonic()
    with stoppable():
        stopped.agent().step(0.0)
        raise AssertionError("it was not told to end")
    assert time.monotonic() - began < 30
    assert len(list((tmp_path / "stopped" / FOLDER).glob("*"))) == int(batch >= 3)
    assert stopped.declined() == []
    stopped.restart(tmp_path / "stopped")
    assert kept(stopped) == before
    rest: list[None] = []
    stopped.now.check = lambda: rest.append(None)
    stopped.link.tasks.append(task)
    work(stopped.agent(), 1)
    assert len(rest) == 6 - batch // 3 * 3
    assert (kept(stopped), stopped.link.pushed[-1][1].data) == (kept(calm), calm.link.pushed[-1][1].data)


# 36: the wall clock


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """A wall clock that jumps to and fro by a day whenever it is read."""
    now, days = time.time(), itertools.cycle((0.0, DAY_S, -DAY_S))

    def jump() -> float:
        return now + next(days)

    monkeypatch.setattr(time, "time", jump)
    yield jump
    monkeypatch.undo()


@pytest.mark.usefixtures("quick_heartbeats")
def test_row_36_a_fit_and_its_heartbeats_go_on_when_the_clock_jumps(
    jumping: Callable[[], float], tmp_path: Path
) -> None:
    harness = in_folder(tmp_path, now=DaemonStatus(run="run", heartbeat_s=0.01))
    pulse = Heartbeat(harness.link, harness.now, lambda: 0)
    pulse.start()
    harness.now.check = lambda: time.sleep(0.02)  # type: ignore[method-assign]
    harness.fit(2)
    work(harness.agent(), 1)
    wait_for(lambda: any(beat.activity is Activity.TRAINING for beat in harness.link.beats))
    pulse.stop()
    pulse.join(5.0)
    assert kept(harness)[0] == 2


def test_row_36_patience_with_a_server_that_is_away_is_not_the_clocks(
    jumping: Callable[[], float], monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, time=jumping)
    monkeypatch.undo()  # gRPC itself gives the core its deadlines by the wall clock, and reads it at once
    monkeypatch.setattr(calls, "time", clock)
    link = GrpcLink(
        f"127.0.0.1:{unused_port}",
        "ann",
        "tested",
        frozenset({Role.TRAINER}),
        identity=None,
        audit=audit(),
        give_up_after_s=0.5,
    )
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="no answer"):
        link.enroll()
    assert 0.5 <= time.monotonic() - began < 20
    link.close()


def test_row_36_nothing_on_a_site_reads_the_wall_clock() -> None:
    reads = re.compile(r"time\.time\(|time_ns\(|datetime\.(now|utcnow|today)\(|from time import")
    found = [path.name for path in (ROOT / "client").rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    assert found == []
