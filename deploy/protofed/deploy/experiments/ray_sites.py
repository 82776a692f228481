"""Workers of one simulation as actors of Ray: text, numbers and payloads in the codec's encoding go there and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from protofed.common.codec import Digest
from protofed.common.process import keep_memory
from protofed.deploy.experiments.ray_cluster import joined
from protofed.deploy.experiments.ray_tasks import line
from protofed.deploy.simulation.messages import Beginning, Message, Work
from protofed.deploy.simulation.shared_block import Block
from protofed.deploy.simulation.site_worker import SiteWorker
from protofed.deploy.simulation.workers import Lost


class SiteActor:
    """A worker on a node, with one thread.

    Args:
        data: the block of data [bytes] uint8, which all workers of a node read in one place.
    """

    def __init__(self, beginning: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        keep_memory()
        torch.set_num_threads(1)
        self._data = data  # Ray frees what nobody holds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nothing may be written to it, and nothing is
            self._worker = SiteWorker(Beginning.model_validate_json(beginning), data.data)

    def carry_out(self, header: str, *frames: bytes) -> tuple[str | bytes, ...]:
        """A `Work`'s `Result`: its header, and its frames."""
        result = self._worker.carry_out(Message(header, frames))
        return result.header, *result.frames


class RayWorkers:
    """A crew on whichever nodes of a cluster have room.

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
        self._held = ExitStack()
        self._cluster = self._held.enter_context(joined(address, device, None, size or cores, 2 * data.nbytes))
        self.size = min(size or self._cluster.room, self._cluster.room)
        self._data: Any = ray.put(data)
        self._base: tuple[Digest | None, Any] = None, None  # the newest one: a node fetches it once for all its workers
        self._actors: dict[int, Any] = {}
        self._working: dict[Any, int] = {}  # by the promise of a result

    def begin(self, worker: int, beginning: Message) -> None:
        """See `Crew.begin`."""
        actor = ray.remote(SiteActor).options(num_cpus=1, num_gpus=self._cluster.gpus, scheduling_strategy="SPREAD")
        device = self._cluster.device
        header = Beginning.model_validate_json(beginning.header).model_copy(update={"device": device})
        self._actors[worker] = actor.remote(header.model_dump_json(), self._data)

    def send(self, worker: int, message: Message) -> None:
        """See `Crew.send`."""
        work, frames = Work.model_validate_json(message.header), list[Any](message.frames)
        if work.sent:
            if self._base[0] != work.task.base_digest:
                self._base = work.task.base_digest, ray.put(frames[0])
            frames[0] = self._base[1]
        self._working[self._actors[worker].carry_out.remote(message.header, *frames)] = worker

    def receive(self, *, wait: bool) -> Sequence[tuple[int, Message | Lost]]:
        """See `Crew.receive`."""
        if not self._working:
            return []
        ready, _ = ray.wait(list(self._working), num_returns=1, timeout=None if wait else 0)
        return [self._result(promise) for promise in ready]

    def end(self) -> None:
        """See `Crew.end`."""
        with suppress(RayError):
            for actor in self._actors.values():
                ray.kill(actor)
        self._held.close()

    def _result(self, promise: Any) -> tuple[int, Message | Lost]:
        worker = self._working.pop(promise)
        try:
            header, *frames = ray.get(promise)
        except RayError as error:
            self._working = {other: of for other, of in self._working.items() if of != worker}
            with suppress(RayError):
                ray.kill(self._actors[worker])
            return worker, Lost(f"was lost ({type(error).__name__}: {line(error)})")
        return worker, Message(header, frames)
