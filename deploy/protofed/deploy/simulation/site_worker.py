"""The part of a worker that computes: whatever site's work comes, it gives what the simulation itself would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import structlog

from protofed.client.agent.computation import Computation, fit, score
from protofed.client.agent.task_tools import decode_base
from protofed.client.data.shared import Memory, Shared
from protofed.client.data.site_data import SiteData
from protofed.client.device import pick_device
from protofed.client.method import client_methods, dp_cost_of
from protofed.client.models.catalogue import device_model
from protofed.client.site import DaemonStatus, DpSource, PreparedRun, train_alone
from protofed.client.state.store import FitOutcome, SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.dp import SIMULATED_SECRET
from protofed.common import codec, plugins
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.payload import Payload, SiteId, Tensors
from protofed.deploy.simulation.messages import Beginning, Message, Result, Work

log = structlog.get_logger()


class SiteWorker:
    """Computes for the sites of one run, one work after the other.

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
        self._shared = Shared(beginning.data, memory, self._recipe.input, self._recipe.classes)
        self._placed: dict[SiteId, SiteData] = {}
        self._base: Payload = {}

    def carry_out(self, message: Message) -> Message:
        """The result of a `Work`; an error is one, too: the simulation then computes it itself, and meets it there.

        Raises:
            MemoryError, CodecError: the base could not be taken, and what follows would start from the one before.
        """
        work, frames = Work.model_validate_json(message.header), iter(message.frames)
        if work.sent:
            self._base = decode_base(next(frames))
        try:
            return self._result(work, frames)
        except Exception as error:
            log.warning("a worker could not compute", site=work.site, round=work.task.round, why=str(error))
            return Message(Result(number=work.number, failed=f"{type(error).__name__}: {error}").model_dump_json())

    def _result(self, work: Work, frames: Iterator[bytes]) -> Message:
        memory = codec.decode(next(frames))
        state = SiteState(work.state_round, memory, codec.decode(next(frames)) if work.own_model else None)
        dp = None if work.recipe is None else self._noise(work.recipe)
        run = PreparedRun(self._recipe, self._method, self._model, self._data(work.site), work.seed, dp)
        computation = Computation(work.site, run, work.task, state, work.fewest, work.scored)
        if work.scored is not None:
            scores = dict(score(computation, self._base, DaemonStatus()))
            return Message(Result(number=work.number, scores=scores).model_dump_json())
        status = DaemonStatus()
        outcome = fit(computation, self._base, status, NoCheckpoints(), train_alone)
        return _of_fit(work, outcome, status.throughput.examples)

    def _noise(self, recipe: Digest) -> DpSource:
        return DpSource(SIMULATED_SECRET, dp_cost_of(self._method, self._recipe.method.name, self._recipe.plan), recipe)

    def _data(self, site: SiteId) -> SiteData:
        if site not in self._placed:
            self._placed[site] = self._shared.site(site).placed(self._device)
        return self._placed[site]


def _of_fit(work: Work, outcome: FitOutcome, trained: int) -> Message:
    update, personal = outcome.update, outcome.personal
    shared = tuple(part for part in personal if part in update.payload and _same(personal[part], update.payload[part]))
    own = {part: tensors for part, tensors in personal.items() if part not in shared}
    result = Result(
        number=work.number, metrics=dict(update.metrics), weight=update.weight, trained=trained, shared=shared
    )
    return Message(
        result.model_dump_json(), [codec.encode(payload) for payload in (update.payload, outcome.memory, own)]
    )


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether they are the same bytes; a NaN is itself."""
    return one.keys() == other.keys() and all(
        array.dtype == other[name].dtype
        and array.shape == other[name].shape
        and np.array_equal(array.reshape(-1).view(np.uint8), other[name].reshape(-1).view(np.uint8))
        for name, array in one.items()
    )
