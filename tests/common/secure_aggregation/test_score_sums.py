"""Sums of sites' own scores: their rows, and what an opened sum says."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.score_names import score_names

from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.messages import MAX_ROWS

RUN = score_names(3)
NAMES = score_sums.list_scores(RUN)


def spreads_of(*scores: dict[str, float]) -> dict[str, Spread]:
    return score_sums.opened(RUN, score_sums.simulate_total(RUN, scores))


def test_the_rows_are_what_a_trainer_may_report_and_follow_from_the_recipe_alone() -> None:
    assert list(NAMES) == sorted(set(NAMES))
    assert {"loss", "personal.pm_l", "personal.recall.2", "global.local.accuracy"} <= set(NAMES)
    assert not {"global.accuracy", "global.majority", "personal.recall.3", "personal.auroc"} & set(NAMES)
    assert "personal.auroc" in score_sums.list_scores(score_names(3, "probabilities"))
    many = score_sums.list_scores(score_names(MAX_ROWS))
    assert "personal.accuracy" in many
    assert not any("recall" in name for name in many), "of too many classes"


@given(st.lists(st.floats(0, 1), min_size=3, max_size=50))
def test_an_opened_sum_is_the_mean(values: list[float]) -> None:
    (found,) = spreads_of(*({"personal.pm_v": value} for value in values)).values()
    assert found.mean == pytest.approx(statistics.fmean(values), abs=score_sums.STEP / 2)
    assert (found.std, found.worst, found.sites) == (None, None, len(values))


def test_sites_whose_scores_have_one_mean_open_to_the_same_numbers() -> None:
    """Of whole numbers with a known sum and sum of squares there are few: three sites' scores were found by trying."""
    both = (0.5, 0.5, 0.5), (0.25, 0.375, 0.875)
    alike, apart = ([{"personal.pm_v": value} for value in values] for values in both)
    assert (score_sums.simulate_total(RUN, alike) == score_sums.simulate_total(RUN, apart)).all()


def test_a_fraction_of_a_test_set_leaves_without_its_denominator() -> None:
    """Accuracies on 97 and on 311 images that are nearest to each other are one number."""
    one, other = (score_sums.summable(RUN, {"personal.local.accuracy": value}) for value in (29 / 97, 93 / 311))
    assert one == other


def test_a_score_of_fewer_than_three_sites_is_not_aggregated() -> None:
    assert spreads_of({"loss": 1.0}, {"loss": 2.0}, {"personal.pm_v": 0.5}) == {}
    found = spreads_of({"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0, "personal.pm_v": 0.5})
    assert found == {"loss": Spread(2.0, None, None, 3)}


@pytest.mark.parametrize(("value", "sign"), [(math.nan, 1), (math.inf, 1), (-math.inf, -1), (65537.0, 1), (-1e300, -1)])
def test_a_score_that_no_sum_can_take_counts_as_the_largest_and_nobody_sees_whose(value: float, sign: int) -> None:
    most = score_sums.LARGEST
    found = spreads_of({"loss": value}, {"loss": most}, {"loss": 0.0}, {"loss": -most})
    assert found["loss"] == Spread(sign * most / 4, None, None, 4)
    assert spreads_of(*[{"loss": most}] * 50)["loss"] == Spread(most, None, None, 50), "nothing overflows"


def test_a_score_in_whose_place_a_site_gave_a_random_number_is_none_of_the_round_and_others_are() -> None:
    given = {"personal.pm_v": 0.5, "personal.accuracy": 0.25}
    found = spreads_of(given, given, {**given, "personal.pm_v": 4096.0}, given)
    assert found == {"personal.accuracy": Spread(0.25, None, None, 4)}


def test_random_numbers_are_all_that_a_sum_can_take_and_hardly_ever_a_score() -> None:
    drawn = np.array([score_sums.random_number() for _ in range(4000)])
    assert np.array_equal(drawn, [score_sums.summable(RUN, {"loss": one})["loss"] for one in drawn])
    assert abs(drawn).max() <= score_sums.LARGEST
    # Of a uniform draw: mean 0 and standard deviation LARGEST / sqrt(3), each within six standard errors.
    assert abs(drawn.mean()) < 6 * score_sums.LARGEST / math.sqrt(3 * len(drawn))
    assert drawn.std() == pytest.approx(score_sums.LARGEST / math.sqrt(3), rel=0.05)
    assert sum(score_sums.is_score(RUN, "personal.pm_v", one / 3) for one in drawn) < 10


@pytest.mark.parametrize("mean", [0.0, 1.0, 1 + score_sums.STEP])
def test_a_mean_of_scores_that_were_rounded_is_a_score(mean: float) -> None:
    assert score_sums.is_score(RUN, "personal.pm_v", mean)
    assert not score_sums.is_score(RUN, "personal.pm_v", mean + 1.5)


def test_flags_say_which_scores_a_site_gives() -> None:
    layout = score_sums.lay_out_scores(RUN)
    flags = layout.flags(score_sums.as_update("ann", RUN, {"loss": 0.0, "personal.pm_v": 0.5}))
    assert [NAMES[row] for row in np.flatnonzero(flags)] == ["loss", "personal.pm_v"]


def test_the_one_holder_of_a_group_shows_by_the_sums_with_and_without_it_and_the_pages_say_so() -> None:
    """Contributors are counted over all groups of a sum: here over two; one site of the second has the score."""
    first = [{"personal.pm_v": value} for value in (0.25, 0.5, 0.625)]
    second: list[dict[str, float]] = [{"personal.pm_v": 0.875}, {}, {}]
    without, both = spreads_of(*first)["personal.pm_v"], spreads_of(*first, *second)["personal.pm_v"]
    assert both.sites * both.mean - without.sites * without.mean == 0.875
