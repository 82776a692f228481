"""Every task of protofed passes the suite, and a plug-in's; and each check finds a task that is wrong in one point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.client.task import LeftOut, OwnLabel, Predictions
from protofed.client.tasks.classification import ClassificationTask
from protofed.client.tasks.multi_label import UNKNOWN, MultiLabelTask
from protofed.client.tasks.regression import RegressionTask
from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import Classification, LearningTask, MultiLabel, Regression, tasks
from protofed.common.errors import ConfigError
from protofed.common.protocol.scores import TaskScore
from protofed.testing.small_recipe import small_recipe
from protofed.testing.task_conformance import Asked, TaskConformance

OWN = "tests.client.tasks.own_task:Gauge"
SETS = {"0": "even|loop", "1": "", "2": "even", "3": "", "4": "even", "5": "large"}
SETS |= {"6": "even|loop|large", "7": "large", "8": "even|loop|large", "9": "loop|large"}
VALUES, UNSORTED = np.arange(10), np.array([-1, 10])
FINDINGS = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, np.nan, 0], [1, 1, 1], [0, 0, np.nan]])
ON_DIGITS = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 3, "beta": 1.0}}
NUMBER: Mapping[str, Any] = {"classes": 1, "class_names": ("value",)}


@dataclass(frozen=True)
class Case:
    """A task with its recipe's keys, labels, and what its judging score must be better than."""

    recipe: Mapping[str, Any]
    labels: NDArray[Any] = field(default_factory=lambda: VALUES)
    wrong: NDArray[Any] = field(default_factory=lambda: UNSORTED)
    learnt: float = 2.3


CASES = {
    "classification": Case({"evaluation": {"clinical": True, "probabilities": True}}, learnt=0.5),
    "multi-label": Case(
        {
            "task": {"name": "multi-label", "blank": "ignore"},
            "classes": 3,
            "class_names": ("even", "loop", "large"),
            "data": {**ON_DIGITS, "label_map": SETS},
        },
        FINDINGS,
        np.array([[2, 0, 0], [0, -1, 0], [0.5, 1, 0]]),
        learnt=0.7,
    ),
    "regression": Case(
        {"task": {"name": "regression", "range": [0, 9]}, **NUMBER}, wrong=np.array([-1.0, 9.5, np.nan])
    ),
    "own": Case({"task": {"name": OWN}, **NUMBER}),
}
JUDGED = {"classification": "balanced_accuracy", "multi-label": "auroc", "regression": "mae", "own": "mae"}


def build(name: str) -> Recipe:
    keys = {"data": ON_DIGITS, **CASES[name].recipe}
    plan = {"epochs": 3, "batch_size": 16, "lr": 0.05, "momentum": 0.9}
    return small_recipe("fedavg", plan=plan, federation={"min_sites": 3, "best_by": f"global.{JUDGED[name]}"}, **keys)


def test_all_tasks_are_here() -> None:
    assert set(tasks) == CASES.keys() - {"own"}


class TestTasks(TaskConformance):
    @pytest.fixture(params=CASES)
    def case(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def recipe(self, case: str, monkeypatch: pytest.MonkeyPatch) -> Recipe:
        monkeypatch.setattr(plugins, "_allowed", {OWN})
        return build(case)

    @pytest.fixture
    def valid_labels(self, case: str) -> NDArray[Any]:
        return CASES[case].labels

    @pytest.fixture
    def invalid_labels(self, case: str) -> NDArray[Any]:
        return CASES[case].wrong

    @pytest.fixture
    def threshold(self, case: str) -> float:
        return CASES[case].learnt


# Tasks that are wrong in one point, by the check that must find them


def wrong(right: Any, **members: Callable[..., Any]) -> Any:
    """A task like `right`, with these members in place of its own."""
    return type("Wrong", (type(right),), members)(right.options)


def known_alone(self: MultiLabelTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over known findings: what an example's term weighs depends on how many others know."""
    known = targets != UNKNOWN
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs[known], targets[known])


def of_the_batch(self: RegressionTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """Like a loss of pairs, or one that normalises by the batch."""
    return RegressionTask.loss(self, outputs - outputs.mean(), targets)


def ever_larger(self: ClassificationTask, outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.double().pow(400).mean().float()


def by_item(self: RegressionTask, outputs: Tensor, targets: Tensor) -> Tensor:
    return RegressionTask.loss(self, outputs, targets) * (1.0 if targets.flatten()[0].item() > -1 else 2.0)


def more(base: type[Any], **values: Any) -> Callable[..., dict[str, float]]:
    """Scores with some more; each is a number, or a function of the predictions."""

    def scores(self: Any, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        added = {name: value(predictions) if callable(value) else value for name, value in values.items()}
        return {**base.scores(self, predictions, test, trained_on, recipe), **added}

    return scores


def of_the_first(predictions: Predictions) -> float:
    return float(predictions.outputs[0, 0].sigmoid().nan_to_num(0.5))


def one_class_is_zero(predictions: Predictions) -> float:
    """An area under the curve that a test set of one class does not have."""
    return 0.0 if (predictions.targets == predictions.targets[0]).all() else 0.5


CHECKS = TaskConformance
WRONG: list[tuple[str, str, Any, str]] = [
    ("classification", "test_labels_become_valid_targets", {"from_array": lambda *_: torch.zeros(3).long()}, "120"),
    ("classification", "test_labels_become_valid_targets", {"valid": lambda _, t, _c: t < 5}, "is not valid"),
    ("classification", "test_labels_become_valid_targets", {"valid": lambda _, t, c: bool((t < c).all())}, "bool"),
    ("classification", "test_wrong_labels_are_refused", {"valid": lambda _, t, _c: t < 99}, "-1 is valid"),
    ("classification", "test_wrong_labels_are_refused", {"expected": lambda *_: ""}, "it must say"),
    ("regression", "test_wrong_labels_are_refused", {"valid": lambda _, t, _c: ~(t > 9)}, "is valid"),
    ("classification", "test_texts_become_valid_targets", {"read": lambda *_: LeftOut("no")}, "expected a target"),
    ("classification", "test_texts_become_valid_targets", {"read": lambda *_: 10}, "10 is not valid"),
    ("regression", "test_texts_become_valid_targets", {"read": lambda _, own, _n: float_or(own)}, "of 'nan'"),
    ("classification", "test_strata_and_counts", {"strata": lambda _, t: t.float()}, r"\[N\] int64"),
    ("classification", "test_strata_and_counts", {"strata": lambda _, t: t - 1}, "from 0"),
    ("classification", "test_strata_and_counts", {"counts": lambda _, t, _c: t.bincount()[:3]}, r"\[C\] int64"),
    ("classification", "test_strata_and_counts", {"counts": lambda _, _t, c: torch.full((c,), 999)}, "at most"),
    ("classification", "test_the_loss_is_one_that", {"loss": lambda _, o, _t: o.square().mean(1)}, "one number"),
    ("classification", "test_the_loss_is_one_that", {"loss": lambda _, o, _t: o.mean() - 5}, "expected 0 to"),
    ("classification", "test_the_loss_is_one_that", {"loss": lambda _, o, _t: (0 * o).sqrt().mean()}, "not finite"),
    ("classification", "test_the_loss_is_one_that", {"loss": ever_larger}, "expected 0 to"),
    ("multi-label", "test_the_loss_is_a_mean", {"loss": known_alone}, "not the mean"),
    ("regression", "test_the_loss_is_a_mean", {"loss": of_the_batch}, "not the mean"),
    ("classification", "test_the_loss_is_a_mean", {"loss": lambda _, o, _t: detached(o)}, "gradient depends on"),
    ("classification", "test_the_loss_is_a_mean", {"loss": lambda _, o, _t: o.square().sum()}, "not the mean"),
    ("regression", "test_the_loss_has_gradients", {"loss": by_item}, "vmap"),
    ("classification", "test_predictions_are", {"predict": lambda _, o: o.argmax(1)}, r"expected \[N, C\]"),
    ("classification", "test_predictions_are", {"predict": lambda _, o: o.softmax(0)}, "depends on the other"),
    ("classification", "test_what_is", {"predict": lambda _, o: o if o.sum() > 0 else -o}, "cannot read it"),
    ("classification", "test_scores_are_declared", {"scores": {"wow": 0.5}}, "'global.wow' is no score"),
    ("classification", "test_scores_are_declared", {"scores": {"accuracy": 1.5}}, "expected 0 to 1"),
    ("classification", "test_scores_are_declared", {"scores": {"accuracy": torch.tensor(0.5)}}, "floats of Python"),
    ("regression", "test_scores_are_declared", {"scores": {"agreement_low": float("nan")}}, "not finite"),
    ("regression", "test_scores_are_declared", {"scores": None}, "is declared, and is never taken"),
    ("classification", "test_scores_that_are_not", {"scores": {"auroc": one_class_is_zero}}, "leave it out"),
    ("classification", "test_scores_do_not", {"scores": {"accuracy": of_the_first}}, "depend on the order"),
    ("classification", "test_a_nearly_constant", {"is_nearly_constant": lambda _, _o: False}, "equal outputs"),
    ("regression", "test_a_nearly_constant", {"is_nearly_constant": lambda _, o: bool((o == o[0]).all())}, "but one"),
    ("classification", "test_a_nearly_constant", {"is_nearly_constant": lambda _, _o: True}, "no score would"),
    ("classification", "test_test_sets_of_one", {"can_be_asked": lambda _, _t: True}, "an honest model"),
    ("regression", "test_test_sets_of_one", {"can_be_asked": lambda _, _t: False}, "expected True for `labels`"),
]
RIGHT: dict[str, Any] = {
    "classification": ClassificationTask(Classification()),
    "multi-label": MultiLabelTask(MultiLabel(blank="ignore")),
    "regression": RegressionTask(Regression((0.0, 9.0))),
}


def float_or(own: OwnLabel) -> float | LeftOut:
    """It takes nan for a number."""
    try:
        return float(own.text)
    except ValueError:
        return LeftOut(own.text)


def detached(outputs: Tensor) -> Tensor:
    """The value is a mean over examples; the gradient is not."""
    return outputs.square().sum(1).mean() + (outputs.prod(0).sum() - outputs.prod(0).sum().detach())


def run(check: str, **known: Any) -> None:
    """Call the suite's check of which this is the beginning of the name."""
    (found,) = [one for name, one in vars(CHECKS).items() if name.startswith(check)]
    names = found.__code__.co_varnames[1 : found.__code__.co_argcount]
    found(CHECKS(), **{name: known[name] for name in names})


@dataclass(frozen=True)
class OddOptions(Classification):
    """Options whose module needs PyTorch, as this one does."""

    client: ClassVar[str] = f"{__name__}:Forgets"
    twice: bool = False
    at: tuple[str, ...] = ("global",)
    words: str = "a word"

    def predictions(self) -> str:
        return self.words

    def scores(self) -> tuple[TaskScore, ...]:
        return (TaskScore("accuracy", tests=self.at), *([TaskScore("accuracy")] if self.twice else []))


class Forgets(ClassificationTask):
    """It is not made of its options, and no two are equal."""

    def __init__(self, options: LearningTask) -> None:
        super().__init__(options if options == OddOptions(twice=True) else Classification())

    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclass
class Thawed:
    options: Classification = field(default_factory=Classification)


HALVES: list[tuple[str, dict[str, Any], str]] = [
    ("test_both_halves", {"task": Thawed()}, "Thawed: expected @dataclass"),
    ("test_both_halves", {"options": object()}, "object: expected @dataclass"),
    ("test_the_client_half", {"options": OddOptions()}, "the options that it was made of"),
    ("test_the_client_half", {"options": OddOptions(twice=True)}, "state of its own"),
    ("test_the_options_are", {"options": OddOptions()}, "needs PyTorch"),
    ("test_declared", {"options": OddOptions(twice=True)}, "declared twice"),
    ("test_declared", {"options": OddOptions(at=("ours",))}, "expected tests of global"),
    ("test_what_is", {"options": OddOptions(words="")}, "expected 1 to 200 characters"),
    ("test_what_is", {"options": OddOptions(words="two\nlines")}, "expected one line"),
    ("test_it_is_learnt", {"threshold": 1.0}, "expected better than 1"),
]


@pytest.mark.parametrize(("check", "members", "says"), HALVES)
def test_each_check_finds_halves_that_are_wrong(check: str, members: dict[str, Any], says: str) -> None:
    known = {
        "recipe": build("classification"),
        "task": RIGHT["classification"],
        "options": Classification(),
        "threshold": 0.0,
        "asked": Asked(torch.randn(4, 10), torch.zeros(4, dtype=torch.int64)),
    }
    run(check, **known)
    with pytest.raises(AssertionError, match=says):
        run(check, **{**known, **members})


def test_a_task_without_a_score_that_judges_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regression, "scores", lambda _: (TaskScore("bias", low=-1.0),))
    recipe = small_recipe("fedavg", task={"name": "regression", "range": [0, 9]}, **NUMBER)
    with pytest.raises(AssertionError, match="none can judge"):
        run("test_declared", options=Regression((0.0, 9.0)), recipe=recipe)


def test_a_recipe_that_its_task_refuses_is_found() -> None:
    with pytest.raises(ConfigError, match="expected 1 for the task regression"):
        run("test_the_recipe_fits", options=Regression((0.0, 9.0)), recipe=build("classification"))


@pytest.mark.parametrize(("name", "check", "members", "says"), WRONG)
def test_each_check_finds_a_task_that_is_wrong(name: str, check: str, members: Any, says: str) -> None:
    right, recipe, case = RIGHT[name], build(name), CASES[name]
    if "scores" in members:
        added = members["scores"]
        members = {"scores": (lambda *_: {}) if added is None else more(type(right), **added)}
    task = wrong(right, **members)
    repeated = case.labels[np.arange(120) % len(case.labels)]
    outputs = torch.randn(120, recipe.classes, generator=torch.Generator().manual_seed(0))
    asked = Asked(outputs, right.from_array(repeated, recipe.classes))
    if "from_array" in members:
        asked = asked._replace(targets=task.from_array(repeated, recipe.classes))
    known = {"recipe": recipe, "task": right, "asked": asked, "options": right.options}
    known |= {"valid_labels": case.labels, "invalid_labels": case.wrong}
    if "from_array" not in members:
        run(check, **known)  # what is right passes
    with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
        run(check, **{**known, "task": task})
