"""The link over gRPC: the only file of the client that knows gRPC.

Our own retries, with full jitter: gRPC's run a handler twice. A server that is not there yet, restarts or goes away is
waited for; without end, unless told otherwise.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google_crc32c import value as crc32c

from protofed.client.incoming import TRIES, Incoming, MemoryIncoming, receive
from protofed.client.policy import Released, ReleasedScores
from protofed.common import wire
from protofed.common.errors import (
    CodecError,
    Conflict,
    Excluded,
    Fenced,
    Incident,
    Incomplete,
    NotEnrolled,
    ProtocolError,
    Unavailable,
)
from protofed.common.partial import chunks
from protofed.common.payload import SiteId
from protofed.common.task import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Assignment,
    Finished,
    Manifest,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    Wait,
)
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc

log = structlog.get_logger()
A = TypeVar("A", covariant=True)
IN_FLIGHT = 4
OPTIONS = [
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
    ("grpc.enable_http_proxy", 0),  # plain text stays on this machine
]
_CLOSED = "the connection was closed"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_ERRORS: dict[grpc.StatusCode, type[ProtocolError] | type[CodecError]] = {
    grpc.StatusCode.UNAUTHENTICATED: NotEnrolled,
    grpc.StatusCode.ABORTED: Fenced,
    grpc.StatusCode.PERMISSION_DENIED: Excluded,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: Incomplete,
    grpc.StatusCode.DATA_LOSS: CodecError,
    grpc.StatusCode.INTERNAL: Incident,
}


class Call(Protocol[A]):
    """A stub's unary method."""

    def __call__(self, request: Any, /, *, timeout: float) -> A:
        """Make the call."""


class GrpcLink:
    """One daemon's connection.

    Args:
        address: host:port.
        instance: this very daemon, among those of its site.
        incoming: where downloads are kept, so that they outlive the daemon; None: in memory.
        give_up_after_s: seconds without an answer after which calls raise `Unavailable`; None: never.
    """

    def __init__(
        self,
        address: str,
        site: SiteId,
        instance: str,
        roles: frozenset[Role],
        *,
        incoming: Incoming | None = None,
        give_up_after_s: float | None = None,
    ) -> None:
        self._address, self._roles = address, sorted(roles)
        self._caller = pb.Caller(site=site, instance=instance)
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._stub = rpc.FederationStub(self._channel)
        self._incoming = incoming or MemoryIncoming()
        self._give_up, self._closed = give_up_after_s, threading.Event()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "chunks")
        self.bytes_moved, self._counting = 0, threading.Lock()  # chunks move on several threads

    def close(self) -> None:
        """End the connection; calls that wait for the server end, too."""
        self._closed.set()
        self._channel.close()
        self._pool.shutdown(cancel_futures=True)

    def enroll(self) -> Assignment | Finished:
        """Say hello with versions and roles."""
        roles = [wire.role.pack(role) for role in self._roles]
        request = pb.EnrollRequest(caller=self._caller, protocol=PROTOCOL_VERSION, software=VERSION, roles=roles)
        try:
            return wire.unpack_enrolled(self._call(self._stub.Enroll, request))
        except Incomplete as error:  # FAILED_PRECONDITION: at Enroll, the version
            raise ProtocolError(str(error)) from error

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """What to do now."""
        request = pb.NextTaskRequest(caller=self._caller, run=run, wait_s=wait_s)
        return wire.unpack_next(self._call(self._stub.NextTask, request, timeout=wait_s + 20))

    def fetch(self, task: Task) -> bytes:
        """The task's base, in chunks, its digest checked."""
        if task.base is None:
            raise ProtocolError("the task has nothing to fetch")
        try:
            return receive(self._incoming, task.base, task.base_bytes, partial(self._chunk, task), self._pool)
        except Excluded as error:  # PERMISSION_DENIED: of a blob, that the task is not open any more
            raise ProtocolError(str(error)) from error

    def push(self, task: Task, released: Released) -> Receipt:
        """Begin, send what the server lacks, commit; from the beginning again if the server forgot the upload."""
        for tried in range(TRIES):
            ticket = self._call(self._stub.BeginUpload, self._announce(task, released.manifest))
            if ticket.WhichOneof("answer") == "receipt":
                return wire.unpack_receipt(ticket.receipt)
            try:
                self._send(ticket.upload, released.data)
                return wire.unpack_receipt(self._call(self._stub.CommitUpload, self._commit(task, released, ticket)))
            except (Incomplete, CodecError) as error:
                log.warning("upload begins again", run=task.run, round=task.round, tried=tried + 1, why=str(error))
        raise ProtocolError(f"an upload of round {task.round} failed {TRIES} times; see the server's log")

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Hand in scores."""
        request = pb.ScoresRequest(
            caller=self._caller, run=task.run, round=task.round, nonce=task.nonce, scores=dict(released.scores)
        )
        self._call(self._stub.ReportScores, request)

    def beat(self, run: str, progress: Progress) -> Signal:
        """One heartbeat; a lost one is not repeated."""
        request = pb.HeartbeatRequest(caller=self._caller, run=run, **wire.pack_progress(progress))
        try:
            return wire.signal.unpack(self._stub.Heartbeat(request, timeout=10.0).signal)
        except (grpc.RpcError, ProtocolError, ValueError):  # ValueError: the channel was closed
            return Signal.CONTINUE

    def _announce(self, task: Task, manifest: Manifest) -> pb.UploadManifest:
        return pb.UploadManifest(
            caller=self._caller,
            run=task.run,
            round=task.round,
            nonce=task.nonce,
            base=task.base or "",
            tensors=wire.pack_tensors(manifest),
            total=manifest.total,
            digest=manifest.digest,
            digest_algorithm=wire.DIGEST_ALGORITHM,
        )

    def _commit(self, task: Task, released: Released, ticket: pb.UploadTicket) -> pb.CommitRequest:
        return pb.CommitRequest(
            caller=self._caller,
            run=task.run,
            round=task.round,
            nonce=task.nonce,
            upload=ticket.upload.id,
            digest=released.manifest.digest,
            metrics=dict(released.metrics),
            weight=released.weight,
        )

    def _chunk(self, task: Task, index: int) -> tuple[bytes, int]:
        request = pb.GetChunkRequest(caller=self._caller, run=task.run, digest=task.base or "", index=index)
        chunk = self._call(self._stub.GetChunk, request, timeout=120.0)
        self._count(len(chunk.data))
        return chunk.data, chunk.crc32c

    def _send(self, upload: pb.Upload, data: bytes) -> None:
        missing = sorted(set(range(chunks(len(data)))) - set(upload.held))
        list(self._pool.map(lambda index: self._put(upload.id, data, index), missing))

    def _put(self, upload: str, data: bytes, index: int) -> None:
        part = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        chunk = pb.Chunk(caller=self._caller, upload=upload, index=index, data=part, crc32c=crc32c(part))
        self._call(self._stub.PutChunk, chunk, timeout=120.0)
        self._count(len(part))

    def _count(self, moved: int) -> None:
        with self._counting:
            self.bytes_moved += moved

    def _call(self, call: Call[A], request: Any, timeout: float = 30.0) -> A:
        """The call's answer, however long the server is away."""
        began, pause = time.monotonic(), 0.25
        while True:
            try:
                return call(request, timeout=timeout)
            except ValueError as error:  # gRPC's word for a channel that was closed
                raise Unavailable(_CLOSED) from error
            except grpc.RpcError as error:
                self._raise_if_final(error, began)
                if pause == 0.25:
                    log.info("the server does not answer; trying again", server=self._address, why=_why(error))
            if self._closed.wait(random.uniform(0, pause)):  # noqa: S311  (full jitter, no secret)
                raise Unavailable(_CLOSED)
            pause = min(2 * pause, 8.0)

    def _raise_if_final(self, error: grpc.RpcError, began: float) -> None:
        code, text = error.code(), str(error.details())
        if self._closed.is_set():
            raise Unavailable(_CLOSED) from error
        if code not in _AWAY or "larger than max" in text:
            raise _ERRORS.get(code, ProtocolError)(text) from error
        away = time.monotonic() - began
        if self._give_up is not None and away >= self._give_up:
            raise Unavailable(
                f"no answer from {self._address} for {away:.0f} s ({_why(error)}); "
                "start the server, or check the address and the firewall"
            ) from error


def _why(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower()}: {error.details()}"[:160]
