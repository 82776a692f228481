"""Several findings an image: what tables say, the loss by hand, and scores that are scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score, roc_curve
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from protofed.client.data.labels import LabelMap, by_number
from protofed.client.task import LeftOut, OwnLabel, Predictions
from protofed.client.tasks.multi_label import MIN_EACH, MIN_SET, UNKNOWN, MultiLabelTask
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import MultiLabel
from protofed.common.errors import DataError
from protofed.testing.small_recipe import small_recipe

FINDINGS = ("Edema", "Effusion", "Nodule")
TASK = MultiLabelTask(MultiLabel())


def names(**settings: Any) -> LabelMap:
    return LabelMap.of(Data.model_validate({"source": "manifest", **settings}), FINDINGS)


def recipe(**more: Any) -> Recipe:
    return small_recipe("fedavg", task={"name": "multi-label"}, classes=3, class_names=FINDINGS, **more)


def drawn(count: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and targets [N, 3], of which a tenth is unknown."""
    rng = torch.Generator().manual_seed(seed)
    targets = (torch.rand(count, 3, generator=rng) < torch.tensor([0.5, 0.2, 0.05])).float()
    logits = torch.randn(count, 3, generator=rng) + targets
    return logits, torch.where(torch.rand(count, 3, generator=rng) < 0.1, UNKNOWN, targets)


@pytest.mark.parametrize(
    ("cell", "target"),
    [
        ("Edema", (1.0, 0.0, 0.0)),
        ("Edema|Nodule", (1.0, 0.0, 1.0)),
        ("Nodule | Pleural fluid", (0.0, 1.0, 1.0)),
        ("No Finding", (0.0, 0.0, 0.0)),
        ("Edema|Hernia", LeftOut("Hernia")),
    ],
)
def test_names_in_one_cell_are_findings_and_all_others_are_absent(cell: str, target: object) -> None:
    own = names(label_map={"Pleural fluid": "Effusion"}, ignore_labels=["No Finding"])
    assert TASK.read(OwnLabel("several labels", (cell,)), own) == target


def test_a_name_may_stand_for_several_findings_or_for_none() -> None:
    own = names(label_map={"heart failure": "Edema|Effusion", "normal": ""})
    assert TASK.read(OwnLabel("heart failure"), own) == (1.0, 1.0, 0.0)
    assert TASK.read(OwnLabel("normal"), own) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("cells", "options", "target"),
    [
        (("1", "0"), {}, (1.0, UNKNOWN, 0.0)),
        (("1.0", "0.0"), {}, (1.0, UNKNOWN, 0.0)),
        (("-1", "0"), {"uncertain": "ignore"}, (UNKNOWN, UNKNOWN, 0.0)),
        (("-1.0", "0"), {"uncertain": "ones"}, (1.0, UNKNOWN, 0.0)),
        (("-1", ""), {"uncertain": "zeros", "blank": "ignore"}, (0.0, UNKNOWN, UNKNOWN)),
        (("", "1"), {"blank": "zeros"}, (0.0, UNKNOWN, 1.0)),
        (("-1", "0"), {}, LeftOut("-1 in column Edema (the recipe has no task.uncertain)")),
        (("", "0"), {"uncertain": "ones"}, LeftOut("blank in column Edema (the recipe has no task.blank)")),
        (("2", "0"), {}, LeftOut("2 in column Edema (expected 1, 0, -1 or nothing)")),
        (("-1x", "0"), {}, LeftOut("-1x in column Edema (expected 1, 0, -1 or nothing)")),
        (("yes", "0"), {}, LeftOut("yes in column Edema (expected 1, 0, -1 or nothing)")),
    ],
)
def test_columns_of_findings_follow_the_rules_that_the_run_has_chosen(
    cells: tuple[str, ...], options: dict[str, Any], target: object
) -> None:
    task = MultiLabelTask(MultiLabel(**options))
    assert task.read(OwnLabel("", cells, ("Edema", "Nodule")), names()) == target


@pytest.mark.parametrize(
    ("cells", "value"), [(("0", "1"), 1.0), (("1", "-1"), 1.0), (("-1", "0"), UNKNOWN), (("0", "0"), 0.0)]
)
def test_two_columns_of_one_finding_are_there_if_one_is(cells: tuple[str, str], value: float) -> None:
    task = MultiLabelTask(MultiLabel(uncertain="ignore"))
    read = task.read(OwnLabel("", cells, ("Edema", "Oedema")), names(label_map={"Oedema": "Edema"}))
    assert read == (value, UNKNOWN, UNKNOWN)


def test_a_column_that_is_no_finding_is_refused_unless_it_is_ignored() -> None:
    own = OwnLabel("", ("1", "1"), ("Edema", "Fracture"))
    assert TASK.read(own, names()) == LeftOut("Fracture")
    assert TASK.read(own, names(ignore_labels=["Fracture"])) == (1.0, UNKNOWN, UNKNOWN)


def test_arrays_have_a_row_of_numbers_for_each_image() -> None:
    rows = np.array([[1, 0, -1], [0, np.nan, 1]])
    task = MultiLabelTask(MultiLabel(uncertain="ignore", blank="zeros"))
    assert task.from_array(rows, 3).tolist() == [[1, 0, UNKNOWN], [0, 0, 1]]
    assert TASK.valid(TASK.from_array(rows, 3), 3).tolist() == [False, False], "no rule for -1, and none for NaN"
    for wrong in (np.zeros((2, 2)), np.zeros(2), np.array([["a", "b", "c"]])):
        with pytest.raises(DataError, match=r"expected \[N, 3\]"):
            TASK.from_array(wrong, 3)


def test_single_numbers_are_sets_of_findings_by_the_map() -> None:
    grades = {"0": "", "1": "Edema", "2": "Edema|Effusion"}
    data = Data.model_validate({"source": "npz", "label_map": grades})
    rows, targets = by_number(np.array([2, 0, 1]), TASK, data, FINDINGS, 3)
    assert (rows.tolist(), targets.tolist()) == ([0, 1, 2], [[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    with pytest.raises(DataError, match="the run cannot use: '3'"):
        by_number(np.array([3]), TASK, data, FINDINGS, 3)


def test_the_loss_by_hand_and_unknown_findings_teach_nothing() -> None:
    logits, targets = drawn()
    outputs = logits.clone().requires_grad_()
    loss = TASK.loss(outputs, targets)
    known = targets != UNKNOWN
    by_hand = binary_cross_entropy_with_logits(logits[known], targets[known], reduction="sum") / len(targets)
    assert float(loss.detach()) == pytest.approx(float(by_hand), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert (gradient[~known] == 0).all()
    assert (gradient[known] != 0).all()


def test_the_loss_is_a_mean_over_examples() -> None:
    """So that clipping of single examples, and micro-batches, add up to the batch's."""
    logits, targets = drawn(12)
    parts = [TASK.loss(logits[part], targets[part]) for part in (slice(4), slice(4, 12))]
    assert float(TASK.loss(logits, targets)) == pytest.approx(float(parts[0] / 3 + parts[1] * 2 / 3), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_scikit_learns(seed: int) -> None:
    logits, targets = drawn(seed=seed)
    found = TASK.scores(Predictions(logits, targets), "global", targets[:0], recipe(evaluation={"specificity": 0.8}))
    for c in range(3):
        known = targets[:, c] != UNKNOWN
        truth, values = targets[known, c].numpy(), logits[known, c].numpy()
        assert found[f"class_auroc.{c}"] == pytest.approx(roc_auc_score(truth, values), abs=1e-6)
        expected = average_precision_score(truth, values)
        assert found[f"class_average_precision.{c}"] == pytest.approx(expected, abs=1e-6)
        false_positives, sensitivity, _ = roc_curve(truth, values, drop_intermediate=False)
        assert found[f"class_sensitivity.{c}"] == pytest.approx(sensitivity[1 - false_positives >= 0.8].max(), abs=1e-6)
    for name in ("auroc", "average_precision", "sensitivity"):
        assert found[name] == pytest.approx(np.mean([found[f"class_{name}.{c}"] for c in range(3)]))
    known = targets != UNKNOWN
    brier = brier_score_loss(targets[known].numpy(), logits.double().sigmoid()[known].numpy())
    assert found["brier"] == pytest.approx(brier, abs=1e-9)
    bins = [int(name.rpartition(".")[2]) for name in found if ".share." in name]
    kinds = [[found[f"reliability.{kind}.{b}"] for b in bins] for kind in ("share", "accuracy", "confidence")]
    gaps = [share * abs(accuracy - confidence) for share, accuracy, confidence in zip(*kinds, strict=True)]
    assert found["ece"] == pytest.approx(sum(gaps), abs=1e-6)


def test_every_score_is_one_that_the_run_can_have() -> None:
    logits, targets = drawn()
    run = recipe()
    for test in ("global", "personal", "personal.local"):
        found = TASK.scores(Predictions(logits, targets), test, targets, run)
        assert {f"{test}.{name}" for name in found if run.score_names().family(f"{test}.{name}") is None} == set()
        assert any("reliability" in name for name in found) == (test == "global")


def test_a_finding_that_all_or_none_have_has_no_score_and_a_diverged_model_none_at_all() -> None:
    logits, targets = drawn()
    targets[:, 1], targets[:, 2] = 0, UNKNOWN
    found = TASK.scores(Predictions(logits, targets), "personal", targets, recipe())
    assert {name for name in found if name.startswith("class_auroc")} == {"class_auroc.0"}
    assert found["auroc"] == found["class_auroc.0"]
    logits[0, 0] = torch.nan
    assert TASK.scores(Predictions(logits, targets), "personal", targets, recipe()) == {}


def test_strata_are_the_sets_of_findings_and_rare_sets_join_their_rarest_finding() -> None:
    often = [[1.0, 0.0, 0.0]] * MIN_SET + [[1.0, 1.0, 0.0]] * MIN_SET + [[0.0, 0.0, 0.0]]
    rare = [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]
    strata = TASK.strata(torch.tensor(often + rare)).tolist()
    assert len(set(strata[:MIN_SET])) == len(set(strata[MIN_SET : 2 * MIN_SET])) == 1
    assert strata[-1] == strata[-2], "both have the rarest finding"
    assert len(set(strata)) == 4
    assert min(strata) == 0


def test_scores_leave_of_models_that_tell_many_images_apart_on_sets_with_both_kinds() -> None:
    logits, _ = drawn(100)
    assert not TASK.is_nearly_constant(logits)
    logits[6:, 1] = 0.5  # of one finding nearly all are alike: the score would be that of the few
    assert TASK.is_nearly_constant(logits)
    targets = torch.zeros(20, 3)
    targets[: MIN_EACH - 1, 0] = 1
    assert not TASK.can_be_asked(targets)
    targets[:MIN_EACH, 0] = 1
    assert TASK.can_be_asked(targets)
