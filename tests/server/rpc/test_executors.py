"""Commits that wait for the coordinator are judged together, once their uploads are blobs and the folder is synced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from traceback import extract_tb
from typing import Any, cast

import pytest

from protofed.common.codec import Digest
from protofed.common.errors import DiskFailureError, IncompleteUploadError, OverQuotaError, ProtocolError, StateError
from protofed.common.protocol.messages import Manifest, Receipt, Verdict
from protofed.server.rounds.intake.intake import Commit
from protofed.server.rpc.executors import CommitGroups
from protofed.server.storage.blobs import Upload

NOTHING = Manifest((), 0, Digest("0" * 64))
OTHER = Manifest((), 0, Digest("1" * 64))


class Server:
    """What a group is judged by; site `bad` is refused, `gone` has no upload, and `late` comes too late."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.judged: list[str] = []  # of what it did
        self.fails: Exception | None = None
        self.in_rows: set[Digest] = set()

    def verdict_if_closed(self, site: str, *_: Any) -> Receipt | None:
        return Receipt(Verdict.LATE, site, Digest("d"), "") if site == "late" else None

    def named(self, among: Collection[Digest]) -> set[Digest]:
        return self.in_rows & {*among}

    def discard(self, digest: Digest) -> None:
        self.did.append(f"discard {digest[-1]}")

    def seal(self, upload: Upload) -> None:
        if upload.site == "gone":
            raise IncompleteUploadError("begin it again")
        self.did.append(f"seal {upload.site}")

    def sync(self) -> None:
        self.did.append("sync")
        if self.fails is not None:
            raise self.fails

    def intake(self, run: str) -> Server:
        if run == "none":
            raise ProtocolError("no such run")
        return self

    def commit_all(self, commits: Sequence[Commit]) -> list[Receipt | Exception]:
        self.judged.append(" ".join(commit.site for commit in commits))
        self.did.append(self.judged[-1])
        return [
            StateError("bad")
            if commit.site == "bad"
            else Receipt(Verdict(commit.task_id), commit.site, commit.manifest.digest, "")
            for commit in commits
        ]


def commit(site: str, verdict: Verdict = Verdict.ACCEPTED, manifest: Manifest = NOTHING) -> Commit:
    """Which will be judged so."""
    return Commit(site, "daemon", verdict, manifest, {}, None, 1.0)


def judged(
    server: Server,
    *calls: tuple[str, str],
    cut_short: int | None = None,
) -> list[Receipt | BaseException]:
    """The answers to calls, (run, site) each, of which all but the first come while the coordinator is busy."""

    async def call() -> list[Receipt | BaseException]:
        busy = threading.Event()
        with ThreadPoolExecutor(1) as control:
            control.submit(busy.wait)
            groups = CommitGroups(cast("Any", server), cast("Any", server), control)
            tasks = [asyncio.create_task(groups.judge(run, commit(site))) for run, site in calls[:1]]
            await asyncio.sleep(0)  # the first call waits,
            await asyncio.sleep(0)  # and its group is formed
            tasks += [asyncio.create_task(groups.judge(run, commit(site))) for run, site in calls[1:]]
            await asyncio.sleep(0)
            if cut_short is not None:
                tasks[cut_short].cancel()
            busy.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(call())


def test_those_that_wait_share_a_sync_which_comes_first() -> None:
    server = Server()
    answers = judged(server, *(("run", site) for site in ("ann", "bob", "cyd")))
    assert [answer.reason for answer in answers if isinstance(answer, Receipt)] == ["ann", "bob", "cyd"]
    assert server.did == ["seal ann", "sync", "ann", "seal bob", "seal cyd", "sync", "bob cyd"]


def test_each_gets_its_own_answer() -> None:
    server = Server()
    commits = ("run", "bob"), ("none", "cyd"), ("run", "gone"), ("run", "bad"), ("other", "dan")
    answers = judged(server, ("run", "ann"), *commits)
    kinds = [Receipt, Receipt, ProtocolError, IncompleteUploadError, StateError, Receipt]
    assert [type(answer) for answer in answers] == kinds
    assert server.judged == ["ann", "bob bad", "dan"]


def test_a_call_that_is_cut_short_is_recorded_and_stops_no_other() -> None:
    server = Server()
    answers = judged(server, ("run", "ann"), ("run", "bob"), ("run", "cyd"), cut_short=1)
    assert [type(answer) for answer in answers] == [Receipt, asyncio.CancelledError, Receipt]
    assert server.judged == ["ann", "bob cyd"]


@pytest.mark.parametrize(
    "error", [DiskFailureError("the disk has failed"), OverQuotaError("short of memory", retry_after_s=30.0)], ids=repr
)
def test_what_cannot_be_made_durable_is_not_judged(error: Exception) -> None:
    server = Server()
    server.fails = error
    answers = judged(server, ("run", "ann"), ("run", "bob"), ("run", "cyd"))
    assert [type(answer) for answer in answers] == [type(error)] * 3
    assert len({id(answer) for answer in answers}) == 3
    said = getattr(error, "retry_after_s", None)  # beside its text
    assert [getattr(answer, "retry_after_s", None) for answer in answers] == [said] * 3
    assert server.judged == []


class BrokenError(Exception):
    """Of a library: it cannot be made from its arguments."""

    def __init__(self, statement: str, cause: str) -> None:
        super().__init__(f"{statement}: {cause}")


def test_an_error_that_nobody_expects_answers_all_calls_and_says_where_it_came_from() -> None:
    server = Server()
    server.fails = BrokenError("SELECT", "no such table")
    answers = judged(server, ("run", "ann"), ("run", "bob"), ("run", "cyd"))
    assert [type(answer) for answer in answers] == [BrokenError] * 3
    traceback = answers[0].__traceback__ if isinstance(answers[0], BaseException) else None
    assert "sync" in [frame.name for frame in extract_tb(traceback)]


def together(server: Server, *commits: Commit) -> list[Receipt | BaseException]:
    """The answers to commits that are one group."""

    async def call() -> list[Receipt | BaseException]:
        with ThreadPoolExecutor(1) as control:
            groups = CommitGroups(cast("Any", server), cast("Any", server), control)
            return await asyncio.gather(*(groups.judge("run", one) for one in commits), return_exceptions=True)

    return asyncio.run(call())


def test_an_update_that_comes_too_late_never_becomes_a_blob() -> None:
    server = Server()
    (answer,) = together(server, commit("late"))
    assert isinstance(answer, Receipt)
    assert (answer.verdict, server.did) == (Verdict.LATE, [])


@pytest.mark.parametrize("verdict", [*Verdict, None])
def test_of_what_does_not_count_no_blob_stays_unless_a_row_names_it(verdict: Verdict | None) -> None:
    one = commit("bad" if verdict is None else "ann", verdict or Verdict.ACCEPTED)
    for named in (False, True):
        server = Server()
        server.in_rows = {one.manifest.digest} if named else set()
        together(server, one)
        stays = named or verdict in (Verdict.ACCEPTED, Verdict.REFUSED)
        assert server.did[:2] == ["seal ann" if verdict else "seal bad", "sync"]
        assert server.did[3:] == ([] if stays else ["discard 0"])


def test_bytes_that_another_site_sent_too_stay() -> None:
    """As of the first model, which all sites make of the recipe's seed."""
    server = Server()
    server.in_rows = {NOTHING.digest}  # by ann's row
    together(server, commit("ann"), commit("bad"), commit("bob", Verdict.NOT_NEEDED, OTHER))
    assert [deed for deed in server.did if "discard" in deed] == ["discard 1"]


def test_a_blob_that_cannot_be_removed_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(Server, "discard", fails)
    (answer,) = together(Server(), commit("ann", Verdict.NOT_NEEDED))
    assert isinstance(answer, Receipt)
    assert answer.verdict is Verdict.NOT_NEEDED
