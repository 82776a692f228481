"""Models that an honest run has pass; each kind of weights that a server prepares is refused by its check."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from protofed.client.base_checks import statistics as base_checks
from protofed.client.base_checks.statistics import BaseCheck
from protofed.client.models.catalogue import first_model
from protofed.common.codec import decode, encode
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload

TABLE = {
    "name": "run",
    "rounds": 3,
    "classes": 6,
    "input": {"shape": [1, 16, 16]},
    "method": {"name": "fedavg"},
    "model": {"name": "resnet18"},
}
RECIPE = Recipe.model_validate(TABLE)
MLP = Recipe.model_validate({**TABLE, "model": {"name": "mlp", "hidden": [32]}})


def built(recipe: Recipe = MLP) -> Payload:
    return first_model(recipe, frozenset())


def name_of_weight(model: Payload) -> str:
    return next(name for name, array in model[Part.BODY].items() if array.ndim == 2)


def with_weight(change: Callable[[Array], Array], part: Part = Part.BODY) -> Payload:
    """The built model with one weight of [rows, columns] changed."""
    model = built()
    name = name_of_weight(model) if part is Part.BODY else "weight"
    return {**model, part: {**model[part], name: change(model[part][name]).astype(np.float32)}}


def structure(model: Payload, recipe: Recipe = MLP) -> BaseCheck | None:
    problem = base_checks.finite_problem(model) or base_checks.structure_problem(
        model, base_checks.statistics(built(recipe))
    )
    return problem.check if problem else None


@pytest.mark.parametrize("recipe", [RECIPE, MLP], ids=["resnet18", "mlp"])
def test_the_built_model_passes_every_check(recipe: Recipe) -> None:
    before = torch.get_rng_state()
    model = decode(encode(built(recipe)))
    assert encode(model) == encode(built(recipe))  # as every site builds it
    assert torch.equal(torch.get_rng_state(), before)
    assert base_checks.first_problem(model, built(recipe), {}) is None
    assert structure(model, recipe) is None
    assert base_checks.change_problem(model, model, 1e-9) is None


def test_the_last_digits_of_another_platform_pass_and_a_step_of_training_does_not() -> None:
    for size, refused in ((1e-6, False), (1e-2, True)):
        model = with_weight(lambda weight, size=size: weight * (1 + size))  # type: ignore[misc]
        problem = base_checks.first_problem(model, built(), {})
        assert (problem is not None) == refused
    assert problem is not None
    assert (problem.check, problem.layer) == (BaseCheck.FIRST_MODEL, f"body/{name_of_weight(built())}")
    lacking = base_checks.first_problem({**built(), Part.BODY: {}}, built(), {})
    assert lacking is not None
    assert lacking.check is BaseCheck.FIRST_MODEL


@pytest.mark.parametrize(
    ("changed", "options", "refused"),
    [
        ({Part.HEAD: {"scale": np.float32(10)}}, {"scale": 10.0}, False),
        ({Part.HEAD: {"scale": np.float32(30)}}, {"scale": 10.0}, True),
        ({Part.HEAD: {"scale": np.float32(1)}}, {}, False),
        ({Part.HEAD: {"scale": np.float32(1e6)}}, {}, True),
        ({Part.PROTOTYPES: {"mean": np.eye(6, 32, dtype=np.float32)}}, {}, False),
        ({Part.PROTOTYPES: {"mean": 5 * np.eye(6, 32, dtype=np.float32)}}, {}, True),
    ],
)
def test_what_is_in_the_heads_place_is_checked(changed: Payload, options: dict[str, object], *, refused: bool) -> None:
    changed = {part: {name: np.asarray(array) for name, array in tensors.items()} for part, tensors in changed.items()}
    problem = base_checks.first_problem({**built(), **changed}, built(), options)
    assert (problem is not None) == refused


@pytest.mark.parametrize("bias", [True, False])
def test_another_head_in_one_matrix_is_the_built_head_in_the_first_round(bias: bool) -> None:
    head = {name: array for name, array in built()[Part.HEAD].items() if bias or name == "weight"}
    model = {**built(), Part.HEAD: head}
    joined = np.column_stack([head["weight"], head["bias"]]) if bias else head["weight"]
    for matrix, refused in ((joined, False), (joined[::-1], True)):
        base = {**model, Part.HEAD: {**head, "retrained": matrix}}
        problem = base_checks.first_problem(base, model, {})
        assert (problem is not None) == refused
    assert problem is not None
    assert (problem.check, problem.layer) == (BaseCheck.FIRST_MODEL, "head/retrained")


def test_class_models_of_the_first_round_are_copies_of_the_built_head() -> None:
    head = built()[Part.HEAD]
    stacks = {name: np.stack([array] * 6) for name, array in head.items()}
    model = {Part.BODY: built()[Part.BODY], Part.CLASS_MODELS: stacks}
    assert base_checks.first_problem(model, built(), {}) is None
    chosen = {**stacks, "bias": stacks["bias"] + 1000 * np.eye(6, dtype=np.float32)}
    problem = base_checks.first_problem({**model, Part.CLASS_MODELS: chosen}, built(), {})
    assert problem is not None
    assert problem.layer == "class-models/bias"
    assert structure({**model, Part.CLASS_MODELS: chosen}) is BaseCheck.GROWTH


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda weight: np.where(np.arange(len(weight))[:, None] == 3, np.nan, weight), BaseCheck.FINITE),
        (lambda weight: weight * 0, BaseCheck.DEAD),
        (lambda weight: weight * 1e-6, BaseCheck.DEAD),
        (lambda weight: np.where(np.arange(len(weight))[:, None] < 20, 0.0, weight), BaseCheck.DEAD),
        (lambda weight: weight * 1e3, BaseCheck.GROWTH),
        (lambda weight: np.where(np.arange(len(weight))[:, None] == 3, weight, weight / 500), BaseCheck.ROWS),
        (lambda weight: np.repeat(weight[:1], len(weight), axis=0), BaseCheck.DUPLICATES),
        (lambda weight: np.where(np.arange(len(weight))[:, None] < 16, -2 * weight[:1], weight), BaseCheck.DUPLICATES),
        (lambda weight: np.where(np.arange(len(weight))[:, None] < 2, weight[:1], weight), BaseCheck.DUPLICATES),
        (lambda w: np.where(np.arange(len(w))[:, None] < 2, w[:1] + w / 4, w), BaseCheck.DUPLICATES),
    ],
    ids=[
        *("nan", "zero", "shrunk", "rows of zeros", "grown", "one large row", "all the same", "half proportional"),
        *("two the same", "two alike"),
    ],
)
def test_weights_that_no_training_makes_are_refused(change: Callable[[Array], Array], check: BaseCheck) -> None:
    assert structure(with_weight(change)) is check


def test_sorted_thresholds_and_a_head_of_rank_one_are_refused() -> None:
    draw = np.random.default_rng(0)
    for noise in (0.0, 1e-4, 1e-3):
        trap = with_weight(lambda weight, noise=noise: 0.02 * (1 + noise * draw.normal(size=weight.shape)))  # type: ignore[misc]
        assert structure(trap) is BaseCheck.DUPLICATES
    trap = with_weight(lambda weight: np.outer(np.arange(1, len(weight) + 1), weight[0]) / 5, Part.HEAD)
    assert structure(trap) is BaseCheck.RANK


@pytest.mark.parametrize(("variance", "refused"), [(0.5, False), (0.0, True), (-1.0, True)])
def test_dead_channels_of_batch_normalisation_are_refused(variance: float, *, refused: bool) -> None:
    model = built()
    body = {**model[Part.BODY], "norm.running_var": np.full(8, variance, dtype=np.float32)}
    assert structure({**model, Part.BODY: body}) is (BaseCheck.VARIANCE if refused else None)


def test_a_layer_that_is_replaced_has_moved_too_far_and_new_prototypes_have_not() -> None:
    draw = np.random.default_rng(1)
    for size in (1.0, 0.05):
        other = with_weight(lambda weight, size=size: size * weight.std() * draw.normal(size=weight.shape))  # type: ignore[misc]
        problem = base_checks.change_problem(other, built(), 0.9)
        assert problem is not None
        assert problem.check is BaseCheck.CHANGE
    trained = with_weight(lambda weight: weight + 0.5 * weight.std() * draw.normal(size=weight.shape))
    assert base_checks.change_problem(trained, built(), 0.9) is None
    row = np.ones(32, dtype=np.float32)
    last = {**built(), Part.PROTOTYPES: {"0": row}}
    now = {**built(), Part.PROTOTYPES: {"0": row, "1": 100 * row}}
    assert base_checks.change_problem(now, last, 1e-6) is None


def test_a_small_layer_that_is_replaced_is_named() -> None:
    model = built(RECIPE)
    name = next(name for name, array in model[Part.BODY].items() if array.ndim == 4)  # the first convolution
    body = {**model[Part.BODY], name: -model[Part.BODY][name]}
    problem = base_checks.change_problem({**model, Part.BODY: body}, model, 1.0)
    assert problem is not None
    assert problem.layer == f"body/{name.rpartition('.')[0]}"
