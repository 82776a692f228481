"""Bytes on their way, in both directions: rows 25, 26, 38 to 44, 48, 58 and 60 to 62 of the fault table."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from google_crc32c import value as crc32c
from structlog.testing import capture_logs
from tests.support.audit_logs import audit
from tests.support.fault_proxy import Mode, Proxy
from tests.support.raw_client import CALLS, Code, RawClient, refused
from tests.support.waiting import wait_for

from protofed.client.policy.policy import Policy, Released
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.downloads import DiskDownloads
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import CodecError, OutOfSpaceError
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol import wire
from protofed.common.protocol.messages import CHUNK_BYTES, Role, Task, Verdict
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rpc import federation
from protofed.server.storage.blobs import Upload
from protofed.server.storage.ledger import Ledger

RUN = "small-fedavg"
CHUNKS = 4
RULES = {"methods": ["fedavg"], "parts": ["body", "head"], "metrics": []}


def model(value: float = 1.0) -> Payload:
    """Of four chunks."""
    body = np.random.default_rng(0).standard_normal((1600, 1000), np.float32) * np.float32(value)
    return {Part.BODY: {"w": body}, Part.HEAD: {"weight": np.ones((10, 3), np.float32)}}


FIRST = model()
UPDATE = model(1.01)
DATA = codec.encode(UPDATE)


def pieces(data: bytes = DATA) -> list[bytes]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def released(payload: Payload = UPDATE) -> Released:
    return Policy(PolicyRules.model_validate(RULES)).release(Update("site-1", payload, {}, None))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short."""
    monkeypatch.setattr(random, "uniform", lambda _, high: min(high, 0.02))


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    return recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1, "score_every": 0, "heartbeat_s": 0.1})


@pytest.fixture
def start(live_server: Callable[..., Any], recipe: Recipe) -> Callable[[], Any]:
    """The server, and after `stop` another one on the same state and port."""
    address = "127.0.0.1:0"

    def serve() -> Any:
        nonlocal address
        server = live_server(recipe, listen=address)
        address = server.address
        return server

    return serve


@pytest.fixture
def server(start: Callable[[], Any]) -> Any:
    return start()


@pytest.fixture
def client(server: Any) -> Iterator[RawClient]:
    """The only site, by raw calls; the first model is there."""
    one = RawClient(server.address, RUN).enroll()
    assert one.push(one.task(), FIRST).verdict == pb.VERDICT_ACCEPTED
    yield one
    one.channel.close()


@pytest.fixture
def task(client: RawClient) -> pb.Task:
    """To start from `FIRST`."""
    return client.task()


@pytest.fixture
def daemon() -> Iterator[Callable[..., GrpcLink]]:
    """Daemons of the only site, enrolled; each fences the one before."""
    links: list[GrpcLink] = []

    def make(address: str, **options: Any) -> GrpcLink:
        instance = f"daemon-{len(links)}"
        known: dict[str, Any] = {"identity": None, "audit": audit(), "give_up_after_s": 20.0}
        link = GrpcLink(address, "site-1", instance, frozenset({Role.TRAINER}), **known, **options)
        links.append(link)
        link.enroll()
        return link

    yield make
    for link in links:
        link.close()


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[tuple[int, str]]]:
    """Reads round and verdict of all that was judged after the first model."""

    def read() -> list[tuple[int, str]]:
        with contextlib.closing(sqlite3.connect(f"file:{tmp_path}/server/ledger.sqlite?mode=ro", uri=True)) as ledger:
            return ledger.execute("select round, verdict from updates where round > 0 order by rowid").fetchall()

    return read


def ours(task: pb.Task) -> Task:
    found = wire.unpack_next(pb.NextTaskResponse(task=task))
    assert isinstance(found, Task)
    return found


def begin(client: RawClient, task: pb.Task, payload: Payload = UPDATE) -> pb.Upload:
    ticket: pb.UploadTicket = client.say("BeginUpload", client.announcement(task, codec.encode(payload), payload))
    return pb.Upload.FromString(ticket.upload.SerializeToString())


def put(client: RawClient, upload: pb.Upload, chunks: Iterable[int] = range(CHUNKS), payload: Payload = UPDATE) -> None:
    """Send these chunks of an update."""
    data = pieces(codec.encode(payload))
    for index in chunks:
        client.put(upload.id, index, data[index])


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "server" / "blobs").iterdir() if path.is_file()}


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in (folder / "server" / "blobs" / "uploads").iterdir()]


class Counted:
    """A call whose requests are remembered; `before` and `after` may raise."""

    def __init__(self, link: GrpcLink, call: str) -> None:
        self.requests = list[Any]()
        self.before: Callable[[int], None] = lambda _: None
        self.after: Callable[[int], None] = lambda _: None
        self._call, self._send, self._kind = call, link._calls._send, GetMessageClass(CALLS[call].input_type)
        link._calls._send = self.send  # type: ignore[method-assign]

    def send(self, request: Any, reply_type: Any) -> Any:
        """One attempt."""
        if request.call != self._call:
            return self._send(request, reply_type)
        number = len(self.requests)
        self.requests.append(self._kind.FromString(request.data))
        self.before(number)
        found = self._send(request, reply_type)
        self.after(number)
        return found


class LostError(grpc.RpcError):
    """The connection broke before the answer arrived."""

    def code(self) -> grpc.StatusCode:
        return Code.UNAVAILABLE

    def details(self) -> str:
        return "lost"

    def trailing_metadata(self) -> tuple[()]:
        return ()


# Downloads


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    made = Proxy(server.address)
    yield made
    made.close()


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("chunk", range(1, CHUNKS))
def test_row_25_a_download_that_is_cut_goes_on_by_chunk(
    chunk: int, beside: int, task: pb.Task, proxy: Proxy, daemon: Callable[..., GrpcLink], tmp_path: Path
) -> None:
    proxy.mode = Mode(cut={"down": chunk * CHUNK_BYTES + beside})
    link = daemon(proxy.address, downloads=DiskDownloads(tmp_path / "downloads"))
    asked, answered = Counted(link, "GetChunk"), list[int]()
    asked.after = lambda number: answered.append(asked.requests[number].index)
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(link.fetch, ours(task))
        wait_for(lambda: len(asked.requests) > CHUNKS)  # one is asked for again
        proxy.mode = Mode()
        assert codec.digest(fetched.result(20)) == task.base_digest
    assert sorted(answered) == list(range(CHUNKS))  # what came before the cut did not come again


@pytest.mark.parametrize("held", range(CHUNKS + 1))
def test_row_25_another_daemon_and_another_server_go_on_where_they_stopped(
    held: int,
    client: RawClient,
    task: pb.Task,
    server: Any,
    start: Callable[[], Any],
    daemon: Callable[..., GrpcLink],
    tmp_path: Path,
) -> None:
    downloads = DiskDownloads(tmp_path / "downloads")
    downloads.begin(ours(task).base_digest or codec.Digest(""), task.base_bytes)
    data = pieces(codec.encode(FIRST))
    for index in range(held):
        downloads.write(ours(task).base_digest or codec.Digest(""), index, data[index], crc32c(data[index]))
    server.stop()
    link = daemon(start().address, downloads=DiskDownloads(tmp_path / "downloads"))
    asked = Counted(link, "GetChunk")
    assert link.fetch(ours(task)) == codec.encode(FIRST)
    assert sorted(request.index for request in asked.requests) == list(range(held, CHUNKS))


def test_row_26_a_flipped_bit_is_fetched_again_and_a_third_is_the_end(
    task: pb.Task, proxy: Proxy, daemon: Callable[..., GrpcLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = daemon(proxy.address, downloads=DiskDownloads(tmp_path / "downloads"))
    asked, flips = Counted(link, "GetChunk"), itertools.count()
    real = link._get_chunk

    def flipped(fetching: Any, index: int) -> tuple[bytes, int]:
        data, checksum = real(fetching, index)
        if index == 1 and next(flips) < 2:
            data = bytes([data[0] ^ 1]) + data[1:]
            checksum = crc32c(data)  # inside what TLS and CRC protect
        return data, checksum

    monkeypatch.setattr(link, "_get_chunk", flipped)
    assert link.fetch(ours(task)) == codec.encode(FIRST)
    assert len(asked.requests) == 3 * CHUNKS
    for path in (tmp_path / "downloads").iterdir():
        path.unlink()
    flips = itertools.count(-1)
    with pytest.raises(CodecError, match="arrived damaged 3 times"):
        link.fetch(ours(task))
    assert list((tmp_path / "downloads").iterdir()) == []


# Uploads


@pytest.mark.parametrize("restarted", ["client", "server", "both"])
@pytest.mark.parametrize("held", range(CHUNKS + 1))
def test_row_38_only_missing_chunks_are_sent_again(
    held: int,
    restarted: str,
    client: RawClient,
    task: pb.Task,
    server: Any,
    start: Callable[[], Any],
    daemon: Callable[..., GrpcLink],
    rows: Callable[[], Any],
) -> None:
    upload = begin(client, task)
    put(client, upload, range(held))
    assert rows() == []
    if restarted != "client":
        server.stop()
        server = start()
    assert rows() == []
    if restarted == "server":
        client.enroll()
        assert list(begin(client, task).received_chunks) == list(range(held))
        put(client, upload, range(held, CHUNKS))
        assert client.commit(task, upload.id).verdict == pb.VERDICT_ACCEPTED
    else:
        new = daemon(server.address)
        sent = Counted(new, "PutChunk")
        assert new.push(ours(task), released()).verdict is Verdict.ACCEPTED
        assert sorted(request.index for request in sent.requests) == list(range(held, CHUNKS))
    assert rows() == [(1, "accepted")]


def test_row_39_what_is_never_committed_never_counts_and_is_collected(
    client: RawClient,
    task: pb.Task,
    rows: Callable[[], Any],
    start: Callable[[], Any],
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload = begin(client, task)
    put(client, upload)
    server.stop()
    past = time.time() - federation.UPLOADS_KEPT_S - 1
    os.utime(tmp_path / "server" / "blobs" / "uploads" / upload.id, (past, past))
    start()
    wait_for(lambda: not unfinished(tmp_path))
    assert rows() == []
    client.enroll()
    assert client.push(task, UPDATE).verdict == pb.VERDICT_ACCEPTED


def test_row_40_a_commit_of_less_than_was_announced_is_refused(
    client: RawClient, task: pb.Task, rows: Callable[[], Any], tmp_path: Path
) -> None:
    before = blobs(tmp_path)
    upload = begin(client, task)
    put(client, upload, (0, 3))
    code, text = refused(lambda: client.commit(task, upload.id))
    assert (code, text) == (Code.FAILED_PRECONDITION, "2 chunks are missing, the first is 1")
    for index in (1, 2):
        client.put(upload.id, index, bytes(CHUNK_BYTES))
    assert refused(lambda: client.commit(task, upload.id))[0] is Code.DATA_LOSS  # another digest
    assert refused(lambda: client.commit(task, upload.id))[0] is Code.FAILED_PRECONDITION  # dropped
    assert (blobs(tmp_path), unfinished(tmp_path), rows()) == (before, [], [])
    for change in (-1, 1):
        wrong = client.announcement(task, DATA, UPDATE, total_bytes=len(DATA) + change)
        assert client.say("BeginUpload", wrong).receipt.verdict == pb.VERDICT_REFUSED
    assert rows() == [(1, "refused")] * 2


def test_row_41_chunks_twice_and_in_any_order_are_one_and_out_of_range_none(
    client: RawClient, task: pb.Task, rows: Callable[[], Any]
) -> None:
    upload = begin(client, task)
    put(client, upload, (3, 1, 3, 1, 0))
    for index, data in ((4, b""), (5, pieces()[3]), (2**31, pieces()[0]), (2**32 - 1, pieces()[0]), (2, pieces()[3])):
        assert refused(lambda index=index, data=data: client.put(upload.id, index, data))[0] is Code.DATA_LOSS
    assert refused(lambda: client.commit(task, upload.id))[1] == "1 chunks are missing, the first is 2"
    put(client, upload, [2])
    assert client.commit(task, upload.id).verdict == pb.VERDICT_ACCEPTED
    assert rows() == [(1, "accepted")]


def test_row_42_other_bytes_for_a_chunk_are_equivocation_and_change_nothing(
    client: RawClient, task: pb.Task, rows: Callable[[], Any]
) -> None:
    upload = begin(client, task)
    put(client, upload)
    with capture_logs() as logs:
        code, text = refused(lambda: client.put(upload.id, 2, bytes(CHUNK_BYTES)))
    assert (code, text) == (Code.ALREADY_EXISTS, "chunk 2 was sent before with other bytes")
    (entry,) = [entry for entry in logs if entry["event"] == "equivocation"]
    assert {
        "log_level": "error",
        "site": "site-1",
        "run": RUN,
        "round": 1,
        "task_id": task.task_id,
    }.items() <= entry.items()
    assert client.commit(task, upload.id).verdict == pb.VERDICT_ACCEPTED
    assert rows() == [(1, "accepted")]


@pytest.mark.parametrize("damage", ["checksum", "short", "long"])
def test_row_43_a_damaged_chunk_is_refused_and_sent_again(
    damage: str, client: RawClient, task: pb.Task, server: Any, daemon: Callable[..., GrpcLink], rows: Callable[[], Any]
) -> None:
    link = daemon(server.address)
    sent = Counted(link, "PutChunk")

    def hurt(number: int) -> None:
        if number == 1:
            chunk = sent.requests[1]
            size = {"short": CHUNK_BYTES - 1, "long": CHUNK_BYTES + 1}.get(damage)
            chunk.data = (chunk.data + b"x")[:size] if size else bytes(len(chunk.data))
            chunk.crc32c = crc32c(chunk.data) if size else chunk.crc32c

    sent.before = hurt
    assert link.push(ours(task), released()).verdict is Verdict.ACCEPTED
    assert len(sent.requests) <= 2 * CHUNKS
    assert rows() == [(1, "accepted")]


@pytest.mark.parametrize("call", ["BeginUpload", "PutChunk", "CommitUpload"])
def test_row_44_a_lost_answer_is_asked_for_again_and_is_the_same(
    call: str, client: RawClient, task: pb.Task, server: Any, daemon: Callable[..., GrpcLink], rows: Callable[[], Any]
) -> None:
    link = daemon(server.address)
    counted = Counted(link, call)

    def lose(number: int) -> None:
        if number < 5:
            raise LostError

    counted.after = lose
    receipt = link.push(ours(task), released())
    again = link.push(ours(task), released())
    assert receipt.verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE)
    assert (again.verdict, again.record_hash) == (Verdict.DUPLICATE, receipt.record_hash)
    assert rows() == [(1, "accepted")]


def test_row_16_a_commit_of_another_daemon_leaves_the_upload_and_no_blob(
    client: RawClient, task: pb.Task, rows: Callable[[], Any], tmp_path: Path
) -> None:
    before, upload = blobs(tmp_path), begin(client, task)
    put(client, upload)
    fenced = pb.Caller(site="site-1", instance="older")
    assert refused(lambda: client.commit(task, upload.id, caller=fenced))[0] is Code.ABORTED
    assert (blobs(tmp_path), rows()) == (before, [])
    assert list(begin(client, task).received_chunks) == list(range(CHUNKS))
    assert client.commit(task, upload.id).verdict == pb.VERDICT_ACCEPTED


def failing_once(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """A call that has no room for what it writes the first time, before it does its work or after."""
    tries = itertools.count()

    def call(*arguments: Any) -> Any:
        if (first := next(tries) == 0) and not after:
            raise OutOfSpaceError("no space left")
        done = real(*arguments)
        if first:
            raise OutOfSpaceError("no space left")
        return done

    return call


@pytest.mark.parametrize("after", [False, True], ids=["before the row", "after the row"])
def test_row_58_an_update_that_could_not_be_recorded_keeps_its_blob_only_if_its_row_stands(
    client: RawClient,
    task: pb.Task,
    rows: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    after: bool,
) -> None:
    before, upload = blobs(tmp_path), begin(client, task)
    put(client, upload)
    monkeypatch.setattr(Ledger, "judge_all", failing_once(Ledger.judge_all, after=after))
    assert refused(lambda: client.commit(task, upload.id))[0] is Code.RESOURCE_EXHAUSTED
    assert rows() == ([(1, "accepted")] if after else [])
    assert blobs(tmp_path) == before | ({codec.digest(DATA)} if after else set())
    assert client.commit(task, upload.id).verdict == pb.VERDICT_ACCEPTED  # with the chunks that were sent
    assert rows() == [(1, "accepted")]
    assert codec.digest(DATA) in blobs(tmp_path)


def test_row_48_of_two_updates_at_once_one_counts(
    client: RawClient, task: pb.Task, rows: Callable[[], Any], tmp_path: Path
) -> None:
    payloads = [UPDATE, model(1.02), model(1.03)]
    uploads = [begin(client, task, payload) for payload in payloads]
    for upload, payload in zip(uploads[:2], payloads, strict=False):
        put(client, upload, payload=payload)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.commit, task, upload.id) for upload in uploads[:2]]
        errors = [call.exception(20) for call in calls]
    verdicts = sorted(call.result().verdict for call, error in zip(calls, errors, strict=True) if error is None)
    assert verdicts in ([pb.VERDICT_ACCEPTED], [pb.VERDICT_ACCEPTED, pb.VERDICT_REFUSED])
    for error in filter(None, errors):  # it came when the other had counted already, and was forgotten
        assert isinstance(error, grpc.RpcError)
        assert error.code() is Code.FAILED_PRECONDITION
    assert [verdict for _, verdict in rows()].count("accepted") == 1
    assert refused(lambda: client.put(uploads[2].id, 0, pieces()[0]))[0] is Code.FAILED_PRECONDITION
    assert unfinished(tmp_path) == []
    late = client.say("BeginUpload", client.announcement(task, codec.encode(payloads[2]), payloads[2]))
    assert late.receipt.verdict == pb.VERDICT_REFUSED
    assert "another update" in late.receipt.reason


@pytest.mark.parametrize("full", ["posix_fallocate", "fsync"])
def test_row_58_a_full_disk_is_waited_for(
    full: str,
    client: RawClient,
    task: pb.Task,
    server: Any,
    daemon: Callable[..., GrpcLink],
    rows: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, tries = blobs(tmp_path), itertools.count()
    real = getattr(os, full)

    def call(file: int, *arguments: int) -> None:
        if "blobs" in os.readlink(f"/proc/self/fd/{file}") and next(tries) < 3:  # of the audit log: row 89
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, *arguments)

    if full == "posix_fallocate":
        monkeypatch.setattr(os, full, call)
        code, text = refused(lambda: begin(client, task))
        assert (code, str(tmp_path) in text) == (Code.RESOURCE_EXHAUSTED, False)
    else:
        upload = begin(client, task)
        put(client, upload)
        monkeypatch.setattr(os, full, call)
        assert refused(lambda: client.commit(task, upload.id))[0] is Code.RESOURCE_EXHAUSTED
    assert (blobs(tmp_path), unfinished(tmp_path), rows()) == (before, [], [])
    assert daemon(server.address).push(ours(task), released()).verdict is Verdict.ACCEPTED
    assert next(tries) > 3
    assert rows() == [(1, "accepted")]


def test_row_60_a_server_that_dies_with_a_chunk_written_goes_on(
    client: RawClient, task: pb.Task, server: Any, start: Callable[[], Any], rows: Callable[[], Any]
) -> None:
    """The chunk is there and its answer is not: as row 38, with the last chunk sent once more."""
    upload = begin(client, task)
    put(client, upload, [0])
    server.stop()
    start()
    client.enroll()
    assert refused(lambda: client.put(upload.id, 0, pieces()[0]))[0] is Code.FAILED_PRECONDITION  # begin it again
    assert list(begin(client, task).received_chunks) == [0]
    put(client, upload, [0])
    assert client.push(task, UPDATE).verdict == pb.VERDICT_ACCEPTED
    assert rows() == [(1, "accepted")]


def test_row_60_a_server_that_dies_between_the_blob_and_its_row_is_sent_no_chunk_again(
    client: RawClient,
    task: pb.Task,
    server: Any,
    start: Callable[[], Any],
    daemon: Callable[..., GrpcLink],
    rows: Callable[[], Any],
    tmp_path: Path,
) -> None:
    before, upload = blobs(tmp_path), begin(client, task)
    put(client, upload)
    which = Upload("site-1", task.task_id, codec.digest(DATA))  # what a commit does before the row is written
    server.blobs.check(which)
    server.blobs.seal(which)
    server.blobs.sync()
    assert blobs(tmp_path) > before
    server.stop()
    new = daemon(start().address)
    assert (blobs(tmp_path), rows()) == (before, [])
    sent = Counted(new, "PutChunk")
    assert new.push(ours(task), released()).verdict is Verdict.ACCEPTED
    assert (sent.requests, rows(), unfinished(tmp_path)) == ([], [(1, "accepted")], [])


# Quotas


def test_row_61_a_flood_of_uploads_is_bounded_and_harms_nobody_else(
    client: RawClient, task: pb.Task, rows: Callable[[], Any], tmp_path: Path
) -> None:
    message, started = client.announcement(task, DATA, UPDATE), 0
    for number in range(200):  # beyond 240 another bound would speak
        message.digest = codec.digest(number.to_bytes(2, "big"))
        with contextlib.suppress(grpc.RpcError):
            client.say("BeginUpload", message)
            started += 1
    assert started == 4
    assert len(unfinished(tmp_path)) == 2 * started  # data and marks
    code, text = refused(lambda: begin(client, task))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "unfinished; commit one of them" in text
    assert rows() == []


def test_row_61_uploads_for_a_closed_invitation_do_not_count(client: RawClient, task: pb.Task, tmp_path: Path) -> None:
    message = client.announcement(task, DATA, UPDATE)
    for number in range(4):
        message.digest = codec.digest(bytes([number]))
        client.say("BeginUpload", message)
    failed = pb.HeartbeatRequest(caller=client.caller, run=RUN, task_id=task.task_id)
    failed.activity, failed.failure = pb.ACTIVITY_FAILED, pb.FAILURE_REASON_DISK
    client.say("Heartbeat", failed)
    again = client.task()  # of the same round, opened again
    assert again.task_id != task.task_id
    assert client.push(again, UPDATE).verdict == pb.VERDICT_ACCEPTED
    assert unfinished(tmp_path) == []


def test_row_62_more_than_the_update_can_be_is_refused_at_the_declared_total(
    client: RawClient, task: pb.Task, tmp_path: Path
) -> None:
    ticket = client.say("BeginUpload", client.announcement(task, DATA, UPDATE, total_bytes=100 * len(DATA)))
    assert ticket.receipt.verdict == pb.VERDICT_REFUSED
    assert f"{100 * len(DATA)} bytes announced" in ticket.receipt.reason
    assert unfinished(tmp_path) == []
