"""Faults of audit logs: there is no room for one, or somebody changed one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.conftest import Mount
from tests.support.command_line import called
from tests.support.processes import Processes
from tests.support.raw_client import MODEL, RawClient, refused

from protofed.client.transport.audit import ClientAudit as SiteAudit
from protofed.common import codec, failpoint
from protofed.common.config.recipe import Recipe
from protofed.common.storage.journal import SEGMENT_BYTES, Journal, Record, records, segments, verify
from protofed.protos.v1 import federation_pb2 as pb

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
PAGE = 4096  # what a file system in memory gives at a time
Tamper = Callable[[list[bytes]], list[bytes]]


# Row 89


class Room:
    """A small disk with nothing but an audit log."""

    def __init__(self, folder: Path) -> None:
        self.log, self._filler = folder / "audit.jsonl", folder / "filler"

    def fill(self) -> None:
        """Leave none, but for what the log's last page still has."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        assert os.statvfs(self._filler).f_bfree == 0

    def free(self) -> None:
        """Give it back."""
        self._filler.unlink()

    @property
    def left(self) -> int:
        """Bytes of the log's last page."""
        return -self.log.stat().st_size % PAGE


@pytest.fixture
def room(tmp_path: Path, mount: Mount) -> Room:
    """Where a server's audit log is that starts in `server`; everything else of it has a disk of its own."""
    mount(tmp_path / "small", "size=1m")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "audit.jsonl").symlink_to(tmp_path / "small" / "audit.jsonl")
    return Room(tmp_path / "small")


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], room: Room) -> Any:
    """Waits for one site's first model."""
    return live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1.0, "heartbeat_s": 0.1}))


@pytest.fixture
def site(server: Any) -> Iterator[RawClient]:
    """Enrolled."""
    bare = RawClient(server.address, "small-fedavg")
    yield bare.enroll()
    bare.channel.close()


def beat(site: RawClient) -> Any:
    return site.say("Heartbeat", pb.HeartbeatRequest(caller=site.caller, run=site.run, activity=pb.ACTIVITY_TRAINING))


def uploaded(site: RawClient, task: pb.Task) -> str:
    """Everything of an update but its commit."""
    data = codec.encode(MODEL)
    upload: str = site.say("BeginUpload", site.announcement(task, data, MODEL)).upload.id
    site.put(upload, 0, data)
    return upload


def accepted(server: Any, site: RawClient, task: pb.Task) -> int:
    """Updates of the task's round in the ledger."""
    return len(server.ledger.updates(site.run, task.round, 1))


def recorded(room: Room) -> list[str]:
    """Calls that were answered, in order."""
    return [str(record.facts["call"]) for record in records(room.log) if record.event == "call"]


def gap(room: Room) -> Any:
    """What the log says of the time when it was full."""
    (found,) = [record.facts for record in records(room.log) if record.event == "resumed"]
    return found


def test_row_89_while_the_audit_log_is_full_no_call_acts(server: Any, site: RawClient, room: Room) -> None:
    task = site.task()
    upload = uploaded(site, task)
    room.fill()
    while room.left > 1:  # as long as records find room
        try:
            beat(site)
        except grpc.RpcError as error:
            assert error.code() is FULL  # noqa: PT017
            break
    calls = len(recorded(room))
    for _ in range(3):
        code, text = refused(site.commit, task, upload)
        assert code is FULL
        assert "cannot store anything now" in text
    assert accepted(server, site, task) == 0, "nothing half-done"
    assert len(recorded(room)) == calls, "nothing answered"
    room.free()
    assert site.commit(task, upload).verdict == pb.VERDICT_ACCEPTED
    assert accepted(server, site, task) == 1
    assert recorded(room)[calls:] == ["CommitUpload"]
    assert gap(room)["refused"] == {"CommitUpload": 3}
    assert verify(room.log) > calls


def test_row_89_what_acted_when_the_log_was_suddenly_full_is_not_answered_and_told_later(
    server: Any, site: RawClient, room: Room
) -> None:
    task = site.task()
    upload = uploaded(site, task)
    while room.left > 700:  # a commit's record has more, a heartbeat's has less
        beat(site)
    room.fill()
    assert refused(site.commit, task, upload)[0] is FULL
    assert accepted(server, site, task) == 1, "this is known only behind the act"
    assert refused(site.push, task)[0] is FULL
    room.free()
    assert site.push(task).verdict == pb.VERDICT_DUPLICATE, "the stored receipt, now that it can be recorded"
    assert accepted(server, site, task) == 1
    assert gap(room) == {"unrecorded": {"CommitUpload": 1}, "refused": {"BeginUpload": 1}}


# Row 92


def newest(lines: list[bytes]) -> str:
    return str(json.loads(lines[-1])["hash"])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A site's, of nine records."""
    journal = Journal(tmp_path / "audit.jsonl")
    audit = SiteAudit(journal)
    for number in range(9):
        audit.sent("fl.example.org:7443", "ab" * 32, "PutChunk", {"index": number, "upload": "u"}, b"%d" % number)
    journal.close()
    return tmp_path / "audit.jsonl"


@pytest.fixture
def verifier(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`protofed audit verify`: exit code, and all that it says."""

    def run(*arguments: object) -> tuple[int, str]:
        code, *said = called(capfd, "audit", "verify", *arguments)
        return code, "".join(said)

    return run


def edited(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4].replace(b'"PutChunk"', b'"Enroll"'), *lines[5:]]


def edited_and_sealed(lines: list[bytes]) -> list[bytes]:
    """By somebody who knows how hashes are made; the record behind no longer follows."""
    said = json.loads(lines[3])
    return [*lines[:3], Record(said["seq"], said["at"], "sent", {}, said["prev"]).sealed().line(), *lines[4:]]


def put_in(lines: list[bytes]) -> list[bytes]:
    before = json.loads(lines[3])
    return [*lines[:4], Record(5, before["at"], "sent", {}, before["hash"]).sealed().line(), *lines[4:]]


TAMPERINGS: list[tuple[Tamper, int]] = [
    (edited, 5),
    (edited_and_sealed, 5),
    (put_in, 6),
    (lambda lines: [*lines[:4], *lines[5:]], 5),  # removed
    (lambda lines: lines[1:], 1),
    (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], 5),  # swapped
    (lambda lines: [*lines[:4], lines[4][:50] + b"\n", *lines[5:]], 5),
]


@pytest.mark.parametrize(("tamper", "first"), TAMPERINGS)
def test_row_92_the_first_bad_record_of_a_changed_log_is_named(
    log: Path, verifier: Callable[..., tuple[int, str]], tamper: Tamper, first: int
) -> None:
    assert verifier(log)[0] == 0
    log.write_bytes(b"".join(tamper(log.read_bytes().splitlines(keepends=True))))
    code, said = verifier(log)
    assert code == 1
    assert f"line {first}: record {first} is not what was written there" in said


def test_row_92_a_log_that_was_cut_off_lacks_the_hash_of_before(
    log: Path, verifier: Callable[..., tuple[int, str]]
) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    before, earlier = newest(lines), newest(lines[:5])
    assert before in verifier(log, "--expect", before)[1]
    log.write_bytes(b"".join(lines[:6]))
    assert verifier(log)[0] == 0, "the end alone tells nothing"
    code, said = verifier(log, "--expect", before)
    assert code == 1
    assert f"no record has the hash {before}" in said
    assert "ends with record 6" in said
    assert verifier(log, "--expect", earlier)[0] == 0, "up to there nothing was changed"


# A log whose next line begins a new segment


@pytest.fixture
def nearly_full() -> Callable[[Path], int]:
    """Fills a log's first segment; returns its number of records."""

    def fill(path: Path) -> int:
        journal = Journal(path)
        while path.stat().st_size < SEGMENT_BYTES:
            journal.append("server", why="x" * 4_000_000)
        journal.close()
        return verify(path)

    return fill


@pytest.mark.parametrize(("killed", "point"), list(zip(("server", "site-1"), failpoint.JOURNAL, strict=True)))
def test_daemons_killed_while_a_segment_begins_finish_the_run_with_whole_logs(
    tmp_path: Path, nearly_full: Callable[[Path], int], recipe_of: Callable[..., Recipe], killed: str, point: str
) -> None:
    processes = Processes.of(tmp_path, recipe_of("fedavg", rounds=1, federation={"min_sites": 1, "quorum": 1.0}))
    fails = f"{point}=kill"
    filled = nearly_full(tmp_path / killed / "audit.jsonl")
    try:
        server = processes.server(fails=fails if killed == "server" else "")
        site = processes.site("site-1", "--partition-index=0", fails=fails if killed == "site-1" else "")
        victim = server if killed == "server" else site
        assert victim.wait(60) == -signal.SIGKILL, processes.logs()
        if killed == "server":
            server = processes.server()
        else:
            site = processes.site("site-1", "--partition-index=0")
        assert server.wait(90) == site.wait(90) == 0, processes.logs()
    finally:
        processes.end()
    for name in ("server", "site-1"):
        assert verify(tmp_path / name / "audit.jsonl") > 0
    log = tmp_path / killed / "audit.jsonl"
    assert [segment.number for segment in segments(log)] == [1, 2]
    assert verify(log) > filled + 1


def test_a_chunk_that_is_put_again_and_again_does_not_fill_the_log(
    live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]
) -> None:
    server = live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1.0, "heartbeat_s": 0.1}))
    site = RawClient(server.address, "small-fedavg").enroll()
    upload = uploaded(site, site.task())
    before = server.audit_file.stat().st_size
    for _ in range(300):
        site.put(upload, 0, codec.encode(MODEL))
    assert server.audit_file.stat().st_size == before
    site.channel.close()
