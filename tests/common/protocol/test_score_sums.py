"""Sums of sites' own scores: their rows, and what an opened sum says."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.protocol import score_sums
from protofed.common.protocol.score_names import ScoreNames
from protofed.common.protocol.sum_messages import MOST_ROWS
from protofed.common.statistics import Spread

NAMES = score_sums.names_of(ScoreNames(3))


def spreads_of(*scores: dict[str, float]) -> dict[str, Spread]:
    return score_sums.opened(NAMES, score_sums.total_of(NAMES, scores))


def test_the_rows_are_what_a_trainer_may_report_and_follow_from_the_recipe_alone() -> None:
    assert list(NAMES) == sorted(set(NAMES))
    assert {"loss", "personal.pm_l", "personal.recall.2", "global.local.accuracy"} <= set(NAMES)
    assert not {"global.accuracy", "global.majority", "personal.recall.3", "personal.auroc"} & set(NAMES)
    assert "personal.auroc" in score_sums.names_of(ScoreNames(3, {"probabilities"}))


def test_recalls_of_too_many_classes_are_in_no_sum() -> None:
    names = score_sums.names_of(ScoreNames(MOST_ROWS))
    assert "personal.accuracy" in names
    assert not any("recall" in name for name in names)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=50))
def test_an_opened_sum_is_mean_and_population_deviation(values: list[float]) -> None:
    (found,) = spreads_of(*({"personal.pm_v": value} for value in values)).values()
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.std == pytest.approx(statistics.pstdev(values), abs=1e-4)
    assert (found.worst, found.sites) == (None, len(values))


def test_equal_scores_do_not_deviate() -> None:
    assert spreads_of(*[{"loss": 1 / 3}] * 7)["loss"].std == 0.0


def test_a_score_of_fewer_than_three_sites_is_not_summed() -> None:
    assert spreads_of({"loss": 1.0}, {"loss": 2.0}, {"personal.pm_v": 0.5}) == {}
    found = spreads_of({"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0, "personal.pm_v": 0.5})
    assert found == {"loss": Spread(2.0, math.sqrt(2 / 3), None, 3)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 256.1, -1e300])
def test_a_score_that_no_sum_can_take_stays_and_ends_nothing(value: float) -> None:
    found = spreads_of({"loss": value}, {"loss": 256.0}, {"loss": 0.0}, {"loss": -256.0})
    assert found["loss"] == Spread(0.0, 256 * math.sqrt(2 / 3), None, 3)


def test_of_fifty_of_the_largest_nothing_overflows() -> None:
    assert spreads_of(*[{"loss": 256.0}] * 50)["loss"] == Spread(256.0, 0.0, None, 50)


def test_flags_say_which_scores_a_site_gives() -> None:
    layout = score_sums.layout_of(NAMES)
    flags = layout.flags(score_sums.terms_of("ann", NAMES, {"loss": 0.0, "personal.pm_v": 0.5}))
    assert [NAMES[row] for row in np.flatnonzero(flags)] == ["loss", "personal.pm_v"]


def test_the_one_holder_of_a_group_shows_by_the_sums_with_and_without_it_and_the_pages_say_so() -> None:
    """Holders are counted over all groups of a sum: here over two, of which one site of the second has the score."""
    first = [{"personal.pm_v": value} for value in (0.25, 0.5, 0.625)]
    second: list[dict[str, float]] = [{"personal.pm_v": 0.875}, {}, {}]
    without, both = spreads_of(*first)["personal.pm_v"], spreads_of(*first, *second)["personal.pm_v"]
    assert both.sites * both.mean - without.sites * without.mean == 0.875
