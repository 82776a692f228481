"""The client's end of the wire against a server by hand: what is retried, what is final, and what is sent."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google_crc32c import value as crc32c
from structlog.testing import capture_logs
from tests.support.audit_logs import MemoryAuditLog, audit

from protofed.client.policy.policy import Policy, Released, ReleasedScores
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.downloads import DiskDownloads
from protofed.client.transport import calls
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.calls import CHUNK_S
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import (
    CodecError,
    ConflictError,
    ExcludedError,
    FailureReason,
    FencedError,
    IncidentError,
    IncompleteUploadError,
    NotEnrolledError,
    ProtocolError,
    RevokedError,
    UnavailableError,
    WithdrawnError,
)
from protofed.common.payload import Part, Update
from protofed.common.protocol import wire
from protofed.common.protocol.call_metadata import DENIED_KEY
from protofed.common.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Activity,
    Assignment,
    Finished,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    TaskKind,
    Verdict,
    Wait,
)
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc

Handler = Callable[[Any, Any], Any]
Start = Callable[..., str]
Connect = Callable[..., GrpcLink]
Background = Callable[..., Future[Any]]
Code = grpc.StatusCode
pytestmark = pytest.mark.usefixtures("short_pauses")
SOON = 10.0  # seconds after which a test gives up
RUN = Assignment("run", "{}", preprocessing_digest="0" * 64)


class Servicer(rpc.FederationServicer):
    """Answers each call as `on` says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.on: dict[str, Handler] = {"Enroll": lambda *_: wire.pack_enrolled(RUN)}
        self.asked: list[tuple[str, Any]] = []

    def _answer(self, call: str, request: Any, context: Any) -> Any:
        self.asked.append((call, request))
        return self.on[call](request, context)

    def requests(self, call: str) -> list[Any]:
        return [request for name, request in self.asked if name == call]


for call in ("Enroll", "NextTask", "Heartbeat", "GetChunk", "BeginUpload", "PutChunk", "CommitUpload", "ReportScores"):
    setattr(Servicer, call, partialmethod(Servicer._answer, call))


def refuse(code: grpc.StatusCode, text: str = "as the server says") -> Handler:
    return lambda _request, context: context.abort(code, text)


def one_by_one(*handlers: Handler) -> Handler:
    left, lock = list(handlers), threading.Lock()

    def answer(request: Any, context: Any) -> Any:
        with lock:
            handler = left.pop(0) if len(left) > 1 else left[0]
        return handler(request, context)

    return answer


@pytest.fixture
def server() -> Servicer:
    return Servicer()  # type: ignore[abstract]


@pytest.fixture
def start(server: Servicer) -> Iterator[Start]:
    """Starts `server` on a port (0: any); its address."""
    started: list[grpc.Server] = []

    def serve(port: int = 0) -> str:
        made = grpc.server(ThreadPoolExecutor(8))
        rpc.add_FederationServicer_to_server(server, made)
        bound = made.add_insecure_port(f"127.0.0.1:{port}")
        made.start()
        started.append(made)
        return f"127.0.0.1:{bound}"

    yield serve
    for one in started:
        one.stop(grace=None).wait()


@pytest.fixture
def connect() -> Iterator[Connect]:
    links: list[GrpcLink] = []

    def make(address: str, roles: frozenset[Role] = frozenset({Role.TRAINER}), **options: Any) -> GrpcLink:
        links.append(GrpcLink(address, "ann", "instance", roles, **{"identity": None, "audit": audit(), **options}))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def link(start: Start, connect: Connect) -> GrpcLink:
    return connect(start(), give_up_after_s=SOON)


# Away and back


def test_a_server_is_waited_for_unless_a_daemon_was_told_to_give_up(
    connect: Connect, unused_port: int, start: Start, background: Background
) -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=f"{unused_port}"):
        connect(f"127.0.0.1:{unused_port}", give_up_after_s=0.3).enroll()
    assert 0.3 <= time.monotonic() - began < 5
    enrolled = background(connect(f"127.0.0.1:{unused_port}").enroll)
    time.sleep(0.3)
    assert not enrolled.done()
    start(unused_port)
    assert enrolled.result(SOON) == RUN


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.CANCELLED])
def test_a_call_is_tried_again_until_it_is_answered(code: grpc.StatusCode, server: Servicer, link: GrpcLink) -> None:
    server.on["Enroll"] = one_by_one(refuse(code), refuse(code), server.on["Enroll"])
    assert link.enroll() == RUN
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("metadata", "kind", "signal"),
    [
        (((DENIED_KEY, "revoked"),), RevokedError, Signal.ABORT),  # a fit need not end first
        ((), ExcludedError, Signal.CONTINUE),
        (((DENIED_KEY, "excluded"),), ExcludedError, Signal.CONTINUE),
        (((DENIED_KEY, "of a newer server"),), ExcludedError, Signal.CONTINUE),
    ],
)
def test_a_revoked_certificate_ends_the_daemon_and_what_is_denied_for_another_reason_is_waited_for(
    metadata: tuple[tuple[str, str], ...], kind: type[Exception], signal: Signal, server: Servicer, link: GrpcLink
) -> None:
    def denied(_request: Any, context: Any) -> None:
        context.set_trailing_metadata(metadata)
        context.abort(Code.PERMISSION_DENIED, "the operator has excluded site ann")

    server.on |= {"Enroll": denied, "Heartbeat": denied}
    with pytest.raises(kind):
        link.enroll()
    assert link.beat("run", Progress("n1", Activity.TRAINING)) is signal
    assert len(server.asked) == 2


def test_only_a_call_that_the_server_did_counts_as_its_answer(server: Servicer, link: GrpcLink) -> None:
    assert link.answered_at == -math.inf
    done = server.on["Enroll"]
    server.on["Enroll"] = refuse(Code.PERMISSION_DENIED)
    with pytest.raises(ExcludedError):
        link.enroll()
    assert link.answered_at == -math.inf
    server.on["Enroll"] = done
    before = time.monotonic()
    link.enroll()
    assert before <= link.answered_at <= time.monotonic()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNAUTHENTICATED, NotEnrolledError),
        (Code.ABORTED, FencedError),
        (Code.FAILED_PRECONDITION, IncompleteUploadError),
        (Code.DATA_LOSS, CodecError),
        (Code.INVALID_ARGUMENT, ProtocolError),
        (Code.PERMISSION_DENIED, ExcludedError),
        (Code.ALREADY_EXISTS, ConflictError),
        (Code.INTERNAL, IncidentError),
        (Code.UNKNOWN, ProtocolError),
    ],
)
def test_a_refusal_is_final(code: grpc.StatusCode, kind: type[Exception], server: Servicer, link: GrpcLink) -> None:
    server.on["NextTask"] = refuse(code)
    with pytest.raises(kind, match="as the server says") as refused:
        link.next_task("run", 0.0)
    assert type(refused.value) is kind
    assert len(server.asked) == 1


def test_another_version_is_final(server: Servicer, link: GrpcLink) -> None:
    server.on["Enroll"] = refuse(Code.FAILED_PRECONDITION, "client speaks 1, server 2")
    with pytest.raises(ProtocolError, match="client speaks 1, server 2") as refused:
        link.enroll()
    assert type(refused.value) is ProtocolError  # Incomplete would be taken for an upload to begin again


@pytest.mark.parametrize("waiting", ["away", "silent"])
def test_close_ends_a_call_that_waits(
    waiting: str, server: Servicer, start: Start, connect: Connect, background: Background, unused_port: int
) -> None:
    asked, over = threading.Event(), threading.Event()

    def silent(*_: Any) -> None:
        asked.set()
        over.wait(SOON)

    server.on["NextTask"] = silent
    link = connect(start() if waiting == "silent" else f"127.0.0.1:{unused_port}")
    call = background(link.next_task, "run", 20.0)
    asked.wait(SOON if waiting == "silent" else 0.2)
    assert not call.done()
    began = time.monotonic()
    link.close()
    with pytest.raises(UnavailableError, match="connection was closed"):
        call.result(SOON)
    assert time.monotonic() - began < 1
    over.set()
    with pytest.raises(UnavailableError, match="connection was closed"):
        link.enroll()
    assert link.beat("run", Progress("n1", Activity.TRAINING)) is Signal.CONTINUE  # from another thread, just too late


def test_close_ends_a_pause(
    server: Servicer, link: GrpcLink, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = threading.Event()

    def long(_low: float, _high: float) -> float:
        pausing.set()
        return SOON

    monkeypatch.setattr(random, "uniform", long)
    server.on["Enroll"] = refuse(Code.UNAVAILABLE)
    call = background(link.enroll)
    assert pausing.wait(SOON)
    began = time.monotonic()
    link.close()
    with pytest.raises(UnavailableError, match="connection was closed"):
        call.result(SOON)
    assert time.monotonic() - began < 1


# Enrolling and tasks


def test_a_daemon_says_who_it_is_and_what_it_offers(server: Servicer, start: Start, connect: Connect) -> None:
    assert connect(start(), frozenset(Role), give_up_after_s=SOON).enroll() == RUN
    ((_, request),) = server.asked
    assert (request.caller.site, request.caller.instance) == ("ann", "instance")
    assert request.protocol_version == PROTOCOL_VERSION
    assert {wire.role.unpack(role) for role in request.roles} == set(Role)


@pytest.mark.parametrize("first", [RUN, Finished("no run", last=True)])
def test_the_first_answer_alone_is_logged(first: Assignment | Finished, server: Servicer, link: GrpcLink) -> None:
    server.on["Enroll"] = lambda *_: wire.pack_enrolled(first)
    with capture_logs() as lines:
        link.enroll()
        link.enroll()
    (line,) = [line for line in lines if line["event"] == "connected"]
    assert line.get("run") == (first.run if isinstance(first, Assignment) else None)


@pytest.mark.parametrize("answer", [Wait(2.5), Finished("done", last=True), None])
def test_an_answer_is_the_servers(answer: Wait | Finished | None, server: Servicer, link: GrpcLink, task: Task) -> None:
    server.on["NextTask"] = lambda *_: wire.pack_next(answer or task)
    assert link.next_task("run", 1.5) == (answer or task)
    (request,) = server.requests("NextTask")
    assert (request.run, request.wait_s, request.caller.site) == ("run", 1.5, "ann")


@pytest.mark.parametrize(
    "reply",
    [
        pb.NextTaskResponse(),
        pb.NextTaskResponse(task=pb.Task(kind=99, run="run", task_id="n1")),  # type: ignore[arg-type]
        pb.NextTaskResponse(task=pb.Task(kind=pb.TASK_KIND_FIT, run="../run", task_id="n1")),
        pb.NextTaskResponse(task=pb.Task(kind=pb.TASK_KIND_FIT, run="run", task_id="n1", base_digest="../../etc")),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(reply: pb.NextTaskResponse, server: Servicer, link: GrpcLink) -> None:
    server.on["NextTask"] = lambda *_: reply
    with pytest.raises(ProtocolError):
        link.next_task("run", 0.0)


# Downloads

BLOB = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5)


@pytest.fixture
def task() -> Task:
    """To start from `BLOB`."""
    return Task(TaskKind.FIT, "run", 3, "n1", codec.digest(BLOB), len(BLOB), 60.0)


def chunk(request: Any, _context: Any = None) -> pb.Chunk:
    data = BLOB[request.index * CHUNK_BYTES :][:CHUNK_BYTES]
    return pb.Chunk(index=request.index, data=data, crc32c=crc32c(data))


def cut(request: Any, _context: Any) -> pb.Chunk:
    """Shorter than its checksum says."""
    whole = chunk(request)
    return pb.Chunk(index=whole.index, data=whole.data[:-1], crc32c=whole.crc32c)


def test_a_blob_is_fetched_in_chunks(server: Servicer, link: GrpcLink, task: Task) -> None:
    server.on["GetChunk"] = chunk
    assert link.fetch(task) == BLOB
    asked = server.requests("GetChunk")
    assert sorted(request.index for request in asked) == [0, 1, 2]
    assert {(r.run, r.digest, r.caller.site) for r in asked} == {("run", task.base_digest, "ann")}
    assert link.bytes_moved == len(BLOB)


def test_a_damaged_chunk_is_fetched_again(server: Servicer, link: GrpcLink, task: Task) -> None:
    server.on["GetChunk"] = one_by_one(cut, chunk)
    assert link.fetch(task) == BLOB
    assert len(server.asked) == 4
    assert len(BLOB) < link.bytes_moved < 2 * len(BLOB)


def test_what_cannot_be_fetched_is_final(server: Servicer, link: GrpcLink, task: Task) -> None:
    server.on["GetChunk"] = lambda *_: pb.Chunk(data=bytes(7 << 20))
    with pytest.raises(ProtocolError, match="larger than max"):
        link.fetch(task)
    server.on["GetChunk"] = refuse(Code.PERMISSION_DENIED, "not part of the site's current task")
    with pytest.raises(ProtocolError, match="not part of") as refused:
        link.fetch(task)
    assert type(refused.value) is ProtocolError  # Excluded would be waited for
    before = len(server.asked)
    with pytest.raises(ProtocolError, match="nothing to fetch"):
        link.fetch(Task(TaskKind.INITIALISE, "run", 0, "n1", None, 0, 60.0))
    assert len(server.asked) == before


# Uploads


class Uploads:
    """A server's end of an upload: keeps what is put, and accepts what is whole."""

    def __init__(self, server: Servicer, *held: int) -> None:
        self.held, self.chunks = held, dict[int, bytes]()
        server.on |= {"BeginUpload": self.begin, "PutChunk": self.put, "CommitUpload": self.commit}

    def begin(self, request: Any, _context: Any = None) -> pb.UploadTicket:
        return pb.UploadTicket(upload=pb.Upload(id="u1", received_chunks=self.held))

    def put(self, request: Any, _context: Any = None) -> pb.ChunkAck:
        assert crc32c(request.data) == request.crc32c
        self.chunks[request.index] = request.data
        return pb.ChunkAck()

    def commit(self, request: Any, _context: Any = None) -> pb.Receipt:
        return wire.pack_receipt(accepted(request.digest))


def accepted(digest: str) -> Receipt:
    return Receipt(Verdict.ACCEPTED, "", Digest(digest), "seal")


def released(numbers: int, *, example_count: bool = False) -> Released:
    """An update of `numbers` float32 and one metric."""
    rules = {"methods": ["m"], "parts": ["body"], "metrics": ["loss"], "example_count": example_count}
    payload = {Part.BODY: {"w": np.arange(numbers, dtype=np.float32)}}
    return Policy(PolicyRules.model_validate(rules)).release(Update("ann", payload, {"loss": 0.5, "secret": 1.0}, 42.0))


FOUR_CHUNKS = 1_700_000  # numbers


def test_only_missing_chunks_are_sent(server: Servicer, link: GrpcLink, task: Task) -> None:
    update, uploads = released(FOUR_CHUNKS), Uploads(server, 0, 2)
    assert link.push(task, update) == accepted(update.manifest.digest)
    assert uploads.chunks == {1: update.data[CHUNK_BYTES : 2 * CHUNK_BYTES], 3: update.data[3 * CHUNK_BYTES :]}
    assert {(request.upload, request.caller.site) for request in server.requests("PutChunk")} == {("u1", "ann")}
    assert link.bytes_moved == sum(map(len, uploads.chunks.values()))


def test_the_chunks_of_a_transfer_share_a_line_that_stands_before_the_first_is_sent(
    server: Servicer, start: Start, connect: Connect, task: Task
) -> None:
    log, written = MemoryAuditLog(), list[int]()
    link = connect(start(), give_up_after_s=SOON, audit=ClientAudit(log))
    update, uploads = released(FOUR_CHUNKS), Uploads(server, 0, 2)

    def put(request: Any, context: Any = None) -> pb.ChunkAck:
        written.append(len([line for line in log.of("sent") if line["call"] == "PutChunk"]))
        return uploads.put(request, context)

    server.on["PutChunk"] = one_by_one(refuse(Code.RESOURCE_EXHAUSTED), put, put)  # one chunk is sent twice
    link.push(task, update)
    (line,) = [line for line in log.of("sent") if line["call"] == "PutChunk"]
    assert written == [1, 1]
    sent = {request.index: request.SerializeToString() for request in server.requests("PutChunk")}
    assert (line["calls"], line["bytes"]) == (2, sum(map(len, sent.values())))
    assert line["digest"] == update.manifest.digest
    assert line["facts"] == {"site": "ann", "instance": "instance", "upload": "u1"}


def test_of_a_download_that_goes_on_the_log_has_only_what_is_asked_for(
    server: Servicer, start: Start, connect: Connect, task: Task, tmp_path: Path
) -> None:
    log, downloads, address = MemoryAuditLog(), DiskDownloads(tmp_path), codec.digest(BLOB)
    downloads.begin(address, len(BLOB))
    held = BLOB[CHUNK_BYTES : 2 * CHUNK_BYTES]
    downloads.write(address, 1, held, crc32c(held))
    server.on["GetChunk"] = chunk
    assert connect(start(), give_up_after_s=SOON, audit=ClientAudit(log), downloads=downloads).fetch(task) == BLOB
    (line,) = log.of("sent")
    assert (line["call"], line["calls"], line["digest"]) == ("GetChunk", 2, address)
    assert line["bytes"] == sum(len(request.SerializeToString()) for request in server.requests("GetChunk"))


class StuckUploads(Uploads):
    """Chunks arrive, and are not answered before the end of the test."""

    def __init__(self, server: Servicer) -> None:
        super().__init__(server)
        self.arrived, self.ended = queue.Queue[int](), queue.Queue[int]()
        self.answer = threading.Event()

    def put(self, request: Any, context: Any = None) -> pb.ChunkAck:
        context.add_callback(lambda: self.ended.put(request.index))
        self.arrived.put(request.index)
        self.answer.wait(SOON)
        return super().put(request)


@dataclass(frozen=True)
class Departure:
    """A site about to leave a run, of which an upload of four chunks is under way."""

    link: GrpcLink
    uploads: StuckUploads
    pushed: Future[Any]
    left: threading.Event
    log: MemoryAuditLog


@pytest.fixture
def departure(server: Servicer, start: Start, connect: Connect, background: Background, task: Task) -> Departure:
    left, log = threading.Event(), MemoryAuditLog()

    def check(run: str) -> None:
        if left.is_set() and run == task.run:
            raise WithdrawnError(run)

    link = connect(start(), give_up_after_s=SOON, check_run=check, audit=ClientAudit(log))
    Uploads(server)
    link.push(task, released(10))  # quickly: from now on several chunks move at once
    uploads = StuckUploads(server)
    return Departure(link, uploads, background(link.push, task, released(FOUR_CHUNKS)), left, log)


def test_leaving_a_run_cuts_short_what_moves_of_it(server: Servicer, departure: Departure, task: Task) -> None:
    link, log, uploads = departure.link, departure.log, departure.uploads
    moving = {uploads.arrived.get(timeout=SOON) for _ in range(4)}
    link.cancel("another-run")
    assert not departure.pushed.done()
    departure.left.set()
    link.cancel("run")
    with pytest.raises(WithdrawnError):
        departure.pushed.result(SOON)
    assert {uploads.ended.get(timeout=SOON) for _ in range(4)} == moving  # cut short: none was answered
    uploads.answer.set()
    assert "WITHDRAWN" in {facts.get("code") for facts in log.of("answered")}
    before, told = len(server.asked), len(log.of("sent"))
    moves = (lambda: link.push(task, released(10)), lambda: link.fetch(task), lambda: link.report(task, SCORES))
    for move in moves:
        with pytest.raises(WithdrawnError):
            move()
    assert server.asked[before:] == []
    assert len(log.of("sent")) == told  # nor does the audit log say so
    server.on["Heartbeat"] = lambda *_: pb.HeartbeatResponse(signal=pb.SIGNAL_ABORT)
    assert link.beat("run", Progress("n1", Activity.FAILED, failure=FailureReason.WITHDRAWN)) is Signal.ABORT
    (request,) = server.requests("Heartbeat")
    assert wire.unpack_progress(request).failure is FailureReason.WITHDRAWN


def test_leaving_a_run_repeats_what_else_was_under_way(server: Servicer, departure: Departure, task: Task) -> None:
    asked = threading.Event()

    def wait(_request: Any, context: Any) -> pb.NextTaskResponse:
        ended = threading.Event()
        context.add_callback(ended.set)
        asked.set()
        ended.wait(SOON)
        return pb.NextTaskResponse()

    answer = pb.NextTaskResponse(wait=pb.Wait(retry_after_s=7.0))
    server.on["NextTask"] = one_by_one(wait, lambda *_: answer)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(departure.link.next_task, "other", 5.0)
        departure.uploads.arrived.get(timeout=SOON)
        assert asked.wait(SOON)
        departure.left.set()
        departure.link.cancel(task.run)
        with pytest.raises(WithdrawnError):
            departure.pushed.result(SOON)
        assert waiting.result(SOON) == Wait(7.0)
    departure.uploads.answer.set()
    assert len(server.requests("NextTask")) == 2


def test_a_run_that_is_left_while_a_call_is_written_to_the_audit_log_sends_it_no_more(
    server: Servicer, start: Start, connect: Connect, task: Task
) -> None:
    log = MemoryAuditLog()

    def check(run: str) -> None:
        if log.of("sent"):
            raise WithdrawnError(run)

    link = connect(start(), give_up_after_s=SOON, check_run=check, audit=ClientAudit(log))
    with pytest.raises(WithdrawnError):
        link.report(task, SCORES)
    assert server.asked == []
    assert [(line["call"], line["code"]) for line in log.of("answered")] == [("ReportScores", "WITHDRAWN")]


SCORES = Policy(PolicyRules(methods=frozenset(), parts=frozenset())).release_scores({})


@pytest.mark.parametrize("example_count", [False, True])
def test_an_upload_says_what_it_will_be_first_and_its_commit_carries_what_was_released_and_no_more(
    example_count: bool, server: Servicer, link: GrpcLink, task: Task
) -> None:
    update = released(10, example_count=example_count)
    Uploads(server)
    link.push(task, update)
    assert [call for call, _ in server.asked] == ["BeginUpload", "PutChunk", "CommitUpload"]
    (begun,), (request,) = server.requests("BeginUpload"), server.requests("CommitUpload")
    assert wire.unpack_manifest(begun) == update.manifest
    assert (begun.run, begun.round, begun.task_id, begun.base_digest) == ("run", 3, "n1", task.base_digest)
    assert (request.run, request.round, request.task_id, request.upload) == ("run", 3, "n1", "u1")
    assert (request.digest, dict(request.metrics)) == (update.manifest.digest, {"loss": 0.5})
    assert (request.HasField("weight"), request.weight) == (example_count, 42.0 * example_count)


def test_what_leaves_is_told_once_before(server: Servicer, start: Start, connect: Connect, task: Task) -> None:
    told: list[tuple[Task, Released, int]] = []
    link = connect(start(), on_release=lambda task, what: told.append((task, what, len(server.asked))))
    update, uploads = released(10), Uploads(server)
    server.on["CommitUpload"] = one_by_one(refuse(Code.FAILED_PRECONDITION), uploads.commit)  # it begins again
    link.push(task, update)
    assert told == [(task, update, 0)]
    assert len(server.requests("BeginUpload")) == 2


def test_nothing_is_sent_for_an_update_that_was_decided_and_one_that_never_gets_whole_fails(
    server: Servicer, link: GrpcLink, task: Task
) -> None:
    update = released(10)
    receipt = Receipt(Verdict.LATE, "round 3 is closed", update.manifest.digest, "seal")
    server.on["BeginUpload"] = lambda *_: pb.UploadTicket(receipt=wire.pack_receipt(receipt))
    assert link.push(task, update) == receipt
    assert len(server.asked) == 1
    Uploads(server)
    server.on["CommitUpload"] = refuse(Code.FAILED_PRECONDITION)
    with pytest.raises(ProtocolError, match="an upload of round 3 failed 3 times"):
        link.push(task, released(10))
    assert len(server.requests("CommitUpload")) == 3


@pytest.mark.parametrize("code", [Code.FAILED_PRECONDITION, Code.DATA_LOSS])
@pytest.mark.parametrize("call", ["PutChunk", "CommitUpload"])
def test_an_upload_begins_again(code: grpc.StatusCode, call: str, server: Servicer, link: GrpcLink, task: Task) -> None:
    update, uploads = released(10), Uploads(server)
    server.on[call] = one_by_one(refuse(code), refuse(code), server.on[call])
    assert link.push(task, update).verdict is Verdict.ACCEPTED
    assert len(server.requests("BeginUpload")) == 3
    assert uploads.chunks == {0: update.data}


@pytest.mark.parametrize("call", ["BeginUpload", "PutChunk", "CommitUpload"])
@pytest.mark.parametrize(
    ("code", "kind"), [(Code.ALREADY_EXISTS, ConflictError), (Code.UNAUTHENTICATED, NotEnrolledError)]
)
def test_a_contradiction_is_final_and_a_server_that_forgot_the_daemon_is_not_pressed(
    code: grpc.StatusCode, kind: type[Exception], call: str, server: Servicer, link: GrpcLink, task: Task
) -> None:
    Uploads(server)
    server.on[call] = refuse(code)
    with pytest.raises(kind):
        link.push(task, released(10))
    assert len(server.requests(call)) == 1


@pytest.mark.parametrize("call", ["BeginUpload", "PutChunk", "CommitUpload"])
def test_a_server_without_room_is_asked_again_later(call: str, server: Servicer, link: GrpcLink, task: Task) -> None:
    Uploads(server)
    server.on[call] = one_by_one(refuse(Code.RESOURCE_EXHAUSTED), server.on[call])
    assert link.push(task, released(10)).verdict is Verdict.ACCEPTED
    assert len(server.requests("BeginUpload")) == (2 if call == "BeginUpload" else 1)


# Slow links


class SlowLink:
    """The first attempt misses its deadline; of the later ones it counts how many are under way, with deadlines."""

    def __init__(self, handler: Handler) -> None:
        self._handler, self._lock, self._missed, self._under_way = handler, threading.Lock(), False, 0
        self._beside = threading.Event()
        self.most, self.deadlines = 0, list[float]()

    def __call__(self, request: Any, context: Any) -> Any:
        with self._lock:
            missed, self._missed = self._missed, True
        if not missed:
            context.abort(Code.DEADLINE_EXCEEDED, "as if")
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self.deadlines.append(context.time_remaining())
            if self._under_way > 1:
                self._beside.set()
        self._beside.wait(0.1)
        with self._lock:
            self._under_way -= 1
        return self._handler(request, context)


@pytest.mark.parametrize("direction", ["down", "up"])
def test_after_a_missed_deadline_chunks_move_one_by_one_and_may_take_longer(
    direction: str, server: Servicer, link: GrpcLink, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "QUICK_S", -1.0)  # none is
    if direction == "down":
        server.on["GetChunk"] = slow = SlowLink(chunk)
        assert link.fetch(task) == BLOB
    else:
        update, uploads = released(FOUR_CHUNKS), Uploads(server)
        server.on["PutChunk"] = slow = SlowLink(uploads.put)
        assert link.push(task, update) == accepted(update.manifest.digest)
    assert slow.most == 1
    assert slow.deadlines == pytest.approx([2 * CHUNK_S] * len(slow.deadlines), abs=10)  # gRPC rounds them


# Scores and heartbeats


def test_scores_are_handed_in_as_released(server: Servicer, link: GrpcLink, task: Task) -> None:
    rules = PolicyRules.model_validate({"methods": [], "parts": [], "metrics": ["global.accuracy"]})
    scores: ReleasedScores = Policy(rules).release_scores({"global.accuracy": 0.25, "secret": 1.0})
    server.on["ReportScores"] = lambda *_: pb.Ack()
    link.report(task, scores)
    (request,) = server.requests("ReportScores")
    assert (request.run, request.round, request.task_id) == ("run", 3, "n1")
    assert dict(request.scores) == {"global.accuracy": 0.25}


@pytest.mark.parametrize("signal", list(Signal))
def test_a_heartbeat_brings_the_servers_signal(signal: Signal, server: Servicer, link: GrpcLink) -> None:
    server.on["Heartbeat"] = lambda *_: pb.HeartbeatResponse(signal=wire.signal.pack(signal))
    progress = Progress("n1", Activity.FAILED, 1, 2, True, 5, FailureReason.NUMERIC)
    assert link.beat("run", progress) is signal
    (request,) = server.requests("Heartbeat")
    assert wire.unpack_progress(request) == progress


@pytest.mark.parametrize("lost", [refuse(Code.UNAVAILABLE), refuse(Code.INTERNAL), lambda *_: pb.HeartbeatResponse()])
def test_a_lost_heartbeat_is_not_repeated_and_stops_nothing(lost: Handler, server: Servicer, link: GrpcLink) -> None:
    server.on["Heartbeat"] = lost
    assert link.beat("run", Progress("n1", Activity.TRAINING)) is Signal.CONTINUE
    assert len(server.asked) == 1
