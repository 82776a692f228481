"""The server's audit log: no answer without its record, one fsync for many, and nothing acts while it is full."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protofed.common import codec
from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError
from protofed.common.storage import files
from protofed.common.storage.journal import Journal, Record, records
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.access.authorization import PLAINTEXT, Peer
from protofed.server.rpc.audit import MAX_NAMES, TRIAL_BYTES, AuditEntry, ServerAudit

ANN = Peer("ab" * 32, "site", "ann")


def entry(
    number: int = 1, *, call: str = "Heartbeat", peer: Peer = ANN, code: str = "OK", reply: bytes = b""
) -> AuditEntry:
    message = pb.HeartbeatRequest(caller=pb.Caller(site="ann", instance="0a"), run="r", epoch=number)
    return AuditEntry(call, peer, message.SerializeToString(), message, code, reply)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(path: Path) -> Iterator[ServerAudit]:
    made = ServerAudit(path)
    yield made
    made.close()


def epochs(path: Path) -> list[Any]:
    """Of all calls, in the order of their records."""
    return [fields(record)["epoch"] for record in records(path) if record.event == "call"]


def fields(record: Record) -> Any:
    return record.facts["facts"]


class Slow:
    """An fsync that waits until it may go on.

    Attributes:
        started: how many there were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self._began, self.go, self._real = 0, threading.Event(), threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, file: int) -> None:
        self.started += 1
        self._began.set()
        assert self.go.wait(timeout=20)
        self._real(file)

    async def first(self) -> None:
        """Until one has started."""
        assert await asyncio.to_thread(self._began.wait, 20)


@pytest.fixture
def slow(audit: ServerAudit, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.go.set()


class Disk:
    """Fails with `number` while it is not None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number: int | None = None
        self._real = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        return self._real(file, data)


@pytest.fixture
def disk(audit: ServerAudit, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


# What is recorded


def test_a_record_says_who_asked_what_and_what_was_answered(audit: ServerAudit, path: Path) -> None:
    sent = entry(3, reply=b"12345")
    asyncio.run(audit.note(sent))
    (record,) = records(path)
    assert record.event == "call"
    assert record.facts == {
        "peer": {"fingerprint": "ab" * 32, "party": "site", "name": "ann"},
        "call": "Heartbeat",
        "facts": {"site": "ann", "instance": "0a", "run": "r", "epoch": 3},
        "bytes": len(sent.request),
        "digest": codec.digest(sent.request),
        "code": "OK",
        "answer_bytes": 5,
    }


def test_what_could_not_be_parsed_is_recorded_by_size_and_digest_and_a_receipt_with_its_verdict(
    audit: ServerAudit, path: Path
) -> None:
    asyncio.run(audit.ready("CommitUpload"))  # which writes nothing while all is well
    asyncio.run(audit.note(AuditEntry("CommitUpload", PLAINTEXT, b"\xff\xff", None, "INVALID_ARGUMENT", b"")))
    receipt = pb.Receipt(verdict=pb.VERDICT_LATE, digest="0" * 64)
    asyncio.run(audit.note(entry(call="CommitUpload", reply=receipt.SerializeToString())))
    record, late = records(path)
    assert late.facts["verdict"] == "late"
    assert record.facts["facts"] == {}
    assert record.facts["bytes"] == 2
    assert record.facts["digest"] == codec.digest(b"\xff\xff")
    assert record.facts["code"] == "INVALID_ARGUMENT"
    assert record.facts["peer"] == {"fingerprint": "", "party": "plaintext", "name": ""}


def test_it_goes_on_behind_what_an_earlier_server_wrote(path: Path) -> None:
    for number in (1, 2):
        audit = ServerAudit(path)
        asyncio.run(audit.note(entry(number)))
        audit.close()
    assert epochs(path) == [1, 2]


def test_a_log_that_was_changed_is_refused(audit: ServerAudit, path: Path) -> None:
    asyncio.run(audit.note(entry(1)))
    path.write_bytes(path.read_bytes().replace(b'"ann"', b'"bob"'))
    with pytest.raises(StateError, match="last line"):
        ServerAudit(path)


# When


async def waiting(audit: ServerAudit, count: int) -> list[asyncio.Task[None]]:
    """Calls that ask for their records, one after the other."""
    tasks = []
    for number in range(1, count + 1):
        tasks.append(asyncio.create_task(audit.note(entry(number))))
        await asyncio.sleep(0)
    return tasks


def test_nobody_is_answered_before_the_record_is_durable(audit: ServerAudit, path: Path, slow: Slow) -> None:
    async def scenario() -> None:
        (task,) = await waiting(audit, 1)
        await slow.first()
        await asyncio.sleep(0.05)  # the event loop goes on
        assert not task.done()
        slow.go.set()
        await task
        assert epochs(path) == [1]

    asyncio.run(scenario())


def test_those_that_come_during_an_fsync_share_the_next_one_in_their_order(
    audit: ServerAudit, path: Path, slow: Slow
) -> None:
    async def scenario() -> None:
        tasks = await waiting(audit, 1)
        await slow.first()
        tasks += await waiting(audit, 64)
        slow.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())
    assert slow.started == 2
    assert epochs(path) == [1, *range(1, 65)]


def test_a_call_that_is_cut_short_is_recorded_all_the_same(audit: ServerAudit, path: Path, slow: Slow) -> None:
    async def scenario() -> None:
        first = await waiting(audit, 1)
        await slow.first()
        gone, stays = await waiting(audit, 2)
        gone.cancel()
        slow.go.set()
        await asyncio.gather(*first, stays)

    asyncio.run(scenario())
    assert epochs(path) == [1, 1, 2]


def test_what_waits_when_the_server_ends_is_written_once_and_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = ServerAudit(path)
    slow = Slow(monkeypatch)

    async def scenario() -> None:
        await waiting(audit, 1)
        await slow.first()
        await waiting(audit, 3)  # the loop ends now and cancels them all

    threading.Timer(0.1, slow.go.set).start()
    asyncio.run(scenario())
    audit.close()
    assert epochs(path) == [1, 1, 2, 3]


def test_messages_are_let_go_when_they_are_recorded_and_when_they_cannot_be(audit: ServerAudit, disk: Disk) -> None:
    async def scenario(number: int | None) -> Any:
        disk.number = number
        noted = entry()
        watched = weakref.ref(noted)
        assert await refused(audit.note(noted)) == (number is not None)
        del noted
        await asyncio.sleep(0.01)
        gc.collect()
        return watched()

    for number in (None, errno.ENOSPC):
        assert asyncio.run(scenario(number)) is None


# When nothing can be written


async def refused(doing: Awaitable[None]) -> bool:
    try:
        await doing
    except OutOfSpaceError:
        return True
    return False


def test_while_there_is_no_room_no_call_acts_and_then_the_log_says_so(
    audit: ServerAudit, path: Path, disk: Disk
) -> None:
    async def scenario() -> None:
        assert not await refused(audit.ready("CommitUpload"))
        await audit.note(entry(1))
        disk.number = errno.ENOSPC
        assert not await refused(audit.ready("CommitUpload")), "nobody knows yet"
        together = [audit.note(entry(2, call="CommitUpload")) for _ in range(5)]
        assert all(await asyncio.gather(*map(refused, together))), "so that no answer is given"
        for _ in range(3):
            assert await refused(audit.ready("BeginUpload"))
            assert await refused(audit.note(entry(2, call="BeginUpload", code="RESOURCE_EXHAUSTED")))
        assert epochs(path) == [1]
        disk.number = None
        assert not await refused(audit.ready("BeginUpload"))
        await audit.note(entry(3))

    asyncio.run(scenario())
    assert epochs(path) == [1, 3]
    (resumed,) = (record for record in records(path) if record.event == "resumed")
    assert resumed.facts == {"unrecorded": {"CommitUpload": 5}, "refused": {"BeginUpload": 3}}


def test_it_takes_more_than_room_for_one_record_to_go_on(
    audit: ServerAudit, path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, data: bytes) -> None:
        assert len(data) == TRIAL_BYTES
        raise OutOfSpaceError("a little more would fit")

    async def scenario() -> None:
        disk.number = errno.ENOSPC
        assert await refused(audit.note(entry(1)))
        disk.number = None
        with monkeypatch.context() as patch:
            patch.setattr(files, "write", full)
            assert await refused(audit.ready("CommitUpload"))
        assert not await refused(audit.ready("CommitUpload"))

    asyncio.run(scenario())
    assert [record.event for record in records(path)] == ["resumed"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_names_of_calls_that_peers_invent_are_bounded(audit: ServerAudit, path: Path, disk: Disk) -> None:
    async def scenario() -> None:
        disk.number = errno.ENOSPC
        for number in range(MAX_NAMES + 50):
            assert await refused(audit.note(entry(call=f"Invented{number}")))
        disk.number = None
        await audit.ready("CommitUpload")

    asyncio.run(scenario())
    (resumed,) = records(path)
    counted = resumed.facts["unrecorded"]
    assert isinstance(counted, dict)
    assert len(counted) == MAX_NAMES + 1
    assert counted["others"] == 50


def test_a_broken_disk_is_a_failure_that_ends_the_server(audit: ServerAudit, disk: Disk) -> None:
    async def scenario() -> None:
        disk.number = errno.EIO
        with pytest.raises(DiskFailureError):
            await audit.note(entry(1))
        with pytest.raises(DiskFailureError):
            await audit.ready("CommitUpload")

    asyncio.run(scenario())


def test_an_unforeseen_error_reaches_those_who_wait(
    audit: ServerAudit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("never thought of")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append_all", broken)
            with pytest.raises(ValueError, match="never thought of"):
                await audit.note(entry(1))
        await audit.note(entry(2))

    asyncio.run(scenario())
    assert epochs(path) == [2]


def test_what_cannot_be_written_at_the_end_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = ServerAudit(path)
    slow, disk = Slow(monkeypatch), Disk(monkeypatch)

    async def scenario() -> None:
        await waiting(audit, 1)
        await slow.first()
        await waiting(audit, 2)

    threading.Timer(0.1, slow.go.set).start()
    asyncio.run(scenario())
    audit._thread.shutdown()
    disk.number = errno.ENOSPC
    audit.close()
    assert epochs(path) == [1]
    assert "['Heartbeat', 'Heartbeat']" in capsys.readouterr().out
