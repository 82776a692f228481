"""A pool without processes: the same messages and the same computations, in an order that no test depends on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from protofed.deploy.simulation.worker import SiteWorker
from protofed.deploy.simulation.workers import Answer, Beginning, Block, Lost, Work, WorkResult, buffers


class LocalPool:
    """Workers in this process that answer as late as they can, the last worker first."""

    def __init__(self, size: int, block: Block) -> None:
        self.size, self._block = size, block
        self._workers: dict[int, SiteWorker] = {}
        self._received: dict[int, deque[tuple[Work, Sequence[bytes]]]] = {}

    def start(self, worker: int, beginning: Beginning) -> None:
        """See `WorkerPool.start`."""
        assert self._block.memory is not None
        header, *_ = buffers(beginning)
        self._workers[worker] = SiteWorker(Beginning.model_validate_json(header), self._block.memory)
        self._received[worker] = deque()

    def submit(self, worker: int, work: Work, frames: Sequence[bytes]) -> None:
        """See `WorkerPool.submit`."""
        header, *sent = buffers(work, frames)
        self._received[worker].append((Work.model_validate_json(header), sent))

    def results(self, *, wait: bool) -> Sequence[tuple[int, Answer | Lost]]:
        """See `WorkerPool.results`: nothing has come before it is waited for."""
        busy = [worker for worker, received in self._received.items() if received]
        if not wait or not busy:
            return []
        worker = max(busy)
        header, *frames = buffers(*self._workers[worker].carry_out(*self._received[worker].popleft()))
        return [(worker, (WorkResult.model_validate_json(header), frames))]

    def close(self) -> None:
        """See `WorkerPool.close`."""
        self._workers.clear()
