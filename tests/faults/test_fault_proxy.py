"""The proxy itself: each way of misbehaving is what the fault tests take it for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.fault_proxy import BOTH, PASS, Direction, Mode, Proxy
from tests.support.waiting import wait_for


class Echo(threading.Thread):
    """Sends back what it gets, and ends a connection when its peer does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends: list[str] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
                self.ends.append("closed")
            except ConnectionError:
                self.ends.append("reset")


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    server.start()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()
    server.join(5)


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with closing(Proxy(echo.address)) as between:
        yield between


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        yield connection


def connect(proxy: Proxy) -> socket.socket:
    host, port = proxy.address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.settimeout(5)
    return connection


def echoed(client: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    back = b""
    while len(back) < len(data):
        back += client.recv(1 << 16)
    sender.join()
    return back


def test_by_default_it_forwards_and_counts(proxy: Proxy, client: socket.socket) -> None:
    data = bytes(range(256)) * 10_000
    assert echoed(client, data) == data
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    assert proxy.counts == {"up": len(data), "down": len(data)}  # a chunk is counted once it is forwarded


def test_latency_delays_without_slowing_down(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Mode(latency_s=0.3)
    began = time.monotonic()
    assert echoed(client, bytes(3_000_000)) == bytes(3_000_000)
    assert 0.6 <= time.monotonic() - began < 4


def test_a_rate_bounds_each_direction(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Mode(rate=1000)
    began = time.monotonic()
    echoed(client, bytes(500))
    assert 0.4 <= time.monotonic() - began < 4


@pytest.mark.parametrize("hole", [BOTH, frozenset({"up"}), frozenset({"down"})])
def test_a_black_hole_keeps_what_is_said_until_it_is_gone(
    proxy: Proxy, client: socket.socket, hole: frozenset[Direction]
) -> None:
    echoed(client, b"before")
    proxy.mode = Mode(hole=hole)
    client.sendall(b"lost?")
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert proxy.counts["up"] == (6 if "up" in hole else 11)
    proxy.mode = PASS
    client.settimeout(5)
    assert client.recv(5) == b"lost?"


def test_new_connections_can_be_reset(proxy: Proxy) -> None:
    proxy.mode = Mode(refuse=True)
    with pytest.raises(ConnectionResetError):
        knock(proxy)


def test_live_connections_can_be_reset_on_both_sides(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    echoed(client, b"before")
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_for(lambda: echo.ends == ["reset"])
    assert proxy.reset() == 0


def test_a_share_of_the_connections_is_reset(proxy: Proxy) -> None:
    clients = [connect(proxy) for _ in range(40)]
    for client in clients:
        echoed(client, b"before")
    assert 4 <= proxy.reset(0.3) <= 20
    for client in clients:
        client.close()


def test_a_direction_is_cut_after_so_many_bytes(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Mode(cut={"down": 1000})
    client.sendall(bytes(5000))
    wait_for(lambda: proxy.counts["down"] == 1000)
    with pytest.raises(ConnectionResetError):
        drain(client)
    assert proxy.counts["down"] == 1000


def test_one_byte_is_corrupted(proxy: Proxy, client: socket.socket) -> None:
    proxy.mode = Mode(corrupt={"up": 700})
    assert echoed(client, b"a" * 500) == b"a" * 500
    assert echoed(client, b"a" * 500) == b"a" * 200 + bytes([ord("a") ^ 0xFF]) + b"a" * 299


def test_half_a_connection_can_be_closed(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    echoed(client, b"before")
    proxy.half_close("up")
    wait_for(lambda: echo.ends == ["closed"])
    assert client.recv(1) == b""


def test_a_tap_sees_all_and_decides_what_never_arrives(proxy: Proxy, client: socket.socket) -> None:
    seen = []

    def tap(way: Direction, data: bytes) -> bool:
        seen.append((way, data))
        return way == "down" and b"secret" in data

    proxy.mode = Mode(tap=tap)
    assert echoed(client, b"public") == b"public"
    client.sendall(b"secret")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert seen == [("up", b"public"), ("down", b"public"), ("up", b"secret"), ("down", b"secret")]


def test_a_server_that_is_away_looks_away(proxy: Proxy, echo: Echo) -> None:
    proxy.target = "127.0.0.1:1"
    with pytest.raises(ConnectionResetError):
        knock(proxy)
    proxy.target = echo.address
    with connect(proxy) as client:
        assert echoed(client, b"back") == b"back"


def knock(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.recv(1)


def drain(client: socket.socket) -> None:
    while client.recv(100):
        pass
