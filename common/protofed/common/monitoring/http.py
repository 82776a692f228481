"""/metrics, /healthz and /readyz of a daemon, over HTTP or HTTPS, on threads of their own.

What is asked here must be answered when the daemon is in trouble: nothing waits for its event loop or other threads.
"""

from __future__ import annotations

import hmac
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from protofed.common.address import host_and_port, is_loopback
from protofed.common.config.settings import Monitoring
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.pki.https import Https, check_private

log = structlog.get_logger()
SILENCE_S = 5.0  # of a peer, within its request or while it reads the answer
LONGEST_S = 20.0  # of one connection, however it goes
CONNECTIONS = 32  # at a time; one more is closed at once
POLL_S = 0.1  # how soon an end is noticed
PLAIN = "text/plain; charset=utf-8"


class Monitor:
    """One HTTP server.

    /metrics is the registry's; /healthz says that the process lives; /readyz what it lacks to do its work, a line each.

    Args:
        ready: what is missing now; asked on any thread.

    Raises:
        ConfigError: the address, the identity or the token cannot be used.
    """

    def __init__(self, where: Monitoring, registry: CollectorRegistry, ready: Callable[[], Sequence[str]]) -> None:
        self._where, self._host_and_port = where, host_and_port(where.listen)
        self._token = None if where.token is None else _read_token(where.token)
        self._tls = None if where.identity is None else Https(where.identity)
        self._registry, self._ready = registry, ready
        self._server: _Server | None = None

    def start(self) -> str:
        """Answer from now on; the URL that it does under.

        Raises:
            UnavailableError: the port is taken, or the address is not this machine's.
        """
        host, port = self._host_and_port
        try:
            self._server = _Server(host, port, self._tls, self._answer)
        except OSError as error:
            told = f"cannot answer /metrics on {self._where.listen}: {error.strerror or error}"
            raise UnavailableError(f"{told}; free the port or take another") from error
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="monitor", daemon=True).start()
        if self._token is None and not is_loopback(host):
            log.warning(
                "metrics without a token: whoever reaches this port can read the sites' names and scores",
                listen=self._where.listen,
            )
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{shown}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, path: str, headers: Any) -> tuple[HTTPStatus, str, bytes]:
        """Status, type and body of the answer to GET."""
        match path:
            case "/healthz":
                return HTTPStatus.OK, PLAIN, b"alive\n"
            case "/readyz":
                missing = self._ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
                return status, PLAIN, "".join(f"{line}\n" for line in missing or ("ready",)).encode()
            case "/metrics":
                if not self._may_read(headers.get("Authorization", "")):
                    return HTTPStatus.UNAUTHORIZED, PLAIN, b"expected Authorization: Bearer with this server's token\n"
                encode, kind = choose_encoder(headers.get("Accept", ""))
                return HTTPStatus.OK, kind, encode(self._registry)
            case _:
                return HTTPStatus.NOT_FOUND, PLAIN, b"here are /metrics, /healthz and /readyz\n"

    def _may_read(self, said: str) -> bool:
        if self._token is None:
            return True
        scheme, _, token = said.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Hands each connection to a thread, ends those that last too long, and takes in only so many."""

    allow_reuse_address, daemon_threads = True, True
    request_queue_size = CONNECTIONS

    def __init__(
        self, host: str, port: int, tls: Https | None, answer: Callable[[str, Any], tuple[HTTPStatus, str, bytes]]
    ) -> None:
        self.answer, self._tls = answer, tls
        self._open: dict[socket.socket, float] = {}  # since when
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._lock:
            if len(self._open) >= CONNECTIONS:
                return False
            self._open[request] = time.monotonic()
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the connection's own thread: a handshake holds up nobody else."""
        request.settimeout(SILENCE_S)
        if self._tls is None:
            _Handler(request, client_address, self)
            return
        with self._tls.context().wrap_socket(request.dup(), server_side=True) as wrapped:
            _Handler(wrapped, client_address, self)

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Now and then: end what lasts too long."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, since in self._open.items() if now - since > LONGEST_S]
        for request in late:
            _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away, is too slow or speaks no TLS is nobody's fault here."""
        log.debug("monitor: a connection ended early", why=str(sys.exc_info()[1]))


class _Handler(BaseHTTPRequestHandler):
    """One request, GET only, without a body; the connection ends with the answer."""

    server: _Server
    error_message_format, error_content_type = "%(message)s\n", PLAIN

    def do_GET(self) -> None:
        """Answer it."""
        try:
            status, kind, body = self.server.answer(self.path.partition("?")[0], self.headers)
        except Exception as error:  # no traceback: a token would stand in it
            why = f"{type(error).__name__}: {error}"
            log.error("monitor: no answer", path=self.path.partition("?")[0][:80], why=why)
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"see this daemon's log\n"
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Without the name and version of any software."""
        self.send_response_only(code, message)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes come every few seconds."""


def _read_token(path: Path) -> bytes:
    check_private(path, f"`chmod 600 {path}`, and if somebody may have read it, write another one")
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file with the token") from error
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f"{path}: expected one line with the token, such as of `openssl rand -hex 32`")
    return token


def _cut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has gone already
        return
