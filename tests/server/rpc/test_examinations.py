"""An update is examined once, and paid for once, however often its site's calls are cut short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google_crc32c import value as crc32c

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import IncompleteUploadError, StateError
from protofed.common.payload import Part, describe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import Manifest, Receipt, Verdict
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.access.rate_limits import EXAMINED, Budget
from protofed.server.rounds.intake.intake import Commit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.federation import EXAMINATIONS, Examinations, Examined, FederationService
from protofed.server.storage.blobs import FolderBlobs, Upload

ANN, BOB, CYD = (Upload(site, "task", Digest("0" * 64)) for site in ("ann", "bob", "cyd"))
PAYLOAD = {Part.BODY: {"w": np.ones(8, np.float32)}}
DATA = codec.encode(PAYLOAD)
MANIFEST = Manifest(describe(PAYLOAD), len(DATA), codec.digest(DATA))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Work:
    """Examinations that end when they are let go on."""

    def __init__(self) -> None:
        self.done: list[str] = []  # whose, in the order in which they began
        self.started: list[str] = []  # whose turn came
        self.go_on = threading.Event()
        self.fails: Exception | None = None

    def of(self, upload: Upload) -> tuple[Callable[[], None], Callable[[], Examined]]:
        return lambda: self.started.append(upload.site), lambda: self._examined(upload)

    def _examined(self, upload: Upload) -> Examined:
        self.done.append(upload.site)
        assert self.go_on.wait(30)
        if self.fails is not None:
            raise self.fails
        return float(len(self.done))


async def cut(call: Coroutine[Any, Any, Any]) -> None:
    """End a call after it has come as far as it can without its examination."""
    task = asyncio.create_task(call)
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def settled() -> None:
    """All that can happen on the loop without the threads has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_call_that_was_cut_short_leaves_its_examination_to_the_next_one(threads: ThreadPoolExecutor) -> None:
    work = Work()

    async def scenario() -> tuple[Examined, Examined]:
        examinations = Examinations(threads)
        for _ in range(3):
            await cut(examinations.result(ANN, "base", *work.of(ANN)))
        work.go_on.set()
        first = await examinations.result(ANN, "base", *work.of(ANN))
        return first, await examinations.result(ANN, "base", *work.of(ANN))

    assert asyncio.run(scenario()) == (1.0, 1.0)
    assert work.done == work.started == ["ann"]


def test_who_waits_keeps_its_place_and_pays_nothing_before_its_turn(threads: ThreadPoolExecutor) -> None:
    work = Work()

    async def scenario() -> None:
        examinations = Examinations(threads)
        others = [Upload(f"site-{number}", "task", Digest("0" * 64)) for number in range(EXAMINATIONS)]
        running = [asyncio.create_task(examinations.result(other, "base", *work.of(other))) for other in others]
        for _ in range(5):
            await cut(examinations.result(ANN, "base", *work.of(ANN)))
        later = asyncio.create_task(examinations.result(BOB, "base", *work.of(BOB)))
        await settled()
        assert work.started == [other.site for other in others]
        work.go_on.set()
        await asyncio.gather(*running, later, examinations.result(ANN, "base", *work.of(ANN)))

    asyncio.run(scenario())
    assert work.started[EXAMINATIONS:] == ["ann", "bob"]


def test_one_that_failed_is_done_again(threads: ThreadPoolExecutor) -> None:
    work = Work()
    work.go_on.set()
    work.fails = StateError("the base is gone")

    async def scenario() -> Examined:
        examinations = Examinations(threads)
        with pytest.raises(StateError):
            await examinations.result(ANN, "base", *work.of(ANN))
        work.fails = None
        return await examinations.result(ANN, "base", *work.of(ANN))

    assert asyncio.run(scenario()) == 2.0


def test_what_a_turn_refuses_is_not_examined(threads: ThreadPoolExecutor) -> None:
    work = Work()
    work.go_on.set()

    def refuse() -> None:
        raise StateError("nothing is left")

    async def scenario() -> Examined:
        examinations = Examinations(threads)
        for _ in range(EXAMINATIONS + 1):  # each gives its place back
            with pytest.raises(StateError):
                await examinations.result(ANN, "base", refuse, work.of(ANN)[1])
        return await examinations.result(ANN, "base", *work.of(ANN))

    asyncio.run(scenario())
    assert work.done == ["ann"]


def test_each_upload_has_its_own_and_a_result_is_of_what_it_was_asked_about(threads: ThreadPoolExecutor) -> None:
    work = Work()
    work.go_on.set()

    async def scenario() -> list[Examined]:
        examinations = Examinations(threads)

        def ask(upload: Upload, about: str) -> Awaitable[Examined]:
            return examinations.result(upload, about, *work.of(upload))

        found = [await ask(ANN, "base"), await ask(BOB, "base"), await ask(ANN, "other"), await ask(BOB, "base")]
        examinations.forget(BOB)
        found += [await ask(BOB, "base"), await ask(CYD, "base")]
        examinations.forget_but({BOB})
        return [*found, await ask(BOB, "base"), await ask(CYD, "base")]

    assert asyncio.run(scenario()) == [1.0, 2.0, 3.0, 2.0, 4.0, 5.0, 4.0, 6.0]


class Site:
    """A site's upload at the real service; round, coordinator and budget are not real."""

    def __init__(self, folder: Path, executors: Executors) -> None:
        self.paid: list[int] = []
        self.examined, self.started, self.go_on = 0, threading.Event(), threading.Event()
        self.fails: Exception | None = None
        self.blobs = FolderBlobs(folder)
        fakes: Any = self
        memory: Any = SimpleNamespace(short=lambda: False)
        metrics: Any = SimpleNamespace(bytes_transferred=lambda *_: None, chunks_resumed=lambda _: None)
        self.service = FederationService(fakes, self.blobs, executors, TaskNotifier(), memory, metrics, fakes)
        self.service._commits = fakes

    async def send(self) -> None:
        """Begin the upload, and put its only chunk."""
        caller = pb.Caller(site="ann", instance="a")
        of: dict[str, Any] = {"caller": caller, "run": "run", "round": 1, "task_id": "task", "digest": MANIFEST.digest}
        algorithm, tensors = wire.DIGEST_ALGORITHM, wire.pack_tensors(MANIFEST)
        begin = pb.UploadManifest(**of, tensors=tensors, total_bytes=len(DATA), digest_algorithm=algorithm)
        upload = (await self.service.BeginUpload(begin, None)).upload.id
        await self.service.PutChunk(pb.Chunk(caller=caller, upload=upload, data=DATA, crc32c=crc32c(DATA)), None)
        self.request = pb.CommitRequest(**of, upload=upload)

    def commit(self) -> Coroutine[Any, Any, pb.Receipt]:
        return self.service.CommitUpload(self.request, None)

    def invitation(self, site: str) -> str:
        return "task"

    def intake(self, run: str) -> Site:
        return self

    def begin(self, *_: Any) -> None:
        """Send it."""

    def verdict_if_closed(self, *_: Any) -> None:
        """It can count."""

    def examine(self, *_: Any) -> float:
        self.examined += 1
        self.started.set()
        assert self.go_on.wait(30)
        return 1.0

    def spend(self, site: str, budget: Budget, amount: float = 1.0, *, key: str = "", size: int = 0) -> None:
        if budget is EXAMINED:
            self.paid.append(int(amount))

    async def judge(self, run: str, commit: Commit) -> Receipt:
        if self.fails is not None:
            raise self.fails
        return Receipt(Verdict.ACCEPTED, "", commit.manifest.digest, "")


@pytest.fixture
def executors() -> Iterator[Executors]:
    made = Executors()
    yield made
    made.close()


def test_a_commit_that_is_tried_again_is_examined_and_paid_for_once(tmp_path: Path, executors: Executors) -> None:
    site = Site(tmp_path, executors)

    async def scenario() -> pb.Receipt:
        await site.send()
        for _ in range(3):
            call = asyncio.create_task(site.commit())
            assert await asyncio.to_thread(site.started.wait, 30)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        site.go_on.set()
        return await site.commit()

    assert asyncio.run(scenario()).verdict == pb.VERDICT_ACCEPTED
    assert (site.examined, site.paid) == (1, [len(DATA)])
    assert not site.service._examinations._known


def test_an_upload_that_is_sent_again_is_examined_again(tmp_path: Path, executors: Executors) -> None:
    """Its bytes were lost after they were examined: those that come now are others until they were read."""
    site = Site(tmp_path, executors)
    site.go_on.set()

    async def scenario() -> pb.Receipt:
        await site.send()
        site.fails = IncompleteUploadError("begin it again")
        with pytest.raises(IncompleteUploadError):
            await site.commit()
        site.fails = None
        await site.send()
        return await site.commit()

    assert asyncio.run(scenario()).verdict == pb.VERDICT_ACCEPTED
    assert site.examined == 2
