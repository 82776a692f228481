"""The link over gRPC: our types to and from messages. Channels and retries are those of `calls`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from google_crc32c import value as crc32c

from protofed.client.privacy.policy import Released, ReleasedScores
from protofed.client.state.downloads import MAX_ATTEMPTS, BlobDownloads, MemoryDownloads, download
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.calls import Calls
from protofed.client.transport.proxy import Proxy
from protofed.common.errors import CodecError, ExcludedError, IncompleteUploadError, ProtocolError
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol import wire
from protofed.common.protocol.chunks import chunks
from protofed.common.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Assignment,
    Finished,
    Manifest,
    PauseReason,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    Wait,
)
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb

log = structlog.get_logger()
IN_FLIGHT = 4


class GrpcLink:
    """One daemon's connection.

    Args:
        address: host:port.
        instance: this very daemon, among those of its site.
        identity: this site's; None: plain text, which stays on this machine.
        proxy: on the way to the server.
        audit: has a line of each message before it is sent.
        downloads: where downloads are kept, so that they outlive the daemon; None: in memory.
        give_up_after_s: seconds without an answer after which calls raise `Unavailable`; None: never.
        released: told what the gate let out, before it is sent.

    Every call raises ConfigError if, at the first contact, the server cannot be trusted, and DiskFailure if the audit
    log cannot be written; then nothing was sent.
    """

    def __init__(
        self,
        address: str,
        site: SiteId,
        instance: str,
        roles: frozenset[Role],
        *,
        identity: LiveIdentity | None,
        audit: ClientAudit,
        proxy: Proxy | None = None,
        downloads: BlobDownloads | None = None,
        give_up_after_s: float | None = None,
        released: Callable[[Task, Released], None] = lambda _task, _released: None,
    ) -> None:
        self._caller, self._roles = pb.Caller(site=site, instance=instance), sorted(roles)
        self._calls = Calls(address, identity=identity, proxy=proxy, audit=audit, give_up_after_s=give_up_after_s)
        self._downloads, self._released = downloads or MemoryDownloads(), released
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "chunks")
        self.bytes_moved, self._counting = 0, threading.Lock()  # chunks move on several threads

    @property
    def answered_at(self) -> float:
        """When the server last did what a call asked for, in monotonic seconds; -inf: never yet."""
        return self._calls.answered_at

    def close(self) -> None:
        """End the connection; calls that wait for the server end, too."""
        self._calls.close()
        self._pool.shutdown(cancel_futures=True)

    def enroll(self, hold: PauseReason = PauseReason.NONE) -> Assignment | Finished:
        """Say hello with versions and roles."""
        said = {"roles": [wire.role.pack(role) for role in self._roles], "hold": wire.pack_hold(hold)}
        request = pb.EnrollRequest(
            caller=self._caller, protocol_version=PROTOCOL_VERSION, software_version=VERSION, **said
        )
        try:
            return wire.unpack_enrolled(self._calls.ask("Enroll", request, pb.EnrollResponse))
        except IncompleteUploadError as error:  # FAILED_PRECONDITION: at Enroll, the version
            raise ProtocolError(str(error)) from error

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """What to do now."""
        request = pb.NextTaskRequest(caller=self._caller, run=run, wait_s=wait_s)
        return wire.unpack_next(self._calls.ask("NextTask", request, pb.NextTaskResponse, wait_s + 20))

    def fetch(self, task: Task) -> bytes:
        """The task's base, in chunks, its digest checked."""
        if task.base_digest is None:
            raise ProtocolError("the task has nothing to fetch")
        try:
            return download(self._downloads, task.base_digest, task.base_bytes, partial(self._chunk, task), self._pool)
        except ExcludedError as error:  # PERMISSION_DENIED: of a blob, that the task is not open any more
            raise ProtocolError(str(error)) from error

    def push(self, task: Task, released: Released) -> Receipt:
        """Begin, send what the server lacks, commit; from the beginning again if the server forgot the upload."""
        self._released(task, released)
        for tried in range(MAX_ATTEMPTS):
            ticket = self._calls.ask("BeginUpload", self._announce(task, released.manifest), pb.UploadTicket)
            if ticket.WhichOneof("answer") == "receipt":
                return wire.unpack_receipt(ticket.receipt)
            try:
                self._send(ticket.upload, released.data)
                commit = self._commit(task, released, ticket)
                return wire.unpack_receipt(self._calls.ask("CommitUpload", commit, pb.Receipt))
            except (IncompleteUploadError, CodecError) as error:
                log.warning("upload begins again", run=task.run, round=task.round, tried=tried + 1, why=str(error))
        raise ProtocolError(f"an upload of round {task.round} failed {MAX_ATTEMPTS} times; see the server's log")

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Hand in scores."""
        request = pb.ScoresRequest(
            caller=self._caller, run=task.run, round=task.round, task_id=task.task_id, scores=dict(released.scores)
        )
        self._calls.ask("ReportScores", request, pb.Ack)

    def beat(self, run: str, progress: Progress) -> Signal:
        """One heartbeat; a lost one is not repeated."""
        request = pb.HeartbeatRequest(caller=self._caller, run=run, **wire.pack_progress(progress))
        reply = self._calls.once("Heartbeat", request, pb.HeartbeatResponse, 10.0)
        try:
            return Signal.CONTINUE if reply is None else wire.signal.unpack(reply.signal)
        except ProtocolError:
            return Signal.CONTINUE

    def _announce(self, task: Task, manifest: Manifest) -> pb.UploadManifest:
        return pb.UploadManifest(
            caller=self._caller,
            run=task.run,
            round=task.round,
            task_id=task.task_id,
            base_digest=task.base_digest or "",
            tensors=wire.pack_tensors(manifest),
            total_bytes=manifest.total_bytes,
            digest=manifest.digest,
            digest_algorithm=wire.DIGEST_ALGORITHM,
        )

    def _commit(self, task: Task, released: Released, ticket: pb.UploadTicket) -> pb.CommitRequest:
        return pb.CommitRequest(
            caller=self._caller,
            run=task.run,
            round=task.round,
            task_id=task.task_id,
            upload=ticket.upload.id,
            digest=released.manifest.digest,
            metrics=dict(released.metrics),
            weight=released.weight,
        )

    def _chunk(self, task: Task, index: int) -> tuple[bytes, int]:
        request = pb.GetChunkRequest(caller=self._caller, run=task.run, digest=task.base_digest or "", index=index)
        chunk = self._calls.ask("GetChunk", request, pb.Chunk, 120.0)
        self._count(len(chunk.data))
        return chunk.data, chunk.crc32c

    def _send(self, upload: pb.Upload, data: bytes) -> None:
        missing = sorted(set(range(chunks(len(data)))) - set(upload.received_chunks))
        list(self._pool.map(lambda index: self._put(upload.id, data, index), missing))

    def _put(self, upload: str, data: bytes, index: int) -> None:
        part = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        chunk = pb.Chunk(caller=self._caller, upload=upload, index=index, data=part, crc32c=crc32c(part))
        self._calls.ask("PutChunk", chunk, pb.ChunkAck, 120.0)
        self._count(len(part))

    def _count(self, moved: int) -> None:
        with self._counting:
            self.bytes_moved += moved
