"""The suite that every method passes, under `[plan.dp]`: the noise of a task is the same wherever it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.scores import spreads
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import simulation
from protofed.server.method import server_methods
from protofed.testing import conformance
from protofed.testing.conformance import LEARNT, LONELY_CLASSES, LONG_TAIL, MethodConformance, MethodResult
from protofed.testing.small_recipe import small_recipe

# Class means, a private head beside; class means; class counts.
METHODS = ("fedprp", pytest.param("fednh", marks=pytest.mark.slow), pytest.param("cwfedavg", marks=pytest.mark.slow))
OPTIONS: dict[str, dict[str, Any]] = {"fednh": {"scale": 1.0}, "fedprp": {"inter": 0.0, "head_epochs": 1}}
DP = {"noise_multiplier": 0.3, "sampling_rate": 0.25, "class_noise_multiplier": 0.5, "min_noisy_count": 3.0}
SOFT = {"noise_multiplier": 0.02, "class_noise_multiplier": 0.05}  # of means of features without a length of their own
DP_OF: dict[str, dict[str, Any]] = {"fedprp": {**DP, "max_feature_norm": 5.0, **SOFT}}
PLAN_OF: dict[str, dict[str, Any]] = {"fedprp": {"lr": 0.3, "momentum": 0.0, "batch_size": 25}}
ROUNDS = 12  # of 20, in which a method has learnt with noise
PLAN: dict[str, Any] = {"epochs": 1, "batch_size": 40, "lr": 0.2}


def noisy(method: str, /, **changes: object) -> Recipe:
    """The suite's small recipe with noise that little is lost by."""
    tables: dict[str, Any] = {
        "plan": {**PLAN, "dp": DP_OF.get(method, DP)},
        "method": {"name": method, **OPTIONS.get(method, {})},
    }
    return small_recipe(method, **{**tables, **changes})


class TestNoisyRounds(MethodConformance):
    """Of the methods that release something by class, or train more than once."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def with_noise(cls) -> Iterator[None]:
        """The suite's small recipe, so."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(conformance, "small_recipe", noisy)
            yield

    @pytest.fixture(params=METHODS)
    def method(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def recipe(self, method: str) -> Recipe:
        """The shipped recipe, with noise."""
        table = shipped.recipe(f"digits-{method}").model_dump()
        plan = {**table["plan"], "epochs": 5, **PLAN_OF.get(method, {}), "dp": DP_OF.get(method, DP)}
        options = {**table["method"], **OPTIONS.get(method, {})}
        return Recipe.model_validate({**table, "rounds": ROUNDS, "plan": plan, "method": options})

    @pytest.mark.slow
    def test_it_learns(self, method: str, recipe: Recipe) -> None:
        score = "global.accuracy" if server_methods.get(method).global_model else "personal.balanced_accuracy"
        assert _last(recipe, score) > LEARNT

    def test_nothing_is_ever_nan(self, method: str) -> None:
        federation = {"min_sites": 4, "quorum": 1.0}
        with simulation(noisy(method, data={**LONELY_CLASSES, "source": "digits"}, federation=federation)) as running:
            running.go()
            published = running.run.published
            assert published is not None
            assert codec.first_not_finite(published.state) is None

    def test_going_back_two_rounds_and_on_again_gives_the_same_bytes(
        self, method: str, simulated: MethodResult, tmp_path: Path
    ) -> None:
        """Not so under noise: another attempt of a round has noise of its own."""
        recipe = noisy(method)
        with simulation(recipe, tmp_path) as running:
            running.go()
            running.runs.roll_back(recipe.name, 1)
            running.go()
            assert running.run.published is not None
            assert running.run.published.address != simulated.digest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-fedavg-dp", "digits-fednh-dp", "digits-fedavg-dp-sum"])
def test_the_shipped_recipes_learn(name: str) -> None:
    recipe = shipped.recipe(name)
    recipe = recipe.model_copy(update={"federation": recipe.federation.model_copy(update={"score_every": 0})})
    with simulation(recipe) as running:
        running.go()
        assert spreads(running.ledger.scores(name)[recipe.rounds])["global.accuracy"].mean > LEARNT


def test_another_seed_is_another_noise_and_the_same_repeats() -> None:
    digests = []
    for seed in (0, 0, 1):
        with simulation(noisy("fednh", seed=seed)) as running:
            running.go(until=partial(_published, running))
            digests.append(running.run.published.address if running.run.published else None)
    assert digests[0] == digests[1] != digests[2]


def _published(running: Any) -> bool:
    rows = running.ledger.rounds(running.recipe.name)
    return any(row.round == 1 and row.state is not None for row in rows)


def _last(recipe: Recipe, name: str) -> float:
    """A score of the last round, in the mean over those that have it; sites' own are read where they stay."""
    assert recipe.data is not None
    federation = recipe.federation.model_copy(update={"score_every": 0})
    data = recipe.data.model_copy(update={"long_tail": LONG_TAIL})
    recipe = recipe.model_copy(update={"federation": federation, "data": data})
    with TemporaryDirectory() as folder, simulation(recipe, Path(folder)) as running:
        running.go()
        sent = running.ledger.scores(recipe.name).get(recipe.rounds, {}).values()
        kept = [OwnScores(path).latest(recipe.name) for path in Path(folder).glob(f"sites/site-*/{FOLDER}")]
    return float(np.mean([scores[name] for scores in (*sent, *kept) if name in scores]))
