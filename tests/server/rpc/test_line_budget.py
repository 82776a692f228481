"""Which calls the server's audit log has one by one: no caller fills the disk, and none goes uncounted."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protofed.common.errors import OutOfSpaceError
from protofed.common.storage.journal import records
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.access.authorization import PLAINTEXT, Peer
from protofed.server.rpc import line_budget
from protofed.server.rpc.audit import AuditEntry, ServerAudit
from protofed.server.rpc.line_budget import DAY_BYTES, DAY_S, EVERY_S, LineBudget

ANN, BOB = Peer("ab" * 32, "site", "ann"), Peer("cd" * 32, "site", "bob")
JO = Peer("0e" * 32, "operator", "jo")
ACCEPTED = pb.Receipt(verdict=pb.VERDICT_ACCEPTED, digest="0" * 64).SerializeToString()
DUPLICATE = pb.Receipt(verdict=pb.VERDICT_DUPLICATE, digest="0" * 64).SerializeToString()


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Log:
    """An audit log whose time is set by hand."""

    path: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.budget = LineBudget(self.clock)
        self.audit = ServerAudit(self.path, self.budget)

    def note(self, *entries: AuditEntry) -> None:
        async def scenario() -> None:
            for entry in entries:
                await self.audit.note(entry)

        asyncio.run(scenario())

    def told(self, event: str = "call") -> list[Any]:
        return [record.facts for record in records(self.path) if record.event == event]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "audit.jsonl")


def entry(call: str, message: Any, peer: Peer = ANN, code: str = "OK", reply: bytes = b"") -> AuditEntry:
    return AuditEntry(call, peer, message.SerializeToString(), message, code, reply)


def put(index: int = 0, upload: str = "u", **more: Any) -> AuditEntry:
    instance = more.pop("instance", "0a")
    chunk = pb.Chunk(caller=pb.Caller(site="ann", instance=instance), upload=upload, index=index, data=b"x" * 50)
    return entry("PutChunk", chunk, **more)


def get(index: int = 0, digest: str = "d", **more: Any) -> AuditEntry:
    return entry(
        "GetChunk", pb.GetChunkRequest(caller=pb.Caller(site="ann"), run="r", digest=digest, index=index), **more
    )


def beat(number: int = 1, **more: Any) -> AuditEntry:
    return entry("Heartbeat", pb.HeartbeatRequest(caller=pb.Caller(site="ann"), run="r", epoch=number), **more)


@pytest.mark.parametrize("made", [put, get])
@pytest.mark.parametrize("peer", [ANN, PLAINTEXT])
def test_a_chunk_that_is_repeated_has_one_line_and_is_counted_once_a_minute(log: Log, made: Any, peer: Peer) -> None:
    log.note(*[made(peer=peer) for _ in range(500)])
    assert len(log.told()) == 1
    assert log.told("counted") == []
    log.clock.now += EVERY_S
    log.note(beat(peer=peer))
    (counted,) = log.told("counted")
    call = made().call
    assert counted["calls"] == {f"{call} OK": 499}
    assert counted["bytes"] == 499 * len(made().request)
    assert counted["peer"]["fingerprint"] == peer.fingerprint
    log.clock.now += EVERY_S
    log.note(beat())
    assert len(log.told("counted")) == 1, "nothing was repeated since"


def test_another_instance_of_a_daemon_makes_a_repeated_chunk_no_new_one(log: Log) -> None:
    log.note(*[put(instance=f"{number:02x}") for number in range(20)])
    assert len(log.told()) == 1


def test_chunks_that_differ_and_refused_ones_have_lines(log: Log) -> None:
    log.note(*[put(number) for number in range(5)], *[put(0, f"u{number}") for number in range(5)])
    log.note(*[put(0, code="ALREADY_EXISTS") for _ in range(3)], put(0, peer=BOB), get(0), get(1), get(0, "other"))
    assert len(log.told()) == 17


def test_a_certificate_above_its_lines_of_a_day_is_counted_and_others_are_not(log: Log) -> None:
    log.budget.charge(ANN, DAY_BYTES)
    log.note(*[beat(number) for number in range(50)], beat(peer=BOB), beat(peer=PLAINTEXT))
    assert [facts["peer"]["name"] for facts in log.told()] == ["bob", ""]
    log.audit.close()
    assert [facts["calls"] for facts in log.told("counted")] == [{"Heartbeat OK": 50}]


def test_a_budget_comes_back_within_a_day(log: Log) -> None:
    log.budget.charge(ANN, 2 * DAY_BYTES)
    log.clock.now += DAY_S * 0.99
    log.note(beat(1))
    log.clock.now += DAY_S * 0.02
    log.note(beat(2))
    assert [facts["facts"]["epoch"] for facts in log.told()] == [2]


def test_lines_take_from_the_budget_what_they_have_in_the_log(log: Log) -> None:
    log.note(beat(1))
    left = log.budget._bucket(ANN).left
    assert 200 < DAY_BYTES - left <= log.path.stat().st_size


def test_accepted_updates_and_what_operators_do_always_have_lines(log: Log) -> None:
    for peer in (ANN, JO):
        log.budget.charge(peer, DAY_BYTES)
    commit = pb.CommitRequest(caller=pb.Caller(site="ann"), run="r", round=1)
    log.note(entry("CommitUpload", commit, reply=ACCEPTED), entry("CommitUpload", commit, reply=DUPLICATE))
    log.note(beat(peer=JO), beat(peer=JO, code="PERMISSION_DENIED"))
    assert [(facts["call"], facts["code"]) for facts in log.told()] == [("CommitUpload", "OK"), ("Heartbeat", "OK")]
    log.audit.close()
    counted = {facts["peer"]["name"]: facts["calls"] for facts in log.told("counted")}
    assert counted == {"ann": {"CommitUpload OK": 1}, "jo": {"Heartbeat PERMISSION_DENIED": 1}}


def test_a_day_of_repeated_calls_stays_within_the_budget(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_budget, "DAY_BYTES", 100_000)
    for _ in range(24):
        log.clock.now += DAY_S / 24
        log.note(*[put(number, f"u{log.clock.now}") for number in range(100)])
    lines = 2 * 100_000 + 24 * 600  # what was there at once, what came back, and the counts
    assert log.path.stat().st_size < 1.6 * lines < 24 * 100 * 500
    assert sum(sum(facts["calls"].values()) for facts in log.told("counted")) + len(log.told()) > 2200


def test_counts_that_cannot_be_written_are_kept(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    log.note(put(), put())
    log.clock.now += EVERY_S
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutOfSpaceError):
            log.note(beat(1))
    assert log.told("counted") == []
    asyncio.run(log.audit.ready("Heartbeat"))
    log.note(beat(2))
    assert [facts["calls"] for facts in log.told("counted")] == [{"PutChunk OK": 1}]


def test_counts_are_written_by_themselves(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.server.rpc.audit.EVERY_S", 0.01)

    async def scenario() -> None:
        for _ in range(2):
            await log.audit.note(put())
        log.clock.now += EVERY_S
        begun = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, begun.set)  # timers fire in the order of their times
        await begun.wait()
        assert log.audit._counting is not None
        await log.audit._counting

    asyncio.run(scenario())
    assert len(log.told("counted")) == 1


def test_names_of_calls_that_peers_invent_are_bounded(log: Log) -> None:
    log.budget.charge(ANN, DAY_BYTES)
    log.note(*[entry(f"Invented{number}", pb.HeartbeatRequest(), code="UNIMPLEMENTED") for number in range(300)])
    log.audit.close()
    (counted,) = log.told("counted")
    assert len(counted["calls"]) == line_budget.MAX_NAMES + 1
    assert sum(counted["calls"].values()) == 300


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_budget, "MAX_CHUNKS", 10)
    monkeypatch.setattr(line_budget, "MAX_PEERS", 10)
    budget = LineBudget(Clock())
    for number in range(50):
        assert budget.admits(put(number, peer=Peer(f"{number}", "site", "x")))
    assert (len(budget._chunks), len(budget._buckets)) == (10, 10)
