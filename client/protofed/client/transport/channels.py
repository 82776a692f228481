"""gRPC channels to the server, by the site's identity and its proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from protofed.client.transport.proxy import Proxy
from protofed.common.errors import UnavailableError
from protofed.common.pki.identity import Identity, LiveIdentity
from protofed.common.process import check_in_time
from protofed.common.protocol.call_metadata import ServerInfo, read_server_info

# Each option was measured to matter: docs/explanation/protocol.md, section 4.
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_retries", 0),  # gRPC's own retries run a handler twice; `calls` has ours
    ("grpc.max_receive_message_length", 6 << 20),
    ("grpc.max_send_message_length", 6 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # keepalive_timeout_ms does nothing
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # also the time that a slow link gets to establish a connection
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel may share the old one's connection and its failures
]
_BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_NOT_REACHED = ("DNS resolution failed", "failed to connect")  # in details of UNAVAILABLE: no server has said it
_HEALTH = "/grpc.health.v1.Health/Check"


class BusyError(UnavailableError):
    """The server was reached and did not answer: it has no room, or hangs."""


def fetch_server_info(
    address: str, identity: LiveIdentity | None, proxy: Proxy | None, timeout: float = 10.0
) -> ServerInfo | None:
    """Call a server's health check over a connection of its own; an empty message is all that is sent.

    Args:
        timeout: seconds.

    Returns:
        What the server says of itself in the answer's metadata; None: nothing.

    Raises:
        BusyError: the server was reached, and there was no answer.
        UnavailableError: the call failed otherwise, as on this machine.
    """
    channels = Channels(address, identity, proxy)
    try:
        with channels.take() as (channel, _):
            check: Any = channel.unary_unary(_HEALTH)  # bytes to bytes
            _reply, call = check.with_call(b"", timeout=timeout)
            return read_server_info(dict(call.initial_metadata()))
    except grpc.RpcError as error:
        status = f"{error.code().name.lower()}: {error.details()}"[:160]
        if error.code() in _BUSY and not any(sign in str(error.details()) for sign in _NOT_REACHED):
            raise BusyError(f"{address} does not answer a health check ({status})") from error
        raise UnavailableError(f"the health check of {address} failed ({status})") from error
    finally:
        channels.close()


@dataclass(eq=False)
class _Channel:
    """A channel, the identity it was opened with, and the number of calls on it."""

    grpc_channel: grpc.Channel
    identity: Identity | None
    calls: int = 0


class Channels:
    """Channels to one address. A renewed identity opens a new channel; the old one closes with the last of its calls.

    gRPC reads certificates once for each channel, so a renewal needs a new one.

    Args:
        options: of each channel, but for the proxy.
    """

    def __init__(
        self,
        address: str,
        identity: LiveIdentity | None,
        proxy: Proxy | None = None,
        options: Sequence[tuple[str, Any]] = OPTIONS,
    ) -> None:
        self._address, self._identity, self._proxy, self._options = address, identity, proxy, options
        self._lock, self._open = threading.Lock(), [self._dial()]  # new calls use the last one

    @contextmanager
    def take(self) -> Iterator[tuple[grpc.Channel, Identity | None]]:
        """A channel for one call, and the identity it was opened with."""
        with self._lock:
            if self._identity is not None and self._identity.current() is not self._open[-1].identity:
                self._open.append(self._dial())
            channel = self._open[-1]
            channel.calls += 1
            self._close_unused()
        try:
            yield channel.grpc_channel, channel.identity
        finally:
            with self._lock:
                channel.calls -= 1
                self._close_unused()

    def redial(self) -> None:
        """Open a new channel for later calls, free of the reconnect back-off that the old one has built up."""
        with self._lock:
            self._open.append(self._dial())
            self._close_unused()

    def hang_up(self) -> None:
        """End the calls that are under way, as CANCELLED; later ones get a new channel."""
        with self._lock:
            ended, self._open = self._open, [self._dial()]
            for channel in ended:
                channel.grpc_channel.close()

    def close(self) -> None:
        """Close all channels, which ends their calls."""
        with self._lock:
            for channel in self._open:
                channel.grpc_channel.close()

    def _close_unused(self) -> None:
        for channel in self._open[:-1]:
            if not channel.calls:
                channel.grpc_channel.close()
                self._open.remove(channel)

    def _dial(self) -> _Channel:
        if self._identity is None:
            options = [*self._options, ("grpc.enable_http_proxy", 0)]
            return _Channel(grpc.insecure_channel(self._address, options), None)
        check_in_time()
        identity = self._identity.current()
        credentials = grpc.ssl_channel_credentials(identity.authorities_pem, identity.key_pem, identity.certificate_pem)
        # Only the setting counts: without it, gRPC would take a proxy from the environment.
        proxy = [("grpc.enable_http_proxy", 0)] if self._proxy is None else [("grpc.http_proxy", self._proxy.url)]
        return _Channel(grpc.secure_channel(self._address, credentials, [*self._options, *proxy]), identity)
