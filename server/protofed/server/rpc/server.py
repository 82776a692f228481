"""Runs the gRPC server: its options, health, periodic work, and an orderly end.

A watchdog notices a blocked event loop. gRPC's keepalive cannot: it answers pings from threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from protofed.common.address import host_and_port
from protofed.common.errors import ConfigError, DiskFailureError, StateError, UnavailableError
from protofed.common.failpoint import reach
from protofed.common.pki.identity import LiveIdentity
from protofed.protos.v1 import federation_pb2_grpc, operator_pb2_grpc
from protofed.server.access.authorization import AccessRules
from protofed.server.access.certificates import Certificates, warn_of_expiry
from protofed.server.access.rate_limits import Budgets, RateLimits
from protofed.server.monitoring.readiness import Readiness, ServerReadiness, WaitingLog, identity_usable
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc.audit import ServerAudit
from protofed.server.rpc.connections import ConnectionGuard, HandshakeCounter, server_credentials
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.federation import LONGEST_WAIT_S, FederationService
from protofed.server.rpc.interceptor import MESSAGE_BYTES, CallInterceptor
from protofed.server.rpc.memory_guard import MemoryGuard
from protofed.server.rpc.operator import OperatorService
from protofed.server.storage.blobs import Blobs, FolderBlobs

log = structlog.get_logger()
BEAT_S = 0.5
TOLERATED_S = 3.0  # a beat that is later than this is logged, and the server is not ready


class Watchdog(threading.Thread):
    """Sends a beat through the loop every `BEAT_S` seconds; a late one is logged with the stack that blocks the loop.

    Create it on the loop's thread.

    Attributes:
        lag_s: delay of the newest beat in seconds, so far.
        blocked: the newest beat was later than `TOLERATED_S`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._end = threading.Event()
        self.lag_s, self.blocked = 0.0, False

    def run(self) -> None:
        """The thread's work: beat until stopped or until the loop is closed."""
        while not self._end.wait(BEAT_S):
            try:
                self._beat()
            except RuntimeError:  # the loop is closed
                return

    def stop(self) -> None:
        """End the thread after the beat under way."""
        self._end.set()

    def _beat(self) -> None:
        arrived, sent_at = threading.Event(), time.monotonic()
        self._loop.call_soon_threadsafe(arrived.set)
        if not arrived.wait(TOLERATED_S):
            self.blocked = True
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame)) if frame else "unknown"
            log.error("the event loop is blocked", for_s=TOLERATED_S, where=where)
            while not arrived.wait(BEAT_S) and not self._end.is_set():
                self.lag_s = time.monotonic() - sent_at
        self.lag_s = time.monotonic() - sent_at
        if self.blocked and self.lag_s < TOLERATED_S:
            self.blocked = False
            log.info("the event loop runs again")


COLLECT_EVERY_S = 60.0  # unfinished uploads
TICK_S = 0.5
OPTIONS = [  # each was measured to matter: PROTOCOL §4
    ("grpc.so_reuseport", 0),  # the default lets two servers share a port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a compressed bomb is refused without unpacking it
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call: a daemon makes one every few seconds
    ("grpc.keepalive_time_ms", 30_000),
    (
        "grpc.http2.ping_timeout_ms",
        20_000,
    ),  # else a dead peer goes unnoticed for 62 s (keepalive_timeout_ms does nothing)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # at most half the clients' keepalive
]
CONNECTIONS = 4096  # silent ones are closed after the handshake's 10 s: thousands of them leave sites enough
MIN_CONNECTIONS = 16  # a server with descriptors for fewer called itself ready, and served one site
CALLS_EACH = 2  # in flight for each connection, of all peers together: one that waits for work, and one other
EXPIRY_EVERY_S = 86_400.0
HANDSHAKES_EVERY_S = 60.0
CHECK_EVERY_S = 5.0  # whether the state still is this server's, also while nobody calls
_SPARE_DESCRIPTORS = 256  # for files, the ledger and the metrics' port


@dataclass(frozen=True)
class Served:
    """What the gRPC services stand on.

    Attributes:
        audit: records every call.
        identity: the server's; None: plain text, in which the server believes whoever reaches the port.
        check: as `ServerContext.check`.
    """

    runs: RunQueue
    operator: OperatorApi
    blobs: Blobs
    audit: ServerAudit
    executors: Executors
    notifier: TaskNotifier
    identity: LiveIdentity | None
    check: Callable[[], None] = lambda: None


async def serve(
    served: Served,
    listen: str,
    stop: asyncio.Event,
    *,
    started: Callable[[str], None],
    until_finished: bool,
    memory_limit: int | None = None,
    max_connections: int = CONNECTIONS,
    readiness: ServerReadiness | None = None,
) -> None:
    """Serve until `stop` is set or, with `until_finished`, until all runs have ended and the sites know it.

    Args:
        listen: host:port; port 0 takes a free one.
        stop: also set by `serve` itself, when the disk fails or the coordinator breaks.
        started: called with the address once calls are answered.
        memory_limit: bytes of resident memory above which no upload may begin; None: no limit.
        max_connections: fewer, if the process may not open as many descriptors.
        readiness: gets this function's requirements; gRPC's health follows all of them.

    Raises:
        UnavailableError: the port is taken.
        ConfigError: this process may open too few files.
        StateError: the ledger, the blobs or the audit log can no longer be written.
    """
    if not isinstance(blobs := served.blobs, FolderBlobs):
        raise TypeError("uploads need a folder: open the server with a state folder")
    loop, identity, executors = asyncio.get_running_loop(), served.identity, served.executors
    served.notifier.attach(loop)
    handshakes, certificates = HandshakeCounter(), served.operator.certificates
    access = AccessRules(None if identity is None else certificates)
    connections = room(max_connections)
    connection_guard = None if identity is None else ConnectionGuard(connections, loop.time)
    interceptor = CallInterceptor(stop, access, RateLimits(), served.audit, handshakes, connection_guard)
    metrics, memory = served.operator.metrics, MemoryGuard(memory_limit)
    interceptor.on_denied = metrics.call_denied
    service = FederationService(served.runs, blobs, executors, served.notifier, memory, metrics, Budgets())
    operator = OperatorService(served.operator, executors, access)
    health, ready, watchdog = HealthServicer(), readiness or ServerReadiness(), Watchdog(loop)
    _require(ready, identity, served.audit, interceptor, watchdog)
    server = _server(interceptor, connections, service, operator, health)
    port = _listen(server, listen, None if identity is None else server_credentials(identity, handshakes))
    await _start(server, health, ready)
    started(f"{listen.rpartition(':')[0]}:{port}")
    watchdog.start()
    metrics.lag = lambda: watchdog.lag_s
    ticker = asyncio.create_task(_tick(served, service, stop, until_finished=until_finished))
    guarding = [] if connection_guard is None else [connection_guard.watch(port)]
    watchers = [_follow_health(health, ready), _log_certificates(identity, certificates, handshakes), *guarding]
    background = [asyncio.create_task(watcher) for watcher in watchers]
    await stop.wait()
    for task in background:
        task.cancel()
    watchdog.stop()
    # In this order: health says NOT_SERVING, calls end, the last tick ends, then the threads finish their work.
    await _stop(server, health, ready)
    try:
        await ticker
    finally:
        await loop.run_in_executor(None, executors.close)
    if interceptor.failure is not None:
        raise interceptor.failure


async def _start(server: grpc.aio.Server, health: HealthServicer, ready: ServerReadiness) -> None:
    await server.start()
    ready.serving = True
    await _set_health(health, await _look(ready))


async def _stop(server: grpc.aio.Server, health: HealthServicer, ready: ServerReadiness) -> None:
    ready.serving = False
    await _set_health(health, Readiness([], answers=False))  # without a look, which may wait for a disk
    await server.stop(grace=1.0)


def _require(
    ready: ServerReadiness,
    identity: LiveIdentity | None,
    audit: ServerAudit,
    interceptor: CallInterceptor,
    watchdog: Watchdog,
) -> None:
    ready.require("identity", identity_usable(identity))
    ready.require("audit", lambda: audit.missing, blocks_calls=False)
    ready.require("disk", lambda: "" if interceptor.failure is None else "it has failed, and the server ends")
    ready.require("loop", lambda: "the event loop is blocked; the log says where" if watchdog.blocked else "")


def _server(
    interceptor: CallInterceptor,
    connections: int,
    service: FederationService,
    operator: OperatorService,
    health: HealthServicer,
) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[*OPTIONS, *_room_for(connections)],
        interceptors=[interceptor],
        maximum_concurrent_rpcs=CALLS_EACH * connections,
        compression=grpc.Compression.NoCompression,
    )
    federation_pb2_grpc.add_FederationServicer_to_server(service, server)
    operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _room_for(connections: int) -> list[tuple[str, int]]:
    """Options: gRPC would cancel calls while 1000 wait for us, as they do when a new run wakes all sites."""
    waiting = CALLS_EACH * connections
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server.max_pending_requests", waiting),
        ("grpc.server.max_pending_requests_hard_limit", waiting),
    ]


def _listen(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {listen}: {why_not(listen)}") from error


def why_not(listen: str) -> str:
    """Why an address cannot be listened on: gRPC only says that it cannot."""
    host, port = host_and_port(listen)
    elsewhere = "this machine has no such address (`ip address` lists its own); 0.0.0.0 stands for all of them"
    try:
        socket.getaddrinfo(host, port)
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except socket.gaierror:
        return elsewhere
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # the latter: no IPv6 here
            return elsewhere
        if error.errno == errno.EACCES:
            return "ports below 1024 are for root; take another one, such as 7443"
    return "the port is taken; free it or take another"


def room(connections: int) -> int:
    """How many connections this process has file descriptors for, at most `connections`.

    Raises the process's soft limit as far as the hard limit allows. Without a descriptor gRPC cannot accept, and a
    flood of silent connections would shut sites out.

    Raises:
        ConfigError: it has descriptors for fewer than `MIN_CONNECTIONS`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    needed = connections + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, limit), hard))
    if needed > limit:
        if (connections := limit - _SPARE_DESCRIPTORS) < MIN_CONNECTIONS:
            raise ConfigError(
                f"this process may open {limit} files: too few to serve sites. Let it open {needed} (`ulimit -n`, "
                f"LimitNOFILE= of systemd), at least {_SPARE_DESCRIPTORS + MIN_CONNECTIONS}"
            )
        log.warning("fewer connections than wanted: raise `ulimit -n`", connections=connections, descriptors=limit)
    return connections


async def _log_certificates(
    identity: LiveIdentity | None, certificates: Certificates, handshakes: HandshakeCounter
) -> None:
    """Log failed handshakes once a minute, and certificates that end soon at the start and once a day."""
    clock = asyncio.get_running_loop().time
    expiry_at = clock()
    while True:
        if identity is not None and clock() >= expiry_at:
            warn_of_expiry(identity.current(), certificates)
            expiry_at = clock() + EXPIRY_EVERY_S
        await asyncio.sleep(HANDSHAKES_EVERY_S)
        handshakes.log_failed()


async def _tick(served: Served, service: FederationService, stop: asyncio.Event, *, until_finished: bool) -> None:
    """Let the run queue act on deadlines twice a second, and delete abandoned uploads once a minute."""
    loop, runs = asyncio.get_running_loop(), served.runs
    waiting_log = WaitingLog(runs, served.operator.certificates, loop.time)

    check_at = loop.time()

    def tick() -> None:
        nonlocal check_at
        if loop.time() >= check_at:
            check_at = loop.time() + CHECK_EVERY_S
            _check(served)
        runs.tick()
        waiting_log.note()

    finished_at: float | None = None
    # Beside the ticks: it waits for threads that may be busy for minutes, and no deadline may.
    collecting, collect_at = asyncio.create_task(service.collect()), loop.time() + COLLECT_EVERY_S
    try:
        while not stop.is_set():
            reach("loop")
            await loop.run_in_executor(served.executors.control, tick)
            if collecting.done():
                collecting.result()  # a disk that has failed ends the server
                if loop.time() >= collect_at:
                    collecting, collect_at = asyncio.create_task(service.collect()), loop.time() + COLLECT_EVERY_S
            if until_finished and runs.finished:
                # Sites learn of the end at their next call, which may be a NextTask that waits; lost ones never do.
                finished_at = finished_at or loop.time()
                if runs.all_informed() or loop.time() > finished_at + LONGEST_WAIT_S + 5:
                    stop.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
        await collecting
    finally:
        stop.set()  # a broken coordinator ends the server: nothing is acknowledged that is not durable


def _check(served: Served) -> None:
    """End a server whose state is another one's; one whose database does not answer is not ready, and waits for it."""
    try:
        served.check()
        served.audit.check()
    except DiskFailureError:
        raise
    except StateError as error:
        log.debug("the ledger does not answer", why=str(error))


async def _follow_health(health: HealthServicer, ready: ServerReadiness) -> None:
    """Keep gRPC's health up to date, and log when the server becomes unready or ready."""
    before: list[str] = []
    while True:
        await asyncio.sleep(TICK_S)
        if (look := await _look(ready)).missing != before:
            before = look.missing
            log.warning("not ready", missing=before) if before else log.info("ready again")
            await _set_health(health, look)


async def _look(ready: ServerReadiness) -> Readiness:
    """Not on the loop, which must not wait for a disk: nothing would be answered, not even by gRPC's health."""
    return await asyncio.get_running_loop().run_in_executor(None, ready.look)


async def _set_health(health: HealthServicer, look: Readiness) -> None:
    response = health_pb2.HealthCheckResponse
    await health.set("", response.SERVING if look.answers else response.NOT_SERVING)
