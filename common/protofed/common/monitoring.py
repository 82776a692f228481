"""What a daemon says of itself to a monitoring system: metrics as data, and their endpoint.

The endpoint has /metrics, /healthz and /readyz, over HTTP or HTTPS, on threads of their own. It must answer when the
daemon is in trouble, so nothing here waits for the daemon's event loop or other threads.
"""

from __future__ import annotations

import hmac
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal, TypeAlias

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder

from protofed.common.address import host_and_port, is_loopback
from protofed.common.config.settings import Monitoring
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.pki.identity import Https, check_private

Kind: TypeAlias = Literal["gauge", "counter", "histogram", "summary"]
disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series, of which nothing is made


@dataclass(frozen=True)
class Metric:
    """One metric; its name, labels and meaning are a public contract.

    A point in time is a gauge `…_timestamp_seconds` in Unix time: PromQL computes ages and remaining times by `time()`.

    Attributes:
        labels: their names. No value may be a path, a count of labels, or text that a site chooses.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A counter in this registry, to be incremented at events."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, buckets: Sequence[float]) -> Histogram:
        """A histogram in this registry, to be given observations at events.

        Args:
            buckets: upper edges, in the metric's unit.
        """
        return Histogram(self.name, self.help, self.labels, buckets=buckets, registry=registry)

    def family(self, values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily | CounterMetricFamily:
        """A gauge's or a counter's values by label values, as a collector yields them at a scrape.

        Raises:
            ValueError: values for another number of labels; the same in `summary`.
        """
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = kind(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            self._check(labels)
            family.add_metric(labels, value)
        return family

    def summary(self, values: Mapping[tuple[str, ...], tuple[int, float]]) -> SummaryMetricFamily:
        """Counts and sums of observations by label values; without quantiles."""
        family = SummaryMetricFamily(self.name, self.help, labels=self.labels)
        for labels, (count, total) in values.items():
            self._check(labels)
            family.add_metric(labels, count, total)
        return family

    def _check(self, labels: Sequence[str]) -> None:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not values {labels}")


def table(metrics: Iterable[Metric]) -> str:
    """A table of metrics in Markdown, for the reference pages."""
    rows = [f"| `{metric.name}{_in_braces(metric.labels)}` | {metric.kind} | {metric.help} |" for metric in metrics]
    return "\n".join(["| metric | kind | what it is |", "|---|---|---|", *rows])


def _in_braces(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


log = structlog.get_logger()
SILENCE_S = 5.0  # that a peer may pause within its request or while it reads the answer
LONGEST_S = 20.0  # of one connection: a peer that sends a byte every 4 s never pauses for long
CONNECTIONS = 32  # at a time, a thread each; further ones are closed at once
POLL_S = 0.1  # between two checks for `stop` and for connections that last too long
PLAIN = "text/plain; charset=utf-8"


class Monitor:
    """One HTTP server: /metrics of a registry, /healthz (the process runs), /readyz (it can do its work).

    Args:
        where: address, and the identity and token if there are any.
        ready: what the daemon lacks to do its work, a line each; called on any thread.

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
        """Begin to answer; returns the URL.

        Raises:
            UnavailableError: the port is taken, or the address is not this machine's.
        """
        host, port = self._host_and_port
        try:
            self._server = _Server(host, port, self._tls, self._answer)
        except OSError as error:
            text = f"cannot answer /metrics on {self._where.listen}: {error.strerror or error}"
            raise UnavailableError(f"{text}; free the port or take another") from error
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="monitor", daemon=True).start()
        if self._token is None and not is_loopback(host):
            log.warning(
                "metrics without a token: whoever reaches this port can read the sites' names and scores",
                listen=self._where.listen,
            )
        url_host = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{url_host}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Stop answering and free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, path: str, headers: Any) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of the answer to a GET."""
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

    def _may_read(self, authorization: str) -> bool:
        if self._token is None:
            return True
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each connection, up to `CONNECTIONS`, each for `LONGEST_S` at most."""

    allow_reuse_address, daemon_threads = True, True
    request_queue_size = CONNECTIONS

    def __init__(
        self, host: str, port: int, tls: Https | None, answer: Callable[[str, Any], tuple[HTTPStatus, str, bytes]]
    ) -> None:
        self.answer, self._tls = answer, tls
        self._open: dict[socket.socket, float] = {}  # when it was accepted, monotonic seconds
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to accept the connection; called by socketserver before it starts a thread."""
        with self._lock:
            if len(self._open) >= CONNECTIONS:
                return False
            self._open[request] = time.monotonic()
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle the connection, on its own thread."""
        request.settimeout(SILENCE_S)
        if self._tls is None:
            _Handler(request, client_address, self)
            return
        # The handshake is here, not on the accepting thread: a slow peer delays nobody else. Of a duplicate, because
        # `wrap_socket` takes its socket over, and socketserver closes the original.
        with self._tls.context().wrap_socket(request.dup(), server_side=True) as wrapped:
            _Handler(wrapped, client_address, self)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection; called by socketserver when its thread ends."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that last too long; called by `serve_forever` every `POLL_S`."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, since in self._open.items() if now - since > LONGEST_S]
        for request in late:
            _shut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a peer that disconnects, is too slow or speaks no TLS is no error of this daemon."""
        log.debug("monitor: a connection ended early", why=str(sys.exc_info()[1]))


class _Handler(BaseHTTPRequestHandler):
    """One GET request without a body; the connection is closed after the answer."""

    server: _Server
    error_message_format, error_content_type = "%(message)s\n", PLAIN

    def do_GET(self) -> None:
        """Answer a GET; `http.server` finds the method by this name, and answers others with 501."""
        try:
            status, kind, body = self.server.answer(self.path.partition("?")[0], self.headers)
        except Exception as error:  # logged without a traceback, whose local variables may have the token
            text = f"{type(error).__name__}: {error}"
            log.error("monitor: no answer", path=self.path.partition("?")[0][:80], why=text)
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"see this daemon's log\n"
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """The status line alone: the default would add the names and versions of this software."""
        self.send_response_only(code, message)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: scrapes come every few seconds."""


def _read_token(path: Path) -> bytes:
    check_private(path, f"`chmod 600 {path}`, and if somebody may have read it, write another one")
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file with the token") from error
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f"{path}: expected one line with the token, such as of `openssl rand -hex 32`")
    return token


def _shut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer has closed it already
        return
