"""gRPC service `Federation`: what sites call.

Nothing heavy runs on the event loop, since gRPC's keepalive cannot see a blocked loop. The coordinator runs on one
thread (`control`). Chunks are read and written on others (`transfer`), and aggregation has its own (`work`).

An answer to GetChunk is made once for all sites: a cohort fetches the same model at about the same time. Whole uploads
are examined a few at a time, and each once, however often its commit is tried.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import structlog

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import (
    CodecError,
    ConflictError,
    DeniedError,
    IncompleteUploadError,
    OverQuotaError,
    ProtocolError,
)
from protofed.common.failpoint import reach
from protofed.common.ids import read_id
from protofed.common.payload import Part, SiteId
from protofed.common.protocol import wire
from protofed.common.protocol.messages import (
    CHUNK_BYTES,
    Activity,
    Assignment,
    Finished,
    Manifest,
    PauseReason,
    Receipt,
    Task,
    Verdict,
    Wait,
)
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc
from protofed.server.access.rate_limits import (
    BEGINNINGS,
    DOWNLOADED,
    ENROLLMENTS,
    EXAMINED,
    HEARTBEATS,
    UPLOADED,
    Budget,
    Budgets,
)
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.intake.intake import Commit, Intake
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc.executors import CommitGroups, Executors, TaskNotifier
from protofed.server.rpc.memory_guard import MemoryGuard
from protofed.server.storage.blobs import FolderBlobs, Upload
from protofed.server.verdicts import UpdateProblem

KEPT_BYTES = 32 << 20  # of answers: sites of a cohort are woken together, each with four chunks in flight
KEPT_SIZES = 256  # blobs whose size and parts are remembered


@dataclass(frozen=True)
class BlobParts:
    """A blob's size in bytes and each part's share of them, for metrics; no shares where its header is damaged."""

    size: int
    shares: Mapping[Part, float]


class ChunkReplies:
    """Serialised `Chunk` messages, the newest `KEPT_BYTES` of them; used on the event loop only.

    An address has one content, so what is kept goes stale only when a blob that had rotted was written again.
    """

    def __init__(self, blobs: FolderBlobs, threads: Executor, kept_bytes: int = KEPT_BYTES) -> None:
        self._blobs, self._threads = blobs, threads
        self._most = max(1, kept_bytes // CHUNK_BYTES)
        self._replies: OrderedDict[tuple[Digest, int], asyncio.Future[bytes]] = OrderedDict()
        self._parts: OrderedDict[Digest, BlobParts] = OrderedDict()
        self._repairs = blobs.repairs

    async def parts(self, address: Digest) -> BlobParts:
        """A blob's size and parts.

        Raises:
            StateError: it cannot be read.
        """
        self._forget_rotten()
        if (known := self._parts.get(address)) is None:
            known = await asyncio.get_running_loop().run_in_executor(self._threads, self._read_parts, address)
            self._parts[address] = known
            if len(self._parts) > KEPT_SIZES:
                self._parts.popitem(last=False)
        return known

    async def get(self, address: Digest, index: int) -> bytes:
        """The answer with the `index`-th chunk of a blob; calls that wait for the same one share it.

        Raises:
            ProtocolError: the blob has no such chunk.
            StateError: it cannot be read.
        """
        self._forget_rotten()
        key = (address, index)
        if (reply := self._replies.get(key)) is None:
            reply = asyncio.get_running_loop().run_in_executor(self._threads, self._made, address, index)
            self._replies[key] = reply
            reply.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._replies) > self._most:
                self._replies.popitem(last=False)  # whoever waits for it has it still
        self._replies.move_to_end(key)
        return await asyncio.shield(reply)  # a call that is cut short leaves it to the others

    def _made(self, address: Digest, index: int) -> bytes:
        data = self._blobs.chunk(address, index)
        if not data:
            raise ProtocolError(f"chunk {index} is past the end of the blob")
        return wire.pack_chunk(index, data)

    def _forget_rotten(self) -> None:
        """Forget all, which costs a read each, if some may come from a damaged blob."""
        if self._repairs != self._blobs.repairs:
            self._repairs = self._blobs.repairs
            self._replies.clear()
            self._parts.clear()

    def _forget_failed(self, key: tuple[Digest, int], done: asyncio.Future[bytes]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and self._replies.get(key) is done:
            del self._replies[key]

    def _read_parts(self, address: Digest) -> BlobParts:
        size = self._blobs.size(address)
        try:
            beginning = self._blobs.chunk(address, 0) + self._blobs.chunk(address, 1)  # longer than any header
            return BlobParts(size, codec.shares(codec.header_specs(beginning)))
        except CodecError:
            return BlobParts(size, {})


# At a time, of all sites: each takes its update's size of memory. Two threads remain for chunks.
EXAMINATIONS = 2
Examined: TypeAlias = UpdateProblem | float  # as `Intake.examine` gives it


@dataclass(frozen=True)
class _Examination:
    about: object
    task: asyncio.Task[Examined]


class Examinations:
    """Used on the event loop only.

    A site's call waits 30 s. Behind a large cohort, or for a large model, this is too short. The site then calls again.
    It finds the examination of its first call in the same place of the queue, or its result.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads, self._turns = threads, asyncio.Semaphore(EXAMINATIONS)
        self._known: dict[Upload, _Examination] = {}

    async def result(
        self, upload: Upload, about: object, begin: Callable[[], None], examine: Callable[[], Examined]
    ) -> Examined:
        """What `examine` finds; one that failed is done again at the next call.

        Args:
            about: what the result depends on, beside the upload's bytes: if it changed, they are examined again.
            begin: called once it is this upload's turn; what it raises is raised here, and nothing is examined.
            examine: runs on the threads.
        """
        known = self._known.get(upload)
        if known is None or known.about != about:
            known = _Examination(about, asyncio.create_task(self._in_turn(begin, examine)))
            self._known[upload] = known
            known.task.add_done_callback(lambda task: self._forget_failed(upload, task))
        return await asyncio.shield(known.task)  # a call that is cut short leaves it to the next one

    def forget(self, upload: Upload) -> None:
        """Examine an upload anew if it is committed again."""
        self._known.pop(upload, None)

    def forget_but(self, uploads: Container[Upload]) -> None:
        """Keep only what is known about the given uploads."""
        self._known = {upload: known for upload, known in self._known.items() if upload in uploads}

    async def _in_turn(self, begin: Callable[[], None], examine: Callable[[], Examined]) -> Examined:
        async with self._turns:
            begin()
            return await asyncio.get_running_loop().run_in_executor(self._threads, examine)

    def _forget_failed(self, upload: Upload, task: asyncio.Task[Examined]) -> None:
        # The exception is asked for in any case: after a call was cut short nobody else does, and asyncio complains.
        failed = task.cancelled() or task.exception() is not None
        if failed and (known := self._known.get(upload)) is not None and known.task is task:
            del self._known[upload]


log = structlog.get_logger()
T = TypeVar("T")
LONGEST_WAIT_S = 20.0  # no call is held open for a round, which proxies and connection ages would break
MEMORY_RETRY_S = 30.0  # memory is short until an aggregation or an examination ends
UPLOADS_KEPT_S = 24 * 3600.0  # of an unfinished upload, after its last chunk


@dataclass(frozen=True)
class _Announced:
    """An upload that was started: the task it answers and its manifest."""

    upload: Upload
    run: str
    round: int
    base: Digest | None
    manifest: Manifest
    intake: Intake
    shares: Mapping[Part, float]  # of its bytes, by part, for metrics
    resumed: int = 0  # chunks that an earlier attempt left and that metrics have counted


class FederationService(rpc.FederationServicer):
    """Calls of sites, each a few lines around the coordinator; `federation.proto` documents what each is for.

    The interceptor has checked that the caller is the site that its message names.
    """

    def __init__(
        self,
        runs: RunQueue,
        blobs: FolderBlobs,
        executors: Executors,
        notifier: TaskNotifier,
        memory: MemoryGuard,
        metrics: ServerMetrics,
        budgets: Budgets,
    ) -> None:
        self._runs, self._blobs, self._executors, self._notifier = runs, blobs, executors, notifier
        self._memory, self._metrics, self._budgets = memory, metrics, budgets
        self._examinations = Examinations(executors.transfer)
        self._commits = CommitGroups(runs, blobs, executors.control)
        self._replies = ChunkReplies(blobs, executors.transfer)
        self._uploads: dict[str, _Announced] = {}  # by upload id; after a restart, sites begin their uploads again
        self._equivocal: set[str] = set()  # ids of those of which it is logged

    async def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollResponse:
        site, instance = _caller(request.caller)
        roles = [wire.role.unpack(number) for number in request.roles]
        if not roles:
            raise ProtocolError("a daemon offers at least one role")
        self._budgets.spend(site, ENROLLMENTS)
        software, pause_reason = request.software_version[:40], wire.unpack_pause_reason(request)
        versions, member = (request.protocol_version, software, VERSION), wire.unpack_member(request)

        def is_nothing(answer: Assignment | Finished) -> bool:
            # A site that has not confirmed the list of partners is told of it at once: its people are about to.
            confirmed = not member.identity or self._runs.partners.admits(site)
            return isinstance(answer, Finished) and confirmed

        answer = await self._wait(
            site,
            request.wait_s,
            is_nothing,
            lambda: self._control(self._runs.enroll, site, instance, *versions, roles, pause_reason, member),
            lambda: self._control(self._runs.offer, site, instance),
        )
        # Not logged for a paused daemon: it enrolls again every few seconds.
        if isinstance(answer, Assignment) and pause_reason is PauseReason.NONE:
            log.info("enrolled", site=site, run=answer.run, roles=[role.value for role in roles], software=software)
        reach("enroll-answered")
        return wire.pack_enrolled(answer, self._runs.partners.document)

    async def NextTask(self, request: pb.NextTaskRequest, context: Any) -> pb.NextTaskResponse:
        (site, instance), run = _caller(request.caller), read_id(request.run)

        async def ask() -> Task | Wait | Finished:
            # Thousands of sites have nothing to do: the coordinator has no thread woken for each of them.
            if (idle := self._runs.idle(run, site, instance)) is not None:
                return idle
            return await self._control(self._runs.next_task, run, site, instance)

        return wire.pack_next(await self._wait(site, request.wait_s, lambda answer: isinstance(answer, Wait), ask, ask))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        site, instance = _caller(request.caller)
        self._budgets.spend(site, HEARTBEATS)
        progress = wire.unpack_progress(request)
        beat = read_id(request.run), site, instance, progress
        # An idle one only says that the site is there, as `RunQueue.idle`; any other may open or close something.
        idle = progress.activity is Activity.IDLE
        signal = self._runs.heartbeat(*beat) if idle else await self._control(self._runs.heartbeat, *beat)
        return pb.HeartbeatResponse(signal=wire.signal.pack(signal))

    async def GetChunk(self, request: pb.GetChunkRequest, context: Any) -> Any:
        """A `Chunk` that is serialised already."""
        site, _ = _caller(request.caller)
        digest = wire.read_digest(request.digest)
        if not self._runs.may_fetch(read_id(request.run), site, digest):
            raise DeniedError("this blob is not part of the site's current task")
        blob = await self._replies.parts(digest)
        self._budgets.spend(site, DOWNLOADED, min(blob.size, CHUNK_BYTES), key=digest, size=blob.size)
        reply = await self._replies.get(digest, request.index)
        size = min(CHUNK_BYTES, blob.size - request.index * CHUNK_BYTES)
        self._metrics.bytes_transferred("out", blob.shares, size)
        return reply

    async def BeginUpload(self, request: pb.UploadManifest, context: Any) -> pb.UploadTicket:
        site, instance = _caller(request.caller)
        self._budgets.spend(site, BEGINNINGS, key=self._runs.invitation(site))
        manifest, task_id, run = wire.unpack_manifest(request), read_id(request.task_id), read_id(request.run)
        base = wire.read_digest(request.base_digest) if request.base_digest else None

        def judge() -> tuple[Intake, Receipt | None]:
            intake = self._runs.intake(run)
            return intake, intake.begin(site, instance, task_id, request.round, base, manifest)

        intake, receipt = await self._control(judge)
        if receipt is not None:
            await self._close(Upload(site, task_id, manifest.digest), receipt.verdict)
            return pb.UploadTicket(receipt=wire.pack_receipt(receipt))
        # The id follows from the content: after a restart of either side the chunks are found again.
        upload = Upload(site, task_id, manifest.digest)
        received = await self._transfer(self._make_room, upload, manifest.total_bytes)
        resumed = self._count_resumed(upload, received)
        self._uploads[str(upload)] = _Announced(
            upload, run, request.round, base, manifest, intake, codec.shares(manifest.tensors), resumed
        )
        return pb.UploadTicket(upload=pb.Upload(id=str(upload), received_chunks=sorted(received)))

    async def PutChunk(self, request: pb.Chunk, context: Any) -> pb.ChunkAck:
        announced = self._announced(_caller(request.caller)[0], request.upload)
        upload = announced.upload
        data = request.data  # once: protobuf copies a field's bytes each time that it is read
        self._spend(UPLOADED, announced, len(data))
        try:
            await self._transfer(self._blobs.uploads.write, upload, request.index, data, request.crc32c)
        except ConflictError as error:  # other bytes for a chunk that was received: no retry does that
            if request.upload not in self._equivocal:  # once: the same chunk may come again and again
                self._equivocal.add(request.upload)
                fields = {"run": announced.run, "round": announced.round, "site": upload.site}
                log.error("equivocation", **fields, task_id=upload.task_id, why=str(error))
            raise
        self._metrics.bytes_transferred("in", announced.shares, len(data))
        return pb.ChunkAck()

    async def CommitUpload(self, request: pb.CommitRequest, context: Any) -> pb.Receipt:
        site, instance = _caller(request.caller)
        announced = self._announced(site, request.upload)
        manifest, task_id = announced.manifest, announced.upload.task_id
        if (request.run, request.round, request.task_id, request.digest) != (
            announced.run,
            announced.round,
            task_id,
            manifest.digest,
        ):
            raise ProtocolError("this names another run, round, task or digest than the upload was started with")
        # First, whether it can count: else its bytes need not be read, and the model that it starts from may be gone.
        request_key = site, instance, task_id, manifest
        receipt = await self._control(lambda: self._runs.intake(announced.run).verdict_if_closed(*request_key))
        if receipt is None:
            examined = await self._examined(announced)
            weight = request.weight if request.HasField("weight") else None
            commit = Commit(*request_key, dict(request.metrics), weight, examined)
            try:
                receipt = await self._commits.judge(announced.run, commit)
            except IncompleteUploadError:  # its bytes are gone; those that are sent again are checked again
                self._examinations.forget(announced.upload)
                raise
        self._uploads.pop(request.upload, None)  # only now: a commit that failed is repeated with the same upload
        self._examinations.forget(announced.upload)
        self._equivocal.discard(request.upload)
        reach("commit-recorded")
        await self._close(announced.upload, receipt.verdict)
        return wire.pack_receipt(receipt)

    async def ReportScores(self, request: pb.ScoresRequest, context: Any) -> pb.Ack:
        site, instance = _caller(request.caller)
        run, task_id = read_id(request.run), read_id(request.task_id)
        await self._control(lambda: self._runs.intake(run).report_scores(site, instance, task_id, dict(request.scores)))
        return pb.Ack()

    async def collect(self) -> None:
        """Delete unfinished uploads that got no chunk for `UPLOADS_KEPT_S`; called once a minute."""
        if collected := await self._transfer(self._blobs.uploads.collect, UPLOADS_KEPT_S, time.time()):
            log.info("unfinished uploads collected", uploads=collected)
        self._forget()

    def _make_room(self, upload: Upload, total: int) -> Collection[int]:
        """Begin an upload; the chunks that are there."""
        if self._memory.short():
            raise OverQuotaError("the server is short of memory; try again later", retry_after_s=MEMORY_RETRY_S)
        self._blobs.uploads.drop_but(upload.site, upload.task_id)  # a site has one open invitation at a time
        return self._blobs.uploads.begin(upload, total)

    async def _examined(self, announced: _Announced) -> Examined:
        """Check and examine an upload; its site's budget pays when that begins."""
        upload, manifest, intake, base = announced.upload, announced.manifest, announced.intake, announced.base

        def examine() -> Examined:
            return intake.examine(upload.site, upload.task_id, manifest, self._blobs.check(upload), base)

        def begin() -> None:
            self._spend(EXAMINED, announced, manifest.total_bytes)

        return await self._examinations.result(upload, (intake, manifest, base), begin, examine)

    def _spend(self, budget: Budget, announced: _Announced, amount: int) -> None:
        upload = announced.upload
        self._budgets.spend(upload.site, budget, amount, key=upload.task_id, size=announced.manifest.total_bytes)

    async def _close(self, upload: Upload, verdict: Verdict) -> None:
        """Drop an upload that was judged, and its task's others, too, unless it is REFUSED: other verdicts close it."""
        uploads, of_task = self._blobs.uploads, (upload.site, upload.task_id)
        if verdict is not Verdict.REFUSED and uploads.holds_any(*of_task):
            await self._transfer(uploads.drop_all, *of_task)
            self._forget()
        elif verdict is Verdict.REFUSED and upload in uploads:
            await self._transfer(uploads.drop, upload)
            self._forget()

    def _forget(self) -> None:
        self._uploads = {key: known for key, known in self._uploads.items() if known.upload in self._blobs.uploads}
        self._equivocal &= self._uploads.keys()
        self._examinations.forget_but({known.upload for known in self._uploads.values()})

    def _count_resumed(self, upload: Upload, received: Collection[int]) -> int:
        """Count the chunks received before; each once, however often the upload is started again."""
        earlier = self._uploads.get(str(upload))
        self._metrics.chunks_resumed(max(0, len(received) - (earlier.resumed if earlier else 0)))
        return len(received)

    def _announced(self, site: SiteId, upload: str) -> _Announced:
        announced = self._uploads.get(upload)
        if announced is None or announced.upload.site != site:
            # Also after a restart of the server: the site begins again and is told which chunks are there.
            raise IncompleteUploadError("no such upload of this site; begin it again")
        return announced

    async def _wait(
        self,
        site: SiteId,
        wait_s: float,
        is_nothing: Callable[[T], bool],
        ask: Callable[[], Awaitable[T]],
        ask_again: Callable[[], Awaitable[T]],
    ) -> T:
        """Ask the coordinator, again whenever the site is woken, until there is something or the time is over.

        Args:
            is_nothing: whether an answer says that there is nothing.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + min(max(0.0, wait_s), LONGEST_WAIT_S)  # NaN is 0, too
        while True:
            event = self._notifier.event(site)  # before asking: what appears meanwhile sets it
            answer = await ask()
            if not is_nothing(answer) or clock() >= until:
                return answer
            ask = ask_again
            try:
                # Not `wait_for`, which makes a task: thousands of sites wait here.
                async with asyncio.timeout_at(until):
                    await event.wait()
            except TimeoutError:
                return answer

    async def _control(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executors.control, function, *arguments)

    async def _transfer(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executors.transfer, function, *arguments)


def _caller(caller: pb.Caller) -> tuple[SiteId, str]:
    return read_id(caller.site), read_id(caller.instance)
