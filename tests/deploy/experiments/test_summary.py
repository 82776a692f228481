"""A run's scores over rounds and sites, by hand and against reference numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protofed.common.errors import DataError
from protofed.common.protocol.scores import spread, spreads
from protofed.deploy.experiments.summary import OWN_LOCAL as LOCAL
from protofed.deploy.experiments.summary import (
    LocalAccuracy,
    best_round,
    local_accuracies,
    over_sites,
    recent,
    summary,
    worst_classes,
    worst_sites,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics_numpy.npz"
SITES = ("ann", "bob", "cyd", "dan")


def rounds_of(accuracies: list[list[float]], name: str = LOCAL) -> dict[int, dict[str, dict[str, float]]]:
    """Rounds 1, 2, ... of one score of `SITES`."""
    return {
        number: {site: {name: value} for site, value in zip(SITES, values, strict=False)}
        for number, values in enumerate(accuracies, 1)
    }


def test_best_mean_accuracy_is_the_reference_number() -> None:
    golden = np.load(GOLDEN)
    tested = dict(zip(SITES, golden["best_mean_n_test"].tolist(), strict=True))
    found = summary(rounds_of(golden["best_mean_round_acc"].tolist()), {}, tested)
    assert [found.local[r].pooled for r in (1, 2, 3)] == pytest.approx(golden["best_mean_weighted"].tolist())
    assert best_round(found.local) == 2
    assert found.local[2].pooled == pytest.approx(float(golden["best_mean_accuracy"]))
    assert max(r.unweighted for r in found.local.values()) == pytest.approx(float(golden["best_mean_unweighted"]))
    assert found.round == 3
    assert found.local[3].pooled == pytest.approx(0.522)


def test_personal_scores_over_sites_are_the_reference_numbers() -> None:
    golden = np.load(GOLDEN)
    both = rounds_of([golden["PML_per_client"].tolist()], "personal.pm_l")
    for site, value in zip(SITES, golden["PMV_per_client"].tolist(), strict=True):
        both[1][site]["personal.pm_v"] = value
    found = summary(both, {1: SITES}, {})
    assert found.fairness == pytest.approx(float(golden["fairness_std_PML_population"]))
    assert found.sites["personal.pm_l"].mean == pytest.approx(float(golden["PML"]))
    assert found.sites["personal.pm_v"].mean == pytest.approx(float(golden["PMV"]))
    assert found.sites["personal.pm_v"].worst == float(golden["PMV_per_client"].min())
    assert found.active == found.sites


def test_active_sites_are_those_of_the_last_rounds_cohort() -> None:
    scores = rounds_of([[0.9, 0.9, 0.9, 0.9], [0.2, 0.4, 0.6, 0.8]])
    scores[2]["eva"] = {"global.accuracy": 0.7}
    found = summary(scores, {1: ("cyd", "dan"), 2: ("ann", "bob", "zoe")}, {})
    assert found.sites[LOCAL] == spread([0.2, 0.4, 0.6, 0.8])
    assert found.active == {LOCAL: spread([0.2, 0.4])}
    assert found.sites["global.accuracy"].mean == 0.7
    assert (found.local, best_round(found.local), found.fairness) == ({}, None, None)


def test_a_round_is_pooled_over_the_sites_that_have_the_score() -> None:
    scores = {7: {"ann": {LOCAL: 1.0}, "bob": {"x": 1.0}, "cyd": {LOCAL: 0.25}}, 5: {"ann": {"x": 0.0}}}
    found = local_accuracies(scores, {"ann": 1, "bob": 50, "cyd": 2}, LOCAL)
    assert found == {7: LocalAccuracy(pooled=0.5, unweighted=0.625)}


def test_the_global_model_on_local_tests_is_pooled_apart() -> None:
    scores = {1: {"ann": {LOCAL: 1.0, "global.local.accuracy": 0.5}, "bob": {"global.local.accuracy": 0.0}}}
    found = summary(scores, {}, {"ann": 3, "bob": 1})
    assert found.local == {1: LocalAccuracy(1.0, 1.0)}
    assert found.shared_local == {1: LocalAccuracy(0.375, 0.25)}


def test_the_first_of_equally_good_rounds_is_the_best() -> None:
    scores = rounds_of([[0.1], [0.5], [0.5], [0.4]])
    assert best_round(summary(dict(reversed(scores.items())), {}, {"ann": 3}).local) == 2


@pytest.mark.parametrize("tested", [{"bob": 3}, {"ann": 0, "bob": 3}])
def test_a_site_without_its_size_is_refused(tested: dict[str, int]) -> None:
    with pytest.raises(DataError, match="expected the number of its test examples"):
        summary(rounds_of([[0.1, 0.2]]), {}, tested)


def test_recent_is_the_mean_of_the_last_ten_rounds_that_have_the_score() -> None:
    scores = rounds_of([[float(number), number + 2.0] for number in range(1, 13)])  # means 2 to 13
    scores[12]["eva"] = {"global.accuracy": 0.5}
    scores[20] = {"eva": {"global.accuracy": 0.25}}
    found = recent(over_sites(dict(reversed(scores.items())), {}))
    assert found == {LOCAL: pytest.approx(sum(range(4, 14)) / 10), "global.accuracy": 0.375}
    assert recent(over_sites(scores, {}), rounds=1) == {LOCAL: 13.0, "global.accuracy": 0.25}


def test_the_worst_site_has_the_smallest_score_or_the_largest_error() -> None:
    by_site = {
        "cyd": {"personal.accuracy": 0.25, "personal.ece": 0.5},
        "bob": {"personal.accuracy": 0.25, "personal.ece": 0.125},
        "ann": {"personal.accuracy": 1.0},
    }
    assert worst_sites(by_site) == {"personal.accuracy": "bob", "personal.ece": "cyd"}
    assert spreads(by_site)["personal.ece"].worst == 0.5


def test_the_worst_class_has_the_smallest_recall_in_the_mean_over_sites() -> None:
    by_site = {
        "ann": {"personal.recall.2": 0.5, "personal.recall.10": 0.0, "personal.local.recall.1": 0.75},
        "bob": {"personal.recall.2": 0.25, "personal.recall.10": 1.0, "personal.accuracy": 0.0},
        "eva": {"global.recall.10": 0.5, "global.recall.9": 0.5},
    }
    found = worst_classes(spreads(by_site))
    assert found == {"personal": (2, 0.375), "personal.local": (1, 0.75), "global": (9, 0.5)}


def test_a_run_without_scores_has_an_empty_summary() -> None:
    found = summary({}, {}, {"ann": 3})
    assert (found.round, found.sites, found.active, found.recent, found.local) == (0, {}, {}, {}, {})
    assert (found.worst_site, found.worst_class, found.fairness, found.shared_local) == ({}, {}, None, {})
    assert best_round({}) is None
