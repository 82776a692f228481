"""The conformance suite of a task: what training, noise, secure aggregation and score tables rely on, a check for each.

A task's tests subclass `TaskConformance`, as the docstring of `protofed.testing` shows.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from protofed.client.data.labels import LabelMap
from protofed.client.task import ClientTask, LeftOut, OwnLabel, Predictions, build_client_task
from protofed.common import plugins
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.config.tasks import LearningTask, build_task
from protofed.common.errors import DataError
from protofed.common.plugins import import_object
from protofed.common.protocol.messages import Role, score_family
from protofed.common.protocol.scores import JUDGED_BY, MAX_LOSS, TESTS, list_families, lower_is_better, spreads
from protofed.deploy.export.model_folder import LONGEST_NAME
from protofed.deploy.simulation.simulation import simulation

IMAGES = 120  # of the test set that the checks make of a task's labels
NO_TORCH = "import sys; sys.modules['torch'] = None; import {module}"  # None: an import of it fails
DRAWS = 20  # models whose scores on images of one target are looked at
TOLERANCE = 1e-4  # of sums in float32, as a share


class Asked(NamedTuple):
    """A model's outputs [N, C] and the targets [N, ...] of the images, on the CPU."""

    outputs: Tensor
    targets: Tensor


class TaskConformance:
    """The suite for one task.

    Attributes:
        recipe_file: a recipe on the digits with which the task is learnt in a few seconds.
        labels: labels [n, ...] of images, as a source of arrays has them, of all kinds that there are: two kinds at
            least, and none with nearly all of them.
        wrong_labels: labels [n, ...] that no image may have.
        learnt: what the score that judges the recipe's rounds is better than after the last round.
    """

    recipe_file: ClassVar[Path]
    labels: ClassVar[NDArray[Any]]
    wrong_labels: ClassVar[NDArray[Any]]
    learnt: ClassVar[float]

    @pytest.fixture
    def recipe(self) -> Recipe:
        """The recipe of `recipe_file`; its plug-ins are allowed to load."""
        recipe = read_recipe(self.recipe_file)
        plugins.allow(recipe.names)
        return recipe

    @pytest.fixture
    def options(self, recipe: Recipe) -> LearningTask:
        """The half without PyTorch."""
        return build_task(recipe.task)

    @pytest.fixture
    def task(self, recipe: Recipe) -> ClientTask:
        """The half with PyTorch."""
        return build_client_task(recipe.task)

    @pytest.fixture
    def valid_labels(self) -> NDArray[Any]:
        """`labels`."""
        return self.labels

    @pytest.fixture
    def invalid_labels(self) -> NDArray[Any]:
        """`wrong_labels`."""
        return self.wrong_labels

    @pytest.fixture
    def threshold(self) -> float:
        """`learnt`."""
        return self.learnt

    @pytest.fixture
    def asked(self, task: ClientTask, recipe: Recipe, valid_labels: NDArray[Any]) -> Asked:
        """A test set of `IMAGES` with the task's labels, and what a model with random weights says of it."""
        repeated = valid_labels[np.arange(IMAGES) % len(valid_labels)]
        return Asked(_random_outputs(recipe.classes), task.from_array(repeated, recipe.classes))

    # The two halves

    def test_both_halves_are_frozen_dataclasses(self, options: LearningTask, task: ClientTask) -> None:
        for half in (options, task):
            name = type(half).__name__
            assert dataclasses.is_dataclass(half), f"{name}: expected @dataclass(frozen=True)"
            assert type(half).__dataclass_params__.frozen, f"{name}: expected @dataclass(frozen=True)"

    def test_the_client_half_is_made_of_the_options(self, options: LearningTask) -> None:
        made = import_object(options.client, "task")
        first, second = made(options), made(options)
        assert first.options == options, f"{options.client}: expected the options that it was made of, as `options`"
        assert first == second, f"{options.client}: expected equal objects of equal options: it has state of its own"

    def test_the_options_are_imported_without_pytorch(self, options: LearningTask) -> None:
        module = type(options).__module__
        words = [sys.executable, "-c", NO_TORCH.format(module=module)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603  (the author's module)
        assert done.returncode == 0, f"{module} needs PyTorch, which a server has not: {done.stderr[-500:]}"

    def test_the_recipe_fits_the_task(self, recipe: Recipe, options: LearningTask) -> None:
        options.check(recipe.classes)
        recipe.check_task()

    # Targets

    def test_labels_become_valid_targets(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        targets = asked.targets
        assert targets.device.type == "cpu", "from_array: expected targets on the CPU"
        assert len(targets) == IMAGES, f"from_array: expected a target for each of {IMAGES} labels, got {len(targets)}"
        valid = task.valid(targets, recipe.classes)
        assert _is_array(valid, torch.bool, IMAGES), "valid: expected [N] bool"
        assert valid.all(), (
            f"valid: {targets[~valid][0]}, of from_array, is not valid, though {_expected(task, recipe)}"
        )

    def test_wrong_labels_are_refused(self, task: ClientTask, recipe: Recipe, invalid_labels: NDArray[Any]) -> None:
        """By `from_array` as a whole, or each by `valid`."""
        for label in invalid_labels:
            try:
                valid = task.valid(task.from_array(np.array([label]), recipe.classes), recipe.classes)
            except DataError:
                continue
            assert not valid.any(), f"valid: {label} is valid, though {_expected(task, recipe)}"
        assert _expected(task, recipe), "expected: it must say what targets must be"

    def test_texts_become_valid_targets_or_are_left_out(
        self, task: ClientTask, recipe: Recipe, valid_labels: NDArray[Any]
    ) -> None:
        """A table may have anything in it: `read` raises nothing."""
        names = recipe.class_names or tuple(map(str, range(recipe.classes)))
        own = LabelMap({name: (c,) for c, name in enumerate(names)}, frozenset({"ignored"}), names)
        texts = [*names, *map(str, valid_labels if valid_labels.ndim == 1 else ())]
        read = [task.read(OwnLabel(text, (text,)), own) for text in texts]
        targets = [target for target in read if not isinstance(target, LeftOut)]
        assert targets, f"read: expected a target for one of {texts}"
        for target in targets:
            assert task.valid(torch.tensor([target]), recipe.classes).all(), f"read: {target} is not valid"
        for text in ("", "no such label", "nan", "-1e9"):
            found = task.read(OwnLabel(text, (text,)), own)
            fits = isinstance(found, LeftOut) or task.valid(torch.tensor([found]), recipe.classes).all()
            assert fits, f"read: {found}, of '{text}', is not valid; expected LeftOut"

    def test_strata_and_counts(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        strata = task.strata(asked.targets)
        assert _is_array(strata, torch.int64, IMAGES), "strata: expected [N] int64"
        assert strata.min() >= 0, "strata: expected numbers from 0"
        counts = task.counts(asked.targets, recipe.classes)
        assert _is_array(counts, torch.int64, recipe.classes), "counts: expected [C] int64"
        assert counts.min() >= 0, "counts: expected numbers of images"
        assert counts.max() <= IMAGES, "counts: expected at most as many images as there are"

    # Loss

    def test_the_loss_is_one_that_servers_take(self, task: ClientTask, asked: Asked) -> None:
        for scale in (1, 10):
            outputs = (scale * asked.outputs).requires_grad_()
            loss = task.loss(outputs, asked.targets)
            assert loss.shape == (), f"loss: expected one number, got shape {list(loss.shape)}"
            value = float(loss.detach())
            assert 0 <= value <= MAX_LOSS, f"loss = {value:g}: expected 0 to {MAX_LOSS:g}, which servers take"
            (gradient,) = torch.autograd.grad(loss, outputs)
            assert gradient.isfinite().all(), f"loss: a gradient is not finite, for outputs up to {outputs.max():.0f}"

    def test_the_loss_is_a_mean_over_examples(self, task: ClientTask, asked: Asked) -> None:
        """Noise clips the gradient of each example: no term may depend on another example."""
        outputs = asked.outputs.clone().requires_grad_()
        loss = task.loss(outputs, asked.targets)
        (of_batch,) = torch.autograd.grad(loss, outputs)  # [N, C]
        singles = [_single(task, asked, row) for row in range(IMAGES)]
        mean = sum(value for value, _ in singles) / IMAGES
        message = "loss: the loss of a batch is not the mean of the losses of its examples"
        assert float(loss.detach()) == pytest.approx(mean, rel=TOLERANCE, abs=1e-6), message
        by_example = torch.cat([gradient for _, gradient in singles])
        worst = float((IMAGES * of_batch - by_example).abs().max())
        message = "loss: an example's gradient depends on the other examples of its batch"
        assert worst <= TOLERANCE * (1 + float(by_example.abs().max())), message

    def test_the_loss_has_gradients_by_example(self, task: ClientTask, asked: Asked) -> None:
        """Under `[plan.dp]` PyTorch computes them at once, by `vmap`."""

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return task.loss(output.unsqueeze(0), target.unsqueeze(0))

        try:
            gradients = vmap(grad(loss))(asked.outputs, asked.targets)
        except RuntimeError as error:
            pytest.fail(f"loss: torch.func.vmap, which [plan.dp] needs, cannot compute it: {error}")
        assert gradients.isfinite().all(), "loss: a gradient by torch.func.vmap is not finite"

    # Predictions

    def test_predictions_are_of_each_image_alone(self, task: ClientTask, asked: Asked) -> None:
        predicted = task.predict(asked.outputs)
        assert predicted.shape == asked.outputs.shape, f"predict: expected [N, C], got {list(predicted.shape)}"
        alone = torch.cat([task.predict(row.unsqueeze(0)) for row in asked.outputs])
        message = "predict: what is said of an image depends on the other images"
        assert torch.allclose(predicted, alone, rtol=TOLERANCE, atol=1e-6), message

    def test_what_is_predicted_is_described_and_exported(
        self, task: ClientTask, options: LearningTask, asked: Asked
    ) -> None:
        words = options.predictions()
        assert 0 < len(words) <= LONGEST_NAME, f"predictions: expected 1 to {LONGEST_NAME} characters, got {words!r}"
        assert words.isprintable(), f"predictions: expected one line, got {words!r}"

        class Predict(nn.Module):
            def forward(self, outputs: Tensor) -> Tensor:
                return task.predict(outputs)

        count = torch.export.Dim("N")
        try:
            exported = torch.export.export(Predict(), (asked.outputs,), dynamic_shapes=({0: count},)).module()
        except Exception as error:  # torch raises many classes
            pytest.fail(f"predict: torch.export, which `protofed export` needs, cannot read it: {error}")
        assert torch.allclose(exported(asked.outputs), task.predict(asked.outputs)), (
            "predict: other values when exported"
        )

    # Scores

    def test_declared_scores_can_be_told_apart_and_one_judges_a_run(
        self, options: LearningTask, recipe: Recipe
    ) -> None:
        declared = options.scores()
        names = [(score.name, test) for score in declared for test in score.tests]
        assert len(set(names)) == len(names), "scores: a name is declared twice for one test set"
        for score in declared:
            assert score.low < score.high, f"scores: {score.name}: expected low < high"
            assert set(score.tests) <= set(TESTS), f"scores: {score.name}: expected tests of {', '.join(TESTS)}"
        assert _judging(recipe), (
            "scores: none can judge a run's rounds: one is needed that is neither by bin nor a bias"
        )

    def test_scores_are_declared_and_in_their_ranges(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        declared, taken = recipe.score_names(), set[str]()
        for outputs, targets in _test_sets(asked):
            for test, scores in _scores(task, recipe, outputs, targets):
                bad = {name: value for name, value in scores.items() if not isinstance(value, float)}
                assert not bad, f"scores: expected floats of Python: {bad}"
                wrong = [name for name, value in scores.items() if not math.isfinite(value)]
                assert not wrong, f"scores: {wrong[0]} is not finite; leave out what is not defined"
                problem = declared.problem({f"{test}.{name}": value for name, value in scores.items()}, {*Role})
                assert problem is None, f"scores: {problem}; expected what LearningTask.scores declares"
                taken |= {score_family(f"{test}.{name}") for name in scores}
        switched_on = {family for family in declared.families if declared.spelled(family)}
        assert not (unused := switched_on - taken), f"scores: {min(unused)} is declared, and is never taken"

    def test_scores_that_are_not_defined_are_left_out(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        """Of images with one target, a score that is 0 whatever a model says is none, as an area under no curve.

        But for those by bin: the share of what is there in a bin may well be 0.
        """
        families = recipe.score_names().families
        for target in _kinds(asked.targets):
            same = target.expand(IMAGES, *target.shape).contiguous()
            found: dict[str, set[float]] = {}
            for seed in range(DRAWS):
                for test, scores in _scores(task, recipe, _random_outputs(recipe.classes, seed), same):
                    for name, value in scores.items():
                        found.setdefault(score_family(f"{test}.{name}"), set()).add(value)
            zero = sorted(name for name, values in found.items() if values == {0.0} and families[name].indexed != "bin")
            assert not zero, f"scores: {zero[0]} is always 0 if all targets are {target.tolist()}; leave it out there"

    def test_scores_do_not_depend_on_the_order_of_images(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(1))
        shuffled = asked.outputs[order], asked.targets[order]
        for (test, one), (_, other) in zip(
            _scores(task, recipe, *asked), _scores(task, recipe, *shuffled), strict=True
        ):
            assert one == pytest.approx(other, rel=TOLERANCE, abs=1e-6), f"scores: {test}: they depend on the order"

    # What leaves a site

    def test_a_nearly_constant_model_is_found(self, task: ClientTask, recipe: Recipe, asked: Asked) -> None:
        """A server could choose a model that says one thing of all images but one, and read that one's label."""
        for row in asked.outputs[:5]:
            constant = row.expand(IMAGES, recipe.classes).clone()
            assert task.is_nearly_constant(constant) is True, "is_nearly_constant: expected True for equal outputs"
            constant[IMAGES // 2] = -5 * row + 1
            message = "is_nearly_constant: expected True for outputs that are equal for all images but one"
            assert task.is_nearly_constant(constant) is True, message
        message = "is_nearly_constant: expected False for random outputs: no score would ever be sent"
        assert task.is_nearly_constant(asked.outputs) is False, message

    def test_test_sets_of_one_target_are_not_asked(self, task: ClientTask, asked: Asked) -> None:
        message = "can_be_asked: expected True for `labels`; do nearly all of them have one target?"
        assert task.can_be_asked(asked.targets) is True, message
        for target in _kinds(asked.targets):
            same = target.expand(IMAGES, *target.shape).contiguous()
            message = f"can_be_asked: expected False if all targets are {target.tolist()}: an honest model is constant"
            assert task.can_be_asked(same) is False, message

    # All of it

    def test_it_is_learnt(self, recipe: Recipe, threshold: float) -> None:
        score = recipe.federation.best_by or _judging(recipe)[0]
        with simulation(recipe) as running:
            running.go()
            last = spreads(running.ledger.scores(recipe.name)[recipe.rounds])
        assert score in last, f"{score}, which judges the rounds, was not taken; expected one of {', '.join(last)}"
        mean = last[score].mean
        better = mean < threshold if lower_is_better(score) else mean > threshold
        assert better, f"{score} is {mean:.3g} after {recipe.rounds} rounds; expected better than {threshold:g}"


def _is_array(value: object, dtype: torch.dtype, count: int) -> bool:
    return isinstance(value, Tensor) and (value.dtype, value.shape) == (dtype, (count,))


def _expected(task: ClientTask, recipe: Recipe) -> str:
    return task.expected(recipe.classes)


def _random_outputs(classes: int, seed: int = 0) -> Tensor:
    return torch.randn(IMAGES, classes, generator=torch.Generator().manual_seed(seed))


def _kinds(targets: Tensor) -> Tensor:
    """Some of the targets that differ."""
    differing: Tensor = torch.unique(targets, dim=0)
    return differing[:5]


def _single(task: ClientTask, asked: Asked, row: int) -> tuple[float, Tensor]:
    """An example's loss and its gradient [1, C]."""
    output = asked.outputs[row : row + 1].clone().requires_grad_()
    loss = task.loss(output, asked.targets[row : row + 1])
    return float(loss.detach()), torch.autograd.grad(loss, output)[0]


def _test_sets(asked: Asked) -> Iterator[Asked]:
    """The whole one, a single image, images of one target, a constant model, and two that have diverged."""
    yield asked
    yield Asked(asked.outputs[:1], asked.targets[:1])
    yield Asked(asked.outputs, asked.targets[:1].repeat(IMAGES, *[1] * (asked.targets.ndim - 1)))
    yield Asked(asked.outputs[:1].repeat(IMAGES, 1), asked.targets)
    for bad in (math.nan, math.inf):
        diverged = asked.outputs.clone()
        diverged[0, 0] = bad
        yield Asked(diverged, asked.targets)


def _scores(
    task: ClientTask, recipe: Recipe, outputs: Tensor, targets: Tensor
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The scores by test set; an evaluator has no training examples."""
    for test in TESTS:
        trained_on = targets[:0] if test == "global" else targets
        yield test, task.scores(Predictions(outputs, targets), test, trained_on, recipe)


def _judging(recipe: Recipe) -> Sequence[str]:
    """The scores that can judge a run's rounds, those that do so by default first."""
    names = recipe.score_names()
    families = list_families(build_task(recipe.task).scores())
    judging = []
    for name in (*(known for known in JUDGED_BY if known in families), *families):
        try:
            names.judges(name)
        except ValueError:
            continue
        judging.append(name)
    return judging
