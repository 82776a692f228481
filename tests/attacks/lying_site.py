"""One site that lies to an honest server: about its first model, its count, its update, its scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.attacks.hostile_server import recipe_like
from tests.attacks.outcome import Outcome
from tests.attacks.policies import policy_of

from protofed.client.policy import policy
from protofed.client.policy.policy import Released, ReleasedScores
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ProtocolError
from protofed.common.payload import Array, Payload, SiteId
from protofed.common.protocol.messages import Manifest, Receipt, Role, Task, TaskKind
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, build_agents, load_data
from protofed.deploy.simulation.sites import DirectLink
from protofed.server.rounds.context import open_server
from protofed.server.rounds.machine.rules import AGREEING
from protofed.server.rounds.queue import RunQueue

LIAR = "site-1"
CLAIM = 9e15  # examples: the largest count that a float holds exactly
AGGREGATED_CLAIM = 6e10  # as many as the fixed point of a sum holds
FACTOR = 60.0


@dataclass(frozen=True)
class Lie:
    """What the liar's daemon sends in place of what it made; each leaves alone what it does not change."""

    update: Callable[[Task, Payload, Payload], Payload] = lambda _task, sent, _base: sent
    weight: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LyingLink(DirectLink):
    """The link of a daemon that the liar has changed: its policy's gate stands in nobody's way."""

    lie: Lie = field(default_factory=Lie)

    def push(self, task: Task, released: Released) -> Receipt:
        base = codec.decode(self.blobs.get(task.base_digest)) if task.base_digest else {}
        payload = self.lie.update(task, codec.decode(released.data), base)
        data, specs = codec.encode(payload), codec.manifest(codec.encode(payload))
        weight = released.weight if self.lie.weight is None else self.lie.weight
        manifest = Manifest(specs, len(data), codec.digest(data))
        metrics = {**released.metrics, **self.lie.metrics}
        return super().push(task, Released(manifest, data, metrics, weight, policy._GATE))

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Report the lie; what the server refuses is not reported."""
        try:
            super().report(task, ReleasedScores({**released.scores, **self.lie.scores}, policy._GATE))
        except ProtocolError:
            super().report(task, ReleasedScores({}, policy._GATE))


def told(
    recipe: Recipe, lie: Lie, opened: ExitStack, liars: Collection[SiteId] = (LIAR,), rules: policy.Policy | None = None
) -> Simulation:
    """A simulation with the liars, whose policy allows everything, among its sites; the others' may be `rules`."""
    context = open_server(None, opened, simulated=True)
    runs, blobs, data = RunQueue([recipe], context), context.blobs, load_data(recipe)

    def connect(name: SiteId, roles: frozenset[Role]) -> DirectLink:
        return LyingLink(runs, blobs, name, roles, lie=lie) if name in liars else DirectLink(runs, blobs, name, roles)

    honest = build_agents(recipe, connect, data=data, policy=rules)
    lying = build_agents(recipe, connect, data=data)
    agents = [liar if liar.name in liars else other for liar, other in zip(lying, honest, strict=True)]
    return Simulation(recipe, runs, context.ledger, blobs, data, agents)


def zeros(task: Task, sent: Payload, _: Payload) -> Payload:
    if task.kind is not TaskKind.INITIALISE:
        return sent
    return {part: {name: np.zeros_like(t) for name, t in tensors.items()} for part, tensors in sent.items()}


def agreed_first_model(name: str) -> tuple[frozenset[SiteId], frozenset[SiteId], str]:
    """The two makers of the first model answer the same zeros, the first to arrive, under a policy of the honest sites.

    Returns the colluders, the sites that trained on their model, and why the run ended.
    """
    rules = {"quorum": 4, "min_sites": 5, "max_attempts": 2}
    recipe = recipe_like("digits-fedavg", rounds=1, federation=rules)
    sites = sorted(load_data(recipe).keys() - {EVALUATOR})
    colluders = frozenset(sites[:AGREEING])
    with ExitStack() as opened:
        running = told(recipe, Lie(zeros), opened, colluders, policy_of(name, recipe))
        running.go()
        trained = frozenset(row.task.site for row in running.ledger.updates(recipe.name, 1))
        run = running.ledger.run(recipe.name)
        return colluders, trained, "" if run is None else run.reason or ""


def first_model() -> Outcome:
    """The liar answers the first task with zeros; recovered: runs that begin with them."""
    recipe = recipe_like("digits-fedavg", rounds=1)
    with ExitStack() as opened:
        running = told(recipe, Lie(zeros), opened)
        running.go(until=lambda: bool(states_of(running)))
        first = states_of(running)[0]
        return Outcome(int(not any(np.any(t) for tensors in first.values() for t in tensors.values())), 1)


def claimed_count(*, secure: bool = False) -> float:
    """The liar claims `CLAIM` examples, in a sum `AGGREGATED_CLAIM`; returns its share of the new model."""
    weighted = {"name": "fedavg", "weighting": "examples"}
    recipe = recipe_like("digits-fedavg", rounds=1, method=weighted, federation={"secure": secure})
    with ExitStack() as opened:
        running = told(recipe, Lie(weight=AGGREGATED_CLAIM if secure else CLAIM), opened)
        running.go(until=lambda: len(states_of(running)) == 2)
        old, new = (flat(state) for state in states_of(running))
        rows = [row for row in running.ledger.updates(recipe.name, 1) if row.counts]
        moves = {row.task.site: flat(codec.decode(running.blobs.get(row.digest))) - old for row in rows}
        # The new state is the weighted mean of the updates: their weights are what solves it.
        weights, *_ = np.linalg.lstsq(np.stack(list(moves.values())).T, new - old, rcond=None)
        return float(dict(zip(moves, weights, strict=True)).get(LIAR, 0.0))


def scaled_update(*, secure: bool = False) -> Outcome:
    """The liar scales what it learnt by `FACTOR`; recovered: rounds whose model has its update in it."""

    def larger(sent: Array, base: Array) -> Array:
        return np.asarray((base + FACTOR * (sent - base)).astype(sent.dtype))

    def scaled(task: Task, sent: Payload, base: Payload) -> Payload:
        if task.kind is not TaskKind.FIT:
            return sent
        return {part: {n: larger(t, base[part][n]) for n, t in tensors.items()} for part, tensors in sent.items()}

    rules = {"quorum": 4, "min_sites": 5, "max_attempts": 1, "secure": secure}
    recipe = recipe_like("digits-fedavg", rounds=5, federation=rules)
    with ExitStack() as opened:
        running = told(recipe, Lie(scaled), opened)
        running.go()
        rows = [row for number in range(1, 6) for row in running.ledger.updates(recipe.name, number)]
        return Outcome(sum(row.counts for row in rows if row.task.site == LIAR), recipe.rounds)


def forged_scores() -> Outcome:
    """A trainer reports scores of the global model, and names of its own; recovered: numbers that the ledger holds."""
    forged = {"global.accuracy": 1e308, "personal.accuracy": -3.0, **{f"invented.{i}": 1.0 for i in range(2000)}}
    recipe = recipe_like("digits-fedavg", rounds=1, federation={"min_sites": 4, "quorum": 4})
    with ExitStack() as opened:
        running = told(recipe, Lie(metrics={"global.accuracy": 1e308, "invented": 1.0}, scores=forged), opened)
        running.go()
        scores = running.ledger.scores(recipe.name).get(1, {}).get(LIAR, {})
        rows = running.ledger.updates(recipe.name, 1)
        metrics = [row.metrics for row in rows if row.task.site == LIAR and row.counts]
        stored = sum(scores.get(name) == value for name, value in forged.items())
        stored += sum(name != "loss" for reported in metrics for name in reported)
        return Outcome(stored, len(forged) + 2)


def states_of(running: Simulation) -> list[Payload]:
    """The published states, the first model first, as far as they are kept."""
    rows = running.ledger.rounds(running.recipe.name)
    return [codec.decode(running.blobs.get(row.state)) for row in rows if row.state is not None]


def flat(payload: Payload) -> NDArray[np.float64]:
    """All tensors of a payload as one vector [P]."""
    parts = [np.ravel(payload[part][name]) for part in sorted(payload) for name in sorted(payload[part])]
    return np.concatenate(parts).astype(np.float64)
