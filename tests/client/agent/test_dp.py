"""Runs with `[plan.dp]` at a site: what is refused before anything is trained, and what the noise follows from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, give_secret, site_data, work

from protofed.client.agent.computation import Computation, fit
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods, compute_dp_cost
from protofed.client.policy.policy import PolicyRefusedError
from protofed.client.site import prepare
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.dp import MAX_STEPS, share_std
from protofed.common import codec
from protofed.common.config.recipe import DpCost, Plan, Recipe
from protofed.common.errors import ConfigError, FailureReason, TaskFailedError
from protofed.common.payload import Part, Payload, describe, distance_norm
from protofed.common.protocol.messages import Assignment, Role, Task, TaskKind
from protofed.common.secure_aggregation.linear_form import POINT, SumForm, SumLayout

DP: dict[str, Any] = {"noise_multiplier": 0.5, "sampling_rate": 0.5}
CLASSES: dict[str, Any] = {**DP, "class_noise_multiplier": 1.0}
ANYTHING = {
    **RULES,
    "methods": sorted(client_methods),
    "parts": [part.value for part in Part],
    "example_count": True,
    "class_distribution_estimate": True,
}


def run_of(method: dict[str, Any] | None = None, dp: dict[str, Any] | None = None, **tables: Any) -> dict[str, Any]:
    plan = {**RUN["plan"], "dp": DP if dp is None else dp}
    return {**RUN, "plan": plan, "method": method or RUN["method"], **tables}


def prepared(run: dict[str, Any], rules: dict[str, Any] | None = None, **site: Any) -> Any:
    harness = AgentHarness(recipe=run, rules={**ANYTHING, **(rules or {})}, **site)
    return prepare(harness.agent()._site, Assignment("run", harness.link.recipe))


def cause_of(run: dict[str, Any], rules: dict[str, Any] | None = None) -> BaseException:
    with pytest.raises(TaskFailedError) as caught:
        prepared(run, rules)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


# Methods and what they cost


@pytest.mark.parametrize(
    ("method", "options", "cost"),
    [
        ("fedavg", {}, DpCost((3,), linear=True)),
        ("fedavgm", {}, DpCost((3,), linear=True)),
        ("fedprox", {}, DpCost((3,), linear=True)),
        ("fedper", {}, DpCost((3,))),
        ("solo", {}, DpCost((3,))),
        ("fedrep", {"head_epochs": 2}, DpCost((2, 3))),
        ("fedbabu", {"finetune_epochs": 4}, DpCost((3, 4))),
        ("fednh", {}, DpCost((3,), 1)),
        ("fedproc", {}, DpCost((3,), 1)),
        ("fedprp", {"inter": 0.0, "head_epochs": 2}, DpCost((2, 3), 1)),
        ("fedprp", {"inter": 0.0, "margins": "learned", "compat": "authors"}, DpCost((5, 3), 1)),  # which are 1
        ("cwfedavg", {}, DpCost((3,), 1)),
    ],
)
def test_what_a_round_of_a_method_costs(method: str, options: dict[str, Any], cost: DpCost) -> None:
    assert compute_dp_cost(client_methods.build(method, options), method, Plan(epochs=3)) == cost
    assert prepared(run_of({"name": method, **options}, CLASSES)).dp.cost == replace(
        cost, epochs=tuple(2 if epochs == 3 else epochs for epochs in cost.epochs)
    )


WITHOUT = sorted(name for name in client_methods if not hasattr(client_methods.get(name), "dp_cost"))


def test_methods_and_options_without_noise_are_refused_by_their_names() -> None:
    assert {"scaffold", "moon", "creff", "cwfedavg-private"} <= set(WITHOUT)
    options: list[tuple[str, dict[str, Any], str]] = [
        ("fedprp", {}, "inter"),
        ("fedprp", {"inter": 0.0, "margins": "learned"}, "margins"),
        ("cwfedavg", {"shares": "true"}, "shares"),
    ]
    for method, said_options, said in [*options, *((name, {}, f"'{name}'") for name in WITHOUT)]:
        with pytest.raises(ConfigError, match=said):
            compute_dp_cost(client_methods.build(method, said_options), method, Plan())


@pytest.mark.parametrize("method", ["fednh", "fedproc", "cwfedavg"])
def test_class_sums_need_a_noise_of_their_own(method: str) -> None:
    assert isinstance(cause_of(run_of({"name": method})), ConfigError)
    prepared(run_of({"name": method}, CLASSES))


# What is refused before anything is trained


def test_a_model_that_normalises_over_batches_is_refused() -> None:
    def of_eight(recipe: Recipe) -> SiteData:
        data = site_data()
        large = replace(data.train, images=torch.nn.functional.interpolate(data.train.pixels(), (8, 8)))
        return replace(data, train=large, test=large, input=recipe.input)

    run = run_of(model={"name": "resnet18", "norm": "batch"}, input={"shape": [1, 8, 8]})
    harness = AgentHarness(recipe=run, rules=ANYTHING, load_data=of_eight)
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED)]
    assert harness.link.pushed == []


def test_a_plan_that_follows_exact_counts_is_no_recipe_and_an_evaluator_has_nothing_to_protect() -> None:
    for plan in ({"sampling": "class-balanced"}, {"loss": "balanced-softmax"}, {"loss": "logit-adjustment"}):
        with pytest.raises(ValueError, match="exact class counts"):
            Plan.model_validate({**plan, "dp": DP})
        Plan.model_validate(plan)
    with pytest.raises(ValueError, match="exact count"):
        Recipe.model_validate(run_of({"name": "fedavg", "weighting": "examples"}))

    def load(recipe: Recipe) -> SiteData:
        return SiteData.for_scoring(site_data().test, recipe.input, recipe.classes)

    prepared(run_of(), {"min_images_per_unit": 4}, roles=frozenset({Role.EVALUATOR}), load_data=load)


@pytest.mark.parametrize(
    ("rule", "method", "refused"),
    [
        ("min_images_per_unit", "fedavg", True),
        ("min_samples_per_class", "fedavg", False),  # which sends nothing by class
        ("min_samples_per_class", "fednh", True),
        ("min_images_per_unit", "solo", False),  # which sends nothing at all
    ],
)
def test_rules_that_decide_by_exact_counts_are_refused_where_they_would(rule: str, method: str, refused: bool) -> None:
    run = run_of({"name": method}, CLASSES)
    if not refused:
        prepared(run, {rule: 4})
        return
    cause = cause_of(run, {rule: 4})
    assert isinstance(cause, PolicyRefusedError)
    assert cause.rule == rule
    prepared(run, {rule: 1})
    prepared({**run, "plan": RUN["plan"]}, {rule: 4})  # without noise they hold


# Noise


def update_of(
    folder: Path, run: dict[str, Any] | None = None, base: Payload | None = None, round: int = 1, **site: Any
) -> bytes:
    harness = AgentHarness(store=DiskStore(folder), recipe=run or run_of(), rules=ANYTHING, **site)
    harness.fit(round, base)
    harness.agent().step(0.0)
    assert isinstance(harness.store, DiskStore)
    harness.store.close()
    return harness.link.pushed[0][1].data


def moved(sent: bytes, base: Payload) -> np.ndarray[Any, Any]:
    payload = codec.decode(sent)
    return np.concatenate([(payload[p][n] - base[p][n]).ravel() for p in sorted(base) for n in sorted(base[p])])


def test_the_same_task_gives_the_same_bytes_and_another_secret_others(tmp_path: Path) -> None:
    for name, secret in (("a", b"a"), ("b", b"a"), ("c", b"c")):
        give_secret(tmp_path / name, secret)
    sent = [update_of(tmp_path / name) for name in ("a", "b", "c")]
    assert sent[0] == sent[1] != sent[2]


def test_a_run_under_another_name_a_base_and_one_image_more_have_another_noise(tmp_path: Path) -> None:
    """The noise of two fits never cancels: what is left of their difference is as large as the noise itself."""

    def of_fewer(_: Recipe) -> SiteData:
        data = site_data()
        return replace(data, train=data.train.take(torch.arange(11)))

    base = first_model()
    nudged = {part: {n: a + np.float32(1e-6) for n, a in tensors.items()} for part, tensors in base.items()}
    steep = run_of(dp={**DP, "noise_multiplier": 50.0, "max_unit_norm": 1e-3})
    variants: list[dict[str, Any]] = [
        {},
        {"base": nudged},
        {"round": 2},
        {"load_data": of_fewer},
        {"run": {**steep, "seed": 1}},
        {"run": {**steep, "method": {"name": "fedprox", "mu": 0.0}}},
        {"name": "bob"},
    ]
    moves = []
    for number, variant in enumerate(variants):
        give_secret(tmp_path / str(number))
        moves.append(moved(update_of(tmp_path / str(number), **{"run": steep, **variant}), variant.get("base", base)))
    for one in range(len(moves)):
        for other in range(one):
            assert np.linalg.norm(moves[one] - moves[other]) > 0.7 * np.linalg.norm(moves[one])


def test_no_count_and_no_secret_is_shown(tmp_path: Path) -> None:
    give_secret(tmp_path, b"x")
    harness = AgentHarness(store=DiskStore(tmp_path), recipe=run_of(), rules=ANYTHING)
    harness.fit(1)
    agent = harness.agent()
    agent.step(0.0)
    assert harness.link.pushed[0][1].weight is None
    run = prepare(agent._site, Assignment("run", harness.link.recipe))
    assert run.dp is not None
    assert "xxxx" not in repr(run)


def test_memory_is_a_part_of_what_the_noise_follows_from(tmp_path: Path) -> None:
    """FedPer's head: with the same base a site that remembers another one must not have the same noise."""
    give_secret(tmp_path)
    harness = AgentHarness(store=DiskStore(tmp_path), recipe=run_of({"name": "fedper"}), rules=ANYTHING)
    daemon = harness.agent()
    for number in (1, 2):
        harness.fit(number)
        work(daemon, 1)
    run = prepare(daemon._site, Assignment("run", harness.link.recipe))
    task, now, no = harness.fit(3), daemon._status, None
    states = [harness.store.last_counted("run", before) for before in (2, 3)]
    seeds = []
    for state in states:
        context = run.fit_context("ann", task, state, now, no)  # type: ignore[arg-type]
        assert context.dp is not None
        seeds.append(context.dp.noise.number("any"))
    assert seeds[0] != seeds[1]


# Noise that is shared

IN_SUMS: dict[str, Any] = {"secure": True, "min_sites": 3}


def sharing(method: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    run = run_of({"name": method, **(options or {})}, {**DP, "shared_by": 2}, federation=IN_SUMS)
    return {**run, "plan": {**run["plan"], "epochs": 1}}


@pytest.mark.parametrize("method", ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedprox"])
def test_a_method_of_one_step_can_share_its_noise(method: str) -> None:
    run = prepared(sharing(method))
    assert run.shares_noise
    assert run.dp.cost.steps(run.recipe.plan.dp) == 1


@pytest.mark.parametrize("method", ["fedper", "fedbabu", "fedrep", "fednh", "fedproc", "cwfedavg"])
def test_what_a_site_keeps_or_makes_of_its_step_has_no_noise_where_it_is_shared(method: str) -> None:
    assert isinstance(cause := cause_of(sharing(method)), ConfigError)
    assert method in str(cause)


def test_a_step_of_a_fit_that_shares_its_noise_has_none() -> None:
    """The sum of the clipped gradients: the model moves by lr C n / B at most."""
    dp = {"noise_multiplier": 1e6, "sampling_rate": 1.0, "max_unit_norm": 1e-3, "shared_by": 2}
    run = run_of(None, dp, federation=IN_SUMS)
    run["plan"] |= {"epochs": 1, "lr": 0.01, "batch_size": 10}
    harness = AgentHarness(recipe=run, rules=ANYTHING)
    plan = Recipe.model_validate(run).plan
    assert plan.dp is not None
    assert plan.dp.noise_share(plan.lr, plan.batch_size) > 0.5
    agent = harness.agent()
    made = prepare(agent._site, Assignment("run", harness.link.recipe))
    base = first_model()
    task = Task(TaskKind.FIT, "run", 1, "fit-1", codec.digest(codec.encode(base)), 1, 60.0, 1)
    outcome = fit(Computation("ann", made, task, SiteState()), base, agent._status, NoCheckpoints(), agent._site.fit)
    assert 0 < distance_norm(outcome.update.payload, base) <= 0.01 * 1e-3 / 10 * len(made.data.train) * 1.01


def test_a_model_too_large_for_its_noise_takes_nothing_away() -> None:
    """From a std on no share of the noise is a number of its own any more: a conversion gives all the same word."""
    run = prepared(sharing("fedavg"))
    task = Task(TaskKind.FIT, "run", 1, "fit-1", codec.digest(b"base"), 1, 60.0, 1)
    most = MAX_STEPS * 2.0**-POINT.bits
    share = run.noise_share("ann", task, SiteState(), most * 0.99)
    layout = SumLayout.of(SumForm((Part.HEAD,)), describe(first_model()), first_model())
    words = share.on_words(layout, np.zeros(layout.size, np.uint64), POINT.bits).view(np.int64)
    assert len(set(words.tolist())) == layout.size
    assert np.abs(words.astype(float)).max() < 2.0**62
    for std in (most, np.inf, np.nan, 0.0):
        with pytest.raises(TaskFailedError):
            run.noise_share("ann", task, SiteState(), std)
    base = first_model()
    name = next(iter(base[Part.HEAD]))
    huge = {**base, Part.HEAD: {**base[Part.HEAD], name: np.full_like(base[Part.HEAD][name], 1e20)}}
    assert share_std(run.recipe.plan, 1, 1, huge) > most > share_std(run.recipe.plan, 1, 1, base)
