"""Workers of one simulation as actors of Ray: text, numbers and payloads in the codec's encoding go there and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from protofed.common.codec import Digest
from protofed.deploy.experiments.ray_cluster import joined, line
from protofed.deploy.simulation.worker import SiteWorker, alone_on_a_core
from protofed.deploy.simulation.workers import Answer, Beginning, Block, Lost, Work, WorkResult, buffers


class SiteActor:
    """A worker on a node, with one thread.

    Args:
        data: the block of data [bytes] uint8, which all workers of a node read in one place.
    """

    def __init__(self, beginning: bytes, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        alone_on_a_core()
        self._data = data  # Ray frees what nobody holds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nothing may be written to it, and nothing is
            self._worker = SiteWorker(Beginning.model_validate_json(beginning), data.data)

    def carry_out(self, work: bytes, *frames: bytes) -> list[bytes]:
        """A `Work`'s `WorkResult`, with its frames."""
        return buffers(*self._worker.carry_out(Work.model_validate_json(work), frames))


class RayWorkers:
    """A pool on whichever nodes of a cluster have room.

    Args:
        address: as of `joined`.
        size: at most; None, and where there is less room: as many as the cluster has room for, for `local` as there
            are cores. Ray would begin more only once others end, and what they were given would wait for that.

    Raises:
        ConfigError, UnavailableError: as of `joined`.
    """

    def __init__(self, address: str, size: int | None, device: str, cores: int, block: Block) -> None:
        assert block.memory is not None  # noqa: S101  (the data are in it)
        data = np.frombuffer(block.memory, np.uint8)
        self._stack = ExitStack()
        self._cluster = self._stack.enter_context(joined(address, device, None, size or cores, 2 * data.nbytes))
        self.size = min(size or self._cluster.room, self._cluster.room)
        self._data: Any = ray.put(data)
        self._base: tuple[Digest | None, Any] = None, None  # the newest one: a node fetches it once for all its workers
        self._actors: dict[int, Any] = {}
        self._working: dict[Any, int] = {}  # by the promise of a result

    def start(self, worker: int, beginning: Beginning) -> None:
        """See `WorkerPool.start`."""
        on_node = beginning.model_copy(update={"device": self._cluster.device})
        actor = ray.remote(SiteActor).options(**self._cluster.options)
        self._actors[worker] = actor.remote(*buffers(on_node), self._data)

    def submit(self, worker: int, work: Work, frames: Sequence[bytes]) -> None:
        """See `WorkerPool.submit`."""
        sent = list[Any](buffers(work, frames))
        if work.sent:
            if self._base[0] != work.task.base_digest:
                self._base = work.task.base_digest, ray.put(frames[0])
            sent[1] = self._base[1]
        self._working[self._actors[worker].carry_out.remote(*sent)] = worker

    def results(self, *, wait: bool) -> Sequence[tuple[int, Answer | Lost]]:
        """See `WorkerPool.results`."""
        if not self._working:
            return []
        ready, _ = ray.wait(list(self._working), num_returns=1, timeout=None if wait else 0)
        return [self._result(promise) for promise in ready]

    def close(self) -> None:
        """See `WorkerPool.close`."""
        with suppress(RayError):
            for actor in self._actors.values():
                ray.kill(actor)
        self._stack.close()

    def _result(self, promise: Any) -> tuple[int, Answer | Lost]:
        worker = self._working.pop(promise)
        try:
            header, *frames = ray.get(promise)
        except RayError as error:
            self._working = {other: of for other, of in self._working.items() if of != worker}
            with suppress(RayError):
                ray.kill(self._actors[worker])
            return worker, Lost(f"was lost ({type(error).__name__}: {line(error)})")
        return worker, (WorkResult.model_validate_json(header), frames)
