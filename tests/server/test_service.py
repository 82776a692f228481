"""The wire, as a hostile or confused client meets it: documented status codes, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google_crc32c import value as crc32c
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protofed.common import codec, wire
from protofed.common.errors import DiskFailure
from protofed.common.payload import Part, Payload, describe
from protofed.common.recipe import Recipe
from protofed.common.task import CHUNK_BYTES, PROTOCOL_VERSION, Manifest, Scores
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc
from protofed.server.blobs import FolderBlobs
from protofed.server.runs import Runs
from protofed.server.serving import serve
from protofed.server.threads import Bells, Threads

Code = grpc.StatusCode
RUN = "small-fedavg"
MODEL: Payload = {
    Part.BODY: {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    Part.HEAD: {"weight": np.ones((10, 3), dtype=np.float32)},
}


class Client:
    """A client made of bare stubs."""

    def __init__(self, address: str, site: str = "site-1", instance: str = "a") -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = rpc.FederationStub(self.channel)
        self.caller = pb.Caller(site=site, instance=instance)

    def enroll(self, protocol: int = PROTOCOL_VERSION) -> pb.EnrollReply:
        return self.stub.Enroll(
            pb.EnrollRequest(caller=self.caller, protocol=protocol, software="0.0.9", roles=[pb.ROLE_TRAINER]),
            timeout=10,
        )

    def next_task(self, run: str = RUN, wait_s: float = 10) -> pb.NextTaskReply:
        return self.stub.NextTask(pb.NextTaskRequest(caller=self.caller, run=run, wait_s=wait_s), timeout=30)

    def announce(self, task: pb.Task, data: bytes, payload: Payload, **changes: Any) -> pb.UploadManifest:
        manifest = Manifest(describe(payload), len(data), codec.digest(data))
        fields: dict[str, Any] = {
            "caller": self.caller,
            "run": RUN,
            "round": task.round,
            "nonce": task.nonce,
            "base": task.base,
            "tensors": wire.pack_tensors(manifest),
            "total": manifest.total,
            "digest": manifest.digest,
            "digest_algorithm": wire.DIGEST_ALGORITHM,
        }
        return pb.UploadManifest(**{**fields, **changes})

    def put(self, upload: str, index: int, data: bytes, checksum: int | None = None) -> pb.ChunkAck:
        crc = crc32c(data) if checksum is None else checksum
        chunk = pb.Chunk(caller=self.caller, upload=upload, index=index, data=data, crc32c=crc)
        return self.stub.PutChunk(chunk, timeout=10)

    def commit(self, task: pb.Task, upload: str, metrics: Scores | None = None, **changes: Any) -> pb.Receipt:
        known = {"run": RUN, "round": task.round, "nonce": task.nonce, "digest": upload.rpartition(".")[2]}
        request = pb.CommitRequest(caller=self.caller, upload=upload, metrics=metrics, **{**known, **changes})
        return self.stub.CommitUpload(request, timeout=10)

    def push(self, task: pb.Task, payload: Payload) -> pb.Receipt:
        data = codec.encode(payload)
        ticket = self.stub.BeginUpload(self.announce(task, data, payload), timeout=10)
        if ticket.WhichOneof("answer") == "receipt":
            return ticket.receipt
        for index in range(-(-len(data) // CHUNK_BYTES)):
            self.put(ticket.upload.id, index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        return self.commit(task, ticket.upload.id)


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]) -> Any:
    return live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1}))


@pytest.fixture
def connect(server: Any) -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def one(site: str = "site-1", instance: str = "a") -> Client:
        opened.append(Client(server.address, site, instance))
        return opened[-1]

    yield one
    for client in opened:
        client.channel.close()


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    made = connect()
    made.enroll()
    return made


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code(), error.details()


def test_another_protocol_version_is_refused_naming_both(connect: Callable[..., Client]) -> None:
    code, text = code_of(lambda: connect().enroll(protocol=PROTOCOL_VERSION + 1))
    assert code is Code.FAILED_PRECONDITION
    assert f"protocol {PROTOCOL_VERSION + 1}" in text
    assert f"protocol {PROTOCOL_VERSION};" in text
    assert "protofed 0.0.9" in text


def test_a_stranger_is_told_to_enroll(connect: Callable[..., Client]) -> None:
    assert code_of(connect().next_task)[0] is Code.UNAUTHENTICATED


def test_a_newer_daemon_fences_the_older(connect: Callable[..., Client], client: Client) -> None:
    newer = connect(instance="b")
    newer.enroll()
    code, text = code_of(client.next_task)
    assert code is Code.ABORTED
    assert "newer daemon" in text
    assert newer.next_task().WhichOneof("answer") == "task"


@pytest.mark.parametrize("bad", ["../../x", "a" * 65, "A", "", "a\0b", "sité", "сайт"])
def test_bad_ids_are_refused_before_anything_is_touched(bad: str, server: Any, connect: Callable[..., Client]) -> None:
    before = sorted(server.blobs._folder.rglob("*"))
    client = connect(site=bad)
    assert code_of(client.enroll)[0] is Code.INVALID_ARGUMENT
    assert code_of(lambda: connect().next_task(run=bad))[0] is Code.INVALID_ARGUMENT
    assert sorted(server.blobs._folder.rglob("*")) == before


def test_empty_messages_are_refused(client: Client) -> None:
    stub = client.stub
    calls: list[Callable[[], object]] = [
        lambda: stub.Enroll(pb.EnrollRequest(), timeout=10),
        lambda: stub.NextTask(pb.NextTaskRequest(), timeout=10),
        lambda: stub.Heartbeat(pb.HeartbeatRequest(), timeout=10),
        lambda: stub.GetChunk(pb.GetChunkRequest(), timeout=10),
        lambda: stub.BeginUpload(pb.UploadManifest(), timeout=10),
        lambda: stub.PutChunk(pb.Chunk(), timeout=10),
        lambda: stub.CommitUpload(pb.CommitRequest(), timeout=10),
        lambda: stub.ReportScores(pb.ScoresRequest(), timeout=10),
    ]
    assert [code_of(call)[0] for call in calls] == [Code.INVALID_ARGUMENT] * len(calls)


def test_unknown_calls_are_unimplemented(client: Client) -> None:
    call: Callable[..., bytes] = client.channel.unary_unary("/protofed.protos.v1.Federation/Reflect")
    assert code_of(lambda: call(b"", timeout=10))[0] is Code.UNIMPLEMENTED


def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    call: Callable[..., bytes] = client.channel.unary_unary("/protofed.protos.v1.Federation/BeginUpload")
    assert code_of(lambda: call(b"\xff" * 100, timeout=10))[0] is Code.INVALID_ARGUMENT
    assert client.next_task().WhichOneof("answer") == "task"


def test_messages_above_the_limit_are_refused(client: Client) -> None:
    assert code_of(lambda: client.put("x", 0, bytes(8 << 20)))[0] is Code.RESOURCE_EXHAUSTED


def test_unforeseen_errors_show_an_incident_and_nothing_else(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(Runs, "next_task", broken)
    code, text = code_of(client.next_task)
    assert code is Code.INTERNAL
    assert text.startswith("internal error, incident ")
    assert "4711" not in text


def test_a_full_round_over_bare_calls(client: Client, server: Any) -> None:
    first = client.next_task().task
    assert (first.kind, first.round, first.base) == (pb.TASK_KIND_INITIALISE, 0, "")
    assert client.push(first, MODEL).verdict == pb.VERDICT_ACCEPTED
    fit = client.next_task().task
    assert (fit.kind, fit.round) == (pb.TASK_KIND_FIT, 1)
    chunk = client.stub.GetChunk(
        pb.GetChunkRequest(caller=client.caller, run=RUN, digest=fit.base, index=0), timeout=10
    )
    assert codec.digest(chunk.data) == fit.base
    receipt = client.push(fit, MODEL)
    assert receipt.verdict == pb.VERDICT_ACCEPTED
    again = client.push(fit, MODEL)
    assert (again.verdict, again.seal) == (pb.VERDICT_DUPLICATE, receipt.seal)


def test_a_blob_is_for_those_whose_task_names_it(client: Client, connect: Callable[..., Client]) -> None:
    client.push(client.next_task().task, MODEL)
    fit = client.next_task().task
    other = connect(site="site-2")
    other.enroll()
    request = pb.GetChunkRequest(caller=other.caller, run=RUN, digest=fit.base, index=0)
    assert code_of(lambda: other.stub.GetChunk(request, timeout=10))[0] is Code.PERMISSION_DENIED


def test_another_sites_task_and_upload_are_refused(client: Client, connect: Callable[..., Client]) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    upload = client.stub.BeginUpload(client.announce(task, data, MODEL), timeout=10).upload.id
    other = connect(site="site-2")
    other.enroll()
    assert code_of(lambda: other.push(task, MODEL))[0] is Code.INVALID_ARGUMENT
    assert code_of(lambda: other.put(upload, 0, data))[0] is Code.FAILED_PRECONDITION


def test_chunks_are_checked_one_by_one(client: Client) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    upload = client.stub.BeginUpload(client.announce(task, data, MODEL), timeout=10).upload.id
    assert code_of(lambda: client.put(upload, 0, data, checksum=1))[0] is Code.DATA_LOSS
    assert code_of(lambda: client.put(upload, 7, data))[0] is Code.DATA_LOSS
    assert code_of(lambda: client.put(upload, 0, data[:-1]))[0] is Code.DATA_LOSS
    assert code_of(lambda: client.put("never-begun", 0, data))[0] is Code.FAILED_PRECONDITION
    code, text = code_of(lambda: client.commit(task, upload))
    assert code is Code.FAILED_PRECONDITION
    assert "the first is 0" in text


def test_other_bytes_for_a_chunk_are_a_contradiction(client: Client) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    upload = client.stub.BeginUpload(client.announce(task, data, MODEL), timeout=10).upload.id
    client.put(upload, 0, data)
    client.put(upload, 0, data)
    code, text = code_of(lambda: client.put(upload, 0, bytes(len(data))))
    assert (code, text) == (Code.ALREADY_EXISTS, "chunk 0 was sent before with other bytes")


def test_a_site_that_begins_too_much_is_told_what_to_do(client: Client) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    messages = [client.announce(task, data, MODEL, digest=codec.digest(bytes([number]))) for number in range(5)]
    for message in messages[:4]:
        client.stub.BeginUpload(message, timeout=10)
    code, text = code_of(lambda: client.stub.BeginUpload(messages[4], timeout=10))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "4 uploads of this site are unfinished; commit one of them" in text


def test_a_verdict_forgets_what_else_was_begun_for_the_task(client: Client, server: Any) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    other = client.announce(task, data, MODEL, digest=codec.digest(b"other"))
    upload = client.stub.BeginUpload(other, timeout=10).upload.id
    assert client.push(task, MODEL).verdict == pb.VERDICT_ACCEPTED
    assert code_of(lambda: client.put(upload, 0, data))[0] is Code.FAILED_PRECONDITION
    assert list((server.blobs._folder / "uploads").iterdir()) == []


class Idle:
    """Runs of which a server asks nothing but the time."""

    finished = False

    def tick(self) -> None:
        """Nothing happens."""

    def enroll(self, *_: Any) -> None:
        raise DiskFailure("cannot write /state: Input/output error")


def test_a_failed_disk_ends_the_server_without_a_word_of_it_to_the_peer(tmp_path: Path) -> None:
    said: list[tuple[grpc.StatusCode, str]] = []

    def call(address: str) -> None:
        client = Client(address)
        said.append(code_of(client.enroll))
        client.channel.close()

    async def main() -> None:
        with ThreadPoolExecutor(1) as peer:

            def started(address: str) -> None:
                peer.submit(call, address)

            runs: Any = Idle()
            await serve(
                runs,
                runs,
                FolderBlobs(tmp_path),
                Threads(),
                Bells(),
                "127.0.0.1:0",
                asyncio.Event(),
                started=started,
                until_finished=False,
            )

    with pytest.raises(DiskFailure, match="Input/output error"):
        asyncio.run(main())
    assert said == [(Code.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later")]


def test_an_upload_goes_on_where_it_broke_off(client: Client) -> None:
    big = {**MODEL, Part.BODY: {"w": np.zeros((1 << 20, 1), dtype=np.float32)}}
    task, data = client.next_task().task, codec.encode(big)
    announced = client.announce(task, data, big)
    upload = client.stub.BeginUpload(announced, timeout=10).upload
    client.put(upload.id, 1, data[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert list(client.stub.BeginUpload(announced, timeout=10).upload.held) == [1]


def test_bytes_that_are_not_what_was_announced_never_count(client: Client) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    upload = client.stub.BeginUpload(client.announce(task, data, MODEL), timeout=10).upload.id
    client.put(upload, 0, bytes(len(data)))
    assert code_of(lambda: client.commit(task, upload))[0] is Code.DATA_LOSS
    assert client.next_task().task.nonce == task.nonce


@pytest.mark.parametrize(
    "changes", [{"run": "other"}, {"round": 7}, {"nonce": "f" * 32}, {"digest": "0" * 64}], ids=lambda c: next(iter(c))
)
def test_a_commit_that_names_something_else_than_its_upload_is_refused(client: Client, changes: dict[str, Any]) -> None:
    task, data = client.next_task().task, codec.encode(MODEL)
    ticket = client.stub.BeginUpload(client.announce(task, data, MODEL), timeout=10)
    client.put(ticket.upload.id, 0, data)
    code, text = code_of(lambda: client.commit(task, ticket.upload.id, **changes))
    assert (code, text.startswith("this names another run")) == (Code.INVALID_ARGUMENT, True)
    assert client.commit(task, ticket.upload.id).verdict == pb.VERDICT_ACCEPTED


def test_values_that_are_not_finite_are_invalid(client: Client) -> None:
    poisoned = {**MODEL, Part.BODY: {"w": np.full((2, 3), np.nan, dtype=np.float32)}}
    receipt = client.push(client.next_task().task, poisoned)
    assert receipt.verdict == pb.VERDICT_INVALID
    assert receipt.reason == "body/w has values that are not finite"


def test_an_update_of_another_shape_is_invalid_before_a_byte_is_sent(client: Client) -> None:
    client.push(client.next_task().task, MODEL)
    fit = client.next_task().task
    receipt = client.push(fit, {**MODEL, Part.HEAD: {"weight": np.ones((3, 10), dtype=np.float32)}})
    assert receipt.verdict == pb.VERDICT_INVALID
    assert receipt.reason == "head/weight is float32 [3, 10], expected float32 [10, 3]"


def test_health_is_serving(server: Any) -> None:
    with grpc.insecure_channel(server.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
