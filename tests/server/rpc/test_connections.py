"""Which connections are closed: those of refused callers, late strangers, and those above a share."""

from __future__ import annotations

import socket

import pytest
from tests.server.conftest import Clock

from protofed.server.rpc import connections
from protofed.server.rpc.connections import (
    PER_CERTIFICATE,
    REFUSED_S,
    STRANGER_S,
    Connection,
    ConnectionGuard,
    Endpoint,
    endpoint,
    surplus_of,
)

ROOM = 64
HERE = "10.0.0.1"


def at(port: int, address: str = HERE) -> Endpoint:
    return address, port


def name(key: Endpoint) -> str:
    """As gRPC says it."""
    return f"ipv4:{key[0]}:{key[1]}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
    held = {at(port): Connection(0.0, "ann", called_at=port) for port in range(PER_CERTIFICATE + 3)}
    held[at(0)].calls = 1  # in flight: used now
    held |= {at(port, "10.0.0.2"): Connection(0.0, "bob") for port in range(PER_CERTIFICATE)}
    assert surplus_of(held, 4096, 1.0) == [at(1), at(2), at(3)]


def test_strangers_of_one_address_have_a_quarter_and_the_oldest_go() -> None:
    held = {at(port): Connection(float(-port)) for port in range(20)}
    assert surplus_of(held, ROOM, 0.0) == [at(16), at(17), at(18), at(19)]
    held = {(f"2001:db8::{port:x}", port): Connection(float(-port)) for port in range(20)}  # one network of 2^64
    assert len(surplus_of(held, ROOM, 0.0)) == 4


def test_strangers_of_all_addresses_have_half() -> None:
    held = {at(port, f"10.0.0.{port}"): Connection(-port / 2) for port in range(40)}
    sites = {at(port, f"10.0.1.{port}"): Connection(-1e6, f"site-{port}") for port in range(40)}
    assert surplus_of(held | sites, ROOM, 0.0) == sorted(at(port, f"10.0.0.{port}") for port in range(32, 40))


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
