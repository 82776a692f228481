"""Channels of gRPC to the server, as the site's identity and its proxy have it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from protofed.client.transport.proxy import Proxy
from protofed.common.errors import UnavailableError
from protofed.common.grpc_environment import check_in_time
from protofed.common.pki.identity import Identity, LiveIdentity
from protofed.common.protocol.server_info import ServerInfo, read_greeting

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 6 << 20),
    ("grpc.max_send_message_length", 6 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # keepalive_timeout_ms does nothing (PROTOCOL §4)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # also what a slow link has for its connection to stand
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
]
_HEALTH = "/grpc.health.v1.Health/Check"


def greet(address: str, identity: LiveIdentity | None, proxy: Proxy | None, timeout: float = 10.0) -> ServerInfo | None:
    """Ask whether a server is well, over a connection of its own, and give back how it greets.

    An empty message is all that is sent; nobody enrolls. None: it says nothing of itself.

    Raises:
        Unavailable: there was no answer.
    """
    channels = Channels(address, identity, proxy)
    try:
        with channels.take() as (channel, _):
            ask: Any = channel.unary_unary(_HEALTH)  # bytes to bytes
            _reply, call = ask.with_call(b"", timeout=timeout)
            return read_greeting(dict(call.initial_metadata()))
    except grpc.RpcError as error:
        said = f"{error.code().name.lower()}: {error.details()}"[:160]
        raise UnavailableError(f"{address} does not answer a health check ({said})") from error
    finally:
        channels.close()


@dataclass(eq=False)
class _Channel:
    """A channel, whose it is, and how many calls are on it."""

    way: grpc.Channel
    identity: Identity | None
    calls: int = 0


class Channels:
    """Channels to one address: a new one when the identity was renewed. The old one ends with the last of its calls."""

    def __init__(self, address: str, identity: LiveIdentity | None, proxy: Proxy | None) -> None:
        self._address, self._identity, self._proxy = address, identity, proxy
        self._lock, self._open = threading.Lock(), [self._dial()]  # the last one is for new calls

    @contextmanager
    def take(self) -> Iterator[tuple[grpc.Channel, Identity | None]]:
        """The channel for one call, and whose it is."""
        with self._lock:
            if self._identity is not None and self._identity.now() is not self._open[-1].identity:
                self._open.append(self._dial())
            taken = self._open[-1]
            taken.calls += 1
            self._hang_up()
        try:
            yield taken.way, taken.identity
        finally:
            with self._lock:
                taken.calls -= 1
                self._hang_up()

    def dial_again(self) -> None:
        """Calls to come take a new channel, which has no memory of failures."""
        with self._lock:
            self._open.append(self._dial())
            self._hang_up()

    def close(self) -> None:
        """End all calls."""
        with self._lock:
            for channel in self._open:
                channel.way.close()

    def _hang_up(self) -> None:
        """End what is not for new calls and has none left."""
        for channel in self._open[:-1]:
            if not channel.calls:
                channel.way.close()
                self._open.remove(channel)

    def _dial(self) -> _Channel:
        if self._identity is None:
            return _Channel(grpc.insecure_channel(self._address, [*OPTIONS, ("grpc.enable_http_proxy", 0)]), None)
        check_in_time()
        identity = self._identity.now()
        credentials = grpc.ssl_channel_credentials(identity.authorities_pem, identity.key_pem, identity.certificate_pem)
        way = [("grpc.enable_http_proxy", 0)] if self._proxy is None else [("grpc.http_proxy", self._proxy.url)]
        return _Channel(grpc.secure_channel(self._address, credentials, [*OPTIONS, *way]), identity)
