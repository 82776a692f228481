"""The wire, as a hostile or confused client meets it: documented status codes, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from google.protobuf.message_factory import GetMessageClass
from tests.support.raw_client import FEDERATION, MODEL, RawClient, refused

from protofed.common import codec
from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DiskFailureError
from protofed.common.payload import Part
from protofed.common.protocol import wire
from protofed.common.protocol.consortium import Consortium, Partner
from protofed.common.protocol.messages import CHUNK_BYTES, PROTOCOL_VERSION
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc import federation
from protofed.server.rpc.audit import AUDIT_FILE, ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.server import Served, serve
from protofed.server.storage.blobs import FolderBlobs, Uploads

Code = grpc.StatusCode
RUN = "small-fedavg"


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]) -> Any:
    return live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1}))


@pytest.fixture
def connect(server: Any) -> Iterator[Callable[..., RawClient]]:
    opened: list[RawClient] = []

    def one(site: str = "site-1", instance: str = "a") -> RawClient:
        opened.append(RawClient(server.address, RUN, site, instance))
        return opened[-1]

    yield one
    for client in opened:
        client.channel.close()


@pytest.fixture
def client(connect: Callable[..., RawClient]) -> RawClient:
    return connect().enroll()


def test_another_protocol_version_is_refused_naming_both(connect: Callable[..., RawClient]) -> None:
    hello = pb.EnrollRequest(
        caller=connect().caller,
        protocol_version=PROTOCOL_VERSION + 1,
        software_version="0.0.9",
        roles=[pb.ROLE_TRAINER],
    )
    code, text = refused(connect().say, "Enroll", hello)
    assert code is Code.FAILED_PRECONDITION
    assert f"protocol {PROTOCOL_VERSION + 1}" in text
    assert f"protocol {PROTOCOL_VERSION};" in text
    assert "protofed 0.0.9" in text


def test_a_daemon_without_a_run_waits_until_one_is_queued(
    server: Any, connect: Callable[..., RawClient], recipe_of: Callable[..., Recipe]
) -> None:
    site = connect().enroll()
    with Operator(server.address, NO_TLS) as operator:
        operator.abort(RUN, "enough")
        waiting = site.raw("Enroll", site.enrolment(wait_s=20.0).SerializeToString())
        assert not waiting.done()
        operator.start(recipe_of("fedavg").model_copy(update={"name": "another"}))
    answer = pb.EnrollResponse.FromString(waiting.result())
    assert answer.assignment.run == "another"
    assert wire.is_idle("Enroll", site.enrolment(wait_s=20.0), waiting.result()) is False


def test_a_daemon_that_waits_for_a_run_is_told_of_a_list_of_partners_at_once(
    server: Any, connect: Callable[..., RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federation, "LONGEST_WAIT_S", 1e6)  # else it would be told when the wait is over
    partners = tuple(Partner(site, site, digit * 64) for site, digit in (("ann", "a"), ("bob", "b"), ("cleo", "c")))
    document = Consortium(1, "The Hub", partners).document
    site = connect().enroll()
    with Operator(server.address, NO_TLS) as operator:
        operator.abort(RUN, "enough")
        asking = site.enrolment(wait_s=1e5)
        asking.identity = "a" * 64
        waiting = site.raw("Enroll", asking.SerializeToString())
        assert not waiting.done()
        operator.offer_consortium(document)
    for answered in (waiting.result(), site.raw("Enroll", asking.SerializeToString()).result()):
        answer = pb.EnrollResponse.FromString(answered)
        assert (answer.WhichOneof("answer"), answer.consortium) == ("finished", document)


def test_a_daemon_that_does_not_wait_for_a_run_is_told_at_once_that_there_is_none(
    server: Any, connect: Callable[..., RawClient]
) -> None:
    """As one of 0.2.0 and one that ends with the runs."""
    site = connect().enroll()
    with Operator(server.address, NO_TLS) as operator:
        operator.abort(RUN, "enough")
    assert site.say("Enroll", site.enrolment(), timeout=10.0).WhichOneof("answer") == "finished"
    short = site.say("Enroll", site.enrolment(wait_s=0.05), timeout=10.0)
    assert short.WhichOneof("answer") == "finished"


def test_a_newer_daemon_fences_the_older(connect: Callable[..., RawClient], client: RawClient) -> None:
    newer = connect(instance="b").enroll()
    code, text = refused(client.task)
    assert code is Code.ABORTED
    assert "newer daemon" in text
    assert newer.task()


@pytest.mark.parametrize("bad", ["../../x", "", "сайт"])
def test_bad_ids_are_refused_before_anything_is_touched(
    bad: str, server: Any, connect: Callable[..., RawClient]
) -> None:
    before = sorted(server.blobs._folder.rglob("*"))
    client = connect(site=bad)
    assert refused(client.enroll)[0] is Code.INVALID_ARGUMENT
    assert refused(RawClient(server.address, bad).task)[0] is Code.INVALID_ARGUMENT
    assert sorted(server.blobs._folder.rglob("*")) == before


def test_empty_and_huge_messages_are_refused(client: RawClient) -> None:
    calls = [method.name for method in FEDERATION.methods]
    empty = [GetMessageClass(method.input_type)() for method in FEDERATION.methods]
    codes = [refused(client.say, call, message)[0] for call, message in zip(calls, empty, strict=True)]
    assert codes == [Code.INVALID_ARGUMENT] * 8
    assert refused(lambda: client.put("x", 0, bytes(8 << 20)))[0] is Code.RESOURCE_EXHAUSTED  # above the limit


def test_unforeseen_errors_show_an_incident_and_nothing_else(
    client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(RunQueue, "next_task", broken)
    code, text = refused(client.task)
    assert code is Code.INTERNAL
    assert text.startswith("internal error, incident ")
    assert "4711" not in text


def test_a_full_round_over_bare_calls(client: RawClient, server: Any) -> None:
    first = client.task()
    assert (first.kind, first.round, first.base_digest) == (pb.TASK_KIND_INITIALISE, 0, "")
    assert client.push(first, MODEL).verdict == pb.VERDICT_ACCEPTED
    fit = client.task()
    assert (fit.kind, fit.round) == (pb.TASK_KIND_FIT, 1)
    chunk = client.say("GetChunk", pb.GetChunkRequest(caller=client.caller, run=RUN, digest=fit.base_digest, index=0))
    assert codec.digest(chunk.data) == fit.base_digest
    receipt = client.push(fit, MODEL)
    assert receipt.verdict == pb.VERDICT_ACCEPTED
    again = client.push(fit, MODEL)
    assert (again.verdict, again.record_hash) == (pb.VERDICT_DUPLICATE, receipt.record_hash)


def test_another_sites_task_upload_and_blob_are_refused(client: RawClient, connect: Callable[..., RawClient]) -> None:
    task, data = client.task(), codec.encode(MODEL)
    upload = client.say("BeginUpload", client.announcement(task, data, MODEL)).upload.id
    other = connect(site="site-2").enroll()
    assert refused(lambda: other.push(task, MODEL))[0] is Code.INVALID_ARGUMENT
    assert refused(lambda: other.put(upload, 0, data))[0] is Code.FAILED_PRECONDITION
    client.push(task, MODEL)
    base, third = client.task().base_digest, connect(site="site-3").enroll()
    request = pb.GetChunkRequest(caller=third.caller, run=RUN, digest=base, index=0)
    assert refused(lambda: third.say("GetChunk", request))[0] is Code.PERMISSION_DENIED


def test_chunks_are_checked_one_by_one(client: RawClient) -> None:
    task, data = client.task(), codec.encode(MODEL)
    upload = client.say("BeginUpload", client.announcement(task, data, MODEL)).upload.id
    assert refused(lambda: client.put(upload, 0, data, checksum=1))[0] is Code.DATA_LOSS
    assert refused(lambda: client.put(upload, 7, data))[0] is Code.DATA_LOSS
    assert refused(lambda: client.put(upload, 0, data[:-1]))[0] is Code.DATA_LOSS
    assert refused(lambda: client.put("never-started", 0, data))[0] is Code.FAILED_PRECONDITION
    code, text = refused(lambda: client.commit(task, upload))
    assert code is Code.FAILED_PRECONDITION
    assert "the first is 0" in text


def test_a_contradiction_is_logged_once_however_often_it_comes(client: RawClient) -> None:
    task, data = client.task(), codec.encode(MODEL)
    upload = client.say("BeginUpload", client.announcement(task, data, MODEL)).upload.id
    for _ in range(2):
        client.put(upload, 0, data)
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            code, text = refused(lambda: client.put(upload, 0, bytes(len(data))))
            assert (code, text) == (Code.ALREADY_EXISTS, "chunk 0 was sent before with other bytes")
    assert [line["event"] for line in logs].count("equivocation") == 1


def test_a_site_that_begins_too_much_is_told_what_to_do(client: RawClient) -> None:
    task, data = client.task(), codec.encode(MODEL)
    messages = [client.announcement(task, data, MODEL, digest=codec.digest(bytes([number]))) for number in range(5)]
    for message in messages[:4]:
        client.say("BeginUpload", message)
    code, text = refused(lambda: client.say("BeginUpload", messages[4]))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "4 uploads of this site are unfinished; commit one of them" in text


def test_a_verdict_forgets_what_else_was_started_for_the_task(client: RawClient, server: Any) -> None:
    task, data = client.task(), codec.encode(MODEL)
    other = client.announcement(task, data, MODEL, digest=codec.digest(b"other"))
    upload = client.say("BeginUpload", other).upload.id
    assert client.push(task, MODEL).verdict == pb.VERDICT_ACCEPTED
    assert refused(lambda: client.put(upload, 0, data))[0] is Code.FAILED_PRECONDITION
    assert list((server.blobs._folder / "uploads").iterdir()) == []


class Idle:
    """Runs of which a server asks nothing but the time."""

    finished = False
    current = None
    certificates: Any = None
    metrics = ServerMetrics()

    def tick(self) -> None:
        """Nothing happens."""

    def enroll(self, *_: Any) -> None:
        raise DiskFailureError("cannot write /state: Input/output error")


def test_a_failed_disk_ends_the_server_without_a_word_of_it_to_the_peer(tmp_path: Path) -> None:
    said: list[tuple[grpc.StatusCode, str]] = []

    def call(address: str) -> None:
        client = RawClient(address, RUN)
        said.append(refused(client.enroll))
        client.channel.close()

    async def main() -> None:
        audit = ServerAudit(tmp_path / AUDIT_FILE)
        with ThreadPoolExecutor(1) as peer:

            def started(address: str) -> None:
                peer.submit(call, address)

            runs: Any = Idle()
            await serve(
                Served(runs, runs, FolderBlobs(tmp_path), audit, Executors(), TaskNotifier(), None),
                "127.0.0.1:0",
                asyncio.Event(),
                started=started,
                until_finished=False,
            )

    with pytest.raises(DiskFailureError, match="Input/output error"):
        asyncio.run(main())
    assert said == [(Code.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later")]


def test_deadlines_do_not_wait_for_the_threads_that_read_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are busy, as while whole updates are examined on a slow disk."""
    monkeypatch.setattr("protofed.server.rpc.server.TICK_S", 0.001)
    monkeypatch.setattr("protofed.server.rpc.server.COLLECT_EVERY_S", 0.0)
    executors, let_go, ticks = Executors(), threading.Event(), []
    busy = [executors.transfer.submit(let_go.wait, 20) for _ in range(8)]

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        class Ticking(Idle):
            def tick(self) -> None:
                ticks.append(loop.time())
                if len(ticks) == 5:
                    let_go.set()
                    loop.call_soon_threadsafe(stop.set)

        runs: Any = Ticking()
        served = Served(
            runs, runs, FolderBlobs(tmp_path), ServerAudit(tmp_path / AUDIT_FILE), executors, TaskNotifier(), None
        )
        await serve(served, "127.0.0.1:0", stop, started=lambda _: None, until_finished=False)

    asyncio.run(main())
    assert all(job.result() for job in busy), "the ticks let them go; else they would have gone by themselves"


def test_a_disk_that_fails_while_abandoned_uploads_are_removed_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise DiskFailureError("cannot write /state: Input/output error")

    monkeypatch.setattr(Uploads, "collect", broken)
    runs: Any = Idle()
    audit = ServerAudit(tmp_path / AUDIT_FILE)
    served = Served(runs, runs, FolderBlobs(tmp_path), audit, Executors(), TaskNotifier(), None)
    with pytest.raises(DiskFailureError, match="Input/output error"):
        asyncio.run(serve(served, "127.0.0.1:0", asyncio.Event(), started=lambda _: None, until_finished=False))


def test_an_upload_goes_on_where_it_broke_off(client: RawClient) -> None:
    big = {**MODEL, Part.BODY: {"w": np.zeros((1 << 20, 1), dtype=np.float32)}}
    task, data = client.task(), codec.encode(big)
    announced = client.announcement(task, data, big)
    upload = client.say("BeginUpload", announced).upload
    client.put(upload.id, 1, data[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert list(client.say("BeginUpload", announced).upload.received_chunks) == [1]


def test_bytes_that_are_not_what_was_announced_never_count(client: RawClient) -> None:
    task, data = client.task(), codec.encode(MODEL)
    upload = client.say("BeginUpload", client.announcement(task, data, MODEL)).upload.id
    client.put(upload, 0, bytes(len(data)))
    assert refused(lambda: client.commit(task, upload))[0] is Code.DATA_LOSS
    assert client.task().task_id == task.task_id


@pytest.mark.parametrize(
    "changes",
    [{"run": "other"}, {"digest": "0" * 64}],
    ids=lambda c: next(iter(c)),
)
def test_a_commit_that_names_something_else_than_its_upload_is_refused(
    client: RawClient, changes: dict[str, Any]
) -> None:
    task, data = client.task(), codec.encode(MODEL)
    ticket = client.say("BeginUpload", client.announcement(task, data, MODEL))
    client.put(ticket.upload.id, 0, data)
    code, text = refused(lambda: client.commit(task, ticket.upload.id, **changes))
    assert (code, text.startswith("this names another run")) == (Code.INVALID_ARGUMENT, True)
    assert client.commit(task, ticket.upload.id).verdict == pb.VERDICT_ACCEPTED


def test_an_update_of_another_shape_is_invalid_before_a_byte_is_sent(client: RawClient) -> None:
    client.push(client.task(), MODEL)
    fit = client.task()
    receipt = client.push(fit, {**MODEL, Part.HEAD: {"weight": np.ones((3, 10), dtype=np.float32)}})
    assert receipt.verdict == pb.VERDICT_REFUSED
    assert receipt.reason == "head/weight is float32 [3, 10], expected float32 [10, 3]"
