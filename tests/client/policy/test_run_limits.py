"""What a server may ask: every limit passes at its bound and refuses beyond it, by its own name."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from protofed.client.method import client_methods
from protofed.client.models.catalogue import architectures, build
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import Limits, PolicyRules, unlimited
from protofed.client.policy.run_limits import RunFacts, admit, checks, step_sum, unchecked
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.common.codec import Digest
from protofed.common.config.recipe import Plan, Recipe
from protofed.common.config.tables import Model
from protofed.common.payload import Part
from protofed.deploy import shipped

MINE = {"plugins": frozenset({"mine:clahe"})}
OPEN = unlimited(set(architectures))
DIGEST, OTHER = Digest("a" * 64), "b" * 64
FACTS = RunFacts(DIGEST, frozenset({Part.BODY, Part.HEAD}), cohort=3, examples=100, contrast=0.2, features=32)
RECIPE: dict[str, Any] = {
    "name": "run",
    "rounds": 10,
    "classes": 3,
    "input": {
        "shape": [1, 16, 24],
        "mean": [0.5],
        "std": [0.25],
        "prepare": [{"transform": "torchvision/Pad", "padding": 1}],
    },
    "method": {"name": "fedprp", "intra": 8.0, "temperature": 0.25},
    "model": {"name": "mlp", "hidden": [64, 32]},
    "plan": {
        "epochs": 2,
        "batch_size": 32,
        "lr": 0.1,
        "weight_decay": 0.001,
        "max_grad_norm": 5.0,
        "augmentation": [{"transform": "monai/RandFlip"}],
    },
}
POLICIES = {path.stem: Policy.read(path).rules for path in shipped.folder("policies").glob("*.toml")}
# Points on a line have two coordinates, which is no image.
NOT_FOR_HOSPITALS = {f"spiral-{method}-{data}" for method in ("fedavg", "fednh") for data in ("balanced", "longtail")}


def limits(**changes: Any) -> Limits:
    return Limits.model_validate({**OPEN.model_dump(), **changes})


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({**RECIPE, **changes})


def refused(asked: Recipe, allowed: Limits, facts: RunFacts = FACTS) -> str:
    with pytest.raises(PolicyRefusedError) as error:
        admit(asked, allowed, facts)
    assert f"({error.value.rule})" in str(error.value)
    return error.value.rule


@pytest.mark.parametrize(
    ("key", "at", "beyond"),
    [
        ("models", ["mlp"], ["resnet18"]),
        ("models", ["mlp", "resnet18"], []),
        ("transforms", ["torchvision/*", "monai/RandFlip"], ["torchvision/*"]),
        ("transforms", ["torchvision/Pad", "monai/*"], []),
        ("max_width", 64, 63),
        ("min_features_per_class", 32 / 3, 11),
        ("sides", [16, 24], [17, 24]),
        ("sides", [16, 24], [16, 23]),
        ("min_std", 0.25, 0.26),
        ("min_contrast", 0.2, 0.21),
        ("batches", [32, 32], [33, 64]),
        ("batches", [32, 32], [1, 31]),
        ("losses", ["cross-entropy"], ["balanced-softmax", "logit-adjustment"]),
        ("samplings", ["shuffled"], ["class-balanced"]),
        ("robust", ["none"], ["clip", "krum"]),
        ("epochs", 2, 1),
        ("lr", 0.1, 0.099),
        ("weight_decay", 0.001, 0.0009),
        ("rounds", 10, 9),
        ("steps", 4, 5),  # 100 examples in batches of 32
        ("min_step_sum", 0.8, 0.81),  # 8 steps of 0.1
        ("min_grad_norm", 5.0, 5.1),
        ("max_method_number", 8.0, 7.9),
        ("min_cohort", 3, 4),
        ("recipes", [DIGEST, OTHER], [OTHER]),
    ],
)
def test_a_run_passes_at_the_limit_and_is_refused_beyond_it(key: str, at: Any, beyond: Any) -> None:
    admit(recipe(), limits(**{key: at}), FACTS)
    assert refused(recipe(), limits(**{key: beyond})) == f"limits.{key}"


def test_without_limits_nothing_is_refused_and_a_silent_policy_has_the_standard_ones() -> None:
    least = dataclasses.replace(FACTS, cohort=1, examples=1, contrast=0.0)
    admit(recipe(plan={"batch_size": 1_000_000, "lr": 1e5}), OPEN, least)
    silent = PolicyRules(methods=frozenset({"fedavg"}), parts=frozenset({Part.BODY}))
    assert silent.limits == Limits() == POLICIES["standard"].limits


@pytest.mark.parametrize(
    ("changes", "allowed", "facts"),
    [
        ({}, {"robust": ["clip"]}, {"sends": frozenset()}),
        ({}, {"models": ["resnet18"]}, {"plugins": frozenset({"mlp"})}),  # which the policy names
        ({"input": {"shape": [1, 16, 16], "prepare": [{"transform": "mine:clahe"}]}}, {}, MINE),
        ({"input": {"shape": [1, 16, 16]}, "plan": {"augmentation": "crop-flip"}}, {"transforms": []}, {}),
        ({}, {"min_step_sum": 1e9}, {"sends": frozenset({Part.BODY})}),  # neither head nor prototypes
        ({"method": {"name": "fedprp", "intra": 0.0, "flag": True}}, {"max_method_number": 1}, {}),  # an option is off
    ],
)
def test_limits_that_concern_no_run(changes: dict[str, Any], allowed: dict[str, Any], facts: dict[str, Any]) -> None:
    admit(recipe(**changes), limits(**allowed), dataclasses.replace(FACTS, **facts))


def test_a_secure_aggregation_is_no_robust_rule() -> None:
    aggregated = recipe(federation={"secure": True, "min_sites": 3})
    admit(aggregated, limits(robust=["none"]), FACTS)
    assert refused(aggregated, limits(robust=["clip"])) == "limits.robust"


@pytest.mark.parametrize(
    "images", [{"std": [0.25, 1.5, 0.25]}, {"mean": [1000.0]}, {"mean": [-0.1]}, {"std": [0.25, 0.01, 0.25]}]
)
def test_no_channel_is_blown_up_or_flattened(images: dict[str, Any]) -> None:
    asked = recipe(input={**RECIPE["input"], "shape": [3, 16, 24], **images})
    assert refused(asked, limits(min_std=0.05)) == "limits.min_std"


@pytest.mark.parametrize("options", [{"temperature": 0.001}, {"intra": 1e9}, {"weights": [[1.0], [-1e4]]}])
def test_numbers_of_a_method_are_bounded_with_their_inverse_and_at_any_depth(options: dict[str, Any]) -> None:
    asked = recipe(method={"name": "fedprp", **options})
    assert refused(asked, limits(max_method_number=999)) == "limits.max_method_number"


def test_what_needs_the_data_waits_for_them_and_what_is_left_out_is_named() -> None:
    allowed = limits(steps=1000, min_step_sum=1000, min_cohort=1000, min_contrast=1)
    admit(recipe(), allowed, dataclasses.replace(FACTS, examples=None, contrast=None, cohort=None))
    assert refused(recipe(), allowed, dataclasses.replace(FACTS, contrast=None, cohort=None)) == "limits.steps"
    nothing_known = RunFacts(DIGEST, FACTS.sends)
    known, left = (
        {f"limits.{check.key}" for check in checks(recipe(), OPEN, facts)} for facts in (FACTS, nothing_known)
    )
    assert set(unchecked(nothing_known)) == known - left
    assert unchecked(FACTS) == ()
    body = RunFacts(DIGEST, frozenset({Part.BODY}))
    assert "limits.min_step_sum" not in unchecked(body)


@pytest.mark.parametrize(
    ("plan", "moved"),
    [
        ({}, 0.8),
        ({"optimizer": "adam", "momentum": 0.9}, 0.8),
        ({"momentum": 0.5}, 0.1 * sum((1 - 0.5**t) / 0.5 for t in range(1, 9))),
        ({"schedule": "exponential", "lr_decay": 0.5}, 0.8 * 0.5**9),
        ({"schedule": "cosine"}, 0.8 * 0.0244717418524232),
        ({"schedule": "step", "lr_decay": 0.1}, 0.8 * 0.01),
        ({"warmup_rounds": 4}, 0.2),  # the first round moves least
        ({"warmup_rounds": 20}, 0.8 / 20),  # 10 rounds are over before it is
        ({"warmup_rounds": 2, "schedule": "step", "lr_decay": 0.1}, 0.8 * 0.01),  # the last one does
        ({"drop_last": True}, 0.6),
        ({"epochs": 5}, 2.0),
    ],
)
def test_movement_is_counted_in_the_round_of_the_lowest_rate_with_momentum(plan: dict[str, Any], moved: float) -> None:
    asked = recipe(plan={**RECIPE["plan"], **plan})
    admit(asked, limits(min_step_sum=moved - 1e-6), FACTS)
    assert refused(asked, limits(min_step_sum=moved + 1e-6)) == "limits.min_step_sum"


def test_a_momentum_near_one_counts_no_more_than_it_moves() -> None:
    plan = Plan(momentum=1 - 1e-12)
    assert 0 < step_sum(plan, 1, 1.0) == pytest.approx(1.0)
    assert step_sum(plan, 100, 1.0) <= 100 * 101 / 2


@pytest.mark.parametrize(
    ("drop_last", "examples", "steps"), [(False, 65, 3), (True, 65, 2), (True, 5, 1), (False, 5, 1)]
)
def test_steps_are_those_that_training_takes(drop_last: bool, examples: int, steps: int) -> None:
    assert Plan(batch_size=32, drop_last=drop_last).steps_per_epoch(examples) == steps


@pytest.mark.parametrize(
    "table", [{"sides": [9, 8]}, {"lr": float("nan")}, {"recipes": ["not a digest"]}, {"learning_rate": 0.1}]
)
def test_limits_that_cannot_be_understood_are_no_limits(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate(table)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_shipped_policy_states_every_limit(name: str, tmp_path: Path) -> None:
    assert POLICIES[name].limits.model_fields_set == Limits.model_fields.keys()


def test_a_stricter_policy_has_tighter_limits() -> None:
    for tight, wide in (("strict", "standard"), ("standard", "open")):
        narrow, loose = POLICIES[tight].limits, POLICIES[wide].limits
        for key in ("models", "losses", "samplings", "robust"):
            assert getattr(narrow, key) <= getattr(loose, key), key
        for low, high in ((narrow.sides, loose.sides), (narrow.batches, loose.batches)):
            assert high[0] <= low[0] <= low[1] <= high[1]
        most = ("max_width", "epochs", "lr", "weight_decay", "rounds", "max_method_number", "max_base_change")
        for key in (*most, "tasks_per_day", "scorings_per_day", "max_rollback_rounds"):
            assert getattr(narrow, key) < getattr(loose, key), key
        for key in ("min_std", "min_contrast", "steps", "min_step_sum", "min_grad_norm", "min_cohort"):
            assert getattr(narrow, key) > getattr(loose, key), key
        assert narrow.min_features_per_class >= loose.min_features_per_class
        assert narrow.check_base >= loose.check_base


@pytest.mark.parametrize("name", ["standard", "strict"])
def test_a_body_of_fewer_features_than_classes_is_declined(name: str) -> None:
    """Of one feature, eight sums of three honest sites told the shares of each."""
    allowed = POLICIES[name].limits
    for features in (1, 2, 9, 10):
        model = Model.model_validate({"name": "digits-cnn", "features": features})
        asked = shipped.recipe("digits-fedavg").model_copy(update={"model": model})
        built = build(asked.model, asked.input, asked.classes).features
        facts = RunFacts(DIGEST, FACTS.sends, features=built)
        broken = {check.key for check in checks(asked, allowed, facts) if not check.holds}
        assert ("min_features_per_class" in broken) == (features < 10)


@pytest.mark.parametrize("path", sorted(shipped.folder("recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_keeps_the_standard_limits_but_those_of_points(path: Path) -> None:
    asked = shipped.recipe(path.stem)
    half = client_methods.build(asked.method.name, asked.method.options)
    with torch.random.fork_rng(devices=[]):
        features = build(asked.model, asked.input, asked.classes).features
    facts = RunFacts(DIGEST, half.sends, own_losses=half.declares.own_losses, features=features)
    admit(asked, POLICIES["open"].limits, facts)
    broken = {check.key for check in checks(asked, POLICIES["standard"].limits, facts) if not check.holds}
    expected = {"models", "sides", "min_features_per_class"} if path.stem in NOT_FOR_HOSPITALS else set()
    assert broken == expected | ({"losses"} if asked.method.name == "fedrod" else set())


def test_a_loss_that_the_method_has_whatever_the_plan_says_must_be_allowed_too() -> None:
    asked = shipped.recipe("digits-fedrod")
    assert asked.plan.loss == "cross-entropy"
    half = client_methods.build("fedrod", {})
    facts = RunFacts(DIGEST, half.sends, own_losses=half.declares.own_losses)
    limits = POLICIES["standard"].limits
    with pytest.raises(PolicyRefusedError, match="method 'fedrod', which trains by 'balanced-softmax'") as refused:
        admit(asked, limits, facts)
    assert refused.value.rule == "limits.losses"
    admit(asked, limits.model_copy(update={"losses": limits.losses | {"balanced-softmax"}}), facts)


@pytest.mark.parametrize("name", list(client_methods))
def test_a_method_names_the_loss_by_class_frequencies_that_it_calls(name: str) -> None:
    half = client_methods.build(name, {})
    calls = "balanced_softmax(" in inspect.getsource(type(half))
    assert half.declares.own_losses == ({"balanced-softmax"} if calls else frozenset())
