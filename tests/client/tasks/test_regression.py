"""One number an image: its range, the loss by hand, and scores that are scikit-learn's and NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error
from torch import Tensor

from protofed.client.data.hold_out import hold_out
from protofed.client.data.labels import LabelMap
from protofed.client.task import LeftOut, OwnLabel, Predictions
from protofed.client.tasks.regression import RegressionTask
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import Regression
from protofed.common.errors import ConfigError, DataError
from protofed.common.protocol.messages import Role
from protofed.testing.small_recipe import small_recipe

TASK = RegressionTask(Regression(range=(20.0, 80.0), unit="years"))
NAMES = LabelMap({}, frozenset({"n/a"}), ("age",))


def recipe(**more: Any) -> Recipe:
    return small_recipe(
        "fedavg", task={"name": "regression", "range": [20, 80]}, classes=1, class_names=("age",), **more
    )


def drawn(count: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs [N, 1], some of which are outside of the range, and targets [N]."""
    rng = torch.Generator().manual_seed(seed)
    targets = 20 + 60 * torch.rand(count, generator=rng)
    outputs = (targets - 50) / 30 + 0.4 * torch.randn(count, generator=rng)
    return outputs.unsqueeze(1), targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("45.5", 45.5),
        ("80", 80.0),
        ("81", LeftOut("81 (no number from 20 to 80)")),
        ("nan", LeftOut("nan (no number from 20 to 80)")),
        ("old", LeftOut("old (no number from 20 to 80)")),
        ("n/a", LeftOut("n/a", ignored=True)),
    ],
)
def test_a_label_is_a_number_in_the_range(text: str, target: object) -> None:
    assert TASK.read(OwnLabel(text, (text,)), NAMES) == target


def test_arrays_have_one_number_an_image() -> None:
    assert TASK.from_array(np.array([20, 30]), 1).dtype == torch.float32
    with pytest.raises(DataError, match="expected one number"):
        TASK.from_array(np.zeros((2, 2)), 1)
    assert TASK.valid(torch.tensor([20.0, 80.0, 80.5, 19.0, torch.nan]), 1).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_the_loss_is_that_of_the_place_in_the_range() -> None:
    outputs, targets = torch.tensor([[0.0], [1.0]]), torch.tensor([50.0, 20.0])
    assert float(TASK.loss(outputs, targets)) == pytest.approx((0**2 + 2**2) / 2)
    assert TASK.predict(torch.tensor([[0.0], [0.5], [7.0], [-7.0]])).flatten().tolist() == [50, 65, 80, 20]


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_scikit_learns_and_bland_and_altmans(seed: int) -> None:
    outputs, targets = drawn(seed=seed)
    found = TASK.scores(Predictions(outputs, targets), "global", targets[:0], recipe())
    predicted = np.clip(50 + 30 * outputs.double().flatten().numpy(), 20, 80)
    assert found["mae"] == pytest.approx(mean_absolute_error(targets.numpy(), predicted), abs=1e-5)
    errors = predicted - targets.double().numpy()
    reach = 1.96 * np.std(errors, ddof=1)
    expected = errors.mean(), errors.mean() - reach, errors.mean() + reach
    assert [found[name] for name in ("bias", "agreement_low", "agreement_high")] == pytest.approx(expected, abs=1e-4)
    names = recipe().score_names()
    assert names.problem({f"personal.{name}": value for name, value in found.items()}, {*Role}) is None


def test_a_single_image_has_no_limits_of_agreement_and_a_diverged_model_no_score() -> None:
    outputs, targets = drawn(1)
    assert TASK.scores(Predictions(outputs, targets), "global", targets, recipe()).keys() == {"mae", "bias"}
    outputs[0] = torch.inf
    assert TASK.scores(Predictions(outputs, targets), "global", targets, recipe()) == {}


def test_a_model_is_constant_whose_predictions_are_near_each_other() -> None:
    outputs, targets = drawn(100)
    assert not TASK.is_nearly_constant(outputs)
    assert TASK.can_be_asked(targets)
    outputs[6:] = outputs[6:] * 0.001
    assert TASK.is_nearly_constant(outputs)
    assert not TASK.can_be_asked(torch.full((30,), 40.0))


def test_strata_are_tenths_of_the_range() -> None:
    numbers = torch.cat([torch.tensor([20.0, 25.9, 26.0, 79.0, 80.0]), torch.arange(20.5, 80, 0.25)])
    assert TASK.strata(numbers)[:5].tolist() == [0, 0, 1, 9, 9]


def test_tenths_with_few_examples_are_joined_so_that_all_of_the_range_is_tested_on() -> None:
    numbers = torch.tensor([20.0] * 8 + [30.0] * 14 + [40.0] * 30 + [60.0] * 18 + [79.0] * 6)
    assert TASK.strata(numbers).tolist() == [0] * 22 + [1] * 30 + [2] * 24
    assert TASK.strata(numbers[-15:]).tolist() == [0] * 15
    assert TASK.strata(numbers[:4]).tolist() == [0] * 4
    few = torch.arange(20, 80).float()  # six a tenth
    _, test = hold_out(TASK.strata(few).numpy(), None, 0.25, np.random.default_rng(0))
    assert len(test) == 15
    assert few[torch.from_numpy(test)].min() < 35
    assert few[torch.from_numpy(test)].max() > 65


@pytest.mark.parametrize("ends", [(2e9, 2e9 + 10), (-1e9, 1 - 1e9), (0.0, 1e-50)])
def test_a_range_whose_numbers_float32_cannot_tell_apart_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="too narrow: float32"):
        Regression(ends).check(1)
    for wide in ((1900.0, 2030.0), (0.0, 1e-6), (0.0, 1e9), (-1e9, 1e9)):
        Regression(wide).check(1)
