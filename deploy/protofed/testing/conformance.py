"""The conformance suite: a method learns, repeats bit for bit, survives interruption and another transport, and sends
only the parts that it declares. A method's tests subclass `MethodConformance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from protofed.client.agent.agent import Agent
from protofed.client.method import Declaration, client_methods, refining
from protofed.client.policy.policy import GateContext, Policy, Released
from protofed.common import codec, plugins
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Finished, Scores
from protofed.common.protocol.scores import spreads
from protofed.common.secure_aggregation.linear_form import SumForm, read_form
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, build_agents, held_out_scores, simulation
from protofed.server.method import refining as refining_half
from protofed.server.method import server_methods
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.testing.live_server import LiveServer, links
from protofed.testing.local_pool import LocalPool
from protofed.testing.small_recipe import small_recipe

LEARNT, PERSONAL = 0.4, 0.75  # accuracy required of a model on ten classes; of a site's own model on its classes
LONG_TAIL = 0.1  # of the data on which a model has to learn that: with two images of a class few methods would
LONELY_CLASSES = {
    "long_tail": 0.05,
    "partition": {"kind": "shards", "sites": 5, "shards": 2},
}  # shards: most classes are at one site only


class MethodResult(NamedTuple):
    """The result of an uninterrupted simulation: the digest of its last state, and the scores by round and site."""

    digest: str
    scores: Mapping[int, Mapping[str, Scores]]


class ConformanceRun(NamedTuple):
    """A simulation that is over, to be looked at, and what its sites and its evaluator sent."""

    running: Simulation
    released: Sequence[Released]
    refined: Sequence[Released]


class MethodConformance:
    """The suite for one method.

    Attributes:
        name: the method's name in recipes.
        recipe_file: a recipe on the digits with which the method learns in a few seconds.
    """

    name: ClassVar[str]
    recipe_file: ClassVar[Path]

    @pytest.fixture
    def method(self) -> str:
        """The method's name; its plug-in is allowed to load."""
        plugins.allow({self.name})
        return self.name

    @pytest.fixture
    def recipe(self, method: str) -> Recipe:
        """The recipe of `recipe_file`."""
        return read_recipe(self.recipe_file)

    @pytest.fixture(scope="class")
    @classmethod
    def simulate(cls) -> Iterator[Callable[[str], ConformanceRun]]:
        """A run of a method's small recipe that nothing disturbed, shared by the tests of a class."""
        with ExitStack() as opened:
            yield cache(lambda method: opened.enter_context(_finished(small_recipe(method))))

    @pytest.fixture
    def finished(self, method: str, simulate: Callable[[str], ConformanceRun]) -> ConformanceRun:
        """That of the method."""
        return simulate(method)

    @pytest.fixture
    def simulated(self, finished: ConformanceRun) -> MethodResult:
        """Its result."""
        return _result(finished.running)

    def test_each_half_knows_the_options_of_the_other(self, method: str) -> None:
        assert client_methods.foreign(method) == server_methods.options(method) - client_methods.options(method)
        assert server_methods.foreign(method) == client_methods.options(method) - server_methods.options(method)

    def test_halves_are_frozen(self, method: str) -> None:
        for half in (client_methods.get(method), server_methods.get(method)):
            assert dataclasses.is_dataclass(half)
            assert half.__dataclass_params__.frozen

    def test_halves_that_can_be_aggregated_say_the_same_of_it(self, method: str) -> None:
        halves = client_methods.build(method, {}), server_methods.build(method, {})
        client, server = (_form(half, method) for half in halves)
        assert client == server

    def test_the_client_half_declares_all_that_policies_ask_about(self, method: str) -> None:
        assert isinstance(client_methods.build(method, {}).declares, Declaration)

    def test_halves_say_the_same_of_their_tasks(self, method: str) -> None:
        assert server_methods.about(method).tasks == client_methods.build(method, {}).declares.tasks

    def test_halves_say_the_same_of_a_global_model(self, method: str) -> None:
        assert client_methods.build(method, {}).declares.global_model is server_methods.get(method).global_model

    def test_halves_that_refine_models_do_so_together(self, method: str) -> None:
        assert (refining(client_methods.build(method, {})) is not None) is _is_refined(method)

    def test_a_recipe_on_digits_uses_the_method(self, method: str, recipe: Recipe) -> None:
        assert recipe.method.name == method
        assert recipe.data is not None
        assert recipe.data.source == "digits"

    def test_it_learns(self, method: str, recipe: Recipe) -> None:
        assert recipe.data is not None
        changes = {
            "federation": recipe.federation.model_copy(update={"score_every": 0}),
            "data": recipe.data.model_copy(update={"long_tail": LONG_TAIL}),
        }
        recipe = recipe.model_copy(update=changes)
        with simulation(recipe) as running:
            running.go()
            last = spreads(running.ledger.scores(recipe.name)[recipe.rounds])
        score = "global.accuracy" if server_methods.get(method).global_model else "personal.balanced_accuracy"
        assert last[score].mean > LEARNT
        assert last["personal.pm_v"].mean > PERSONAL

    def test_grpc_gives_the_bytes_and_scores_of_the_simulation(
        self, method: str, simulated: MethodResult, tmp_path: Path
    ) -> None:
        recipe = small_recipe(method)
        server = LiveServer(recipe, tmp_path / "server")
        try:
            with links(server.address) as connect:
                _take_turns(build_agents(recipe, connect))
            published = server.runs.of(recipe.name).published
            assert published is not None
            assert published.address == simulated.digest
            assert server.ledger.scores(recipe.name) == simulated.scores
        finally:
            server.stop()

    def test_two_simulations_give_the_same_bytes_in_whatever_order_sites_arrive(
        self, method: str, simulated: MethodResult
    ) -> None:
        with simulation(small_recipe(method)) as running:
            backwards = dataclasses.replace(running, agents=list(reversed(running.agents)))
            backwards.go()
            assert _result(backwards).digest == simulated.digest

    def test_several_workers_give_the_same_bytes_and_scores(self, method: str, simulated: MethodResult) -> None:
        with simulation(small_recipe(method), pool=partial(LocalPool, 2)) as running:
            running.go()
            assert _result(running) == simulated

    def test_going_back_two_rounds_and_on_again_gives_the_same_bytes(
        self, method: str, simulated: MethodResult, tmp_path: Path
    ) -> None:
        recipe = small_recipe(method)
        with simulation(recipe, tmp_path) as running:
            running.go()
            running.runs.roll_back(recipe.name, 1)  # sites restore their memory of that round
            assert not running.runs.finished
            running.go()
            assert _result(running) == simulated

    def test_every_published_state_comes_out_again(self, finished: ConformanceRun) -> None:
        running = finished.running
        recipe = running.recipe
        published = [row for row in running.ledger.rounds(recipe.name) if row.state is not None]
        assert len(published) == recipe.rounds + 1
        for row in published[1:]:  # the first model, from which round 0 came, is not kept
            verification = verify_round(running.ledger, running.blobs, recipe.name, row.round, row.attempt)
            assert verification.finding is VerificationResult.SAME

    def test_restarts_between_rounds_change_nothing(self, method: str, simulated: MethodResult, tmp_path: Path) -> None:
        recipe = small_recipe(method)
        for rounds_before in range(recipe.rounds):
            with simulation(recipe, tmp_path) as interrupted:
                assert _published_rounds(interrupted) == rounds_before
                interrupted.go(until=partial(_has_published, interrupted, rounds_before + 1))
                assert not interrupted.runs.finished
        with simulation(recipe, tmp_path) as resumed:
            resumed.go()
            assert _result(resumed).digest == simulated.digest

    def test_only_declared_parts_leave(self, method: str, finished: ConformanceRun) -> None:
        first_model, same, *updates = finished.released
        assert first_model.manifest == same.manifest  # of two sites
        assert {spec.part for spec in first_model.manifest.tensors} == {Part.BODY, Part.HEAD}
        assert len(updates) == 3 * 3
        declared = client_methods.build(method, {}).sends
        assert {spec.part for update in updates for spec in update.manifest.tensors} == declared
        assert all(set(update.metrics) <= {"loss"} for update in (*updates, *finished.refined))
        assert len(finished.refined) == (3 if _is_refined(method) else 0)  # once in each round

    def test_nothing_is_ever_nan(self, method: str) -> None:
        data, federation = {**LONELY_CLASSES, "source": "digits"}, {"min_sites": 4, "quorum": 1.0}
        recipe = small_recipe(method, data=data, federation=federation)
        with simulation(recipe) as running:
            running.go()
            assert codec.first_not_finite(_state(running)) is None
            scores = running.ledger.scores(recipe.name).values()
            values = [
                value for by_site in scores for score_values in by_site.values() for value in score_values.values()
            ]
        assert values
        assert np.isfinite(values).all()

    def test_partial_participation_runs_to_the_end(self, method: str) -> None:
        federation = {"min_sites": 3, "participation": 0.5, "quorum": 1.0}
        with simulation(small_recipe(method, federation=federation)) as running:
            running.go()
            rounds = running.ledger.rounds(running.recipe.name)
            cohorts = [
                {task.site for task in running.ledger.tasks(row.run, row.round) if task.kind == "fit"} for row in rounds
            ]
        assert [len(cohort) for cohort in cohorts[1:]] == [2, 2, 2]
        assert len({frozenset(cohort) for cohort in cohorts[1:]}) > 1

    def test_a_site_that_took_no_part_can_begin_with_the_last_model(self, method: str) -> None:
        data = {"source": "digits", "held_out_sites": 1, "partition": {"kind": "dirichlet", "sites": 4, "beta": 0.5}}
        with simulation(small_recipe(method, data=data, rounds=1)) as running:
            running.go()
            last = _state(running)
            (scores,) = held_out_scores(running).values()
            assert codec.encode(_state(running)) == codec.encode(last)
            assert {task.site for task in running.ledger.tasks(running.recipe.name)}.isdisjoint({"site-4"})
            noisy = running.recipe.plan.dp is not None
        assert ("personal.pm_v" in scores) is not noisy  # which stays at a site whose own scores have no noise
        assert np.isfinite(list(scores.values())).all()


def _take_turns(agents: Sequence[Agent]) -> None:
    """Let the agents work in turns until the run has ended for all of them."""
    over: set[int] = set()
    for _ in range(2000):
        for number, agent in enumerate(agents):
            if number not in over and isinstance(agent.step(0.02), Finished):
                over.add(number)
        if len(over) == len(agents):
            return
    raise AssertionError("the run does not end")


@contextmanager
def _finished(recipe: Recipe) -> Iterator[ConformanceRun]:
    """A run of that recipe, over and open to be looked at."""
    by_sites: list[Released] = []
    by_evaluator: list[Released] = []
    release = Policy.release

    def recorded(policy: Policy, update: Update, context: GateContext | None = None) -> Released:
        released = release(policy, update, context)
        (by_evaluator if update.site == EVALUATOR else by_sites).append(released)
        return released

    with simulation(recipe) as running:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Policy, "release", recorded)
            running.go()
        yield ConformanceRun(running, by_sites, by_evaluator)


def _is_refined(method: str) -> bool:
    """Whether an evaluator refines the method's models."""
    return refining_half(server_methods.build(method, {})) is not None


def _form(half: object, method: str) -> SumForm | None:
    """The linear form of a half with its defaults; None: it has none."""
    try:
        return read_form(half, method)
    except ConfigError:
        return None


def _has_published(running: Simulation, rounds: int) -> bool:
    return _published_rounds(running) >= rounds


def _published_rounds(running: Simulation) -> int:
    return sum(row.state is not None for row in running.ledger.rounds(running.recipe.name))


def _result(running: Simulation) -> MethodResult:
    published = running.run.published
    assert published is not None
    return MethodResult(published.address, running.ledger.scores(running.recipe.name))


def _state(running: Simulation) -> Payload:
    published = running.run.published
    assert published is not None
    return published.state
