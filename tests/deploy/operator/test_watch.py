"""`runs watch` of a real server to the run's end: on a terminal, in lines, as JSON; also through a restart."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.disturbed_run import RULES, RUN, close_channels, disturbed_run
from tests.support.raw_client import RawClient

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, UnavailableError
from protofed.deploy.cli import main
from protofed.deploy.operator import watch as watch_loop
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.watch import Watcher, watch
from protofed.protos.v1 import federation_pb2 as fed
from protofed.server.rounds.machine.phases import Broken

RecipeOf = Callable[..., Recipe]
Start = Callable[..., Any]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_loop, "EVERY_S", 0.02)


@pytest.fixture
def troubled(live_server: Start, recipe_of: RecipeOf) -> Iterator[tuple[Any, list[RawClient]]]:
    """A run in which several things went wrong, and the daemons of its sites."""
    server, daemons = disturbed_run(live_server, recipe_of)
    yield server, daemons
    close_channels(daemons)


def connected(server: Any) -> Operator:
    return Operator(server.address, NO_TLS)


def screen(width: int = 100, height: int = 30) -> Console:
    """A terminal on which nothing is lost."""
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    """Done on another thread, while somebody watches."""
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def abort(server: Any, reason: str = "enough") -> None:
    with connected(server) as operator:
        operator.abort(RUN, reason)


def test_all_that_went_wrong_is_seen_and_a_sites_progress(
    troubled: tuple[Any, list[RawClient]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(troubled[0]) as operator:
        operator.exclude("site-4", "wrong [data]")
        seen = Watcher(operator, RUN).snapshot()
    assert (seen.status, seen.phase, seen.deadline_s, seen.round, seen.done) == ("running", "collecting", 600.0, 2, 1)
    assert seen.history[1].failed == {"failed": 1, "late": 1, "rejected": 1}
    assert {(one.site, one.what) for one in seen.problems} >= {
        ("site-1", "refused"),
        ("site-4", "rejected"),
        ("site-5", "failed"),
        ("site-6", "late"),
    }
    assert seen.sites[0].doing == "excluded: wrong [data]"
    assert seen.seconds is not None
    assert seen.seconds > 0
    server, daemons = troubled
    daemon, task = daemons[1], daemons[1].task()
    beat: dict[str, Any] = {
        "activity": fed.ACTIVITY_TRAINING,
        "epoch": 3,
        "epochs": 4,
        "making_progress": True,
        "bytes_moved": 12_345,
    }
    telemetry = {"gpu_memory_bytes": 3.2e9}
    request = fed.HeartbeatRequest(caller=daemon.caller, run=RUN, task_id=task.task_id, telemetry=telemetry, **beat)
    daemon.say("Heartbeat", request)
    with connected(server) as operator:
        (site,) = [site for site in Watcher(operator, RUN).snapshot().sites if site.site == "site-2"]
        (info,) = [info for info in operator.sites() if info.site == "site-2"]
    assert (site.task_status, site.progress, site.bytes_moved, site.telemetry) == ("started", 0.5, 12_345, telemetry)
    assert site.doing == "training, epoch 3/4"
    assert info.progress == 0.5
    monkeypatch.setattr(watch_loop, "ATTEMPTS", 1)
    server, _ = troubled
    with connected(server) as operator:
        seen = Watcher(operator, RUN, clock=lambda: 5e9).snapshot()
    assert len(seen.history) == 1
    assert seen.seconds == 5e9 - server.ledger.rounds(RUN)[0].opened_at


@pytest.mark.usefixtures("quick")
def test_on_a_terminal_the_end_stays_and_all_else_is_gone(troubled: tuple[Any, list[RawClient]]) -> None:
    console = screen()
    with connected(troubled[0]) as operator:
        watcher = Watcher(operator, RUN)
        after(1.2, lambda: abort(troubled[0]))
        watch(watcher, console)
    live, _, end = written(console).partition("\x1b[?1049l")
    assert live.startswith("\x1b[?1049h")
    assert f"{RUN} · fedavg · running" in live
    assert end.count(f"{RUN} · fedavg · aborted") == 1
    assert "running" not in end
    assert "enough" in end


@pytest.mark.usefixtures("quick")
def test_without_a_terminal_there_is_a_line_a_change_and_no_cursor_is_moved(
    troubled: tuple[Any, list[RawClient]],
) -> None:
    server, _ = troubled
    console = Console(file=io.StringIO(), width=40)

    def act() -> None:
        with connected(server) as operator:
            operator.exclude("site-6", "wrong [data]")
            time.sleep(0.3)
            operator.abort(RUN, "enough")

    with connected(server) as operator:
        watcher = Watcher(operator, RUN)
        after(0.3, act)
        watch(watcher, console)
    assert "\x1b" not in written(console)
    said = [line.partition(" ") for line in written(console).splitlines()]
    assert all(at.endswith("Z") and at[:2] == "20" for at, _, _ in said)
    lines = [line for _, _, line in said]
    assert lines[0] == f"{RUN} · fedavg · running · round 2 of 3"
    assert "site-6: excluded: wrong [data]" in lines
    assert lines[-1] == f"{RUN} · fedavg · aborted · round 2 of 3 · enough"
    assert [line for line in lines if line.startswith("warning: 6 trainers are needed")]  # since site-6 is excluded
    assert len(lines) == len(set(lines)) < 13


@pytest.mark.usefixtures("quick")
def test_json_lines_begin_change_and_end_and_an_ended_run_is_told_once(
    troubled: tuple[Any, list[RawClient]], capsys: pytest.CaptureFixture[str]
) -> None:
    server, _ = troubled
    with connected(server) as operator:
        watcher = Watcher(operator, RUN)
        after(0.3, lambda: abort(server))
        watch(watcher, screen(), as_json=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [one["event"] for one in told] == ["start", *["change"] * (len(told) - 2), "end"]
    assert (told[0]["status"], told[-1]["status"], told[-1]["reason"]) == ("running", "aborted", "enough")
    assert len(told) < 6
    with connected(troubled[0]) as operator:
        watch(Watcher(operator, RUN), screen(), as_json=True)
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == [
        "end"
    ]


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("quick")
def test_a_restarted_server_is_waited_for(
    live_server: Start, recipe_of: RecipeOf, tmp_path: Path, unused_port: int
) -> None:
    recipe, listen = recipe_of("fedavg", federation=RULES), f"127.0.0.1:{unused_port}"
    first = live_server(recipe, tmp_path / "kept", listen)
    console = Console(file=io.StringIO(), width=200)

    def restart() -> None:
        first.stop()
        time.sleep(0.5)
        live_server(recipe, tmp_path / "kept", listen)
        while True:  # channels of one process share a connection, which is tried again within two seconds
            with contextlib.suppress(UnavailableError):
                return abort(first)
            time.sleep(0.1)

    with connected(first) as operator:
        watcher = Watcher(operator, RUN)
        timer = after(0.3, restart)
        watch(watcher, console)
    timer.join()
    text = written(console)
    assert "trying again; nothing listens at the server" in text
    assert text.index("no answer for") < text.index("it answers again, after") < text.index("aborted")


def test_at_the_start_there_has_to_be_a_server_and_later_it_may_be_silent(
    troubled: tuple[Any, list[RawClient]], unused_port: int
) -> None:
    with connected(troubled[0]) as operator, pytest.raises(ConfigError, match="no run 'other'"):
        Watcher(operator, "other")
    with Operator(f"127.0.0.1:{unused_port}", NO_TLS) as operator, pytest.raises(UnavailableError):
        Watcher(operator, RUN)
    now = [1000.0]
    with connected(troubled[0]) as operator:
        watcher = Watcher(operator, RUN, clock=lambda: now[0])
    assert watcher.snapshot().trouble == ""
    now[0] += 7.0
    seen = watcher.snapshot()
    assert (seen.trouble, seen.silent_s) == ("it is busy, or the network is down", 7.0)


def command(server: Any, *arguments: str) -> tuple[str, ...]:
    return ("runs", "watch", RUN, "--server", server.address, "--identity=none", *arguments)


@pytest.mark.usefixtures("quick")
def test_a_run_that_fails_is_exit_code_1(
    live_server: Start, recipe_of: RecipeOf, capfd: pytest.CaptureFixture[str]
) -> None:
    server = live_server(recipe_of("fedavg"))
    after(0.3, lambda: server.runs.of(RUN).handle(Broken("disk")))
    with pytest.raises(SystemExit) as ended:
        main.main(list(command(server)))
    out, err = capfd.readouterr()
    assert ended.value.code == 1
    assert f"protofed: run failed: {RUN}: disk" in err
    assert out.splitlines()[-1].endswith(f"{RUN} · fedavg · failed · round 0 of 3 · disk")


def test_ctrl_c_is_exit_code_130_and_a_terminal_keeps_what_was_seen_last(
    troubled: tuple[Any, list[RawClient]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protofed.deploy.operator.watch.time.sleep", interrupt)
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            main.main(list(command(troubled[0], *more)))
        assert ended.value.code == 130
    console = screen()
    with connected(troubled[0]) as operator, pytest.raises(KeyboardInterrupt):
        watch(Watcher(operator, RUN), console)
    assert f"{RUN} · fedavg · running" in written(console).partition("\x1b[?1049l")[2]


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_started_can_be_watched_as_json_from_its_place_in_the_queue(
    live_server: Start, recipe_of: RecipeOf, capfd: pytest.CaptureFixture[str]
) -> None:
    server = live_server(recipe_of("fedavg"))

    def end() -> None:
        with connected(server) as operator:
            operator.abort("behind", "enough")

    after(1.0, end)
    arguments = ["runs", "start", "digits-fednh", "--name=behind", "--watch", "--json", "--identity=none"]
    with pytest.raises(SystemExit) as ended:
        main.main([*arguments, "--server", server.address])
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    first, last = told[0], told[-1]
    assert ended.value.code in (0, None)
    assert first["queue"] == f"next in the queue, behind {RUN} (running, round 0 of 3)"
    assert (first["event"], last["event"], last["status"]) == ("start", "end", "aborted")
