"""Scores over sites."""

from __future__ import annotations

import pytest

from protofed.common.statistics import spreads


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
