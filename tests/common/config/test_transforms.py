"""What a recipe may name as a transform of images: the tables' names and options, and plug-ins."""

from __future__ import annotations

from typing import Any

import pytest

from protofed.common.config.recipe import Recipe, parse
from protofed.common.config.tables import Input
from protofed.common.config.transforms import FAMILIES, OPTIONS, check_allowed_names, is_allowed
from protofed.common.errors import ConfigError

CROP = {"transform": "torchvision/CenterCrop", "size": 224}
FLIP = {"transform": "torchvision/RandomHorizontalFlip"}
MINE = {"transform": "mine:clahe", "strength": 2.0}


def recipe(prepare: object = None, augmentation: object = None) -> Recipe:
    images: dict[str, Any] = {"shape": [1, 8, 8]} | ({} if prepare is None else {"prepare": prepare})
    table: dict[str, Any] = {
        "name": "run",
        "rounds": 1,
        "classes": 2,
        "input": images,
        "method": {"name": "fedavg"},
        "model": {"name": "digits-cnn"},
        "plan": {} if augmentation is None else {"augmentation": augmentation},
    }
    return parse(table, Recipe, "run.toml")


def test_a_recipe_names_transforms_with_options_and_is_read_again_from_its_wire_form() -> None:
    asked = recipe([CROP, MINE], [FLIP])
    assert [(step.transform, step.options) for step in asked.input.prepare] == [
        ("torchvision/CenterCrop", {"size": 224}),
        ("mine:clahe", {"strength": 2.0}),
    ]
    assert asked.transforms == ("torchvision/CenterCrop", "mine:clahe", "torchvision/RandomHorizontalFlip")
    assert "mine:clahe" in asked.names
    assert Recipe.model_validate_json(asked.wire()) == asked


def test_recipes_without_transforms_have_the_digests_of_before_and_others_have_other_ones() -> None:
    plain = recipe()
    assert plain.preprocessing_digest() == recipe([]).preprocessing_digest()
    assert "prepare" not in plain.wire()
    # As 0.3.0 computed it, which had no such key.
    assert plain.preprocessing_digest() == "c7579dc64ba12bf9ac5eb91a1d33650abb1448ea044f10526cff92ae80da05d1"
    assert recipe([CROP]).preprocessing_digest() != recipe([{**CROP, "size": 223}]).preprocessing_digest()
    assert recipe(augmentation=[FLIP]).preprocessing_digest() == plain.preprocessing_digest()
    assert recipe(augmentation=[FLIP]).fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"transform": "torchvision/CenterCop"}, "did you mean 'torchvision/CenterCrop'"),
        ({"transform": "monai/CenterCrop"}, "did you mean 'monai/CenterS"),
        ({"transform": "torchvision/Lambda", "lambd": "open"}, "unknown transform 'torchvision/Lambda'"),
        ({"transform": "monai/LoadImage"}, "unknown transform 'monai/LoadImage'"),
        ({"transform": "os/system"}, "unknown transform 'os/system'"),
        ({"transform": "monai/HistogramNormalize", "mask": [1]}, "unknown option of monai/HistogramNormalize 'mask'"),
        ({"transform": "torchvision/CenterCrop", "sise": 1}, "did you mean 'size'"),
        ({"transform": "torchvision/CenterCrop", "size": [4, 4097]}, "expected at most 4096"),
        ({"transform": "torchvision/CenterCrop", "size": float("nan")}, "finite"),
        ({"transform": "mine:clahe", "how": {"code": "x"}}, "how: expected a number"),
        ({"size": 1}, "transform' is missing"),
    ],
)
def test_everything_else_is_refused_by_name(step: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"input\.prepare\.0") as error:
        recipe([step])
    assert said in str(error.value)
    with pytest.raises(ConfigError, match=r"plan\.augmentation"):
        recipe(augmentation=[step])


@pytest.mark.parametrize("name", ["torchvision/RandomHorizontalFlip", "monai/RandFlip", "torchvision/ColorJitter"])
def test_a_random_preparation_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is random.*plan.augmentation"):
        recipe([CROP, {"transform": name}])


@pytest.mark.parametrize(
    ("setting", "said"),
    [("crop-flp", "'crop-flip'"), ([], "at least 1"), ([FLIP] * 17, "at most 16"), (3, "plan.augmentation = 3")],
)
def test_an_augmentation_is_a_known_name_or_a_list_and_only_what_was_meant_is_explained(
    setting: object, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(augmentation=setting)
    assert said in str(error.value)


def test_a_policy_names_transforms_and_families() -> None:
    both = frozenset(FAMILIES)
    assert all(is_allowed(name, both) for name in OPTIONS)
    assert is_allowed("monai/RandFlip", frozenset({"monai/*"}))
    assert not is_allowed("torchvision/Resize", frozenset({"monai/*", "torchvision/Pad"}))
    assert not is_allowed("mine:clahe", both)
    assert not is_allowed("monai/LoadImage", both), "a family is what the tables list of it"
    with pytest.raises(ValueError, match="did you mean 'monai/RandFlip'"):
        check_allowed_names(frozenset({"monai/RandFlp"}))
    with pytest.raises(ValueError, match="belongs into `plugins`"):
        check_allowed_names(frozenset({"mine:clahe"}))


def test_inputs_with_equal_transforms_are_equal_and_have_one_hash() -> None:
    one, two, other = (recipe([{**CROP, "size": size}]).input for size in (4, 4, 5))
    assert (one == two, hash(one) == hash(two), one == other) == (True, True, False)
    assert isinstance(one, Input)
