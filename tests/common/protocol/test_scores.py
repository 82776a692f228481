"""Names and ranges of the numbers that sites may report.

Scores over sites.
"""

from __future__ import annotations

import math

import pytest
from tests.support.score_names import families, score_names

from protofed.common.protocol.messages import Role
from protofed.common.protocol.scores import (
    BINS,
    MAX_LOSS,
    MAX_OWN_METRIC,
    MAX_OWN_METRICS,
    metrics_problem,
    spreads,
)

TRAINER, EVALUATOR = frozenset({Role.TRAINER}), frozenset({Role.EVALUATOR})
SWITCHES = ("frequency_groups", "probabilities", "clinical")
FAMILIES, ALL = families(), score_names(3, *SWITCHES)


def every_name(classes: int) -> dict[str, Role]:
    """Each name that a run of so many classes can have, with the role that reports it."""
    counts = {"none": [""], "class": [f".{c}" for c in range(classes)], "bin": [f".{b}" for b in range(BINS)]}
    return {f"{name}{index}": family.role for name, family in FAMILIES.items() for index in counts[family.indexed]}


def test_each_name_is_reported_by_one_role() -> None:
    for name, role in every_name(3).items():
        assert ALL.problem({name: 0.5}, {role}) is None
        other = Role.TRAINER if role is Role.EVALUATOR else Role.EVALUATOR
        assert ALL.problem({name: 0.5}, {other}) is not None, name
        assert ALL.problem({name: 0.5}, set()) is not None, name
        shared = name.startswith("global.") and not name.startswith("global.local.")
        assert (role is Role.EVALUATOR) == shared, name
    assert ALL.problem(dict.fromkeys(every_name(3), 1.0), {Role.TRAINER, Role.EVALUATOR}) is None


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1.0 + 1e-7, 5e-324])
def test_a_share_is_a_score(value: float) -> None:
    assert ALL.problem({"global.auroc": value}, EVALUATOR) is None


@pytest.mark.parametrize("value", [-1e-9, 1.001, 1e308, -1e308, math.nan, math.inf, -math.inf])
def test_a_value_that_no_score_has_is_named(value: float) -> None:
    for name, role in every_name(1).items():
        if name.endswith(".brier") and 1 < value < 2:
            continue  # of C classes it is at most 2
        problem = score_names(1, *SWITCHES).problem({name: value}, {role})
        assert problem is not None
        assert problem.startswith(f"{name} = ")


ODD = ["", "accuracy", "global", "global.", "global.recall", "global.recall.", "global.recall.3", "global.recall.-1"]
ODD += ["global.recall.00", "global.recall.01", "global.recall.1.0", "global.recall.\u00b2", "global.recall.\u0661"]
ODD += ["global.accuracy.0", "GLOBAL.accuracy", "global.accuracy\n", "global.pm_v", "personal.local.pm_v", "loss"]
ODD += [f"global.reliability.share.{BINS}", "global.reliability.share", "personal.reliability.share.0", "n" * 10**6]


@pytest.mark.parametrize("name", ODD, ids=lambda name: name[:30])
def test_a_name_that_nobody_computes_is_no_score(name: str) -> None:
    problem = ALL.problem({name: 0.5}, TRAINER | EVALUATOR)
    assert problem is not None
    assert len(problem) < 200


@pytest.mark.parametrize("name", ["global.ece", "global.many", "global.reliability.share.0"])
def test_what_the_recipe_has_switched_off_is_no_score(name: str) -> None:
    assert ALL.problem({name: 0.5}, EVALUATOR) is None
    assert score_names(3).problem({name: 0.5}, EVALUATOR) is not None


def test_a_trainings_numbers_are_its_loss_and_a_plugins_own() -> None:
    most = {f"train.n{number}": -MAX_OWN_METRIC for number in range(MAX_OWN_METRICS)}
    assert metrics_problem({"loss": MAX_LOSS, **most}) is None
    assert metrics_problem({**most, "train.one_more": 0.0}) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", value) for value in (-1e-9, 1e10, math.nan, math.inf)]
    + [("train.grad", value) for value in (1e10, -1e10, math.nan, -math.inf)]
    + [(name, 0.5) for name in ("train.", "train.A", "train.a.b", "train.1", "train." + "a" * 33, "train.a\n", "")]
    + [(name, 0.5) for name in ("global.accuracy", "personal.pm_l", "n" * 10**6)],
    ids=lambda value: str(value)[:30],
)
def test_any_other_number_beside_an_update_is_named(name: str, value: float) -> None:
    problem = metrics_problem({name: value})
    assert problem is not None
    assert len(problem) < 200


def means(name: str, *values: float) -> float:
    return spreads({f"site-{number}": {name: value} for number, value in enumerate(values)})[name].mean


@pytest.mark.parametrize("name", ["global.accuracy", "global.recall.3"])
def test_one_evaluator_of_three_does_not_own_the_global_models_score(name: str) -> None:
    assert means(name, 0.5, 0.6, 1.0) == 0.6
    assert means(name, 0.5, 0.6, 0.0, 0.7) == 0.5  # a value that somebody reported
    assert means(name, 0.5, 1.0) == 0.75


@pytest.mark.parametrize("name", ["personal.accuracy", "global.local.accuracy", "loss"])
def test_sites_own_scores_are_averaged(name: str) -> None:
    assert means(name, 0.0, 0.25, 0.5, 1.0) == 0.4375
