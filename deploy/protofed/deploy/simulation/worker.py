"""The side of a worker that computes: whatever site's work comes, it gives what the simulation itself would.

As a process of this machine: `python -m protofed.deploy.simulation.worker SOCKET BLOCK`, two descriptors. It ends when
the simulation does, however that came about.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from mmap import ACCESS_COPY, mmap
from multiprocessing.connection import Connection

import numpy as np
import structlog
import torch

from protofed.client.agent.computation import Computation, fit, score
from protofed.client.agent.task_tools import decode_base
from protofed.client.data.shared import Memory, Shared
from protofed.client.data.site_data import SiteData
from protofed.client.device import pick_device
from protofed.client.method import client_methods, compute_dp_cost
from protofed.client.models.catalogue import device_model
from protofed.client.site import DaemonStatus, DpSource, PreparedRun, train_alone
from protofed.client.state.store import FitOutcome, SiteState
from protofed.client.task import build_client_task
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.dp import SIMULATED_SECRET
from protofed.common import codec, plugins
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.payload import Payload, SiteId, Tensors
from protofed.common.process import keep_memory
from protofed.deploy import logs
from protofed.deploy.simulation.workers import Answer, Beginning, Work, WorkResult, buffers

log = structlog.get_logger()


class SiteWorker:
    """Computes for the sites of one run, one work after the other, with one thread.

    Args:
        memory: the block of data.

    Raises:
        ConfigError: the recipe's method or model cannot be built here.
    """

    def __init__(self, beginning: Beginning, memory: Memory) -> None:
        plugins.allow(beginning.plugins)
        self._recipe = parse_json(beginning.recipe, Recipe, "the recipe")
        options = self._recipe.method.options
        self._method = client_methods.build(self._recipe.method.name, options, beginning.plugins)
        self._device = pick_device(beginning.device)
        self._model = device_model(self._recipe, self._device, beginning.plugins)
        task = build_client_task(self._recipe.task, beginning.plugins)
        self._shared = Shared(beginning.data, memory, self._recipe.input, self._recipe.classes, task)
        self._placed: dict[SiteId, SiteData] = {}
        self._base: Payload = {}

    def carry_out(self, work: Work, frames: Sequence[bytes]) -> Answer:
        """A work's result; an error is one, too: the simulation then computes it itself, and meets it there.

        Raises:
            MemoryError, CodecError: the base could not be taken, and what follows would start from the one before.
        """
        payloads = iter(frames)
        if work.sent:
            self._base = decode_base(next(payloads))
        try:
            return self._result(work, payloads)
        except Exception as error:
            log.warning("a worker could not compute", site=work.site, round=work.task.round, why=str(error))
            return WorkResult(number=work.number, failed=f"{type(error).__name__}: {error}"), ()

    def _result(self, work: Work, frames: Iterator[bytes]) -> Answer:
        client_state = codec.decode(next(frames))
        state = SiteState(work.state_round, client_state, codec.decode(next(frames)) if work.own_model else None)
        dp = None if work.recipe is None else self._noise(work.recipe)
        run = PreparedRun(self._recipe, self._method, self._model, self._data(work.site), work.seed, dp)
        computation = Computation(work.site, run, work.task, state, work.fewest, work.scored)
        status = DaemonStatus()
        if work.scored is not None:
            return WorkResult(number=work.number, scores=dict(score(computation, self._base, status))), ()
        outcome = fit(computation, self._base, status, NoCheckpoints(), train_alone)
        return _of_fit(work, outcome, status.throughput.examples)

    def _noise(self, recipe: Digest) -> DpSource:
        return DpSource(
            SIMULATED_SECRET, compute_dp_cost(self._method, self._recipe.method.name, self._recipe.plan), recipe
        )

    def _data(self, site: SiteId) -> SiteData:
        if site not in self._placed:
            self._placed[site] = self._shared.site(site).placed(self._device)
        return self._placed[site]


def _of_fit(work: Work, outcome: FitOutcome, trained: int) -> Answer:
    update, personal = outcome.update, outcome.personal
    shared = tuple(part for part in personal if part in update.payload and _same(personal[part], update.payload[part]))
    own = {part: tensors for part, tensors in personal.items() if part not in shared}
    result = WorkResult(
        number=work.number, metrics=dict(update.metrics), weight=update.weight, trained=trained, shared=shared
    )
    return result, [codec.encode(payload) for payload in (update.payload, outcome.client_state, own)]


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether they are the same bytes; a NaN is itself."""
    return one.keys() == other.keys() and all(
        array.dtype == other[name].dtype
        and array.shape == other[name].shape
        and np.array_equal(array.reshape(-1).view(np.uint8), other[name].reshape(-1).view(np.uint8))
        for name, array in one.items()
    )


def alone_on_a_core() -> None:
    """Workers share the cores of a machine, and a sum's last bits depend on the number of threads."""
    keep_memory()
    torch.set_num_threads(1)


def serve(connection: Connection, block: int) -> None:
    """Carry out what comes, in its order; never returns.

    Reading, computing and sending are three threads: the simulation may be busy with a site, and never waits for us.
    """
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # headers and frames
    finished: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def forever(move: Callable[[], None]) -> None:
        try:
            while True:
                move()
        except (EOFError, OSError):
            os._exit(0)  # nobody waits for what is computed now
        finally:
            os._exit(1)  # as short of memory: the simulation must not wait for a worker that hears or says nothing

    for move in (lambda: received.put(connection.recv_bytes()), lambda: connection.send_bytes(finished.get())):
        threading.Thread(target=forever, args=[move], daemon=True).start()
    beginning = Beginning.model_validate_json(received.get())
    worker = SiteWorker(beginning, mmap(block, beginning.data.nbytes, access=ACCESS_COPY))
    while True:
        work = Work.model_validate_json(received.get())
        for buffer in buffers(*worker.carry_out(work, [received.get() for _ in range(work.frames)])):
            finished.put(buffer)


def main(connection: int, block: int) -> None:
    """Entry point of the process."""
    logs.configure()
    alone_on_a_core()
    serve(Connection(connection), block)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
