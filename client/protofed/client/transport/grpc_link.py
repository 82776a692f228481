"""The link over gRPC: protocol types to and from protobuf messages. `calls` retries, `channels` connects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog

from protofed.client.policy.policy import Released, ReleasedScores
from protofed.client.secure_aggregation.partners import Membership
from protofed.client.state.downloads import MAX_ATTEMPTS, BlobDownloads, MemoryDownloads, download
from protofed.client.transport.audit import ChunkedTransfer, ClientAudit
from protofed.client.transport.calls import IN_FLIGHT, Calls
from protofed.client.transport.proxy import Proxy
from protofed.common.codec import Digest
from protofed.common.errors import CodecError, ExcludedError, IncompleteUploadError, ProtocolError, RevokedError
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol import wire
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.protocol.chunks import chunk_count
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


class _Fetching:
    """A download under way: its messages, and their common line in the audit log."""

    def __init__(self, caller: pb.Caller, run: str, address: Digest) -> None:
        self.run, self._address, self._caller = run, address, caller

    def announce(self, missing: Sequence[int]) -> None:
        """Begin with these chunks."""
        size = sum(len(self.request(index)) for index in missing)
        facts = {**audit_fields(self._caller), "run": self.run, "digest": self._address}
        self.transfer = ChunkedTransfer("GetChunk", facts, self._address, len(missing), size)

    def request(self, index: int) -> bytes:
        """The message that asks for one chunk."""
        request = pb.GetChunkRequest(caller=self._caller, run=self.run, digest=self._address, index=index)
        return request.SerializeToString(deterministic=True)


class GrpcLink:
    """The link of one daemon; see `Link` for its methods.

    Args:
        address: host:port.
        instance: id of this daemon process; the server fences older ones of the same site.
        identity: this site's certificate and key; None: plain text, on loopback only.
        proxy: between the site and the server.
        audit: gets a line before each message is sent.
        downloads: stores fetched chunks; None: in memory, lost with the daemon.
        give_up_after_s: seconds without an answer after which calls raise `UnavailableError`; None: never.
        on_release: called with each update that is about to be uploaded, for the metrics.
        check_run: raises WithdrawnError for a run that the site has left: no model, update or score of it moves.
        membership: of secure aggregation; what it says of the site is sent, and what the server offers is given to it.

    Attributes:
        bytes_moved: of chunks, both directions, since the start.

    Raises:
        ConfigError: from the first calls: the server cannot be trusted; nothing was sent.
        DiskFailureError: from every call: the audit log cannot be written; nothing was sent.
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
        on_release: Callable[[Task, Released], None] = lambda _task, _released: None,
        check_run: Callable[[str], None] = lambda _: None,
        membership: Membership | None = None,
    ) -> None:
        self._address, self._membership = address, membership
        self._caller, self._roles = pb.Caller(site=site, instance=instance), sorted(roles)
        limits: dict[str, Any] = {"give_up_after_s": give_up_after_s, "check_run": check_run}
        self._calls = Calls(address, identity=identity, proxy=proxy, audit=audit, **limits)
        self._downloads, self._on_release = downloads or MemoryDownloads(), on_release
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "chunks")
        self._connected = False  # once: that the server has accepted the daemon is logged, and no later call
        self.bytes_moved, self._bytes_lock = 0, threading.Lock()  # the pool's threads count

    @property
    def answered_at(self) -> float:
        """Monotonic time of the last successful call; -inf before the first."""
        return self._calls.answered_at

    def close(self) -> None:
        """Close the connection; calls that wait for the server raise UnavailableError."""
        self._calls.close()
        self._pool.shutdown(cancel_futures=True)

    def cancel(self, run: str) -> None:
        """End what moves of a run that the site has left; those calls raise WithdrawnError."""
        self._calls.cancel(run)

    def enroll(self, pause_reason: PauseReason = PauseReason.NONE, wait_s: float = 0.0) -> Assignment | Finished:
        """See `Link.enroll`; ProtocolError if the server does not speak this protocol version."""
        request = pb.EnrollRequest(
            caller=self._caller,
            protocol_version=PROTOCOL_VERSION,
            software_version=VERSION,
            roles=[wire.role.pack(role) for role in self._roles],
            wait_s=wait_s,
            pause_reason=wire.pack_pause_reason(pause_reason),
            **({} if self._membership is None else wire.pack_member(self._membership.member())),
        )
        try:
            response = self._calls.call("Enroll", request, pb.EnrollResponse, wait_s + 30)
        except IncompleteUploadError as error:  # FAILED_PRECONDITION, which at Enroll is about the version
            raise ProtocolError(str(error)) from error
        if response.WhichOneof("answer") == "assignment":
            self._calls.record_run(response.assignment)
        answer = wire.unpack_enrolled(response)
        if self._membership is not None:
            self._membership.partners.note_offer(response.consortium)
        if not self._connected:
            more = (
                {"run": answer.run} if isinstance(answer, Assignment) else {"why": "the server has no run at present"}
            )
            log.info("connected", server=self._address, **more)
            self._connected = True
        return answer

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """See `Link.next_task`."""
        request = pb.NextTaskRequest(caller=self._caller, run=run, wait_s=wait_s)
        timeout = wait_s + 20  # the server answers after wait_s; the rest is for a slow network
        response = self._calls.call("NextTask", request, pb.NextTaskResponse, timeout)
        if response.WhichOneof("answer") == "task":
            self._calls.record_task(response.task)
        return wire.unpack_next(response)

    def fetch(self, task: Task) -> bytes:
        """See `Link.fetch`; the base comes in chunks, and stored chunks are not fetched again."""
        if task.base_digest is None:
            raise ProtocolError("the task has nothing to fetch")
        fetching = _Fetching(self._caller, task.run, task.base_digest)
        fetch_chunk, total = partial(self._get_chunk, fetching), task.base_bytes
        try:
            return download(self._downloads, task.base_digest, total, fetch_chunk, self._pool, fetching.announce)
        except ExcludedError as error:  # PERMISSION_DENIED, which for a blob means that the task is closed
            raise ProtocolError(str(error)) from error

    def push(self, task: Task, released: Released) -> Receipt:
        """See `Link.push`: begin, put the chunks that the server lacks, commit; start over if the upload is gone there.

        Raises:
            ProtocolError: `MAX_ATTEMPTS` uploads failed.
        """
        self._on_release(task, released)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            announced = self._announce(task, released.manifest)
            ticket = self._calls.call("BeginUpload", announced, pb.UploadTicket, run=task.run)
            if ticket.WhichOneof("answer") == "receipt":
                return wire.unpack_receipt(ticket.receipt)
            try:
                self._put_missing(task.run, ticket.upload, released)
                commit = self._commit(task, released, ticket)
                return wire.unpack_receipt(self._calls.call("CommitUpload", commit, pb.Receipt, run=task.run))
            # The upload is gone at the server, or its bytes arrived damaged there.
            except (IncompleteUploadError, CodecError) as error:
                log.warning("upload begins again", run=task.run, round=task.round, tried=attempt, why=str(error))
        raise ProtocolError(f"an upload of round {task.round} failed {MAX_ATTEMPTS} times; see the server's log")

    def report(self, task: Task, released: ReleasedScores) -> None:
        """See `Link.report`."""
        request = pb.ScoresRequest(
            caller=self._caller, run=task.run, round=task.round, task_id=task.task_id, scores=dict(released.scores)
        )
        self._calls.call("ReportScores", request, pb.Ack, run=task.run)

    def beat(self, run: str, progress: Progress) -> Signal:
        """See `Link.beat`."""
        request = pb.HeartbeatRequest(caller=self._caller, run=run, **wire.pack_progress(progress))
        try:
            reply = self._calls.call_once("Heartbeat", request, pb.HeartbeatResponse, 10.0)
            return Signal.CONTINUE if reply is None else wire.signal.unpack(reply.signal)
        except RevokedError:  # the fit ends, and the agent's next call raises it
            return Signal.ABORT
        except ProtocolError:  # a signal of a newer server
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

    def _get_chunk(self, fetching: _Fetching, index: int) -> tuple[bytes, int]:
        chunk = self._calls.call_chunk(fetching.transfer, fetching.request(index), pb.Chunk, fetching.run)
        data = chunk.data
        self._count_bytes(len(data))
        return data, chunk.crc32c

    def _put_missing(self, run: str, upload: pb.Upload, released: Released) -> None:
        data, missing = released.data, set(range(chunk_count(len(released.data)))) - set(upload.received_chunks)
        chunks = [pb.Chunk(caller=self._caller, upload=upload.id, index=index) for index in sorted(missing)]
        size = sum(
            wire.upload_chunk_size(chunk, min(CHUNK_BYTES, len(data) - chunk.index * CHUNK_BYTES)) for chunk in chunks
        )
        facts = {**audit_fields(self._caller), "upload": upload.id}
        transfer = ChunkedTransfer("PutChunk", facts, released.manifest.digest, len(chunks), size)

        def put(chunk: pb.Chunk) -> None:
            part = data[chunk.index * CHUNK_BYTES : (chunk.index + 1) * CHUNK_BYTES]
            self._calls.call_chunk(transfer, wire.pack_upload_chunk(chunk, part), pb.ChunkAck, run)
            self._count_bytes(len(part))

        list(self._pool.map(put, chunks))

    def _count_bytes(self, size: int) -> None:
        with self._bytes_lock:
            self.bytes_moved += size
