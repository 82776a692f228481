"""The task REFINE at an evaluator: on its auxiliary images alone, through its own policy, and repeatable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, site_data, work
from tests.support.training_doubles import Deadly, KilledError

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.disk_store import DiskStore
from protofed.client.training.progress import on_disk
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.common.protocol.messages import Role, TaskKind, Verdict

METHOD = {"name": "fedic", "steps": 4}
OPEN: dict[str, Any] = {
    **RULES,
    "methods": ["fedic", "fedavg"],
    "exchange": ["receive", "share"],
    "batch_order": "recipe",  # so that two daemons draw the same batches
}
CHANGES: dict[str, Any] = {"recipe": {**RUN, "method": METHOD}, "rules": OPEN, "roles": frozenset({Role.EVALUATOR})}


def public(classes: int = 3) -> Examples:
    draw = torch.Generator().manual_seed(11)
    return Examples(torch.rand(2 * classes, 1, 2, 2, generator=draw), torch.arange(2 * classes) % classes)


def evaluators(recipe: Recipe) -> SiteData:
    return SiteData.for_scoring(site_data().test, recipe.input, recipe.classes, public())


def aggregate(seeds: tuple[int, ...] = (5, 6)) -> Payload:
    """A mean and the models that it is of, as FEDIC's server half makes it."""
    models = [first_model(seed) for seed in seeds]
    stacks = {
        f"{part}.{name}": np.stack([model[part][name] for model in models])
        for part in (Part.BODY, Part.HEAD)
        for name in models[0][part]
    }
    mean = {
        part: {name: stacks[f"{part}.{name}"].mean(0) for name in models[0][part]} for part in (Part.BODY, Part.HEAD)
    }
    return {**mean, Part.SITE_MODELS: stacks}


def harness(**changes: Any) -> AgentHarness:
    return AgentHarness(**{"name": "eva", "load_data": evaluators, **CHANGES, **changes})


def refined(site: AgentHarness, base: Payload | None = None) -> Payload:
    site.offer(TaskKind.REFINE, 1, base or aggregate())
    work(site.agent(), 1)
    ((task, released),) = site.link.pushed
    assert task.kind is TaskKind.REFINE
    return codec.decode(released.data)


def test_an_evaluator_pushes_a_model_of_the_means_shapes_and_keeps_nothing() -> None:
    site, base = harness(), aggregate()
    sent = refined(site, base)
    assert sent.keys() == {Part.BODY, Part.HEAD}
    assert not same_tensors({Part.BODY: sent[Part.BODY]}, {Part.BODY: base[Part.BODY]})
    assert {name: array.shape for name, array in sent[Part.HEAD].items()} == {
        name: array.shape for name, array in base[Part.HEAD].items()
    }
    ((_, released),) = site.link.pushed
    assert (released.weight, set(released.metrics)) == (None, {"loss"})  # no example count
    assert site.store.newest_counted("run") == 0
    assert site.declined() == []


def test_it_refines_on_its_auxiliary_images_alone() -> None:
    """Neither another test set nor images of its own, of a site that trains as well, change a bit."""
    alone = refined(harness())
    other = Examples(torch.ones(9, 1, 2, 2), torch.arange(9) % 3)

    def trains_as_well(recipe: Recipe) -> SiteData:
        return replace(site_data(), test=other, auxiliary=public())

    both = refined(harness(load_data=trains_as_well, roles=frozenset(Role)))
    assert same_tensors(alone, both)

    def others(recipe: Recipe) -> SiteData:
        images = Examples(public().pixels().flip(0), public().labels)
        return replace(evaluators(recipe), auxiliary=images)

    assert not same_tensors(alone, refined(harness(load_data=others)))


def test_one_without_auxiliary_images_scores_and_declines_to_refine() -> None:
    site = harness(load_data=lambda recipe: replace(evaluators(recipe), auxiliary=None))
    task = site.offer(TaskKind.REFINE, 1, aggregate())
    site.score(1)
    work(site.agent(), 2)
    assert site.declined() == [(task.task_id, FailureReason.DATA)]
    assert site.link.calls["fetch"] == 1  # of the score task alone
    assert len(site.link.scores) == 1


TRAINER = {"roles": frozenset({Role.TRAINER}), "load_data": lambda _: replace(site_data(), auxiliary=public())}


@pytest.mark.parametrize(
    ("changes", "round", "reason", "fetches"),
    [
        (TRAINER, 1, FailureReason.REFUSED, 0),
        ({"recipe": {**RUN, "method": {"name": "fedavg"}}}, 1, FailureReason.REFUSED, 0),  # which refines nothing
        ({}, 0, FailureReason.REFUSED, 0),
        ({}, 4, FailureReason.REFUSED, 0),
        ({"rules": {**OPEN, "exchange": ["share"]}}, 1, FailureReason.POLICY, 1),
        ({"rules": {**OPEN, "parts": ["body"]}}, 1, FailureReason.POLICY, 0),
        ({"rules": {**OPEN, "max_update_mb": 1e-6}}, 1, FailureReason.POLICY, 1),
    ],
)
def test_what_a_server_may_not_ask_for_is_declined(
    changes: dict[str, Any], round: int, reason: FailureReason, fetches: int
) -> None:
    site = harness(**changes)
    task = site.offer(TaskKind.REFINE, round, aggregate())
    work(site.agent(), 1)
    assert site.declined() == [(task.task_id, reason)]
    assert (site.link.calls["fetch"], site.link.calls["push"]) == (fetches, 0)


def test_models_that_are_none_and_a_refused_one_are_declined_so_that_another_evaluator_can_be_asked() -> None:
    site = harness()
    task = site.offer(TaskKind.REFINE, 1, first_model())  # without the sites' models
    work(site.agent(), 1)
    assert site.declined()[0][0] == task.task_id
    assert site.link.calls["push"] == 0
    site = harness()
    site.link.verdict = Verdict.REFUSED
    task = site.offer(TaskKind.REFINE, 1, aggregate())
    work(site.agent(), 1)
    assert site.declined() == [(task.task_id, FailureReason.REFUSED)]


def test_a_policy_for_secure_aggregation_lets_out_what_was_refined_on_public_images() -> None:
    """Rules about a site's own classes: an evaluator's have none. `admit` refuses runs without sums, as of any site."""
    policy = Policy(
        PolicyRules.model_validate({**OPEN, "secure": "required", "partners": "confirmed", "hide_class_presence": True})
    )
    update = Update("eva", first_model())
    with pytest.raises(PolicyRefusedError):
        policy.release(update)
    assert policy.release_public(update).manifest.total_bytes > 0


@pytest.mark.parametrize("batch", [0, 3, 7, 10, 11])  # of three trainings of four batches each
def test_a_daemon_that_dies_in_the_middle_goes_on_to_the_same_bytes(tmp_path: Path, batch: int) -> None:
    recipe = {**RUN, "method": METHOD, "plan": {**RUN["plan"], "checkpoint": True}}
    undisturbed = refined(harness(recipe=recipe))
    site = harness(recipe=recipe, store=DiskStore(tmp_path), checkpoints=partial(on_disk, tmp_path))
    site.now.check = dies = Deadly(batch)  # type: ignore[method-assign]
    site.offer(TaskKind.REFINE, 1, aggregate())
    with pytest.raises(KilledError):
        work(site.agent(), 1)
    dies.at = None
    site.restart(tmp_path)
    assert same_tensors(refined(site), undisturbed)
    assert dies.made == batch + 12 - batch // 2 * 2  # epochs that were done are not done again
