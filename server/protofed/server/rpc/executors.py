"""The server's threads, and how waiting NextTask calls are woken.

Commits of several sites are recorded together: those that come while one group is recorded form the next one. A group
shares the sync of the blobs' folder, a transaction of the ledger and the sync of its journal; each call is answered
after all three. A commit that comes alone waits for nobody.

An upload becomes a blob here, directly before its row is written, with a second name for its file. If the server dies
in between, it still has the upload. An upload that cannot count any more never becomes a blob. If an upload does not
count in the end, its blob is soon removed: the site may try again, and nobody else would ever remove the blob.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import structlog

from protofed.common.codec import Digest
from protofed.common.errors import ProtofedError, StateError, for_another
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Receipt
from protofed.server.rounds.intake.intake import Commit
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import FolderBlobs, Upload
from protofed.server.verdicts import BLOB_KEPT

log = structlog.get_logger()


class Executors:
    """Threads for blocking work, which stays off the event loop.

    Attributes:
        control: the coordinator's only thread, so that its state needs no locks.
        transfer: sites' chunks, examination of updates.
        operators: their downloads and verifications; each may take as long as an aggregation.
        work: aggregation, one at a time.
    """

    def __init__(self) -> None:
        self.control = ThreadPoolExecutor(1, "control")
        self.transfer = ThreadPoolExecutor(4, "transfer")
        self.operators = ThreadPoolExecutor(4, "operators")
        self.work = ThreadPoolExecutor(1, "work")

    def aggregate(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """`Work` of `ServerContext`: run `job` on the work thread, then `done` with its result on the coordinator's."""
        self.work.submit(job).add_done_callback(lambda future: self.control.submit(_logged, done, future.result()))

    def close(self) -> None:
        """Wait for all submitted work; `work` first, since the end of an aggregation is submitted to `control`."""
        for pool in (self.work, self.control, self.transfer, self.operators):
            pool.shutdown()


class TaskNotifier:
    """Wakes waiting NextTask calls when there may be a task for their sites."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[SiteId, asyncio.Event] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake calls on this loop from now on; before, `notify` does nothing, as nobody waits yet."""
        self._loop = loop

    def notify(self, sites: Iterable[SiteId] | None) -> None:
        """Wake the calls of the given sites (None: all); called from any thread."""
        if self._loop is not None:
            # asyncio.Event is not thread-safe, so it is set on the loop's thread.
            self._loop.call_soon_threadsafe(self._set, None if sites is None else list(sites))

    def event(self, site: SiteId) -> asyncio.Event:
        """The site's event, cleared; take it before asking for a task, or a notification in between is lost."""
        event = self._events.setdefault(site, asyncio.Event())
        event.clear()
        return event

    def _set(self, sites: list[SiteId] | None) -> None:
        for site in self._events if sites is None else sites:
            if site in self._events:
                self._events[site].set()


def _logged(function: Callable[[Any], None], argument: Any) -> None:
    """Log errors here: nobody looks at the future of a callback."""
    try:
        function(argument)
    except Exception:
        log.exception("the coordinator failed")
        raise


@dataclass(eq=False)
class _Waiting:
    run: str
    commit: Commit
    done: asyncio.Future[Receipt]
    answer: Receipt | Exception | None = None  # None: it is not judged yet


class CommitGroups:
    """Used on the event loop only.

    Args:
        control: the coordinator's only thread, on which groups are judged.
    """

    def __init__(self, runs: RunQueue, blobs: FolderBlobs, control: Executor) -> None:
        self._runs, self._blobs, self._control = runs, blobs, control
        self._queue: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def judge(self, run: str, commit: Commit) -> Receipt:
        """The receipt of a checked and examined upload, durable; a call that is cut short is recorded all the same.

        Raises:
            As `Intake.commit` and `FolderBlobs.seal`.
        """
        loop = asyncio.get_running_loop()
        self._queue.append(waiting := _Waiting(run, commit, loop.create_future()))
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write())
        return await waiting.done

    async def _write(self) -> None:
        """Record group after group until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            group, self._queue = self._queue, []
            try:
                await loop.run_in_executor(self._control, self._judge, group)
            except Exception as error:  # any error: each waiting call must get one
                for waiting in group:
                    waiting.answer = for_another(error)
            for waiting in group:
                if waiting.done.done():
                    continue  # its call was cut short
                if isinstance(waiting.answer, Receipt):
                    waiting.done.set_result(waiting.answer)
                else:
                    waiting.done.set_exception(waiting.answer or RuntimeError("a commit was not judged"))

    def _judge(self, group: Sequence[_Waiting]) -> None:
        for waiting in group:
            waiting.answer = self._closed_or_sealed(waiting.run, waiting.commit)
        sealed = [waiting for waiting in group if waiting.answer is None]
        try:
            if sealed:
                self._blobs.sync()
            for run, ones in groupby(sealed, lambda waiting: waiting.run):
                same_run = list(ones)
                answers = self._judge_run(run, [waiting.commit for waiting in same_run])
                for waiting, answer in zip(same_run, answers, strict=True):
                    waiting.answer = answer
        finally:
            self._discard(waiting.commit.manifest.digest for waiting in sealed if not _stays(waiting.answer))

    def _closed_or_sealed(self, run: str, commit: Commit) -> Receipt | Exception | None:
        """The answer to a commit that cannot count; None: it is sealed."""
        site, task_id, manifest = commit.site, commit.task_id, commit.manifest
        try:
            intake = self._runs.intake(run)  # while it was examined, its round may have closed
            closed = intake.verdict_if_closed(site, commit.instance, task_id, manifest)
            if closed is None:
                self._blobs.seal(Upload(site, task_id, manifest.digest))
        except ProtofedError as error:
            return error
        return closed

    def _discard(self, refused: Iterable[Digest]) -> None:
        """Remove the blobs of commits that do not count, unless a row needs the same bytes.

        A row may need them though its commit failed: it stands, and only its journal line could not be written. And
        sites that make the same first model send the same bytes. This thread alone writes such rows, and seals.
        """
        if not (digests := set(refused)):
            return
        try:
            for digest in sorted(digests - self._runs.named(digests)):
                self._blobs.discard(digest)
        except (StateError, OSError) as error:  # it changes no answer
            log.warning("blobs of refused updates stay until the next start", why=str(error))

    def _judge_run(self, run: str, commits: Sequence[Commit]) -> list[Receipt | Exception]:
        try:
            intake = self._runs.intake(run)  # a run that was rolled back meanwhile has another
        except ProtofedError as error:
            return [for_another(error) for _ in commits]
        return intake.commit_all(commits)


def _stays(answer: Receipt | Exception | None) -> bool:
    return isinstance(answer, Receipt) and answer.verdict in BLOB_KEPT
