"""A recipe without a key of after 0.1 is, on the wire, what 0.1 made of it: older sites and servers go on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protofed.common.config.recipe import Recipe, parse_json, read_recipe

ROOT = Path(__file__).parents[2]
GOLDEN = (ROOT / "tests" / "golden" / "recipe_digits_fednh_0_1.json").read_text(encoding="utf-8").strip()
FINGERPRINT = "f85f2780e23f476cbf7ef6d4f00dd06d7a15d3c215b4340d501e64c585731f47"  # as 0.1 printed it
LATER: dict[str, Any] = {
    "vocabulary": [f"digit {number}" for number in range(10)],
    "input": {"fit": "crop", "colours": "convert", "window": [40.0, 400.0]},
}


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe(ROOT / "deploy" / "recipes" / "digits-fednh.toml")


def test_a_recipe_without_new_keys_is_letter_by_letter_what_it_was(recipe: Recipe) -> None:
    assert recipe.wire() == GOLDEN
    assert recipe.fingerprint() == FINGERPRINT


def test_what_an_older_server_says_is_read_and_said_again_alike() -> None:
    assert parse_json(GOLDEN, Recipe, "the golden one").wire() == GOLDEN


def test_new_keys_are_said_where_they_are_used_and_change_fingerprint_and_preparation(recipe: Recipe) -> None:
    table = json.loads(GOLDEN)
    for key, value in [("vocabulary", LATER["vocabulary"]), *(("input", {k: v}) for k, v in LATER["input"].items())]:
        changed = {**table, key: {**table[key], **value} if isinstance(value, dict) else value}
        told = parse_json(json.dumps(changed), Recipe, "changed")
        assert json.loads(told.wire()) == changed
        assert told.fingerprint() != FINGERPRINT
        assert told.preparation() != recipe.preparation()


def test_what_does_not_touch_images_leaves_the_preparation(recipe: Recipe) -> None:
    other = recipe.model_copy(update={"name": "another", "rounds": 99, "seed": 5})
    assert other.preparation() == recipe.preparation()
