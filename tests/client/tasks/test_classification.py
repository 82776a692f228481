"""Scores of classes are the papers' formulas: by hand, against reference numbers, and against scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score, roc_curve
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from protofed.client.tasks import classification
from protofed.client.tasks.classification import (
    Tally,
    clinical_scores,
    group_classes,
    majority,
    personal_scores,
    probabilistic_scores,
    reliability,
    scores,
)
from protofed.client.training.evaluation import prefixed
from protofed.common.errors import ConfigError
from protofed.common.protocol.scores import BINS, spread

GOLDEN = Path(__file__).parents[2] / "golden"


def answers(predictions: Tensor, labels: Tensor, classes: int) -> Tally:
    """What is counted of a model that predicts `predictions`."""
    return Tally.of(torch.eye(classes)[predictions.long()], labels, classes)


def given(logits: Tensor, labels: list[int]) -> Tally:
    """What is counted of a model that gives these logits [N, C]."""
    return Tally.of(logits, torch.tensor(labels), logits.shape[1])


def counted(correct: list[int], totals: list[int]) -> Tally:
    rows = [(c if i < right else (c + 1) % len(totals), c) for c, right in enumerate(correct) for i in range(totals[c])]
    predictions, labels = torch.tensor(rows).T
    return answers(predictions, labels, len(totals))


def drawn(examples: int, classes: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, list[int]]:
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.rand(examples, generator=draw).square() * classes).long()
    logits = torch.randn(examples, classes, generator=draw) + torch.nn.functional.one_hot(labels, classes)
    return scale * logits, labels.tolist()


def test_scores_are_the_reference_numbers() -> None:
    golden = np.load(GOLDEN / "metrics_numpy.npz")
    labels, classes = torch.from_numpy(golden["y"]), int(golden["num_classes"])
    whole = scores(answers(torch.from_numpy(golden["global_predictions"]), labels, classes), group_classes(classes))
    assert whole["accuracy"] == pytest.approx(float(golden["GM"]), abs=1e-12)
    assert whole["accuracy"] == pytest.approx(float(golden["global_All"]), abs=1e-12)
    assert [whole[f"recall.{c}"] for c in range(classes)] == pytest.approx(golden["global_per_class_acc"].tolist())
    thirds = [whole[name] for name in ("many", "medium", "few")]
    assert thirds == pytest.approx(golden["global_many_medium_few"].tolist(), abs=1e-12)
    assert whole["groups"] == pytest.approx(float(golden["global_Average"]), abs=1e-12)

    personal = []
    for predictions, counts in zip(golden["client_predictions"], golden["client_train_counts"], strict=True):
        own = answers(torch.from_numpy(predictions), labels, classes)
        personal.append(scores(own) | personal_scores(own, torch.from_numpy(counts / counts.sum())))
    for name, key in (("pm_v", "PMV"), ("pm_l", "PML")):
        values = [one[name] for one in personal]
        assert values == pytest.approx(golden[f"{key}_per_client"].tolist(), abs=1e-9)
        assert spread(values).mean == pytest.approx(float(golden[key]), abs=1e-9)
    fairness = spread([one["pm_l"] for one in personal])
    assert fairness.std == pytest.approx(float(golden["fairness_std_PML_population"]), abs=1e-9)
    balanced = [one["balanced_accuracy"] for one in personal]
    assert balanced == pytest.approx(golden["personal_balanced_acc"].tolist(), abs=1e-9)


def test_scores_by_hand() -> None:
    told = counted([3, 1, 0], [4, 2, 4])
    recalls = {"recall.0": 3 / 4, "recall.1": 1 / 2, "recall.2": 0.0}
    assert scores(told) == pytest.approx({"accuracy": 4 / 10, "balanced_accuracy": (3 / 4 + 1 / 2 + 0) / 3, **recalls})
    personal = {"pm_v": 4 / 6, "pm_l": (0.25 * 3 + 0.75 * 1) / (0.25 * 4 + 0.75 * 2)}  # classes 0 and 1
    assert personal_scores(told, torch.tensor([0.25, 0.75, 0.0])) == pytest.approx(personal)
    assert majority(counted([0, 1, 0], [4, 2, 4])) == 4 / 10
    assert prefixed("personal.local", {"accuracy": 0.5, "recall.3": 1.0}) == {
        "personal.local.accuracy": 0.5,
        "personal.local.recall.3": 1.0,
    }


def test_balanced_accuracy_is_scikit_learns() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (300,), generator=draw).clamp(max=3)  # an uneven test set
    predictions = torch.where(torch.rand(300, generator=draw) < 0.6, labels, labels.roll(1))
    expected = balanced_accuracy_score(labels.numpy(), predictions.numpy())
    found = scores(answers(predictions, labels, 6))  # classes 4 and 5 are absent
    assert found["balanced_accuracy"] == pytest.approx(expected)


def test_classes_absent_from_the_test_set_have_no_say() -> None:
    made = counted([2, 0, 0], [2, 4, 0])
    found = scores(made) | personal_scores(made, torch.tensor([0.5, 0.0, 0.5]))
    assert (found["accuracy"], found["balanced_accuracy"]) == (2 / 6, 0.5)
    assert (found["pm_v"], found["pm_l"]) == (1.0, 1.0)
    assert "recall.2" not in found
    assert not any(math.isnan(value) for value in found.values())
    assert personal_scores(counted([1, 0], [2, 0]), torch.tensor([0.0, 1.0])) == {}


@pytest.mark.parametrize("classes", [2, 4, 7])
def test_auroc_is_scikit_learns(classes: int) -> None:
    logits, labels = drawn(250, classes)
    truth, probabilities = np.array(labels), logits.softmax(1).numpy()
    expected = np.mean([roc_auc_score(truth == c, probabilities[:, c]) for c in range(classes)])
    assert probabilistic_scores(given(logits, labels))["auroc"] == pytest.approx(expected, abs=1e-6)
    if classes > 2:  # its own macro average takes probabilities of all classes
        own = roc_auc_score(truth, probabilities.astype(float), multi_class="ovr", average="macro")
        assert expected == pytest.approx(own, abs=1e-6)


def test_auroc_is_among_the_classes_that_the_test_set_has_and_half_of_a_tie() -> None:
    logits, labels = drawn(250, 7)
    kept = [i for i, label in enumerate(labels) if label not in (0, 3, 6)]
    logits, labels = logits[kept], [labels[i] for i in kept]
    truth, probabilities = np.array(labels), logits.softmax(1).numpy()
    expected = np.mean([roc_auc_score(truth == c, probabilities[:, c]) for c in (1, 2, 4, 5)])
    assert probabilistic_scores(given(logits, labels))["auroc"] == pytest.approx(expected, abs=1e-6)
    logits = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4], [0.2, 0.8]]).log()
    found = probabilistic_scores(given(logits, [0, 0, 1, 1]))
    assert found["auroc"] == pytest.approx((1 + 1 + 1 + 0.5) / 4)  # pairs of one of each class; the tie is half right


@pytest.mark.parametrize("scale", [1.0, 128.0])  # in float32 the softmax of most of these is 1 or 0
@pytest.mark.parametrize("classes", [2, 7])
def test_auroc_of_a_confident_model_is_of_its_log_odds(classes: int, scale: float) -> None:
    logits, labels = drawn(250, classes)
    truth, z = np.array(labels), scale * logits.double().numpy()
    odds = [z[:, c] - np.logaddexp.reduce(np.delete(z, c, axis=1), axis=1) for c in range(classes)]
    expected = np.mean([roc_auc_score(truth == c, odds[c]) for c in range(classes)])
    assert probabilistic_scores(given(scale * logits, labels))["auroc"] == pytest.approx(expected, abs=1e-6)


def test_auroc_of_more_rows_at_a_time_and_of_a_class_that_the_model_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = given(*drawn(250, 5))
    whole = probabilistic_scores(told)
    monkeypatch.setattr(classification, "ROWS", 7)
    assert probabilistic_scores(told) == whole
    logits = torch.tensor([[2.0, 1.0, -math.inf], [1.0, 3.0, -math.inf], [1.0, 0.0, -math.inf]])
    told = given(logits, [0, 1, 2])
    found = scores(told) | probabilistic_scores(told)
    assert found["recall.2"] == 0.0
    assert found["auroc"] == pytest.approx((0.75 + 1 + 0.5) / 3)


def test_calibration_error_by_hand() -> None:
    probabilities = torch.tensor([[0.95, 0.05], [0.97, 0.03], [0.62, 0.38], [0.41, 0.59]])
    found = probabilistic_scores(given(probabilities.log(), [0, 1, 0, 1]))
    assert found["ece"] == pytest.approx((abs(1 - 1.92) + abs(1 - 0.62) + abs(1 - 0.59)) / 4)  # bins 14, 9 and 8
    logits = torch.tensor([[1000.0, 0.0], [math.log(19), 0.0]])  # 1 and 0.95: one right, one wrong
    told = given(logits, [1, 0])
    assert probabilistic_scores(told)["ece"] == pytest.approx(abs(1 - (1 + 0.95)) / 2)
    assert {name.rpartition(".")[2] for name in reliability(told)} == {f"{BINS - 1}"}


def test_calibration_error_is_that_of_15_bins_also_of_what_is_no_log_probability() -> None:
    logits, labels = drawn(256, 5)
    confidence, guess = logits.softmax(1).double().numpy().max(1), logits.argmax(1).numpy()
    bins = np.floor(confidence * BINS)
    gaps = [abs(((guess == labels) - confidence)[bins == b].sum()) for b in range(BINS)]
    assert BINS == 15
    one_class = probabilistic_scores(given(logits[:5], [1] * 5))
    assert one_class.keys() == {"ece"}
    assert probabilistic_scores(given(logits, labels))["ece"] == pytest.approx(sum(gaps) / len(labels), abs=1e-12)
    logits = -torch.tensor([[1.0, 4.0], [9.0, 1.0], [100.0, 400.0]])  # negative distances
    made = given(logits, [0, 1, 0])
    assert made.probabilities.sum(1).tolist() == pytest.approx([1.0] * 3)
    assert probabilistic_scores(made)["ece"] == pytest.approx(
        (2 - 1 / (1 + math.exp(-3)) - 1 / (1 + math.exp(-8))) / 3, abs=1e-6
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_has_diverged_has_no_auroc_and_no_calibration(bad: float) -> None:
    told = given(torch.tensor([[bad, 0.0], [1.0, 0.0], [1.0, 2.0]]), [1, 0, 1])
    found = scores(told) | probabilistic_scores(told)
    assert set(found) == {"accuracy", "balanced_accuracy", "recall.0", "recall.1"}
    assert all(math.isfinite(value) for value in found.values())
    assert reliability(told) == {}


def test_groups_have_the_reference_sizes_and_classes() -> None:
    golden, sizes = np.load(GOLDEN / "metrics_numpy.npz"), np.load(GOLDEN / "longtail_counts.npz")
    assert group_classes(10) == {name: golden[name].tolist() for name in ("many", "medium", "few")}
    for classes in (10, 100, 200):
        groups = group_classes(classes)
        assert [len(group) for group in groups.values()] == sizes[f"K{classes}_n_many_mid_few"].tolist()
        assert [c for group in groups.values() for c in group] == list(range(classes))


def test_groups_follow_the_order_of_frequency_and_their_mean_is_plain() -> None:
    assert group_classes(6, (5, 3, 1, 0, 2, 4)) == {"many": [5], "medium": [3, 1], "few": [0, 2, 4]}
    assert group_classes(2) == {"many": [], "medium": [0], "few": [1]}
    found = scores(counted([4, 1, 0, 0, 1], [4, 2, 2, 6, 1]), group_classes(5))
    assert [found[name] for name in ("many", "medium", "few")] == [1.0, 0.5, 1 / 9]
    assert found["groups"] == pytest.approx((1 + 0.5 + 1 / 9) / 3)
    assert not {"many", "medium", "few", "groups"} & set(scores(counted([1, 0], [1, 1])))


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3)])
def test_an_order_of_other_classes_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected each of 0 to 2 once"):
        group_classes(3, order)


@pytest.mark.parametrize(("totals", "missing"), [([0, 1, 1, 1, 1], "many"), ([1, 0, 1, 1, 1], "medium")])
def test_a_group_without_test_examples_is_left_out_and_so_is_the_mean(totals: list[int], missing: str) -> None:
    found = scores(counted([0] * 5, totals), group_classes(5))
    assert {"many", "medium", "few", "groups"} - set(found) == {missing, "groups"}


def test_a_tally_counts_by_true_class() -> None:
    made = answers(torch.tensor([0, 1, 1, 2, 0]), torch.tensor([0, 0, 1, 1, 1]), 3)
    assert (made.correct.tolist(), made.totals.tolist()) == ([1, 1, 0], [2, 3, 0])
    assert (made.labels.tolist(), made.probabilities.shape) == ([0, 0, 1, 1, 1], (5, 3))
    assert made.probabilities[3].tolist() == pytest.approx(torch.eye(3)[2].softmax(0).tolist())


# Reliability


def test_reliability_by_hand() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.55, 0.45], [0.4, 0.6]])
    found = reliability(given(rows.log(), [0, 1, 1, 1]))
    # Of 15 bins, 0.9 is in that from 13/15, 0.55 in that from 8/15, and 0.6 in that from 9/15.
    by_bin = {13: (0.5, 0.9, 0.5), 8: (0.0, 0.55, 0.25), 9: (1.0, 0.6, 0.25)}
    kinds = ("accuracy", "confidence", "share")
    expected = {f"reliability.{k}.{b}": v for b, values in by_bin.items() for k, v in zip(kinds, values, strict=True)}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_bins_of_reliability_add_up_to_the_calibration_error(seed: int) -> None:
    told = given(*drawn(256, 7, seed))
    found = reliability(told)
    bins = [int(name.rpartition(".")[2]) for name in found if ".share." in name]
    assert len(bins) > 5
    assert sum(found[f"reliability.share.{b}"] for b in bins) == pytest.approx(1)
    gaps = [abs(found[f"reliability.accuracy.{b}"] - found[f"reliability.confidence.{b}"]) for b in bins]
    error = sum(gap * found[f"reliability.share.{b}"] for gap, b in zip(gaps, bins, strict=True))
    assert error == pytest.approx(probabilistic_scores(told)["ece"], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_clinical_scores_are_scikit_learns_and_torchmetrics(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (90,), generator=generator)
    logits = torch.randn(90, 4, generator=generator) + torch.eye(4)[labels]
    probabilities = logits.double().softmax(1)
    found = clinical_scores(Tally.of(logits, labels, 4), 0.8)
    for c in range(3):
        truth, values = (labels == c).numpy(), probabilities[:, c].numpy()
        assert found[f"class_auroc.{c}"] == pytest.approx(roc_auc_score(truth, values), abs=1e-6)
        assert found[f"class_auroc.{c}"] == pytest.approx(
            float(binary_auroc(ranked := probabilities[:, c].float(), labels == c)), abs=1e-6
        )
        precision = found[f"class_average_precision.{c}"]
        assert precision == pytest.approx(average_precision_score(truth, values), abs=1e-6)
        assert precision == pytest.approx(float(binary_average_precision(ranked, labels == c)), abs=1e-6)
        false_positives, sensitivity, _ = roc_curve(truth, values, drop_intermediate=False)
        assert found[f"class_sensitivity.{c}"] == pytest.approx(sensitivity[1 - false_positives >= 0.8].max(), abs=1e-6)
    assert not any(name.endswith(".3") for name in found)
    own = torch.eye(4)[labels]
    assert found["brier"] == pytest.approx(float((probabilities - own).square().sum(1).mean()), abs=1e-6)


def test_clinical_scores_tell_apart_what_a_softmax_rounds_to_one() -> None:
    logits, labels = torch.tensor([[40.0, 0.0], [60.0, 0.0], [50.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 0, 0, 1])
    assert clinical_scores(Tally.of(logits, labels, 2), 0.9)["class_auroc.0"] == 1.0
