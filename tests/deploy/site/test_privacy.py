"""What a run with noise costs a site is known before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protofed.client.method import client_methods
from protofed.client.policy.dp_accountant import NoisySums, epsilon
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules, PrivacyBudget
from protofed.client.state.dp_ledger import FILE, DpLedger, read
from protofed.common.codec import Digest
from protofed.common.config.recipe import Plan, Recipe
from protofed.common.config.tables import Model, NamedOptions
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import Task, TaskKind
from protofed.deploy import shipped
from protofed.deploy.site import plan_request, privacy
from protofed.deploy.site.plan import LOSS, plain, site_plan
from protofed.deploy.site.privacy import planned, privacy_plan

DP = {"noise_multiplier": 1.5, "sampling_rate": 0.1}
ROUND = (NoisySums(0.1, 1.5, 10),)


def noisy(rounds: int = 30, method: str = "fedavg", **dp: Any) -> Recipe:
    plan = Plan.model_validate({"epochs": 1, "dp": {**DP, **dp}})
    changes = {"rounds": rounds, "plan": plan, "method": NamedOptions(name=method)}
    return shipped.recipe("digits-fedavg").model_copy(update=changes)


def policy(budget: float = 8.0, **rules: Any) -> Policy:
    table = {
        "methods": ["fedavg", "fednh"],
        "parts": ["body", "head", "prototypes"],
        "metrics": ["loss", "personal.accuracy", "global.accuracy"],
        "min_images_per_unit": 1,
        "min_samples_per_class": 1,
        "dp": {"epsilon": budget, "delta": 1e-5, "unit": "image"},
        **rules,
    }
    return Policy(PolicyRules.model_validate(table))


def spent(folder: Path, rounds: int) -> Any:
    for number in range(1, rounds + 1):
        task = Task(TaskKind.FIT, "before", number, f"task-{number}", Digest("a" * 64), 1, 60.0)
        DpLedger(folder / FILE).spend(task, "noise", ROUND)
    return read(folder / FILE)


def test_the_cost_of_a_run_follows_from_its_recipe_if_something_bounds_it() -> None:
    assert (plan := planned(noisy())) is not None
    assert plan.events == ROUND
    assert (plan.epsilon, plan.delta) == (epsilon(ROUND * 30, 1e-5), 1e-5)
    assert (plan.budget, plan.allowed, plan.noise) == (None, None, None)
    assert planned(shipped.recipe("digits-fedavg")) is None
    assert (plan := planned(noisy(method="fednh", class_noise_multiplier=10.0))) is not None
    assert plan.events == (*ROUND, NoisySums(1.0, 10.0, 1))
    with pytest.raises(ConfigError, match="class_noise_multiplier"):
        planned(noisy(method="fednh"))
    with pytest.raises(ConfigError, match="scaffold"):
        planned(noisy(method="scaffold"))


def test_a_budget_says_how_many_rounds_it_allows_and_which_noise_it_would_take(tmp_path: Path) -> None:
    budget = PrivacyBudget(epsilon=4.0, delta=1e-5, unit="image")
    half = client_methods.build("fedavg", {})
    fresh, used = privacy_plan(noisy(), half, budget), privacy_plan(noisy(), half, budget, spent(tmp_path, 5))
    assert fresh is not None
    assert used is not None
    for plan, before in ((fresh, 0), (used, 5)):
        assert plan.allowed is not None
        rounds = before + plan.allowed
        assert epsilon(ROUND * rounds, 1e-5) <= 4.0 < epsilon(ROUND * (rounds + 1), 1e-5)
    assert (fresh.spent, used.spent) == (None, epsilon(ROUND * 5, 1e-5))
    assert fresh.noise is not None
    better = privacy_plan(noisy(noise_multiplier=fresh.noise), half, budget)
    assert better is not None
    assert (better.enough, better.noise) == (True, None)


def test_the_preview_has_it_what_is_spent_and_withholds_what_has_no_noise(tmp_path: Path) -> None:
    plan = site_plan(noisy(), policy())
    assert plan.privacy is not None
    assert plain(plan)["privacy"]["epsilon"] == plan.privacy.epsilon
    assert plan.released[LOSS] == ()
    assert [name for names in plan.released.values() for name in names] == ["global.accuracy"]
    assert plan.refusals == ()
    quiet = site_plan(noisy().model_copy(update={"plan": Plan()}), policy(dp=None))
    assert (quiet.privacy, quiet.released[LOSS], plain(quiet)["privacy"]) == (None, ("loss",), None)
    before = spent(tmp_path, 5)
    plan = site_plan(noisy(), policy(), spent=before)
    assert plan.privacy is not None
    assert plan.privacy.spent == epsilon(before.events(), 1e-5)


@pytest.mark.parametrize(
    ("recipe", "rules"),
    [
        (noisy().model_copy(update={"plan": Plan()}), {}),
        (noisy(), {"min_images_per_unit": 4}),
        (noisy(), {"budget": 0.1}),
    ],
    ids=["no noise", "exact counts", "no room for a round"],
)
def test_what_a_budget_would_refuse_the_preview_says(recipe: Recipe, rules: dict[str, Any]) -> None:
    assert len(site_plan(recipe, policy(**rules)).refusals) == 1


def test_beside_a_server_without_pytorch_the_place_to_look_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_request.planned_lines(shipped.recipe("digits-fedavg")) == []
    assert plan_request.planned_lines(noisy())[0] != plan_request.NOT_HERE

    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(privacy, "planned", missing)
    assert plan_request.planned_lines(noisy()) == [plan_request.NOT_HERE]


def test_noise_that_is_shared_is_said_to_be() -> None:
    recipe = shipped.recipe("digits-fedavg-dp-sum")
    assert (plan := planned(recipe)) is not None
    assert plan.events == (NoisySums(0.2, 2.0, 1),)
    assert plan.shared_by == (4, 5)
    assert plan.epsilon == pytest.approx(5.02, abs=0.01)
    assert len(plan_request.planned_lines(recipe)) == 3
    budget = {"epsilon": 8.0, "delta": 1e-5, "unit": "image"}
    for colluders, refused in ((1, 0), (2, 1)):
        found = site_plan(recipe, policy(secure="required", sum_group=5, dp={**budget, "colluders": colluders}))
        assert len(found.refusals) == refused
        assert plain(found)["privacy"]["shared_by"] == 4


def test_a_model_that_mixes_images_is_refused_before_any_image_is_read() -> None:
    model = Model(name="resnet18", norm="batch")
    quiet = noisy().model_copy(update={"model": model, "plan": Plan()})
    assert site_plan(quiet, policy(dp=None)).privacy is None
    for by in (policy(), None):
        with pytest.raises(ConfigError, match=r'model.norm = "group"'):
            site_plan(noisy().model_copy(update={"model": model}), by)
