"""cwFedAVG's server step: O(M P) in time and memory, whatever the number of classes (PERFORMANCE §3)."""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Iterator

import numpy as np
from tests.bench.report import Row, seconds
from tests.support.round_contexts import round_context

from protofed.common.payload import Part, Payload, Update
from protofed.server.methods.cwfedavg import CwFedAvgServer

SITES, PARAMETERS, FEATURES, REPETITIONS = 20, 1_000_000, 4, 5


def rows() -> Iterator[Row]:
    """A thousand classes beside ten, in turns: one aggregation and the mixtures of all sites. O(M P): about 1."""
    few, many = _Step(10), _Step(1000)
    times = [(seconds(few), seconds(many)) for _ in range(REPETITIONS)]
    slower = statistics.median(after / before for before, after in times)
    what = f"cwFedAVG server step, {SITES} sites, 1000 classes"
    fast, slow = (statistics.median(pair[n] for pair in times) for n in (0, 1))
    yield Row(what, slow, "s", fast, "10 classes", slower, at_most=1.5)
    peaks = few.peak_models(), many.peak_models()
    yield Row(f"{what}: peak memory", peaks[1], "models", peaks[0], "10 classes", peaks[1] / peaks[0], at_most=1.5)


class _Step:
    def __init__(self, classes: int) -> None:
        rng = np.random.default_rng(0)
        self._method = CwFedAvgServer()
        self._updates = [Update(f"s{n}", _update(classes, rng)) for n in range(SITES)]
        first = {part: self._updates[0].payload[part] for part in (Part.BODY, Part.HEAD)}
        self._state = self._method.init(first, round_context(classes))

    def __call__(self) -> None:
        state = self._method.aggregate(self._state, self._updates, round_context())
        for update in self._updates:
            self._method.broadcast(state, update.site)

    def peak_models(self) -> float:
        """Memory beyond the updates, in models of the size that is mixed."""
        tracemalloc.start()
        self()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / (4 * PARAMETERS)


def _update(classes: int, rng: np.random.Generator) -> Payload:
    weight = rng.standard_normal((classes, FEATURES), dtype=np.float32)
    shares = np.abs(weight).sum(axis=1)
    body = rng.standard_normal(PARAMETERS, dtype=np.float32)
    return {Part.BODY: {"w": body}, Part.HEAD: {"weight": weight}, Part.CLASS_SHARES: {"shares": shares}}
