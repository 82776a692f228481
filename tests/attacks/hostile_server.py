"""A server that chooses recipe, model and base, against the agent of one real site; and what the site answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.attacks.policies import policy_of
from tests.support.scripted_server import AgentHarness
from torch import Tensor

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import build
from protofed.client.models.split import SplitModel, dump
from protofed.client.task import build_client_task
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import NamedOptions
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.payload import Part, Payload, SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import EVALUATOR, load_data

# Makes the base of a round from what the site sent in the round before; None in round 1.
Lure = Callable[[Payload | None], Payload]
# The digits as every number on docs/explanation/privacy.md has them, 0.2.0's too: its recipes had this long tail.
LONG_TAIL = 0.1
DIGITS = 10
MULTI_LABEL, REGRESSION = "multi-label", "regression"
TASKS: Mapping[str, Mapping[str, Any]] = {
    CLASSIFICATION: {"task": NamedOptions(name=CLASSIFICATION), "classes": DIGITS},
    MULTI_LABEL: {"task": NamedOptions(name=MULTI_LABEL)},
    REGRESSION: {
        "task": NamedOptions.model_validate({"name": REGRESSION, "range": [0, DIGITS - 1]}),
        "classes": 1,
        "class_names": (),
    },
}


def recipe_like(name: str, **changes: Mapping[str, Any] | Any) -> Recipe:
    """A shipped recipe of the digits with changes, table by table, and with LONG_TAIL."""
    table = json.loads(shipped.recipe(name).model_dump_json())
    table["data"]["long_tail"] = LONG_TAIL
    for key, value in changes.items():
        table[key] = {**table[key], **value} if isinstance(value, Mapping) and key in ("plan", "federation") else value
    return Recipe.model_validate(table)


def as_task(recipe: Recipe, task: str) -> Recipe:
    """The same run with another task. An image of the digit d has the findings d and d + 1, or the number d.

    Such a recipe may have no LONG_TAIL, but the sites are to have the same images as in the classification.
    """
    return recipe.model_copy(update=TASKS[task])


def has(labels: Tensor, classes: int) -> NDArray[np.bool_]:
    """Which classes or findings each image has, [N, C], of labels [N] or targets [N, C]."""
    truth = labels == 1 if labels.ndim > 1 else labels[:, None] == torch.arange(classes)
    return np.asarray(truth)


def sites_of(recipe: Recipe) -> Iterator[SiteData]:
    """The data of the recipe's sites, one after the other."""
    return (data for name, data in digits(recipe).items() if name != EVALUATOR)


def public_of(recipe: Recipe) -> SiteData:
    """The test set that all may have, the attacker too."""
    return digits(recipe)[EVALUATOR]


def digits(recipe: Recipe) -> dict[SiteId, SiteData]:
    """The digits by site, enlarged where the recipe's model needs larger images; with findings, if the task asks."""
    known = _enlarged(recipe.model_copy(update=TASKS[CLASSIFICATION]))
    if recipe.task.name == CLASSIFICATION:
        return known
    task, classes = build_client_task(recipe.task), torch.eye(DIGITS)

    def changed(examples: Examples) -> Examples:
        found = (classes + classes.roll(1, dims=1))[examples.labels]
        return Examples(examples.pixels(), found if recipe.task.name == MULTI_LABEL else examples.labels.float())

    return {
        name: replace(
            data,
            train=changed(data.train),
            test=changed(data.test),
            local_test=None,
            task=task,
            classes=recipe.classes,
        )
        for name, data in known.items()
    }


def _enlarged(recipe: Recipe) -> dict[SiteId, SiteData]:
    digits = recipe.model_copy(update={"input": shipped.recipe("digits-fedavg").input})
    sides = recipe.input.shape[1:]

    def enlarged(examples: Examples) -> Examples:
        images = examples.pixels() if examples.pixels().is_floating_point() else examples.pixels() / 255
        return Examples(torch.nn.functional.interpolate(images, sides), examples.labels)

    def fitted(data: SiteData) -> SiteData:
        return replace(data, train=enlarged(data.train), test=enlarged(data.test), input=recipe.input)

    known = load_data(digits)
    return known if sides == digits.input.shape[1:] else {name: fitted(data) for name, data in known.items()}


def honest_model(recipe: Recipe) -> SplitModel:
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return build(recipe.model, recipe.input, recipe.classes)


def as_payload(model: SplitModel) -> Payload:
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}


def always(base: Payload) -> Lure:
    return lambda _: base


def facing(policy: str, recipe: Recipe, data: SiteData) -> AgentHarness:
    """A site with these data under a policy by name; `offer` gives it tasks."""
    rules = policy_of(policy, recipe).rules.model_dump()
    wire = json.loads(recipe.wire())
    harness = AgentHarness(recipe=wire, rules=rules, load_data=lambda _: data, name="site-1")
    harness.link.run, harness.link.min_cohort = recipe.name, 100  # who lies says what the policy wants to hear
    return harness


def updates(policy: str, recipe: Recipe, data: SiteData, lures: Sequence[Lure]) -> list[Payload]:
    """The updates of a site to a server that sends these bases in rounds 1, 2, …; as many as the site sent."""
    harness = facing(policy, recipe, data)
    agent = harness.agent()
    sent: list[Payload] = []
    for number, lure in enumerate(lures, start=1):
        harness.offer(TaskKind.FIT, number, lure(sent[-1] if sent else None))
        agent.step(0.0)
        if len(harness.link.pushed) < number:
            break
        sent.append(codec.decode(harness.link.pushed[-1][1].data))
    return sent
