"""A site's audit log: a line before each message, many under one fsync, and nothing goes on without its line."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.audit_logs import MemoryAuditLog

from protofed.client.state.disk_store import DiskStore
from protofed.client.transport.audit import FILE, PLAINTEXT, ClientAudit
from protofed.common.codec import digest
from protofed.common.errors import DiskFailureError, OutOfSpaceError, PolicyViolationError
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.storage.journal import Journal, records, verify

SOON = 10.0


def send(audit: ClientAudit, message: bytes = b"message") -> None:
    audit.sent("fl.test:7443", PLAINTEXT, "PutChunk", {"site": "ann", "upload": "u1", "data": "7 bytes"}, message)


def test_a_line_says_where_who_what_how_much_and_which_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE)
    send(ClientAudit(journal))
    journal.close()
    (line,) = records(tmp_path / FILE)
    assert line.event == "sent"
    assert line.facts == {
        "server": "fl.test:7443",
        "certificate": "plaintext",
        "call": "PutChunk",
        "facts": {"site": "ann", "upload": "u1", "data": "7 bytes"},
        "bytes": 7,
        "digest": digest(b"message"),
    }


def test_answers_refusals_and_servers_are_told() -> None:
    kept = MemoryAuditLog()
    audit = ClientAudit(kept)
    audit.answered("CommitUpload", digest(b"message"), verdict="accepted")
    audit.answered("CommitUpload", digest(b"message"), code="ABORTED")
    audit.refused(Task(TaskKind.FIT, "run", 3, "n1", None, 0, 1.0), PolicyViolationError("part 'head' may not leave"))
    audit.server("fl.test:7443", "server-name", "ab", "another name")
    told = digest(b"message")
    assert kept.lines == [
        ("answered", {"call": "CommitUpload", "digest": told, "verdict": "accepted"}),
        ("answered", {"call": "CommitUpload", "digest": told, "code": "ABORTED"}),
        ("refused", {"run": "run", "round": 3, "task_id": "n1", "why": "part 'head' may not leave"}),
        ("server", {"server": "fl.test:7443", "finding": "server-name", "certificate": "ab", "why": "another name"}),
    ]


@pytest.mark.parametrize("error", [OutOfSpaceError("full"), DiskFailureError("broken"), ValueError("too long")])
def test_what_cannot_be_written_is_not_taken_for_written(error: Exception) -> None:
    kept = MemoryAuditLog(failing=[error])
    audit = ClientAudit(kept)
    with pytest.raises(type(error)):
        send(audit)
    send(audit)
    assert len(kept.lines) == 1


class Slow(MemoryAuditLog):
    """Writes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go = threading.Event(), threading.Event()

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.started.set()
        assert self.go.wait(SOON)
        super().append_all(entries)


def three_behind_one(
    slow: Slow, audit: ClientAudit, pool: ThreadPoolExecutor, failing: Sequence[Exception] = ()
) -> list[Future[None]]:
    """The first of four threads writes, and the others have queued."""
    calls = [pool.submit(send, audit, b"first")]
    assert slow.started.wait(SOON)
    calls += [pool.submit(send, audit, b"%d" % index) for index in range(3)]
    while len(audit._queue) < 3:
        assert not any(call.done() for call in calls)
    slow.failing = list(failing)
    slow.go.set()
    return calls


def test_lines_that_come_at_the_same_time_share_a_write() -> None:
    slow = Slow()
    with ThreadPoolExecutor(4) as pool:
        for call in three_behind_one(slow, ClientAudit(slow), pool):
            call.result(SOON)
    assert slow.writes == 2
    assert {facts["digest"] for facts in slow.of("sent")} == {digest(said) for said in (b"first", b"0", b"1", b"2")}


def test_a_shared_write_that_fails_fails_for_all_that_shared_it() -> None:
    slow = Slow()
    with ThreadPoolExecutor(4) as pool:
        calls = three_behind_one(slow, ClientAudit(slow), pool, [OutOfSpaceError("full") for _ in range(4)])
        assert [type(call.exception(SOON)) for call in calls] == [OutOfSpaceError] * 4
    assert slow.lines == []


def test_whoever_shares_a_write_that_was_interrupted_does_not_go_on() -> None:
    class Interrupted(Slow):
        def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
            super().append_all(entries)
            if self.writes == 2:
                raise KeyboardInterrupt

    slow = Interrupted()
    with ThreadPoolExecutor(4) as pool:
        found = [type(call.exception(SOON)) for call in three_behind_one(slow, ClientAudit(slow), pool)]
    assert found[0] is type(None)
    assert sorted(kind.__name__ for kind in found[1:]) == ["DiskFailureError", "DiskFailureError", "KeyboardInterrupt"]


def test_many_threads_leave_an_unbroken_chain(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE)
    audit = ClientAudit(journal)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: send(audit, b"%d" % index), range(200)))
    journal.close()
    assert verify(tmp_path / FILE) == 200
    assert {line.facts["digest"] for line in records(tmp_path / FILE)} == {
        digest(b"%d" % index) for index in range(200)
    }


def test_a_state_folder_that_was_moved_takes_no_line_and_is_not_made_anew(tmp_path: Path) -> None:
    """A daemon went on in a new folder, without lock, secret and identity; its lines went to the moved one."""
    store = DiskStore(tmp_path / "state")
    audit = ClientAudit(Journal(tmp_path / "state" / FILE), store.check)
    audit.policy("standard", digest(b"before"))
    (tmp_path / "state").rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(DiskFailureError, match="lock was moved, removed or replaced"):
            audit.policy("standard", digest(b"after"))
    assert not (tmp_path / "state").exists()
    assert verify(tmp_path / "moved" / FILE) == 1
