"""The gRPC server: what it listens on, what it says of itself, and its watchdog.

A server that cannot listen says why: gRPC itself only says that it cannot.

How the server greets those who ask for its health, and nobody else.

A blocked event loop is noticed, told with what blocks it, and forgotten when it runs again.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from tests.support.raw_client import FEDERATION, RawClient
from tests.support.tls_server import tls_server

from protofed.client.transport.channels import fetch_server_info
from protofed.common.clock import utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.errors import UnavailableError
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rpc import server
from protofed.server.rpc.server import Watchdog, why_not


@pytest.mark.parametrize("host", ["192.0.2.7", "[2001:db8::7]", "nowhere.invalid"])
def test_an_address_of_another_machine_is_not_called_taken(host: str) -> None:
    assert "no such address" in why_not(f"{host}:7443")


def test_an_ipv6_address_where_there_is_no_ipv6_is_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "create_server", unsupported)
    assert "no such address" in why_not("[::1]:7443")


def test_a_port_that_another_process_has_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "taken" in why_not(f"127.0.0.1:{other.getsockname()[1]}")


RecipeOf = Callable[..., Recipe]


def test_in_plain_text(live_server: Callable[..., Any], recipe_of: RecipeOf) -> None:
    said = fetch_server_info(live_server(recipe_of("fedavg")).address, None, None)
    assert said is not None
    assert (said.software, said.protocol, said.status) == (VERSION, PROTOCOL_VERSION, "")
    assert abs(utc_now() - said.time) < timedelta(seconds=30)


def test_whoever_has_a_certificate_is_told_how_it_stands(
    live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path
) -> None:
    with tls_server(tmp_path, live_server, recipe_of("fedavg")) as tls:
        folder = tls.identity("site-1", Party.SITE)
        identity = LiveIdentity(folder, Party.SITE)

        def status() -> str | None:
            said = fetch_server_info(tls.server.address, identity, None)
            return None if said is None else said.status

        def roles() -> tuple[str, ...]:
            said = fetch_server_info(tls.server.address, identity, None)
            return () if said is None else said.roles

        assert roles() == ()
        assert status() == "unknown"
        fingerprint = tls.register(folder)
        assert status() == "registered"
        assert roles() == ("trainer",)
        with tls.operator() as operator:
            operator.revoke(fingerprint, "lost")
        assert status() == "revoked"


def test_only_a_health_check_is_greeted_and_it_is_the_standard_one(
    live_server: Callable[..., Any], recipe_of: RecipeOf
) -> None:
    site = RawClient(live_server(recipe_of("fedavg", federation={"min_sites": 1})).address, "small-fedavg")
    check: Any = health_pb2_grpc.HealthStub(site.channel).Check
    answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert {"protofed-time", "protofed-version", "protofed-protocol"} <= dict(call.initial_metadata()).keys()
    watched = health_pb2_grpc.HealthStub(site.channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(iter(watched)).status == health_pb2.HealthCheckResponse.SERVING
    assert "protofed-version" in dict(watched.initial_metadata())
    watched.cancel()
    enroll: Any = site.channel.unary_unary(f"/{FEDERATION.full_name}/Enroll")
    caller = pb.EnrollRequest(caller=site.caller, protocol_version=PROTOCOL_VERSION, roles=[pb.ROLE_TRAINER])
    _reply, other = enroll.with_call(caller.SerializeToString(), timeout=10)
    assert not [name for name, _ in other.initial_metadata() if name.startswith("protofed")]
    site.channel.close()


def test_nobody_there(unused_port: int) -> None:
    with pytest.raises(UnavailableError, match="health check"):
        fetch_server_info(f"127.0.0.1:{unused_port}", None, None, timeout=2.0)


PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def no_dog_is_left() -> Iterator[None]:
    """What one still says would be heard by the next test."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.stop()
            thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BEAT_S", 0.01)
    monkeypatch.setattr(server, "TOLERATED_S", 0.2)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


def blocking_the_loop(dog: Watchdog) -> None:
    """Until the dog has noticed."""
    end = time.monotonic() + PATIENCE_S
    while not dog.blocked and time.monotonic() < end:
        time.sleep(0.01)


def blocking_it_further(dog: Watchdog) -> float:
    """The lag after that."""
    time.sleep(0.3)
    return dog.lag_s


def test_a_blocked_loop_is_told_once_with_its_stack_and_its_lag_grows_until_it_runs_again() -> None:
    lags: list[float] = []

    async def main() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        dog.start()
        blocking_the_loop(dog)
        assert dog.blocked
        lags.extend(blocking_it_further(dog) for _ in range(2))
        await until(lambda: not dog.blocked)
        dog.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    told = [entry["event"] for entry in logs]
    assert told == ["the event loop is blocked", "the event loop runs again"]
    assert "blocking_the_loop" in logs[0]["where"]
    assert 0.2 < lags[0] < lags[1]


def test_a_loop_that_runs_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TOLERATED_S", PATIENCE_S)

    async def main() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        dog.start()
        await until(lambda: dog.lag_s > 0.0)
        assert not dog.blocked
        dog.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    assert logs == []


@pytest.mark.parametrize("how", ["told to", "loop closed"])
def test_its_thread_ends(how: str) -> None:
    loop = asyncio.new_event_loop()
    dog = Watchdog(loop)
    dog.start()
    if how == "told to":
        dog.stop()
    else:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    dog.join(PATIENCE_S)
    assert dog not in threading.enumerate()
    if not loop.is_closed():
        loop.close()
