"""Workers as processes of this machine, with the data of all sites in memory that they share."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from protofed.deploy.logs import LEVEL
from protofed.deploy.progress import end
from protofed.deploy.simulation.messages import Message
from protofed.deploy.simulation.shared_block import Block
from protofed.deploy.simulation.worker import Connection
from protofed.deploy.simulation.workers import Crew, Lost


@dataclass(frozen=True, eq=False)
class _Process:
    connection: Connection
    process: subprocess.Popen[bytes]


class WorkerProcesses:
    """A crew of processes, each with one thread."""

    def __init__(self, size: int, block: Block) -> None:
        self.size, self._block = size, block
        self._running: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._spare = [self._started() for _ in range(size)]  # all at once: each takes seconds to import PyTorch

    def begin(self, worker: int, beginning: Message) -> None:
        """See `Crew.begin`."""
        self._running[worker] = running = self._spare.pop() if self._spare else self._started()
        self._selector.register(running.connection, selectors.EVENT_READ, worker)
        self.send(worker, beginning)

    def send(self, worker: int, message: Message) -> None:
        """See `Crew.send`; that a worker is gone is told by `receive`."""
        with contextlib.suppress(OSError):
            self._running[worker].connection.send(message)

    def receive(self, *, wait: bool) -> Sequence[tuple[int, Message | Lost]]:
        """See `Crew.receive`: one message of each worker."""
        ready = sorted(key.data for key, _ in self._selector.select(None if wait else 0))
        return [(worker, self._from(worker)) for worker in ready]

    def end(self) -> None:
        """See `Crew.end`."""
        started = [*self._running.values(), *self._spare]
        for each in started:
            each.connection.close()
        end([each.process for each in started])
        self._running.clear()
        self._spare.clear()
        self._selector.close()

    def _started(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), self._block.descriptor)
            command = [sys.executable, "-m", "protofed.deploy.simulation.worker", *map(str, descriptors)]
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # standard output is for results
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": "1", LEVEL: "warning"},
                start_new_session=True,  # Ctrl-C reaches only us
            )
        return _Process(Connection(ours), process)

    def _from(self, worker: int) -> Message | Lost:
        running = self._running[worker]
        try:
            return running.connection.receive()
        except (EOFError, OSError):
            self._selector.unregister(running.connection)
            running.connection.close()
            end([running.process])
            del self._running[worker]
            return Lost(_cause(running.process.returncode))


def _cause(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def crew_of(workers: int) -> Callable[[Block], Crew] | None:
    """The `crew` of a `simulation` with so many worker processes; a single one is the simulation's own process."""
    return partial(WorkerProcesses, workers) if workers > 1 else None
