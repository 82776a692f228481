"""Examinations of whole uploads: few at a time, and of each upload one, however often its commit is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from protofed.server.storage.blobs import Upload
from protofed.server.verdicts import UpdateProblem

# At a time, of all sites: each takes its update's size of memory. Two threads remain for chunks.
EXAMINATIONS = 2
Examined: TypeAlias = UpdateProblem | float  # as `UploadIntake.examine` gives it


@dataclass(frozen=True)
class _Examination:
    about: object
    task: asyncio.Task[Examined]


class Examinations:
    """Used on the event loop only.

    A site's call waits 30 s. Behind a large cohort, or for a large model, that is too short: the site calls again, and
    finds the examination that its first call began, in the same place of the queue, or its result.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads, self._turns = threads, asyncio.Semaphore(EXAMINATIONS)
        self._known: dict[Upload, _Examination] = {}

    async def result(
        self, upload: Upload, about: object, begin: Callable[[], None], examine: Callable[[], Examined]
    ) -> Examined:
        """What `examine` finds; one that failed is done again at the next call.

        Args:
            about: what the result depends on, beside the upload's bytes: if it changed, they are examined again.
            begin: called once it is this upload's turn; what it raises is raised here, and nothing is examined.
            examine: runs on the threads.
        """
        known = self._known.get(upload)
        if known is None or known.about != about:
            known = _Examination(about, asyncio.create_task(self._in_turn(begin, examine)))
            self._known[upload] = known
            known.task.add_done_callback(lambda task: self._forget_failed(upload, task))
        return await asyncio.shield(known.task)  # a call that is cut short leaves it to the next one

    def forget(self, upload: Upload) -> None:
        """Examine an upload anew if it is committed again."""
        self._known.pop(upload, None)

    def forget_but(self, uploads: Container[Upload]) -> None:
        """Keep nothing but what is known of these uploads."""
        self._known = {upload: known for upload, known in self._known.items() if upload in uploads}

    async def _in_turn(self, begin: Callable[[], None], examine: Callable[[], Examined]) -> Examined:
        async with self._turns:
            begin()
            return await asyncio.get_running_loop().run_in_executor(self._threads, examine)

    def _forget_failed(self, upload: Upload, task: asyncio.Task[Examined]) -> None:
        # The exception is asked for in any case: after a call was cut short nobody else does, and asyncio complains.
        failed = task.cancelled() or task.exception() is not None
        if failed and (known := self._known.get(upload)) is not None and known.task is task:
            del self._known[upload]
