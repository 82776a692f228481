"""Calls over TLS against a server by hand: whom a site speaks to, as whom, and that its audit log has every byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from tests.support.audit_logs import MemoryAuditLog
from tests.support.connect_proxy import ConnectProxy
from tests.support.fault_proxy import Direction, Mode
from tests.support.fault_proxy import Proxy as FaultProxy
from tests.support.pki import Authority

from protofed.client.transport import server_check
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.calls import Calls
from protofed.client.transport.diagnosis import ConnectionDiagnosis, diagnose
from protofed.client.transport.proxy import Proxy
from protofed.common.codec import digest
from protofed.common.errors import (
    ConfigError,
    DiskFailureError,
    ExcludedError,
    OutOfSpaceError,
    ProtocolError,
    StateError,
    UnavailableError,
)
from protofed.common.pki.identity import LiveIdentity, Party, fingerprint
from protofed.protos.v1 import federation_pb2 as pb

pytestmark = pytest.mark.usefixtures("short_pauses")
SOON = 20.0  # seconds after which a test gives up
HELLO = pb.EnrollRequest(caller=pb.Caller(site="ann", instance="i"), protocol_version=1)
BEAT = pb.HeartbeatRequest(caller=pb.Caller(site="ann", instance="i"), run="r")
Code = grpc.StatusCode
Background = Callable[..., Future[Any]]
Dial = Callable[..., Calls]


class RawServer(grpc.GenericRpcHandler):
    """Takes any call over TLS and answers `reply`; remembers the bytes that came and whose certificate it was.

    Attributes:
        failing: codes of the next answers.
        trailing: metadata of those.
        times: when calls came, by the monotonic clock.
        hold: calls of these names wait for `go`.
    """

    def __init__(self, folder: Path, trusted: bytes, port: int = 0) -> None:
        self.asked: list[tuple[str, bytes, str]] = []
        self.failing: list[grpc.StatusCode] = []
        self.trailing: tuple[tuple[str, str], ...] = ()
        self.times: list[float] = []
        self.reply, self.hold, self.held, self.go = b"", "", threading.Event(), threading.Event()
        pair = (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        credentials = grpc.ssl_server_credentials([pair], trusted, True)
        self.address = f"127.0.0.1:{self._server.add_secure_port(f'127.0.0.1:{port}', credentials)}"
        self._server.start()

    @property
    def calls(self) -> list[str]:
        return [call for call, _, _ in self.asked]

    def stop(self) -> None:
        self.go.set()
        self._server.stop(None).wait()

    def service(self, details: Any) -> Any:
        call = details.method.rpartition("/")[2]

        def answer(request: bytes, context: Any) -> bytes:
            (pem,) = context.auth_context()["x509_pem_cert"]
            self.asked.append((call, request, fingerprint(pem)))
            self.times.append(time.monotonic())
            if self.failing:
                context.set_trailing_metadata(self.trailing)
                context.abort(self.failing.pop(0), "as told")
            if call == self.hold:
                self.held.set()
                self.go.wait(SOON)
            return self.reply

        return grpc.unary_unary_rpc_method_handler(answer)


Serve = Callable[..., RawServer]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def serve(authority: Authority, tmp_path: Path) -> Iterator[Serve]:
    started: list[RawServer] = []

    def start(port: int = 0, issuer: Authority = authority, **certificate: Any) -> RawServer:
        folder = issuer.issue(tmp_path / f"server-{len(started)}", Party.SERVER, "fl", **certificate)
        started.append(RawServer(folder, authority.pem, port))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def identity(authority: Authority, tmp_path: Path) -> LiveIdentity:
    return LiveIdentity(authority.issue(tmp_path / "ann", Party.SITE, "ann"), Party.SITE)


@pytest.fixture
def kept() -> MemoryAuditLog:
    return MemoryAuditLog()


@pytest.fixture
def dial(identity: LiveIdentity, kept: MemoryAuditLog) -> Iterator[Dial]:
    made: list[Calls] = []

    def make(address: str, **options: Any) -> Calls:
        known = {"identity": identity, "proxy": None, "audit": ClientAudit(kept), "give_up_after_s": SOON}
        made.append(Calls(address, **{**known, **options}))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# What is sent was written


def test_the_log_has_the_server_then_each_message_byte_for_byte(
    serve: Serve, dial: Dial, identity: LiveIdentity, kept: MemoryAuditLog, tmp_path: Path
) -> None:
    server = serve()
    calls = dial(server.address)
    assert calls.call("Enroll", HELLO, pb.EnrollResponse) == pb.EnrollResponse()
    calls.call_once("Heartbeat", BEAT, pb.HeartbeatResponse, 5.0)
    assert [event for event, _ in kept.lines] == ["server", "sent", "sent"]
    assert kept.of("server")[0]["certificate"] == fingerprint((tmp_path / "server-0" / "cert.pem").read_bytes())
    assert kept.of("server")[0]["finding"] == "fine"
    own = identity.current().certificate.fingerprint
    for (call, received, shown), facts in zip(server.asked, kept.of("sent"), strict=True):
        assert (facts["call"], facts["digest"], facts["bytes"]) == (call, digest(received), len(received))
        assert facts["certificate"] == shown == own
        assert (facts["server"], facts["facts"]["site"]) == (server.address, "ann")


def test_every_attempt_has_a_line_and_errors_of_the_server_too(serve: Serve, dial: Dial, kept: MemoryAuditLog) -> None:
    server = serve()
    server.failing = [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.PERMISSION_DENIED]
    with pytest.raises(ExcludedError, match="as told"):
        dial(server.address).call("Enroll", HELLO, pb.EnrollResponse)
    assert len(kept.of("sent")) == len(server.asked) == 3
    assert [facts["code"] for facts in kept.of("answered")] == ["RESOURCE_EXHAUSTED", "PERMISSION_DENIED"]
    assert len({facts["digest"] for _, facts in kept.lines if "digest" in facts}) == 1


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_byte_that_changed_on_the_way_is_sent_again(serve: Serve, dial: Dial, direction: Direction) -> None:
    """A damaged TLS record is UNKNOWN to gRPC: the site said that the server did not take the task any more."""
    server = serve()
    way = FaultProxy(server.address)
    try:
        calls = dial(way.address)
        calls.call("Heartbeat", BEAT, pb.HeartbeatResponse)
        made, way.mode = way.connections, Mode(corrupt={direction: way.counts[direction] + 40})
        while way.connections == made:
            calls.call("Heartbeat", BEAT, pb.HeartbeatResponse)
    finally:
        way.close()


def test_the_next_attempt_comes_no_sooner_than_the_server_asks_for(serve: Serve, dial: Dial) -> None:
    server = serve()
    server.failing, server.trailing = [Code.RESOURCE_EXHAUSTED] * 2, (("grpc-retry-pushback-ms", "400"),)
    dial(server.address).call("Heartbeat", BEAT, pb.HeartbeatResponse)
    first, second, third = server.times
    assert second - first >= 0.4
    assert third - second >= 0.4


def test_receipts_are_told_and_an_answer_that_is_no_message_is_refused(
    serve: Serve, dial: Dial, kept: MemoryAuditLog
) -> None:
    server = serve()
    server.reply = pb.Receipt(verdict=pb.VERDICT_LATE).SerializeToString()
    dial(server.address).call("CommitUpload", pb.CommitRequest(run="r"), pb.Receipt)
    assert [facts["verdict"] for facts in kept.of("answered")] == ["late"]
    server.reply = b"\xff\xff\xff"
    with pytest.raises(ProtocolError, match="answer to Enroll cannot be read"):
        dial(server.address).call("Enroll", HELLO, pb.EnrollResponse)


def test_a_full_disk_is_waited_for_and_nothing_leaves_meanwhile(serve: Serve, dial: Dial, kept: MemoryAuditLog) -> None:
    server = serve()
    calls = dial(server.address)
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    kept.failing = [OutOfSpaceError("full")] * 3
    with structlog.testing.capture_logs() as logs:
        calls.call("NextTask", pb.NextTaskRequest(run="r"), pb.NextTaskResponse)
    assert kept.writes == 6
    assert len(server.asked) == len(kept.of("sent")) == 2
    assert [entry["why"] for entry in logs] == ["full"]


def test_close_ends_the_wait_for_room(serve: Serve, dial: Dial, kept: MemoryAuditLog, background: Background) -> None:
    server = serve()
    calls = dial(server.address)
    kept.failing = [OutOfSpaceError("full")] * 1_000_000
    asking = background(calls.call, "Enroll", HELLO, pb.EnrollResponse)
    wait_for(lambda: kept.writes > 3)
    calls.close()
    with pytest.raises(UnavailableError, match="closed"):
        asking.result(SOON)
    assert server.asked == []


def test_a_broken_disk_ends_all_calls_and_nothing_leaves(serve: Serve, dial: Dial, kept: MemoryAuditLog) -> None:
    server = serve()
    calls = dial(server.address)
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    kept.failing = [DiskFailureError("broken")]
    # From a thread that cannot end the daemon.
    assert calls.call_once("Heartbeat", BEAT, pb.HeartbeatResponse, 5.0) is None
    for _ in range(2):
        with pytest.raises(DiskFailureError) as raised:
            calls.call("NextTask", HELLO, pb.NextTaskResponse)
    assert raised.value.exit_code == StateError.exit_code == 74
    assert server.calls == ["Enroll"]


# With whom


@pytest.mark.parametrize("address", ["192.0.2.1:7443", "fl.example.org:7443", "0.0.0.0:7443"])
def test_plain_text_stays_on_this_machine(address: str, dial: Dial) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        dial(address, identity=None)


# Where the server hangs up between connect and handshake, CPython's `wrap_socket` raises without closing what it made.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_goes_wrong_later_is_named_and_waited_for(
    serve: Serve, dial: Dial, kept: MemoryAuditLog, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_check, "DIAGNOSE_EVERY_S", 0.0)
    good = serve()
    calls = dial(good.address)
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    good.stop()
    port = int(good.address.rpartition(":")[2])
    wrong = serve(port, Authority.make())
    with structlog.testing.capture_logs() as logs:
        asking = background(calls.call, "NextTask", HELLO, pb.NextTaskResponse)
        wait_for(lambda: len(kept.of("server")) == 2)
        assert not asking.done()
    wrong.stop()
    again = serve(port)
    asking.result(SOON)
    assert [facts["finding"] for facts in kept.of("server")] == ["fine", "server-authority", "fine"]
    assert len({facts["certificate"] for facts in kept.of("server")}) == 3
    assert any("nothing was sent" in str(entry.get("why")) for entry in logs)
    assert wrong.asked == []
    assert again.calls == ["NextTask"]


def test_a_renewed_certificate_is_for_the_next_call_and_the_one_in_flight_ends(
    authority: Authority,
    serve: Serve,
    dial: Dial,
    background: Background,
    identity: LiveIdentity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[grpc.Channel] = []
    secure = grpc.secure_channel

    def open_channel(*arguments: Any) -> grpc.Channel:
        opened.append(secure(*arguments))
        return opened[-1]

    monkeypatch.setattr(grpc, "secure_channel", open_channel)
    server = serve()
    calls = dial(server.address)
    server.hold = "NextTask"
    before = identity.current().certificate.fingerprint
    waiting = background(calls.call, "NextTask", HELLO, pb.NextTaskResponse)
    assert server.held.wait(SOON)

    authority.issue(tmp_path / "ann", Party.SITE, "ann")
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    after = identity.current().certificate.fingerprint
    assert not waiting.done()
    server.go.set()
    waiting.result(SOON)
    calls.call("Enroll", HELLO, pb.EnrollResponse)

    assert [(call, shown) for call, _, shown in server.asked] == [
        ("NextTask", before),
        ("Enroll", after),
        ("Enroll", after),
    ]
    assert len(opened) == 2
    with pytest.raises(ValueError, match="closed channel"):
        opened[0].unary_unary("/a/b")(b"", timeout=1)  # type: ignore[arg-type]


def test_a_server_that_is_away_is_diagnosed_again_only_after_a_while(
    serve: Serve, dial: Dial, kept: MemoryAuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(address: str, *more: Any) -> ConnectionDiagnosis:
        looks.append(address)
        return diagnose(address, *more)

    monkeypatch.setattr(server_check, "diagnose", look)
    server = serve()
    calls = dial(server.address, give_up_after_s=1.0)
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    server.stop()
    with pytest.raises(UnavailableError, match="no answer"):
        calls.call("NextTask", HELLO, pb.NextTaskResponse)
    assert len(looks) == 1
    assert len(kept.of("sent")) > 5


def test_a_certificate_that_ends_soon_is_told(authority: Authority, serve: Serve, dial: Dial, tmp_path: Path) -> None:
    ends = datetime.now(UTC) + timedelta(days=7, hours=1)
    soon = LiveIdentity(authority.issue(tmp_path / "soon", Party.SITE, "ann", ends=ends), Party.SITE)
    calls = dial(serve().address, identity=soon)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            calls.call("Enroll", HELLO, pb.EnrollResponse)
    told = [entry for entry in logs if "ends soon" in entry["event"]]
    assert [(entry["days_left"], entry["log_level"]) for entry in told] == [(7, "warning")]


def test_through_a_proxy_in_any_environment(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    way, other, server = ConnectProxy("ann:hunter2@home"), ConnectProxy(), serve()
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{other.address}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    dial(server.address).call("Enroll", HELLO, pb.EnrollResponse)
    assert (way.asked, other.asked) == ([], [])
    calls = dial(server.address, proxy=Proxy.read(f"http://ann:hunter2%40home@{way.address}"))
    calls.call("Enroll", HELLO, pb.EnrollResponse)
    assert way.asked == [server.address] * 2  # to look, and to call
    assert other.asked == []
    assert server.calls == ["Enroll"] * 2
    way.die()
    other.die()
