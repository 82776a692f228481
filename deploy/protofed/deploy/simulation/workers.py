"""Several workers compute for the sites of one simulation: which one does what and when changes no byte.

Sites take their turns, and the server commits their updates, in the order of one worker. Only a site's computation may
have been done before its turn, by any free worker. It depends on nothing but what is sent with it.

`Workers` decides who computes what. A `WorkerPool` carries a work to a worker and its result back. The worker is a
process of this machine (`worker_processes`), or an actor of Ray (`experiments.ray_workers`). There a `SiteWorker`
computes.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Protocol, TypeAlias, cast

import structlog
from pydantic import BaseModel, ConfigDict

from protofed.client.agent.computation import Computation, ScoredModel
from protofed.client.data.shared import Contents
from protofed.client.state.store import FitOutcome
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import RunFailedError
from protofed.common.payload import Part, SiteId, Update
from protofed.common.protocol.messages import Scores, Task

log = structlog.get_logger()
AT_ONCE = 2  # works that a worker has: it goes on with the second while we are busy with the result of the first
TRIES = 2  # of a work at which its worker ends


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Beginning(_Header):
    """The first message to a worker; no frames.

    Attributes:
        recipe: as `Recipe.model_dump_json` gives it.
        plugins: those that the sites' policy allows.
        data: where in the block of data everything stands.
    """

    recipe: str
    plugins: frozenset[str]
    device: str
    data: Contents


class Work(_Header):
    """One computation; the frames are the base, if it is `sent`, the site's memory, and its own model, if it is used.

    Attributes:
        number: of the work; the result has the same.
        recipe: digest of the run's recipe as the site was offered it, which noise follows from; None: there is none.
        sent: whether the base is among the frames; else it is the one of the work before.
        own_model: whether the site's own model is.
    """

    number: int
    site: SiteId
    task: Task
    state_round: int
    seed: int
    fewest: int
    recipe: Digest | None
    scored: ScoredModel | None
    sent: bool
    own_model: bool

    @property
    def frames(self) -> int:
        """How many follow."""
        return self.sent + 1 + self.own_model


class WorkResult(_Header):
    """What a computation gave; the frames of a fit are the update, the memory and the site's own model.

    Attributes:
        failed: what the error said, if it failed; nothing else is there then.
        trained: examples that a fit trained on, repetitions counted.
        shared: parts of the own model that are those of the update, and are not sent twice.
    """

    number: int
    failed: str | None = None
    scores: dict[str, float] | None = None
    metrics: dict[str, float] = {}
    weight: float | None = None
    trained: int = 0
    shared: tuple[Part, ...] = ()

    @property
    def frames(self) -> int:
        """How many follow."""
        return 0 if self.failed is not None or self.scores is not None else 3


# A payload in the codec's encoding is a frame. What stands before it is its header.
Answer: TypeAlias = tuple[WorkResult, Sequence[bytes]]


def buffers(header: BaseModel, frames: Sequence[bytes] = ()) -> list[bytes]:
    """All of a message, in its order: the header as JSON, then the frames."""
    return [header.model_dump_json().encode(), *frames]


class Block:
    """A block of memory that other processes of this machine can map: its file descriptor is inherited.

    The block has no name, so nothing stays behind. It is not in /dev/shm, because a container has 64 MB there.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("protofed-data")
        self.memory: mmap | None = None

    def sized(self, nbytes: int) -> mmap:
        """The memory, of so many bytes."""
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap(self.descriptor, nbytes)
        return self.memory

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays for as long as it is used."""
        os.close(self.descriptor)


@dataclass(frozen=True)
class Lost:
    """A worker has ended; `cause` follows on its name."""

    cause: str


class WorkerPool(Protocol):
    """The workers, wherever they are, by their numbers from 0."""

    size: int

    def start(self, worker: int, beginning: Beginning) -> None:
        """Start a worker, also again."""

    def submit(self, worker: int, work: Work, frames: Sequence[bytes]) -> None:
        """Send a work; a worker has several, and does them in their order."""

    def results(self, *, wait: bool) -> Sequence[tuple[int, Answer | Lost]]:
        """What has come from which worker; wait for the first, if there is none."""

    def close(self) -> None:
        """Leave none of them running."""


@dataclass(eq=False)
class _Job:
    number: int
    work: Computation
    tries: int = 0


@dataclass(eq=False)
class _Worker:
    jobs: dict[int, _Job] = field(default_factory=dict)  # by number, the one first that is being computed
    base: Digest | None = None  # the one that it has


class Workers:
    """Computes elsewhere what sites ask for; see `RemoteExecutor`.

    Args:
        base: the bytes of a base by its digest.
        note: called with each fit's examples, as `TrainingLog.note`.
    """

    def __init__(
        self,
        pool: WorkerPool,
        beginning: Beginning,
        base: Callable[[Digest], bytes],
        note: Callable[[Task, SiteId, int], None] = lambda _task, _site, _examples: None,
    ) -> None:
        self._pool, self._beginning, self._base, self._note = pool, beginning, base, note
        self._numbers, self._moment = itertools.count(), cast("Hashable", None)
        self._waiting: deque[_Job] = deque()
        self._expected: dict[Hashable, _Job] = {}
        self._results: dict[int, Answer] = {}  # by number of the job
        self._workers = [_Worker() for _ in range(pool.size)]
        for number in range(pool.size):
            pool.start(number, self._beginning)

    def prefetch(self, moment: Hashable, works: Callable[[], Iterable[Computation]]) -> None:
        """Begin with what sites will ask for, the longest first; nothing else is expected any more.

        Args:
            moment: what was started before holds for as long as this is the same, and `works` is not called.
        """
        if moment == self._moment:
            return
        self._moment, known = moment, self._expected
        expected = sorted(works(), key=_length, reverse=True)
        jobs = [known.get(work.key) or _Job(next(self._numbers), work) for work in expected]
        self._expected = {job.work.key: job for job in jobs}
        busy = {number for worker in self._workers for number in worker.jobs} | self._results.keys()
        self._waiting = deque(job for job in jobs if job.number not in busy)
        self._results = {job.number: self._results[job.number] for job in jobs if job.number in self._results}
        self._hand_out()

    def fit(self, work: Computation) -> FitOutcome | None:
        """See `RemoteExecutor`.

        Raises:
            RunFailedError: workers end at this work.
        """
        result, frames = self._claim(work)
        if result.failed is not None:
            return None
        self._note(work.task, work.site, result.trained)
        payload, (client_state, own) = codec.view(frames[0]), map(codec.decode, frames[1:])
        personal = {**own, **{part: payload[part] for part in result.shared}}
        return FitOutcome(Update(work.site, payload, result.metrics, result.weight), client_state, personal)

    def score(self, work: Computation) -> Scores | None:
        """See `RemoteExecutor`.

        Raises:
            RunFailedError: workers end at this work.
        """
        return self._claim(work)[0].scores

    def _claim(self, work: Computation) -> Answer:
        if (job := self._expected.get(work.key)) is None:
            self._waiting.append(job := _Job(next(self._numbers), work))
            self._expected[work.key] = job
        self._move(wait=False)
        while job.number not in self._results:
            self._move(wait=True)
        del self._expected[work.key]
        return self._results.pop(job.number)

    def _move(self, *, wait: bool) -> None:
        self._hand_out()
        for number, answer in self._pool.results(wait=wait):
            if isinstance(answer, Lost):
                self._replace(number, answer)
                continue
            job = self._workers[number].jobs.pop(answer[0].number)
            if self._expected.get(job.work.key) is job:
                self._results[job.number] = answer
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            number = min(range(len(self._workers)), key=lambda each: len(self._workers[each].jobs))
            worker = self._workers[number]
            if len(worker.jobs) >= AT_ONCE:
                return
            job = self._waiting.popleft()
            worker.jobs[job.number] = job
            self._pool.submit(number, *self._message(job, worker))

    def _message(self, job: _Job, worker: _Worker) -> tuple[Work, Sequence[bytes]]:
        work = job.work
        sent, worker.base = worker.base != work.task.base_digest, work.task.base_digest
        own = work.scored is ScoredModel.OWN and work.run.method.declares.personal != "loaded"
        personal = work.state.personal if own else None
        assert work.task.base_digest is not None  # noqa: S101  (what trains or is scored starts from one)
        frames = [self._base(work.task.base_digest)] if sent else []
        frames += [codec.encode(payload) for payload in (work.state.client_state, personal) if payload is not None]
        header = Work(
            number=job.number,
            site=work.site,
            task=work.task,
            state_round=work.state.round,
            seed=work.run.seed,
            fewest=work.fewest,
            recipe=None if work.run.dp is None else work.run.dp.recipe,
            scored=work.scored,
            sent=sent,
            own_model=personal is not None,
        )
        return header, frames

    def _replace(self, number: int, loss: Lost) -> None:
        """Start the worker again; what it had is handed out anew, if it is still expected."""
        jobs, self._workers[number] = list(self._workers[number].jobs.values()), _Worker()
        where = "before it began"
        if jobs:
            jobs[0].tries += 1
            where = f"at {_named(jobs[0].work)}"
            if jobs[0].tries >= TRIES:
                raise RunFailedError(f"a worker {loss.cause} {where}, {TRIES} times; fewer workers need less memory")
        log.warning("a worker is replaced", why=f"it {loss.cause} {where}")
        # Not what a later moment has given up: the base of it may be removed by now.
        self._waiting.extendleft(job for job in reversed(jobs) if self._expected.get(job.work.key) is job)
        self._pool.start(number, self._beginning)


def _length(work: Computation) -> int:
    """What a computation takes, as compared with others of its kind."""
    data = work.run.data
    return len(data.train) if work.scored is None else len(data.test)


def _named(work: Computation) -> str:
    what = "fit" if work.scored is None else "scores"
    return f"{work.site}'s {what} of round {work.task.round}"
