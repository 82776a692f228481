"""Scores are the papers' formulas: by hand, against reference numbers, and against scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn

from protofed.client.data.examples import Examples, SiteData
from protofed.client.evaluate import Tally, global_scores, personal_scores, tally
from protofed.common.recipe import Input
from protofed.server.overview import spread

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics_numpy.npz"
PLAIN = Input(shape=(1, 1, 1), mean=(0.0,), std=(1.0,))


class Told(nn.Module):
    """Predicts the class that is written in the image's only pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot((images.flatten() * 255).round().long(), self.classes).float()


def answers(predictions: Tensor, labels: Tensor, classes: int) -> Tally:
    """What `Told` scores where it is told to predict `predictions`."""
    test = Examples(predictions.to(torch.uint8).view(-1, 1, 1, 1), labels)
    return tally(Told(classes), SiteData(test, test, PLAIN, classes), batch=7)


def test_scores_are_the_reference_numbers() -> None:
    golden = np.load(GOLDEN)
    labels, classes = torch.from_numpy(golden["y"]), int(golden["num_classes"])
    whole = answers(torch.from_numpy(golden["global_predictions"]), labels, classes)
    scores = global_scores(whole.correct, whole.totals)
    assert scores["global.accuracy"] == pytest.approx(float(golden["GM"]), abs=1e-12)
    assert (whole.correct / whole.totals).tolist() == pytest.approx(golden["global_per_class_acc"].tolist())

    personal = []
    for predictions, counts in zip(golden["client_predictions"], golden["client_train_counts"], strict=True):
        own = answers(torch.from_numpy(predictions), labels, classes)
        frequencies = torch.from_numpy(counts / counts.sum())
        personal.append(personal_scores(own.correct, own.totals, frequencies))
    for name, key in (("pm_v", "PMV"), ("pm_l", "PML")):
        values = [scores[f"personal.{name}"] for scores in personal]
        assert values == pytest.approx(golden[f"{key}_per_client"].tolist(), abs=1e-9)
        assert spread(values).mean == pytest.approx(float(golden[key]), abs=1e-9)
    fairness = spread([scores["personal.pm_l"] for scores in personal])
    assert fairness.std == pytest.approx(float(golden["fairness_std_PML_population"]), abs=1e-9)
    balanced = [scores["personal.balanced_accuracy"] for scores in personal]
    assert balanced == pytest.approx(golden["personal_balanced_acc"].tolist(), abs=1e-9)


def test_scores_by_hand() -> None:
    correct, totals = torch.tensor([3, 1, 0]), torch.tensor([4, 2, 4])
    assert global_scores(correct, totals) == pytest.approx(
        {"global.accuracy": 4 / 10, "global.balanced_accuracy": (3 / 4 + 1 / 2 + 0) / 3}
    )
    assert personal_scores(correct, totals, torch.tensor([0.25, 0.75, 0.0])) == pytest.approx(
        {
            "personal.accuracy": 4 / 10,
            "personal.balanced_accuracy": (3 / 4 + 1 / 2 + 0) / 3,
            "personal.pm_v": 4 / 6,  # classes 0 and 1
            "personal.pm_l": (0.25 * 3 + 0.75 * 1) / (0.25 * 4 + 0.75 * 2),
        }
    )


def test_balanced_accuracy_is_scikit_learns() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (300,), generator=draw).clamp(max=3)  # an uneven test set
    predictions = torch.where(torch.rand(300, generator=draw) < 0.6, labels, labels.roll(1))
    made = answers(predictions, labels, 6)  # classes 4 and 5 are absent
    expected = balanced_accuracy_score(labels.numpy(), predictions.numpy())
    assert global_scores(made.correct, made.totals)["global.balanced_accuracy"] == pytest.approx(expected)


def test_classes_absent_from_the_test_set_have_no_say() -> None:
    correct, totals = torch.tensor([2, 0, 0]), torch.tensor([2, 4, 0])
    scores = personal_scores(correct, totals, torch.tensor([0.5, 0.0, 0.5]))
    assert scores == {
        "personal.accuracy": 2 / 6,
        "personal.balanced_accuracy": 0.5,
        "personal.pm_v": 1.0,
        "personal.pm_l": 1.0,
    }
    assert not any(math.isnan(value) for value in scores.values())


def test_a_score_that_nothing_can_be_said_about_is_left_out() -> None:
    scores = personal_scores(torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([0.0, 1.0]))
    assert scores == {"personal.accuracy": 0.5, "personal.balanced_accuracy": 0.5}


def test_tally_counts_by_true_class() -> None:
    made = answers(torch.tensor([0, 1, 1, 2, 0]), torch.tensor([0, 0, 1, 1, 1]), 3)
    assert (made.correct.tolist(), made.totals.tolist()) == ([1, 1, 0], [2, 3, 0])


class Counting(nn.Module):
    """Two classes; remembers the modes that it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.frozen = nn.BatchNorm2d(1).eval()
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append((self.training, self.norm.training, torch.is_grad_enabled()))
        normed: Tensor = self.frozen(self.norm(images))
        return normed.flatten(1).repeat(1, 2)


def test_tally_evaluates_and_puts_every_mode_back() -> None:
    test = Examples(torch.rand(10, 1, 1, 1), torch.zeros(10, dtype=torch.int64))
    model = Counting()
    tally(model, SiteData(test, test, PLAIN, 2), batch=4)
    assert model.modes == [(False, False, False)] * 3
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert model.norm.state_dict()["running_mean"].tolist() == [0.0]  # the test set taught it nothing
