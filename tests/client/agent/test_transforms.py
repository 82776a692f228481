"""A run whose recipe names transforms: refused by the site's policy before data are loaded, or for what they do."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.scripted_server import RULES, RUN, AgentHarness

from protofed.client.site import PreparedRun, prepare
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
