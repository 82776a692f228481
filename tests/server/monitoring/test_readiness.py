"""A server is ready when it can do its work, and says what it lacks; gRPC's health says whether it answers calls.

The log says why a run does not go on: once for each reason that lasts.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.operator_lab import OperatorLab, operator_lab
from tests.support.pki import Authority
from tests.support.raw_client import credentials

from protofed.common.clock import utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import Monitoring
from protofed.common.errors import OutOfSpaceError
from protofed.common.monitoring import Monitor
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.server.monitoring import readiness
from protofed.server.monitoring.readiness import (
    STEADY_S,
    OnDisk,
    ServerReadiness,
    WaitingLog,
    identity_usable,
    ledger_writable,
    state_writable,
)
from protofed.server.rpc.audit import ServerAudit
from protofed.server.storage.ledger import Ledger

STARTING = "port: calls are not answered: the server starts, or ends"


def test_every_thing_that_is_missing_has_its_line() -> None:
    ready, full = ServerReadiness(), ["full"]
    ready.require("disk", lambda: full[0])
    ready.require("audit", lambda: "")
    assert ready.missing() == [STARTING, "disk: full"]
    ready.serving = True
    assert ready.missing() == ["disk: full"]
    full[0] = ""
    assert ready.missing() == []


def test_a_certificate_is_looked_at_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Authority.make().issue(tmp_path / "hub", Party.SERVER, "hub", ends=utc_now() + timedelta(hours=1))
    look = identity_usable(LiveIdentity(folder, Party.SERVER))
    assert look() == ""
    now = utc_now()
    monkeypatch.setattr(readiness, "utc_now", lambda: now + timedelta(hours=2))
    assert "the server's certificate expired on" in look()
    monkeypatch.setattr(readiness, "utc_now", lambda: now - timedelta(days=2))
    assert "the server's certificate is valid only from" in look()
    assert identity_usable(None)() == ""


def test_a_journal_that_lacks_a_promise() -> None:
    class Slow:
        def append_all(self, *_: Any, **__: Any) -> None:
            seen.append(look())

    class Full:
        def append_all(self, *_: Any, **__: Any) -> None:
            raise OutOfSpaceError("no space left")

    ledger, seen = Ledger(), list[str]()
    look = ledger_writable(ledger, ledger.check)
    ledger.begin_run("one", "0" * 64, "{}")  # type: ignore[arg-type]
    assert look() == ""
    ledger.attach(Slow())
    ledger.pause("one", paused=False)
    assert seen == [""]  # while it is being written, nothing lacks
    ledger.attach(Full())
    with pytest.raises(OutOfSpaceError):
        ledger.pause("one", paused=True)
    assert "the journal cannot be written" in look()


def test_a_disk_that_is_full_read_only_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = state_writable(tmp_path)
    assert look() == ""
    assert "No such file" in state_writable(tmp_path / "none")()
    real = os.statvfs(tmp_path)

    def answered(**changes: int) -> Callable[[Path], Any]:
        fields = {name: getattr(real, name) for name in ("f_bavail", "f_frsize", "f_flag")} | changes
        return lambda _: type("Found", (), fields)

    monkeypatch.setattr("protofed.server.monitoring.readiness.os.statvfs", answered(f_bavail=10, f_frsize=512))
    assert look() == "5120 bytes are free for the state folder; make room"
    monkeypatch.setattr("protofed.server.monitoring.readiness.os.statvfs", answered(f_flag=os.ST_RDONLY))
    assert "read-only" in look()


class Stalled:
    """A file server that is gone: whoever asks waits until it is back."""

    def __init__(self) -> None:
        self.asked, self.back, self._real = 0, threading.Event(), os.statvfs

    def statvfs(self, path: Any) -> os.statvfs_result:
        self.asked += 1
        self.back.wait(60)
        return self._real(path)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalled]:
    disk = Stalled()
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    monkeypatch.setattr(readiness, "SLOW_S", 0.1)
    yield disk
    disk.back.set()


def test_a_disk_that_does_not_answer_is_asked_once_however_many_look(stalled: Stalled, tmp_path: Path) -> None:
    look = state_writable(tmp_path, "folder of the blobs")
    with ThreadPoolExecutor(8) as pool:
        answers = [answer.result(20) for answer in [pool.submit(look) for _ in range(50)]]
    assert all("the folder of the blobs has not answered" in answer for answer in answers)
    assert stalled.asked == 1
    assert [thread.name for thread in threading.enumerate()].count("on-disk") == 1
    stalled.back.set()
    wait_for(lambda: look() == "")


def test_what_a_look_raises_reaches_whoever_looked() -> None:
    def broken() -> str:
        raise ValueError("unforeseen")

    look = OnDisk("a folder", broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="unforeseen"):
            look()


# Of a live server


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return int(answer.status)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def ready() -> ServerReadiness:
    return ServerReadiness()


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], ready: ServerReadiness) -> Any:
    return live_server(recipe_of("fedavg"), readiness=ready)


def test_health_follows_what_calls_need_to_be_answered(server: Any, ready: ServerReadiness) -> None:
    why = ["it has failed"]
    ready.require("disk", lambda: why[0])
    wait_for(lambda: health(server.address) == health_pb2.HealthCheckResponse.NOT_SERVING)
    why[0] = ""
    wait_for(lambda: health(server.address) == health_pb2.HealthCheckResponse.SERVING)
    assert ready.missing() == []
    server.stop()
    assert ready.missing() == [STARTING]


def test_a_certificate_that_expires_ends_readiness_on_both_ports(
    live_server: Callable[..., Any],
    recipe_of: Callable[..., Recipe],
    ready: ServerReadiness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, now = Authority.make(), utc_now()
    identity = authority.issue(tmp_path / "hub", Party.SERVER, "hub", ends=now + timedelta(hours=1))
    boss = authority.issue(identity / "operators" / "boss", Party.OPERATOR, "boss")
    (identity / "operators" / "boss.pem").write_bytes((boss / "cert.pem").read_bytes())
    server = live_server(recipe_of("fedavg"), identity=identity, readiness=ready)
    monitor = Monitor(Monitoring(listen="127.0.0.1:0"), server.context.metrics.registry, ready.missing)
    url = monitor.start()
    with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:  # noqa: S310  (ours)
        assert (answer.status, answer.read()) == (200, b"ready\n")
    with grpc.secure_channel(server.address, credentials(boss)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def said() -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)

        assert said() == health_pb2.HealthCheckResponse.SERVING
        monkeypatch.setattr(readiness, "utc_now", lambda: now + timedelta(hours=2))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/readyz", timeout=10)  # noqa: S310  (ours)
        assert refused.value.code == 503
        assert refused.value.read().startswith(b"identity: the server's certificate expired on 20")
        wait_for(lambda: said() == health_pb2.HealthCheckResponse.NOT_SERVING)
    monitor.stop()


def test_a_disk_of_blobs_that_does_not_answer_stops_no_call(
    server: Any, ready: ServerReadiness, stalled: Stalled, tmp_path: Path
) -> None:
    ready.require("blobs", state_writable(tmp_path, "folder of the blobs"), blocks_calls=False)
    wait_for(lambda: stalled.asked > 0)
    for _ in range(3):
        assert [line.partition(":")[0] for line in ready.missing()] == ["blobs"]  # and not the loop
        assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
    assert stalled.asked == 1
    stalled.back.set()
    wait_for(lambda: ready.missing() == [])


def test_no_look_is_on_the_loop(server: Any, ready: ServerReadiness) -> None:
    """Whatever it is: with it, gRPC's health would hang as well."""
    asked, back = threading.Event(), threading.Event()

    def hangs() -> str:
        asked.set()
        back.wait(60)
        return ""

    ready.require("anything", hangs)
    assert asked.wait(20)
    assert health(server.address) == health_pb2.HealthCheckResponse.SERVING
    back.set()


def test_a_blocked_loop_is_seen_while_it_is_blocked(server: Any, ready: ServerReadiness) -> None:
    back = threading.Event()
    server._loop.call_soon_threadsafe(back.wait, 60)
    wait_for(lambda: ready.missing() == ["loop: the event loop is blocked; the log says where"])
    back.set()
    wait_for(lambda: ready.missing() == [])


def test_an_audit_without_room(server: Any, ready: ServerReadiness, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OutOfSpaceError("no space left")

    stub = grpc.insecure_channel(server.address)
    call: Any = stub.unary_unary("/protofed.protos.v1.Federation/Enroll")
    with monkeypatch.context() as disk:
        disk.setattr(ServerAudit, "_append", full)
        with pytest.raises(grpc.RpcError):
            call(b"", timeout=10)
        assert ready.missing() == ["audit: calls cannot be recorded, and are refused until they can; make room"]
    with pytest.raises(grpc.RpcError):
        call(b"", timeout=10)
    assert ready.missing() == []
    stub.close()


class Log:
    """A lab whose ticks are noted, and what was logged."""

    def __init__(self, lab: OperatorLab) -> None:
        self.lab = lab
        self._log = WaitingLog(lab.runs, lab.operation.certificates, lab.clock)

    def later(self, seconds: float, alive: tuple[SiteId, ...] = ()) -> list[MutableMapping[str, Any]]:
        """Time passes in steps of a second, while these sites live; the lines that were logged."""
        with structlog.testing.capture_logs() as lines:
            for _ in range(int(seconds)):
                self.lab.later(1.0, alive)
                self._log.note()
        return [line for line in lines if line["event"] == "the run does not go on"]


@pytest.fixture
def log() -> Log:
    lab = operator_lab()
    lab.start("one")
    return Log(lab)


def test_a_reason_that_lasts_is_logged_once(log: Log) -> None:
    assert log.later(STEADY_S) == []
    (line,) = log.later(10)
    assert (line["run"], line["round"], line["reason"], line["missing"]) == ("one", 0, "trainers", [])
    assert line["why"] == "needs 2 trainers, has 0"
    assert log.later(100) == []
    log.lab.enroll("ann")
    (line,) = log.later(10, alive=("ann",))
    assert line["why"] == "needs 2 trainers, has 1"  # another reason is another line,
    log.lab.enroll("bob")
    assert log.later(20, alive=("ann", "bob")) == []  # and a run that goes on has none


def test_sites_that_come_one_after_the_other_are_no_lines(log: Log) -> None:
    for site in ("ann", "bob", "cyd"):
        log.lab.enroll(site)
        assert log.later(2) == []
