"""The wire as the server sees it: the only file of the server that knows gRPC.

Nothing heavy runs on the event loop. The coordinator lives on one thread (`control`), chunks are read and written on
others (`transfer`), and aggregation has its own (`work`): gRPC's keepalive cannot see a blocked loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from protofed.common import wire
from protofed.common.address import check_loopback
from protofed.common.errors import (
    CodecError,
    Fenced,
    Incomplete,
    NotEnrolled,
    ProtocolError,
    StateError,
    Unavailable,
    VersionMismatch,
)
from protofed.common.payload import SiteId
from protofed.common.task import Assignment, Manifest, Wait
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc
from protofed.server import screening
from protofed.server.blobs import FolderBlobs
from protofed.server.runs import Runs
from protofed.server.threads import Bells, Threads

log = structlog.get_logger()
T = TypeVar("T")
LONGEST_WAIT_S = 20.0
MESSAGE_BYTES = 6 << 20  # a 2 MiB chunk, or the longest manifest
OPTIONS = [
    ("grpc.so_reuseport", 0),  # two servers would share a port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES),  # bounds what a compressed bomb can become, too
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
_CODES: list[tuple[type[Exception], grpc.StatusCode, str]] = [  # and a fixed text, where ours is not for a peer
    (NotEnrolled, grpc.StatusCode.UNAUTHENTICATED, ""),
    (Fenced, grpc.StatusCode.ABORTED, ""),
    (VersionMismatch, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (Incomplete, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT, "not a message of this protocol"),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT, ""),
    (CodecError, grpc.StatusCode.DATA_LOSS, ""),
    (StateError, grpc.StatusCode.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later"),
]


@dataclass(frozen=True)
class _Announced:
    """An upload that was begun: whose it is and what it will be."""

    site: SiteId
    run: str
    nonce: str
    manifest: Manifest


class Service(rpc.FederationServicer):
    """Federation calls, each a few lines around the coordinator."""

    def __init__(self, runs: Runs, blobs: FolderBlobs, threads: Threads, bells: Bells) -> None:
        self._runs, self._blobs, self._threads, self._bells = runs, blobs, threads, bells
        self._uploads: dict[str, _Announced] = {}

    async def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollReply:
        site, instance = _caller(request.caller)
        roles = [wire.role.unpack(number) for number in request.roles]
        if not roles:
            raise ProtocolError("a daemon offers at least one role")
        software = request.software[:40]
        answer = await self._control(self._runs.enroll, site, instance, request.protocol, software, VERSION, roles)
        if isinstance(answer, Assignment):  # a daemon that waits for the next run asks every few seconds
            log.info("enrolled", site=site, run=answer.run, roles=[role.value for role in roles], software=software)
        return wire.pack_enrolled(answer)

    async def NextTask(self, request: pb.NextTaskRequest, context: Any) -> pb.NextTaskReply:
        site, instance = _caller(request.caller)
        clock = asyncio.get_running_loop().time
        until = clock() + min(max(request.wait_s, 0.0), LONGEST_WAIT_S)
        while True:
            bell = self._bells.of(site)
            answer = await self._control(self._runs.next_task, wire.read_id(request.run), site, instance)
            if not isinstance(answer, Wait) or clock() >= until:
                return wire.pack_next(answer)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), until - clock())

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        site, instance = _caller(request.caller)
        progress = wire.unpack_progress(request)
        signal = await self._control(self._runs.heartbeat, wire.read_id(request.run), site, instance, progress)
        return pb.HeartbeatReply(signal=wire.signal.pack(signal))

    async def GetChunk(self, request: pb.GetChunkRequest, context: Any) -> pb.Chunk:
        site, _ = _caller(request.caller)
        digest = wire.read_digest(request.digest)
        if not self._runs.of(wire.read_id(request.run)).may_fetch(site, digest):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this blob is not part of the site's current task")
        data = await self._transfer(self._blobs.chunk, digest, request.index)
        if not data:
            raise ProtocolError(f"chunk {request.index} lies behind the end of the blob")
        return pb.Chunk(index=request.index, data=data, crc32c=crc32c(data))

    async def BeginUpload(self, request: pb.UploadManifest, context: Any) -> pb.UploadTicket:
        site, instance = _caller(request.caller)
        manifest, nonce, run = wire.unpack_manifest(request), wire.read_id(request.nonce), wire.read_id(request.run)
        base = wire.read_digest(request.base) if request.base else None
        receipt = await self._control(self._runs.of(run).begin, site, instance, nonce, base, manifest)
        if receipt is not None:
            return pb.UploadTicket(receipt=wire.pack_receipt(receipt))
        upload = f"{nonce}-{manifest.digest[:16]}"  # the same after a restart, so that chunks are found again
        held = await self._transfer(self._blobs.begin, upload, manifest.total)
        self._uploads[upload] = _Announced(site, run, nonce, manifest)
        return pb.UploadTicket(upload=pb.Upload(id=upload, held=sorted(held)))

    async def PutChunk(self, request: pb.Chunk, context: Any) -> pb.ChunkAck:
        self._announced(_caller(request.caller)[0], request.upload)
        await self._transfer(self._blobs.write, request.upload, request.index, request.data, request.crc32c)
        return pb.ChunkAck()

    async def CommitUpload(self, request: pb.CommitRequest, context: Any) -> pb.Receipt:
        site, instance = _caller(request.caller)
        announced = self._announced(site, request.upload)
        coordinator, manifest, nonce = self._runs.of(announced.run), announced.manifest, announced.nonce
        data = await self._transfer(self._blobs.seal, request.upload, manifest.digest)
        fault = await self._transfer(screening.blob_fault, data, manifest)
        if fault is not None:
            receipt = await self._control(coordinator.refuse, site, nonce, manifest, fault)
        else:
            weight = request.weight if request.HasField("weight") else None
            metrics = dict(request.metrics)
            receipt = await self._control(coordinator.commit, site, instance, nonce, manifest, metrics, weight)
        self._uploads.pop(request.upload, None)
        return wire.pack_receipt(receipt)

    async def ReportScores(self, request: pb.ScoresRequest, context: Any) -> pb.Ack:
        site, instance = _caller(request.caller)
        coordinator = self._runs.of(wire.read_id(request.run))
        await self._control(
            coordinator.report_scores, site, instance, wire.read_id(request.nonce), dict(request.scores)
        )
        return pb.Ack()

    def _announced(self, site: SiteId, upload: str) -> _Announced:
        announced = self._uploads.get(upload)
        if announced is None or announced.site != site:
            raise Incomplete("no such upload of this site; begin it again")
        return announced

    async def _control(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads.control, function, *arguments)

    async def _transfer(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads.transfer, function, *arguments)


class Shield(grpc.aio.ServerInterceptor):
    """The outermost layer: errors become documented codes, and nothing of an unforeseen one reaches the peer."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner, parse = handler.unary_unary, handler.request_deserializer

        async def guarded(data: bytes, context: Any) -> Any:
            try:
                return await inner(parse(data), context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                for kind, code, text in _CODES:
                    if isinstance(error, kind):
                        log.info("call refused", call=handler_call_details.method, why=str(error))
                        await context.abort(code, text or str(error))
                incident = secrets.token_hex(4)
                log.exception("incident", incident=incident, call=handler_call_details.method)
                await context.abort(grpc.StatusCode.INTERNAL, f"internal error, incident {incident}")

        return grpc.unary_unary_rpc_method_handler(guarded, None, handler.response_serializer)


async def serve(
    runs: Runs,
    blobs: FolderBlobs,
    threads: Threads,
    bells: Bells,
    listen: str,
    stop: asyncio.Event,
    *,
    started: Callable[[str], None],
    until_finished: bool,
) -> None:
    """Serve until `stop` is set, or until the runs are finished and the sites know it.

    Args:
        listen: host:port; port 0 takes a free one.
        started: called with the address once calls are answered.

    Raises:
        ConfigError: `listen` is no loopback address, and there is no TLS yet.
        Unavailable: the port is taken.
        StateError: the ledger or the blobs cannot be written any more.
    """
    check_loopback(listen)
    loop = asyncio.get_running_loop()
    bells.attach(loop)
    server = grpc.aio.server(options=OPTIONS, interceptors=[Shield()], compression=grpc.Compression.NoCompression)
    rpc.add_FederationServicer_to_server(Service(runs, blobs, threads, bells), server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}: the port is taken; free it or take another") from error
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    started(f"{listen.rpartition(':')[0]}:{port}")
    ticker = asyncio.create_task(_tick(runs, threads, stop, until_finished=until_finished))
    await stop.wait()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.stop(grace=1.0)
    try:
        await ticker
    finally:
        await loop.run_in_executor(None, threads.close)


async def _tick(runs: Runs, threads: Threads, stop: asyncio.Event, *, until_finished: bool) -> None:
    """Let time act twice a second."""
    loop = asyncio.get_running_loop()
    finished_at: float | None = None
    try:
        while not stop.is_set():
            await loop.run_in_executor(threads.control, lambda: runs.current.tick())
            if until_finished and runs.finished:
                finished_at = finished_at or loop.time()
                if runs.everyone_was_told() or loop.time() > finished_at + LONGEST_WAIT_S + 5:
                    stop.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
    finally:
        stop.set()  # a coordinator that broke ends the server: nothing is acknowledged that is not durable


def _caller(caller: pb.Caller) -> tuple[SiteId, str]:
    return wire.read_id(caller.site), wire.read_id(caller.instance)
