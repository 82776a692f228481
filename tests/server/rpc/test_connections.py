"""Which connections are closed: those of refused callers, late strangers, and those above a share.

Handshakes that lead to no call, and how many connections there may be.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
from tests.server.conftest import Clock

from protofed.common.process import check_in_time, require_tls_1_3
from protofed.server.rpc import connections, server
from protofed.server.rpc.connections import (
    PER_CERTIFICATE,
    REFUSED_S,
    STRANGER_S,
    ConnectionGuard,
    Endpoint,
    HandshakeCounter,
    PeerConnection,
    endpoint,
    find_surplus,
)

ROOM = 64
HERE = "10.0.0.1"


def at(port: int, address: str = HERE) -> Endpoint:
    return address, port


def name(key: Endpoint) -> str:
    """As gRPC says it."""
    return f"ipv4:{key[0]}:{key[1]}"


@pytest.fixture
def guard(clock: Clock) -> ConnectionGuard:
    return ConnectionGuard(ROOM, clock)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("ipv6:%5B::1%5D:443", ("::1", 443)),
        ("ipv6:[2001:DB8:0::1]:443", ("2001:db8::1", 443)),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", ("fe80::1", 443)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:443", ("10.0.0.1", 443)),
        ("", ("", 0)),
        ("unix:", ("", 0)),
    ],
)
def test_a_peer_is_read_as_grpc_names_it(peer: str, expected: Endpoint) -> None:
    assert endpoint(peer) == expected


def test_a_stranger_has_half_a_minute_for_its_first_call(guard: ConnectionGuard, clock: Clock) -> None:
    assert guard.sweep([at(1), at(2), at(3)]) == []
    with guard.call(name(at(1)), "ann"):
        pass
    clock.now += STRANGER_S - 1
    with guard.call(name(at(2)), ""):  # a health check does not make a site of a stranger
        assert guard.sweep([at(1), at(2), at(3)]) == []
        clock.now += 1
        assert guard.sweep([at(1), at(2), at(3)]) == [at(2), at(3)]
        clock.now += 1e6
        assert guard.sweep([at(1)]) == []


def test_a_refused_caller_can_read_the_answer_and_is_closed(guard: ConnectionGuard, clock: Clock) -> None:
    guard.sweep([at(1), at(2)])
    guard.refused(name(at(1)))
    assert guard.sweep([at(1), at(2)]) == []
    clock.now += REFUSED_S / 2
    guard.refused(name(at(1)))  # calling again gains no time
    clock.now += REFUSED_S / 2
    assert guard.sweep([at(1), at(2)]) == [at(1)]
    assert guard.sweep([at(2)]) == []
    assert guard.sweep([at(1), at(2)]) == []  # another connection from the same port begins anew


def test_a_certificate_keeps_the_connections_that_it_used_last() -> None:
    held = {at(port): PeerConnection(0.0, "ann", called_at=port) for port in range(PER_CERTIFICATE + 3)}
    held[at(0)].calls = 1  # in flight: used now
    held |= {at(port, "10.0.0.2"): PeerConnection(0.0, "bob") for port in range(PER_CERTIFICATE)}
    assert find_surplus(held, 4096, 1.0) == [at(1), at(2), at(3)]


def test_strangers_of_one_address_have_a_quarter_of_all_have_half_and_the_oldest_go() -> None:
    held = {at(port): PeerConnection(float(-port)) for port in range(20)}
    assert find_surplus(held, ROOM, 0.0) == [at(16), at(17), at(18), at(19)]
    held = {(f"2001:db8::{port:x}", port): PeerConnection(float(-port)) for port in range(20)}  # one network of 2^64
    assert len(find_surplus(held, ROOM, 0.0)) == 4
    held = {at(port, f"10.0.0.{port}"): PeerConnection(-port / 2) for port in range(40)}
    sites = {at(port, f"10.0.1.{port}"): PeerConnection(-1e6, f"site-{port}") for port in range(40)}
    assert find_surplus(held | sites, ROOM, 0.0) == sorted(at(port, f"10.0.0.{port}") for port in range(32, 40))


def test_the_connections_of_a_port_are_found_and_only_those_named_are_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        clients.append(socket.create_connection(other.getsockname()))
        accepted = [listener.accept()[0] for _ in range(3)] + [other.accept()[0]]
        found = connections._open(port)
        assert sorted(found) == sorted(client.getsockname() for client in clients[:3])
        first, second, third = (client.getsockname() for client in clients[:3])
        # The second's descriptor belongs to another connection by now.
        connections._shut_down([(found[first], first), (found[third], second), (10**6, third)])
        assert clients[0].recv(1) == b""
        for client, end in zip(clients[1:], accepted[1:], strict=True):
            end.send(b"x")
            assert client.recv(1) == b"x"
        for one in (*clients, *accepted):
            one.close()


def test_a_handshake_without_a_call_counts_once_and_nothing_is_kept_of_connections_that_have_ended() -> None:
    handshakes = HandshakeCounter()
    for _ in range(5):
        handshakes.handshake_started()
    for _ in range(3):
        handshakes.call_arrived("ipv4:127.0.0.1:1")
    with structlog.testing.capture_logs() as logs:
        assert handshakes.log_failed() == 4
        handshakes.call_arrived("ipv4:127.0.0.1:1")  # the same connection goes on
        assert handshakes.log_failed() == 0
        handshakes.handshake_started()
        handshakes.call_arrived("ipv4:127.0.0.1:2")
        assert handshakes.log_failed() == 0
        handshakes.handshake_started()
        handshakes.call_arrived("ipv4:127.0.0.1:2")
        assert handshakes.log_failed() == 1
    assert [(line["count"], line["of"]) for line in logs] == [(4, 5), (1, 1)]
    handshakes = HandshakeCounter()
    for minute in range(100):
        for port in range(10):
            handshakes.call_arrived(f"ipv4:127.0.0.1:{minute * 10 + port}")
        handshakes.log_failed()
    assert len(handshakes._calling | handshakes._calling_before) == 10


@pytest.fixture
def descriptors() -> Iterator[int]:
    """The most that this process may have; it may have 600 now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_is_a_descriptor_for_every_connection(descriptors: int) -> None:
    assert server.room(100) == 100
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
    assert server.room(1000) == 1000
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1256, descriptors)
    with structlog.testing.capture_logs() as logs:
        assert server.room(10 * descriptors) == descriptors - 256
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (descriptors, descriptors)
    assert [(line["connections"], line["descriptors"]) for line in logs] == [(descriptors - 256, descriptors)]


def test_who_imports_grpc_too_early_is_told_so() -> None:
    require_tls_1_3()
    check_in_time()
    script = (
        "import grpc\n"
        "from protofed.common.errors import ConfigError\n"
        "from protofed.common.process import check_in_time, require_tls_1_3\n"
        "require_tls_1_3()\n"
        "try:\n"
        "    check_in_time()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", script], env=bare, capture_output=True, text=True, check=True)
    assert "would offer TLS 1.2" in done.stdout
