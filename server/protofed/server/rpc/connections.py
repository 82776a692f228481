"""The server's TLS, and which connections stay open, so that no caller holds them all.

gRPC limits all connections together, and closes idle ones after minutes. It does not let Python refuse or close a
single one. So this module looks the sockets of the server's port up among this process's descriptors. It shuts down
those that have to go, and gRPC then closes them.

TLS is by the server's own identity and the CAs whose client certificates it accepts; every client needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import structlog

from protofed.common.pki.identity import Identity, LiveIdentity
from protofed.common.process import check_in_time

log = structlog.get_logger()


class HandshakeCounter:
    """Estimates failed handshakes: those that started, less the connections from which a call came.

    gRPC's C core reports no failed handshake to Python, so a site with a wrong certificate would leave no trace here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = 0
        self._calling: set[str] = set()  # connections with a call since `log_failed`
        self._calling_before: set[str] = set()  # those of the interval before: their handshakes are counted already

    def handshake_started(self) -> None:
        """Count a handshake; called from any thread."""
        with self._lock:
            self._started += 1

    def call_arrived(self, connection: str) -> None:
        """Note the connection (`ipv4:address:port`) of a call; called at every call, by the event loop only."""
        self._calling.add(connection)

    def log_failed(self) -> int:
        """Log and return how many handshakes since the last time led to no call."""
        with self._lock:
            started, self._started = self._started, 0
        new = self._calling - self._calling_before
        self._calling_before, self._calling = self._calling, set()
        failed = max(0, started - len(new))
        if failed:
            log.warning(
                "connections without a call: the handshake failed or no call followed", count=failed, of=started
            )
        return failed


def server_credentials(live: LiveIdentity, handshakes: HandshakeCounter) -> grpc.ServerCredentials:
    """TLS with client certificates. Each handshake uses the identity and CAs on disk, so a renewal needs no restart.

    Raises:
        ConfigError: gRPC was imported before TLS 1.3 was required, and would offer TLS 1.2 too.
    """
    check_in_time()
    current = live.current()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls this at the start of every handshake: the only sign of one that fails.
        nonlocal current
        handshakes.handshake_started()
        if (identity := live.current()) is current:
            return None
        current = identity
        return _configuration(identity)

    fetch: Any = newest  # None means "as before", though grpc's types do not allow it
    return grpc.dynamic_ssl_server_credentials(_configuration(current), fetch, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key_pem, identity.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], identity.authorities_pem)


# Of one registered certificate. A daemon has one connection, and another for each renewal, `doctor` or break that the
# server has not noticed yet (50 s); those that were used last stay.
PER_CERTIFICATE = 16
# Shares of all connections that strangers may have: those from which no call of a registered certificate came yet.
# The oldest are closed first, so that a site, which calls as soon as it is connected, gets through a flood. 1024 of
# 4096 are five for each of 200 sites behind one address that all come back at once.
PER_ADDRESS, STRANGERS = 1 / 4, 1 / 2
STRANGER_S = 30.0  # in which the first call of a registered certificate has to come; a handshake gets 10 s
REFUSED_S = 1.0  # after a refused call: the caller reads its answer first
EVERY_S, BUSY_EVERY_S = 1.0, 0.2  # between two sweeps; busy: strangers have more than one address's share
# Of a core, while nobody floods: 10,000 connections take 60 ms to look at, and are looked at every 3 s.
MAX_OF_A_CORE = 0.02
LOG_EVERY_S = 60.0
_DESCRIPTORS = Path("/dev/fd")  # of this process, on Linux and macOS

Endpoint: TypeAlias = tuple[str, int]  # address and port of a peer
NOWHERE: Endpoint = "", 0


@dataclass(slots=True)
class PeerConnection:
    """One connection; times are of the monotonic clock, in seconds.

    Attributes:
        opened_at: when it was first seen.
        certificate: fingerprint of the registered certificate whose call came last; empty: a stranger's.
        called_at: when the last call arrived.
        calls: in flight.
        refused_at: when a call was first refused because its certificate is not registered; None: none was.
    """

    opened_at: float
    certificate: str = ""
    called_at: float = 0.0
    calls: int = 0
    refused_at: float | None = None


class ConnectionGuard:
    """Closes connections of callers whose certificate is not registered, and those above a share.

    All methods are called on the event loop.

    Args:
        room: connections that the server has room for.
        clock: monotonic seconds.
    """

    def __init__(self, room: int, clock: Callable[[], float]) -> None:
        self._room, self._clock = room, clock
        self._connections: dict[Endpoint, PeerConnection] = {}
        self._closed, self._logged_at = 0, -LOG_EVERY_S

    @contextmanager
    def call(self, peer: str, certificate: str) -> Iterator[None]:
        """Note a call for as long as the context lasts.

        Args:
            peer: as gRPC names it: `ipv4:address:port`.
            certificate: fingerprint of its registered certificate; empty: it has none.
        """
        now = self._clock()
        connection = self._connections.setdefault(endpoint(peer), PeerConnection(now))
        connection.certificate, connection.called_at = certificate, now
        connection.calls += 1
        try:
            yield
        finally:
            connection.calls -= 1

    def refused(self, peer: str) -> None:
        """Note that a call was refused because its certificate is not registered, or no longer valid."""
        connection = self._connections.setdefault(endpoint(peer), PeerConnection(self._clock()))
        if connection.refused_at is None:
            connection.refused_at = self._clock()

    async def watch(self, port: int) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            spent_s = 0.0
            with contextlib.suppress(OSError):  # no descriptor is left to list them with: gRPC accepts none either
                endpoints, spent_s = await loop.run_in_executor(None, _timed, port)
                surplus = [(endpoints[key], key) for key in self.sweep(endpoints)]
                await loop.run_in_executor(None, _shut_down, surplus)
            strangers = sum(not connection.certificate for connection in self._connections.values())
            busy = strangers > self._room * PER_ADDRESS
            await asyncio.sleep(BUSY_EVERY_S if busy else max(EVERY_S, spent_s / MAX_OF_A_CORE))

    def sweep(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Take note of the connections that are open now; those that have to be closed."""
        now = self._clock()
        self._connections = {key: self._connections.get(key) or PeerConnection(now) for key in endpoints}
        surplus = find_surplus(self._connections, self._room, now)
        self._closed += len(surplus)
        if self._closed and now - self._logged_at >= LOG_EVERY_S:
            log.warning("connections closed: without a registered certificate, or too many", count=self._closed)
            self._closed, self._logged_at = 0, now
        return surplus


def find_surplus(connections: Mapping[Endpoint, PeerConnection], room: int, now: float) -> list[Endpoint]:
    """The connections that have to be closed: refused ones, late strangers, and those above a share."""
    closing = {key for key, connection in connections.items() if _is_over(connection, now)}
    by_certificate, by_address = defaultdict(list), defaultdict(list)
    for key, connection in connections.items():
        if key not in closing and connection.certificate:
            by_certificate[connection.certificate].append(key)
        elif key not in closing:
            by_address[_network(key[0])].append(key)

    def latest_use(key: Endpoint) -> tuple[bool, float]:
        return connections[key].calls > 0, connections[key].called_at

    for keys in by_certificate.values():
        closing.update(_all_but_last(sorted(keys, key=latest_use), PER_CERTIFICATE))
    strangers: list[Endpoint] = []
    for keys in by_address.values():
        keys.sort(key=lambda key: connections[key].opened_at)
        surplus = _all_but_last(keys, int(room * PER_ADDRESS))
        closing.update(surplus)
        strangers += keys[len(surplus) :]
    strangers.sort(key=lambda key: connections[key].opened_at)
    closing.update(_all_but_last(strangers, int(room * STRANGERS)))
    return sorted(closing)


def endpoint(peer: str) -> Endpoint:
    """Address and port of a peer that gRPC names `ipv4:address:port` or `ipv6:%5Baddress%5D:port`; of no other one."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return _address(host.strip("[]")), int(port)
    except ValueError:  # gRPC may have no name for a peer that is gone already
        return NOWHERE


def _is_over(connection: PeerConnection, now: float) -> bool:
    if connection.refused_at is not None and now - connection.refused_at >= REFUSED_S:
        return True
    return not connection.certificate and now - connection.opened_at >= STRANGER_S


def _all_but_last(keys: list[Endpoint], count: int) -> list[Endpoint]:
    return keys[: max(0, len(keys) - count)]


@lru_cache(maxsize=4096)
def _address(host: str) -> str:
    """The address in one form: a socket for both versions names an IPv4 peer `::ffff:1.2.3.4`."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Who counts as one address: with IPv6, everybody has a network of 2^64."""
    return address if ":" not in address else str(ip_network(f"{address}/64", strict=False))


def _timed(port: int) -> tuple[dict[Endpoint, int], float]:
    """As `_open`, and the processor seconds that it took."""
    began = time.thread_time()
    return _open(port), time.thread_time() - began


def _open(port: int) -> dict[Endpoint, int]:
    """Descriptors of the connections to a port of this process, by peer."""
    ages: dict[Endpoint, int] = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError, ValueError):  # no socket, not connected, or closed in the meantime
            if (peer := _peer(int(name), port)) is not None:
                ages[peer] = int(name)
    return ages


def _shut_down(connections: Iterable[tuple[int, Endpoint]]) -> None:
    for descriptor, expected in connections:
        with contextlib.suppress(OSError):  # closed in the meantime
            copy = os.dup(descriptor)  # of which nobody else disposes: the check below holds until the socket is shut
            with socket.socket(fileno=copy) as connection:
                if _of(connection) == expected:
                    connection.shutdown(socket.SHUT_RDWR)


def _peer(descriptor: int, port: int) -> Endpoint | None:
    """The peer of a connection to this port; None: the descriptor is another one's."""
    connection = socket.socket(fileno=descriptor)
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return None
        return _of(connection)
    finally:
        connection.detach()  # gRPC's: it stays open


def _of(connection: socket.socket) -> Endpoint:
    host, port = connection.getpeername()[:2]
    return _address(host), port
