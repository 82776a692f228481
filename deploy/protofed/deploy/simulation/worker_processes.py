"""Workers as processes of this machine, with the data of all sites in memory that they share."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

from protofed.deploy.logs import LEVEL
from protofed.deploy.progress import end, start_module
from protofed.deploy.simulation.workers import Answer, Beginning, Block, Lost, Work, WorkerPool, WorkResult, buffers


@dataclass(frozen=True, eq=False)
class _Process:
    connection: Connection  # carries bytes alone: nothing is pickled
    process: subprocess.Popen[bytes]

    def send(self, messages: Sequence[bytes]) -> None:
        """That the process is gone is told by `result`."""
        with contextlib.suppress(OSError):
            for message in messages:
                self.connection.send_bytes(message)

    def result(self) -> Answer | Lost:
        try:
            result = WorkResult.model_validate_json(self.connection.recv_bytes())
            return result, [self.connection.recv_bytes() for _ in range(result.frames)]
        except (EOFError, OSError):
            self.connection.close()
            end([self.process])
            code = self.process.returncode
            return Lost(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")


class WorkerProcesses:
    """A pool of processes, each with one thread."""

    def __init__(self, size: int, block: Block) -> None:
        self.size, self._block = size, block
        self._running: dict[int, _Process] = {}
        self._spare = [self._started() for _ in range(size)]  # all at once: each takes seconds to import PyTorch

    def start(self, worker: int, beginning: Beginning) -> None:
        """See `WorkerPool.start`."""
        self._running[worker] = self._spare.pop() if self._spare else self._started()
        self._running[worker].send(buffers(beginning))

    def submit(self, worker: int, work: Work, frames: Sequence[bytes]) -> None:
        """See `WorkerPool.submit`."""
        self._running[worker].send(buffers(work, frames))

    def results(self, *, wait: bool) -> Sequence[tuple[int, Answer | Lost]]:
        """See `WorkerPool.results`: one of each worker."""
        ready = wait_for([process.connection for process in self._running.values()], None if wait else 0)
        return [(worker, of.result()) for worker, of in sorted(self._running.items()) if of.connection in ready]

    def close(self) -> None:
        """See `WorkerPool.close`."""
        processes = [*self._running.values(), *self._spare]
        for each in processes:
            each.connection.close()
        end([each.process for each in processes])
        self._running.clear()
        self._spare.clear()

    def _started(self) -> _Process:
        ours, theirs = Pipe()
        with theirs:
            descriptors = (theirs.fileno(), self._block.descriptor)
            process = start_module(
                "protofed.deploy.simulation.worker",
                *descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # standard output is for results
                pass_fds=descriptors,
                env={LEVEL: "warning"},
            )
        return _Process(ours, process)


def choose_workers(workers: int) -> Callable[[Block], WorkerPool] | None:
    """The `pool` of a `simulation` with so many worker processes; a single one is the simulation's own process."""
    return partial(WorkerProcesses, workers) if workers > 1 else None
