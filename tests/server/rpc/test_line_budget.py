"""Which calls of the server's audit log share a line: no caller fills the disk, and none goes uncounted."""

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
from protofed.server.rpc import audit
from protofed.server.rpc.audit import DAY_BYTES, DAY_S, EVERY_S, IDLE_EVERY_S, AuditEntry, LineBudget, ServerAudit

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


def put(index: int = 0, upload: str = "u.d", **more: Any) -> AuditEntry:
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
def test_the_chunks_of_a_transfer_have_one_line_before_the_next_call(log: Log, made: Any, peer: Peer) -> None:
    chunks = [made(number % 400, peer=peer) for number in range(500)]  # some of them again
    log.note(*chunks)
    assert log.told() == []
    log.note(beat(peer=peer), beat(2, peer=peer))
    line, *beats = log.told()
    assert (line["call"], line["calls"], line["code"]) == (chunks[0].call, 500, "OK")
    assert line["bytes"] == sum(len(chunk.request) for chunk in chunks)
    assert line["answer_bytes"] == sum(len(chunk.reply) for chunk in chunks)
    assert line["digest"] == "d"
    assert line["peer"]["fingerprint"] == peer.fingerprint
    assert line["facts"].items() >= {"site": "ann"}.items()
    assert [facts["call"] for facts in beats] == ["Heartbeat"] * 2


WAIT = pb.NextTaskResponse(wait=pb.Wait(retry_after_s=1.0)).SerializeToString()
NO_RUN = pb.EnrollResponse(finished=pb.Finished(reason="no run is queued", last=True)).SerializeToString()


def enroll(peer: Peer = ANN, wait_s: float = 0.0, instance: str = "0a", **more: Any) -> AuditEntry:
    caller = pb.Caller(site="ann", instance=instance)
    return entry("Enroll", pb.EnrollRequest(caller=caller, wait_s=wait_s, **more), peer, reply=NO_RUN)


def idle(peer: Peer = ANN) -> list[AuditEntry]:
    """The calls of a daemon that has nothing to do."""
    caller = pb.Caller(site="ann", instance="0a")
    return [
        enroll(peer, wait_s=20.0),
        entry("NextTask", pb.NextTaskRequest(caller=caller, run="r", wait_s=20.0), peer, reply=WAIT),
        entry("Heartbeat", pb.HeartbeatRequest(caller=caller, run="r", activity=pb.ACTIVITY_IDLE), peer),
    ]


def test_the_calls_of_a_site_that_has_nothing_to_do_share_a_line_an_hour(log: Log) -> None:
    log.note(enroll(), enroll(BOB))
    log.note(*idle() * 100, *idle(BOB))
    log.clock.now += IDLE_EVERY_S - 1
    log.note(beat())
    assert (log.told("counted"), len(log.told())) == ([], 3)
    log.clock.now += 1
    log.note(beat())
    counted = log.told("counted")
    assert [facts["peer"]["name"] for facts in counted] == ["ann", "bob"]
    assert counted[0]["calls"] == {"Enroll OK": 100, "NextTask OK": 100, "Heartbeat OK": 100}


@pytest.mark.parametrize(
    "more", [{"instance": "0b"}, {"roles": [pb.ROLE_EVALUATOR]}, {"pause_reason": pb.PAUSE_REASON_APPROVAL}], ids=str
)
def test_an_enroll_that_fences_a_daemon_or_says_something_new_has_its_own_line_also_if_it_waits(
    more: dict[str, Any], log: Log
) -> None:
    log.note(
        enroll(), enroll(wait_s=20.0), enroll(wait_s=20.0, **more), enroll(wait_s=15.0, **more), enroll(wait_s=20.0)
    )
    assert len(log.told()) == 3  # the first, the other one, and the first one back


def test_a_daemon_that_waits_for_its_approval_has_a_line_for_each_run_that_it_is_offered(log: Log) -> None:
    def offered(run: str, pause_reason: Any = pb.PAUSE_REASON_APPROVAL) -> AuditEntry:
        reply = pb.EnrollResponse(assignment=pb.Assignment(run=run, recipe="{}")).SerializeToString()
        request = pb.EnrollRequest(caller=pb.Caller(site="ann", instance="0a"), pause_reason=pause_reason)
        return entry("Enroll", request, reply=reply)

    log.note(offered("r"), *[offered("r")] * 50, offered("s"), offered("s"))
    assert len(log.told()) == 2
    takes_tasks = offered("s", pb.PAUSE_REASON_UNSPECIFIED)
    log.note(takes_tasks, takes_tasks)  # each has a line
    assert len(log.told()) == 4
    log.clock.now += IDLE_EVERY_S
    log.note(beat())
    assert log.told("counted")[0]["calls"] == {"Enroll OK": 51}


def test_a_flood_beside_idle_calls_is_counted_within_the_minute(log: Log) -> None:
    log.note(enroll())
    log.note(*idle())
    log.budget.charge(ANN, DAY_BYTES + 10**9)
    log.note(beat())
    log.clock.now += EVERY_S
    log.note(beat(peer=BOB))
    assert [facts["calls"]["Heartbeat OK"] for facts in log.told("counted")] == [2]


@pytest.mark.parametrize(
    "call",
    [
        entry("Enroll", pb.EnrollRequest(), reply=NO_RUN),  # a daemon's first, which may fence another, does not wait
        entry(
            "Enroll",
            pb.EnrollRequest(wait_s=20.0),
            reply=pb.EnrollResponse(assignment=pb.Assignment()).SerializeToString(),
        ),
        entry("NextTask", pb.NextTaskRequest(), reply=pb.NextTaskResponse(task=pb.Task()).SerializeToString()),
        entry("NextTask", pb.NextTaskRequest(), reply=pb.NextTaskResponse(finished=pb.Finished()).SerializeToString()),
        entry("NextTask", pb.NextTaskRequest(), code="ABORTED"),
        entry("Heartbeat", pb.HeartbeatRequest(activity=pb.ACTIVITY_TRAINING)),
        entry("Heartbeat", pb.HeartbeatRequest(activity=pb.ACTIVITY_IDLE), code="CANCELLED"),
    ],
    ids=lambda call: f"{call.call}-{call.code}-{len(call.reply)}",
)
def test_a_call_that_says_or_is_told_anything_has_its_own_line(call: AuditEntry, log: Log) -> None:
    log.note(call)
    assert [facts["call"] for facts in log.told()] == [call.call]


def test_what_a_site_moved_stands_before_the_receipt_in_the_same_write(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.note(*[put(number) for number in range(20)])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    commit = pb.CommitRequest(caller=pb.Caller(site="ann"), run="r", round=1)
    log.note(entry("CommitUpload", commit, reply=ACCEPTED))
    assert [(facts["call"], facts.get("calls")) for facts in log.told()] == [("PutChunk", 20), ("CommitUpload", None)]
    assert len(synced) == 1


def test_a_call_of_another_site_leaves_a_transfer_open(log: Log) -> None:
    log.note(put(0), get(0), beat(peer=BOB), put(1), get(1))
    assert [facts["call"] for facts in log.told()] == ["Heartbeat"]
    log.note(entry("Heartbeat", pb.HeartbeatRequest(caller=pb.Caller(site="bob")), peer=ANN))
    assert len(log.told()) == 2, "one host's certificate, in the name of another site"
    log.note(beat())
    assert [facts["calls"] for facts in log.told() if "calls" in facts] == [2, 2]


def test_other_blobs_have_lines_of_their_own_and_each_refused_chunk_has(log: Log) -> None:
    log.note(*[put(instance=f"{number:02x}") for number in range(7)])  # other instances of a daemon go on with it
    log.clock.now += EVERY_S
    log.note(beat(peer=BOB))  # within the minute, without another call of its own
    assert [facts.get("calls") for facts in log.told()] == [7, None]
    log.note(*[put(0, f"u{number}.d") for number in range(5)], get(0), get(1), get(0, "other"))
    log.note(*[put(0, code="ALREADY_EXISTS") for _ in range(3)], put(0, peer=BOB))
    log.audit.close()  # a server that is stopped writes its transfers
    lines = log.told()[2:]
    assert [facts["code"] for facts in lines].count("ALREADY_EXISTS") == 3
    assert len(lines) == 5 + 2 + 3 + 1


def test_a_certificate_above_its_lines_of_a_day_is_counted_and_others_are_not(log: Log) -> None:
    log.note(beat(peer=BOB))
    assert 200 < DAY_BYTES - log.budget._bucket(BOB).bytes_left <= log.path.stat().st_size
    log.budget.charge(ANN, 2 * DAY_BYTES)
    log.note(*[beat(number) for number in range(50)], beat(peer=PLAINTEXT))
    assert [facts["peer"]["name"] for facts in log.told()] == ["bob", ""]
    invented = [entry(f"Invented{number}", pb.HeartbeatRequest(), code="UNIMPLEMENTED") for number in range(300)]
    log.note(*invented)
    log.clock.now += DAY_S * 0.99
    log.note(beat())
    log.clock.now += DAY_S * 0.02  # the budget comes back within a day
    log.note(beat(2))
    assert [facts["facts"]["epoch"] for facts in log.told()][2:] == [2]
    log.audit.close()
    counted = [facts["calls"] for facts in log.told("counted")]
    assert sum(calls.get("Heartbeat OK", 0) for calls in counted) == 51
    assert max(map(len, counted)) <= audit.MAX_NAMES + 1
    assert sum(sum(calls.values()) for calls in counted) == 351


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
    monkeypatch.setattr(audit, "DAY_BYTES", 100_000)
    for _ in range(24):
        log.clock.now += DAY_S / 24
        log.note(*[beat(number) for number in range(100)])
    lines = 2 * 100_000 + 24 * 600  # what was there at once, what came back, and the counts
    assert log.path.stat().st_size < 1.6 * lines < 24 * 100 * 500
    assert sum(sum(facts["calls"].values()) for facts in log.told("counted")) + len(log.told()) > 2200


@pytest.mark.parametrize("over", [0, DAY_BYTES])
def test_what_cannot_be_written_is_kept(log: Log, monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    log.budget.charge(ANN, over)
    log.note(put(), put())
    log.clock.now += EVERY_S
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutOfSpaceError):
            log.note(beat(1, peer=BOB))
    assert log.told("counted") == log.told() == []
    asyncio.run(log.audit.ready("Heartbeat"))
    log.note(beat(2, peer=BOB))
    if over:
        assert [facts["calls"] for facts in log.told("counted")] == [{"PutChunk OK": 2}]
    else:
        assert [facts["calls"] for facts in log.told() if facts["call"] == "PutChunk"] == [2]


def test_counts_are_written_by_themselves(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.server.rpc.audit.EVERY_S", 0.01)

    async def scenario() -> None:
        for _ in range(2):
            await log.audit.note(put())
        log.clock.now += EVERY_S
        started = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, started.set)  # timers fire in the order of their times
        await started.wait()
        assert log.audit._counting is not None
        await log.audit._counting

    asyncio.run(scenario())
    assert [facts["calls"] for facts in log.told()] == [2]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_TRANSFERS", 10)
    monkeypatch.setattr(audit, "MAX_PEERS", 10)
    budget = LineBudget(Clock())
    for number in range(50):
        assert not budget.admits(put(number, peer=Peer(f"{number}", "site", "x")))
    assert (len(budget.take_transfers((), 0.0)), len(budget._buckets)) == (10, 10)
    assert sum(sum(counts.calls.values()) for counts in budget.take(everything=True)) == 40, "none goes uncounted"
