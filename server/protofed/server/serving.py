"""The server on its port: options of gRPC, health, time, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from protofed.common.address import check_loopback
from protofed.common.errors import Unavailable
from protofed.common.failpoint import reach
from protofed.protos.v1 import federation_pb2_grpc, operator_pb2_grpc
from protofed.server.blobs import FolderBlobs
from protofed.server.operation import Operation
from protofed.server.operator_service import OperatorService
from protofed.server.runs import Runs
from protofed.server.service import LONGEST_WAIT_S, Service
from protofed.server.shedding import Shedding
from protofed.server.shield import MESSAGE_BYTES, Shield
from protofed.server.threads import Bells, Threads
from protofed.server.watchdog import Watchdog

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
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # keepalive_timeout_ms does nothing (PROTOCOL §4)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


async def serve(
    runs: Runs,
    operation: Operation,
    blobs: FolderBlobs,
    threads: Threads,
    bells: Bells,
    listen: str,
    stop: asyncio.Event,
    *,
    started: Callable[[str], None],
    until_finished: bool,
    memory_limit: int | None = None,
) -> None:
    """Serve until `stop` is set, or until the runs are finished and the sites know it.

    Args:
        listen: host:port; port 0 takes a free one.
        memory_limit: bytes of this process above which no upload is begun; None: there is none.
        started: called with the address once calls are answered.

    Raises:
        ConfigError: `listen` is no loopback address, and there is no TLS yet.
        Unavailable: the port is taken.
        StateError: the ledger or the blobs cannot be written any more.
    """
    check_loopback(listen)
    loop = asyncio.get_running_loop()
    bells.attach(loop)
    shield, service = Shield(stop), Service(runs, blobs, threads, bells, Shedding(memory_limit))
    server = grpc.aio.server(options=OPTIONS, interceptors=[shield], compression=grpc.Compression.NoCompression)
    federation_pb2_grpc.add_FederationServicer_to_server(service, server)
    operator_pb2_grpc.add_OperatorServicer_to_server(OperatorService(operation, threads), server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}: the port is taken; free it or take another") from error
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    started(f"{listen.rpartition(':')[0]}:{port}")
    watchdog = Watchdog(loop)
    watchdog.start()
    ticker = asyncio.create_task(_tick(runs, service, threads, stop, until_finished=until_finished))
    healthy = asyncio.create_task(_tell_health(health, watchdog))
    await stop.wait()
    healthy.cancel()
    watchdog.stop()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.stop(grace=1.0)
    try:
        await ticker
    finally:
        await loop.run_in_executor(None, threads.close)
    if shield.failure is not None:
        raise shield.failure


async def _tick(runs: Runs, service: Service, threads: Threads, stop: asyncio.Event, *, until_finished: bool) -> None:
    """Let time act twice a second; on uploads that nobody goes on with, once a minute."""
    loop = asyncio.get_running_loop()
    finished_at: float | None = None
    collect_at = loop.time()
    try:
        while not stop.is_set():
            reach("loop")
            await loop.run_in_executor(threads.control, runs.tick)
            if loop.time() >= collect_at:
                await service.collect()
                collect_at = loop.time() + COLLECT_EVERY_S
            if until_finished and runs.finished:
                finished_at = finished_at or loop.time()
                if runs.everyone_was_told() or loop.time() > finished_at + LONGEST_WAIT_S + 5:
                    stop.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
    finally:
        stop.set()  # a coordinator that broke ends the server: nothing is acknowledged that is not durable


async def _tell_health(health: HealthServicer, watchdog: Watchdog) -> None:
    """Not serving while the event loop was blocked a moment ago."""
    told = False
    while True:
        await asyncio.sleep(TICK_S)
        if watchdog.blocked != told:
            told = watchdog.blocked
            states = health_pb2.HealthCheckResponse
            await health.set("", states.NOT_SERVING if told else states.SERVING)
