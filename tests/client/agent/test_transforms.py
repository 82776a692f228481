"""A run whose recipe names transforms: refused by the site's policy before data are loaded, or for what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness

from protofed.client.data.examples import Examples
from protofed.client.site import PreparedRun, prepare
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.protocol.messages import Assignment

FLIP = {"transform": "torchvision/RandomHorizontalFlip"}
BLACK = {"transform": "monai/RandScaleIntensity", "factors": [-1.0, -1.0], "prob": 1.0}  # times 1 - 1


def site(limits: dict[str, Any], augmentation: list[dict[str, Any]], **input_: Any) -> AgentHarness:
    recipe = {**RUN, "input": {**RUN["input"], **input_}, "plan": {**RUN["plan"], "augmentation": augmentation}}
    return AgentHarness(recipe=recipe, rules={**RULES, "limits": {**RULES["limits"], **limits}})


def prepared(harness: AgentHarness) -> PreparedRun:
    return prepare(harness.agent()._site, Assignment("run", harness.link.recipe))


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "torchvision/RandomHorizontalFlip"), ({"prepare": [{"transform": "mine:clahe"}]}, "mine:clahe")],
)
def test_a_transform_that_the_policy_does_not_name_is_refused_before_data_are_loaded(
    changes: dict[str, Any], name: str
) -> None:
    harness = site({"transforms": ["monai/*"]}, [FLIP], **changes)
    loads = harness.counting_loads()
    with pytest.raises(TaskFailedError, match=rf"'{name}'.* policy allows monai/\* \(limits\.transforms\)") as refused:
        prepared(harness)
    assert refused.value.reason is FailureReason.POLICY
    assert loads == []
    harness.rules = {**harness.rules, "plugins": ["mine:clahe"], "limits": RULES["limits"]}
    prepared(harness)
    assert loads == ["run"]


def test_images_that_an_augmentation_makes_alike_are_refused_as_those_of_a_window_are() -> None:
    prepared(site({"min_contrast": 0.05}, [FLIP]))
    prepared(site({"min_contrast": 0.0}, [BLACK]))
    with pytest.raises(TaskFailedError, match=r"difference of 0 between.*limits\.min_contrast"):
        prepared(site({"min_contrast": 0.05}, [BLACK]))


def test_the_contrast_of_many_images_is_that_of_a_sample_also_of_a_view() -> None:
    rng = torch.Generator().manual_seed(0)
    harness = site({"min_contrast": 0.05}, [FLIP])
    own = harness.load_data(Recipe.model_validate(RUN))
    images = torch.randint(0, 2**16, (900, *own.input.shape), generator=rng).to(torch.uint16)
    many = Examples(images, torch.arange(900) % own.classes).take(torch.arange(0, 900, 2))  # more than the sample has
    harness.load_data = lambda _: replace(own, train=many)
    prepared(harness)
    harness = site({"min_contrast": 0.05}, [BLACK])
    harness.load_data = lambda _: replace(own, train=many)
    with pytest.raises(TaskFailedError, match=r"difference of 0 between"):
        prepared(harness)
