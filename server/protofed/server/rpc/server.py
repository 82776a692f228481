"""The server on its port: options of gRPC, health, time, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from protofed.common.errors import UnavailableError
from protofed.common.failpoint import reach
from protofed.common.pki.identity import LiveIdentity
from protofed.protos.v1 import federation_pb2_grpc, operator_pb2_grpc
from protofed.server.access.authorization import Access
from protofed.server.access.certificates import Certificates, warn_of_expiry
from protofed.server.access.credentials import HandshakeCounter, server_credentials
from protofed.server.access.rate_limits import RateLimits
from protofed.server.monitoring.readiness import ServerReadiness, identity_usable
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.rpc.audit import ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.federation import LONGEST_WAIT_S, FederationService
from protofed.server.rpc.interceptor import MESSAGE_BYTES, CallInterceptor
from protofed.server.rpc.memory_guard import MemoryGuard
from protofed.server.rpc.operator import OperatorService
from protofed.server.rpc.watchdog import Watchdog
from protofed.server.storage.blobs import Blobs, FolderBlobs

log = structlog.get_logger()
COLLECT_EVERY_S = 60.0  # unfinished uploads
TICK_S = 0.5
OPTIONS = [
    ("grpc.so_reuseport", 0),  # two servers would share a port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a compressed bomb is refused unopened
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call: a daemon makes one every few seconds
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # keepalive_timeout_ms does nothing (PROTOCOL §4)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
CONNECTIONS = 4096  # silent ones leave after the handshake's 10 s: room for thousands of them beside all sites
CALLS = 4096  # at a time, of all together
EXPIRY_EVERY_S = 86_400.0
HANDSHAKES_EVERY_S = 60.0
_SPARE_DESCRIPTORS = 256


@dataclass(frozen=True)
class Served:
    """What calls reach.

    Attributes:
        audit: where every call is recorded.
        identity: the server's; None: plain text, and whoever reaches the port is believed.
    """

    runs: RunQueue
    operator: OperatorApi
    blobs: Blobs
    audit: ServerAudit
    executors: Executors
    notifier: TaskNotifier
    identity: LiveIdentity | None


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
    """Serve until `stop` is set, or until the runs are finished and the sites know it.

    Args:
        listen: host:port; port 0 takes a free one.
        memory_limit: bytes of this process above which no upload is begun; None: there is none.
        started: called with the address once calls are answered.
        readiness: learns what has to hold here; gRPC's health follows all of it.

    Raises:
        Unavailable: the port is taken.
        StateError: the ledger, the blobs or the audit cannot be written any more.
    """
    if not isinstance(blobs := served.blobs, FolderBlobs):
        raise TypeError("uploads need a folder: open the server with a state folder")
    loop, identity, executors = asyncio.get_running_loop(), served.identity, served.executors
    served.notifier.attach(loop)
    handshakes, certificates = HandshakeCounter(), served.operator.certificates
    access = Access(None if identity is None else certificates)
    interceptor = CallInterceptor(stop, access, RateLimits(), served.audit, handshakes)
    metrics, guard = served.operator.metrics, MemoryGuard(memory_limit)
    service = FederationService(served.runs, blobs, executors, served.notifier, guard, metrics)
    operator = OperatorService(served.operator, executors)
    health, ready, watchdog = HealthServicer(), readiness or ServerReadiness(), Watchdog(loop)
    _require(ready, identity, served.audit, interceptor, watchdog)
    server = _server(interceptor, room(max_connections), service, operator, health)
    port = _listen(server, listen, None if identity is None else server_credentials(identity, handshakes))
    await _start(server, health, ready)
    started(f"{listen.rpartition(':')[0]}:{port}")
    watchdog.start()
    metrics.lag = lambda: watchdog.lag_s
    ticker = asyncio.create_task(_tick(served.runs, service, executors, stop, until_finished=until_finished))
    tellers = (_tell_health(health, ready), _tell_of_certificates(identity, certificates, handshakes))
    beside = [asyncio.create_task(teller) for teller in tellers]
    await stop.wait()
    for task in beside:
        task.cancel()
    watchdog.stop()
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
    await _set_health(health, ready)


async def _stop(server: grpc.aio.Server, health: HealthServicer, ready: ServerReadiness) -> None:
    ready.serving = False
    await _set_health(health, ready)
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
        options=[*OPTIONS, ("grpc.max_allowed_incoming_connections", connections)],
        interceptors=[interceptor],
        maximum_concurrent_rpcs=CALLS,
        compression=grpc.Compression.NoCompression,
    )
    federation_pb2_grpc.add_FederationServicer_to_server(service, server)
    operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _listen(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {listen}: the port is taken; free it or take another") from error


def room(connections: int) -> int:
    """As many of them as this process may have descriptors for; it takes all that it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    wanted = connections + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, limit), hard))
    if wanted > limit:
        connections = max(1, limit - _SPARE_DESCRIPTORS)
        log.warning("fewer connections than wanted: raise `ulimit -n`", connections=connections, descriptors=limit)
    return connections


async def _tell_of_certificates(
    identity: LiveIdentity | None, certificates: Certificates, handshakes: HandshakeCounter
) -> None:
    """Once a minute how many did not come in; at the start and once a day whose certificate ends soon."""
    clock = asyncio.get_running_loop().time
    expiry_at = clock()
    while True:
        if identity is not None and clock() >= expiry_at:
            warn_of_expiry(identity.now(), certificates)
            expiry_at = clock() + EXPIRY_EVERY_S
        await asyncio.sleep(HANDSHAKES_EVERY_S)
        handshakes.log_failed()


async def _tick(
    runs: RunQueue, service: FederationService, executors: Executors, stop: asyncio.Event, *, until_finished: bool
) -> None:
    """Let time act twice a second; on uploads that nobody goes on with, once a minute."""
    loop = asyncio.get_running_loop()
    finished_at: float | None = None
    collect_at = loop.time()
    try:
        while not stop.is_set():
            reach("loop")
            await loop.run_in_executor(executors.control, runs.tick)
            if loop.time() >= collect_at:
                await service.collect()
                collect_at = loop.time() + COLLECT_EVERY_S
            if until_finished and runs.finished:
                finished_at = finished_at or loop.time()
                if runs.all_informed() or loop.time() > finished_at + LONGEST_WAIT_S + 5:
                    stop.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
    finally:
        stop.set()  # a coordinator that broke ends the server: nothing is acknowledged that is not durable


async def _tell_health(health: HealthServicer, ready: ServerReadiness) -> None:
    """Not serving while calls are not answered, as while the event loop was blocked a moment ago."""
    known: list[str] = []
    while True:
        await asyncio.sleep(TICK_S)
        if (missing := ready.missing()) != known:
            log.warning("not ready", missing=missing) if missing else log.info("ready again")
            known = missing
            await _set_health(health, ready)


async def _set_health(health: HealthServicer, ready: ServerReadiness) -> None:
    states = health_pb2.HealthCheckResponse
    await health.set("", states.SERVING if ready.answers else states.NOT_SERVING)
