"""Passes over models in blocks: the same numbers as over whole tensors, and the same bytes however they are cut.

Robust rules on numbers: worked by hand, and what bad values can do at most.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.payload import Array, Part, Payload, distance_norm
from protofed.server import robust
from protofed.server.robust import (
    centre_weights,
    clip_scales,
    krum_rejected,
    krum_scores,
    robust_rows,
    spherical_median,
    squared_distances,
)

MODEL = (Part.BODY, Part.HEAD)
COUNTS = st.integers(1, 17)


def model(seed: int, size: int = 5000) -> Payload:
    rng = np.random.default_rng(seed)
    body: dict[str, Array] = {
        "w": rng.normal(size=(size, 3)).astype(np.float32),
        "bn.num_batches_tracked": np.array(seed, np.int64),
    }
    return {Part.BODY: body, Part.HEAD: {"scale": np.array(rng.normal(), np.float32)}}


def flat(payload: Payload) -> Array:
    return np.concatenate([payload[Part.BODY]["w"].reshape(-1), payload[Part.HEAD]["scale"].reshape(-1)])


@given(COUNTS, st.integers(0, 100))
def test_the_network_sorts_and_the_median_is_numpys(count: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(-3, 4, (count, 50)).astype(np.float32)
    assert np.array_equal(np.stack(robust.ordered(block.copy())), np.sort(block, axis=0))
    block = np.random.default_rng(seed).normal(size=(count, 40)).astype(np.float32)
    expected = np.median(block, axis=0)
    assert np.array_equal(robust.median(block.copy()).astype(np.float32), expected)
    assert np.array_equal(robust.median(block[::-1].copy()).astype(np.float32), expected)


def test_the_network_is_right_for_any_zeros_and_ones() -> None:
    """The 0-1 principle (Knuth, 5.3.4): what sorts all of these sorts everything."""
    for count in range(1, 12):
        all_inputs = (np.arange(2**count)[None, :] >> np.arange(count)[:, None]) & 1
        assert np.array_equal(np.stack(robust.ordered(all_inputs.copy())), np.sort(all_inputs, axis=0))


def test_the_trimmed_mean_by_hand() -> None:
    block = np.array([[1.0], [9.0], [2.0], [1e9], [-1e9]], np.float32)
    assert robust.trimmed(block, 1).tolist() == [4.0]


@given(st.integers(1, 3), st.integers(0, 50), st.floats(-(2.0**99), 2.0**99, width=32))
def test_f_bad_values_keep_the_trimmed_mean_within_the_honest_ones(bad: int, seed: int, value: float) -> None:
    honest = np.random.default_rng(seed).normal(size=(bad + 1, 30)).astype(np.float32)
    made = robust.trimmed(np.concatenate([honest, np.full((bad, 30), value, np.float32)]), bad)
    assert (made >= honest.min(axis=0)).all()
    assert (made <= honest.max(axis=0)).all()


def test_a_centre_is_made_of_every_element_and_keeps_shapes_and_types_and_may_be_weighted() -> None:
    models = [model(seed) for seed in range(5)]
    made = robust.centred(models, MODEL, robust.median)
    assert np.array_equal(flat(made), np.median([flat(one) for one in models], axis=0))
    assert made[Part.BODY]["bn.num_batches_tracked"] == 2
    assert {array.dtype.name for array in made[Part.BODY].values()} == {"float32", "int64"}
    assert made[Part.HEAD]["scale"].shape == ()
    models, weights = models[:3], np.array([0.5, 0.25, 0.25])
    made = robust.centred(models, MODEL, partial(robust.weighted, weights=weights))
    assert np.allclose(flat(made), weights @ np.stack([flat(one) for one in models]), atol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["one start", "a start of each site's own"])
def test_inner_products_are_of_the_moves(own: bool) -> None:
    models = [model(seed) for seed in range(4)]
    starts = [model(10 + seed) for seed in range(4)] if own else [model(10)] * 4
    moves = np.stack([flat(one).astype(float) - flat(start) for one, start in zip(models, starts, strict=True)])
    made = robust.inner_products(models, starts, MODEL)
    assert np.allclose(made, moves @ moves.T)
    assert np.array_equal(made, made.T)


def test_inner_products_of_float32_are_as_precise_as_they_say() -> None:
    """Moves of like directions, as those of one round: their distances are small beside their lengths."""
    rng, size = np.random.default_rng(0), 300_000
    start, common = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    arrays = [start + common + np.float32(0.01) * rng.normal(size=size).astype(np.float32) for _ in range(4)]
    models: list[Payload] = [{Part.BODY: {"w": array}} for array in arrays]
    made = robust.inner_products(models, [{Part.BODY: {"w": start}}] * 4, [Part.BODY])
    moves = np.stack([(array - start).astype(np.float64) for array in arrays])
    exact, lengths = moves @ moves.T, np.linalg.norm(moves, axis=1)
    assert (np.abs(made - exact) <= 2.0**-22 * np.outer(lengths, lengths)).all()
    np.testing.assert_allclose(squared_distances(made), squared_distances(exact), rtol=1e-3, atol=1e-6)


def test_a_tensor_without_a_start_counts_as_it_is() -> None:
    models: list[Payload] = [{Part.CONTROL: {"c": np.array([3.0, 4.0], np.float32)}}] * 2
    assert robust.inner_products(models, [{}, {}], [Part.CONTROL]).tolist() == [[25.0, 25.0], [25.0, 25.0]]


def test_a_scaled_move_has_the_scaled_length_and_leaves_counters() -> None:
    start, update = model(1), model(2)
    made = robust.moved(update, start, 0.25, MODEL)
    assert distance_norm(made, start) == pytest.approx(distance_norm(update, start) / 4, rel=1e-6)
    assert made[Part.BODY]["bn.num_batches_tracked"] == 2


PROGRAM = """
import hashlib, numpy as np
from protofed.common.payload import Part
from protofed.server import robust
models = [{Part.BODY: {"w": np.random.default_rng(s).normal(size=300_000).astype(np.float32)}} for s in range(6)]
products = robust.inner_products(models, models[:1] * 6, [Part.BODY])
weights = robust.centre_weights(products)
made = robust.centred(models, [Part.BODY], lambda block: robust.weighted(block, weights))
print(hashlib.sha256(products.tobytes() + weights.tobytes() + made[Part.BODY]["w"].tobytes()).hexdigest())
"""


def test_row_74_the_bytes_do_not_depend_on_the_number_of_threads() -> None:
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

    def digest(count: str) -> str:
        environment = os.environ | dict.fromkeys(threads, count)
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("8")


LINE = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])  # five updates of one number


def products(points: Array) -> Array:
    return np.asarray(np.einsum("kd,ld->kl", points, points))


def centre(points: Array) -> Array:
    return np.asarray(np.einsum("k,kd->d", centre_weights(products(points)), points))


def points_of(seed: int, count: int, width: int = 4) -> Array:
    return np.random.default_rng(seed).normal(size=(count, width))


# Clipping


def test_moves_beyond_the_bound_are_scaled_down_to_it_and_no_other() -> None:
    assert clip_scales([1.0, 2.0, 3.0, 12.0], 2.0) == [1.0, 1.0, 1.0, 0.5]  # the upper median is 3
    assert clip_scales([1.0, 10.0], 2.0) == [1.0, 0.2]  # of two the smaller one


@pytest.mark.parametrize("norms", [[], [0.0, 0.0, 5.0], [7.0]])
def test_where_no_length_is_usual_nobody_is_clipped(norms: list[float]) -> None:
    assert clip_scales(norms, 1.0) == [1.0] * len(norms)


# Krum


def test_krum_by_hand() -> None:
    """K = 5, f = 1: the K - f - 2 = 2 nearest others; of 0 these are 1 and 2, so 1 + 4."""
    assert krum_scores(products(LINE), 1).tolist() == [5.0, 2.0, 2.0, 5.0, 97.0**2 + 98.0**2]
    assert krum_rejected(krum_scores(products(LINE), 1), 1, 2.0) == [4]


def test_without_a_score_that_stands_out_nobody_is_rejected() -> None:
    scores = krum_scores(products(LINE[:4].repeat(2, axis=0)), 1)
    assert krum_rejected(scores, 1, 2.0) == []
    assert len(krum_rejected(scores, 1, 0.5)) == 1  # multi-Krum leaves out f in any case
    assert krum_rejected(krum_scores(products(np.array([[1.0]] * 4 + [[2.0]])), 1), 1, 2.0) == []  # most are equal
    assert krum_rejected(np.array([1.0, 1.0, 2.0]), 1, 2.0) == []  # as large as the limit, and no larger


@given(st.integers(0, 1000), st.integers(0, 3))
def test_no_more_than_f_are_ever_rejected(seed: int, bad: int) -> None:
    scores = krum_scores(products(points_of(seed, 2 * bad + 3) * 10.0 ** np.arange(2 * bad + 3)[:, None]), bad)
    assert len(krum_rejected(scores, bad, 2.0)) <= bad


# The geometric median


def test_on_a_line_the_geometric_median_is_the_median() -> None:
    assert centre(LINE)[0] == pytest.approx(2.0, abs=1e-3)
    assert centre_weights(products(np.ones((4, 2)))).tolist() == [0.25] * 4  # of equal points all weigh alike


def test_of_a_triangle_it_is_the_point_from_which_all_sides_are_seen_alike() -> None:
    """Fermat's point: lines to the corners meet at 120 degrees."""
    corners = np.array([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]])
    to_corners = corners - centre(corners)
    unit = to_corners / np.linalg.norm(to_corners, axis=1, keepdims=True)
    for one, other in itertools.combinations(unit, 2):
        assert float(one @ other) == pytest.approx(math.cos(math.radians(120)), abs=1e-4)


@given(st.integers(0, 200), st.integers(1, 3), st.floats(1.0, 1e8))
def test_fewer_than_half_bad_points_move_it_by_a_bounded_distance(seed: int, bad: int, far: float) -> None:
    """Lopuhaä and Rousseeuw 1991: by 2 K / (K - 2 f) times the largest honest norm at most, however far they are."""
    honest = points_of(seed, bad + 2)
    attacked = np.concatenate([honest, np.full((bad, 4), far)])
    count, most = len(attacked), np.linalg.norm(honest, axis=1).max()
    assert np.linalg.norm(centre(attacked)) <= 2 * count / (count - 2 * bad) * most + 1e-6


@given(st.integers(0, 200))
def test_the_order_of_sites_does_not_matter(seed: int) -> None:
    points = points_of(seed, 5)
    order = np.random.default_rng(seed).permutation(5)
    assert np.allclose(squared_distances(products(points)), [[((a - b) ** 2).sum() for b in points] for a in points])
    assert np.allclose(centre(points), centre(points[order]), atol=1e-6)
    assert np.allclose(krum_scores(products(points), 1)[order], krum_scores(products(points[order]), 1))


# Rows of classes


def test_the_direction_of_most_contributors_and_their_median_length() -> None:
    rows = np.array([[2.0, 0.0], [3.0, 0.0], [0.0, -50.0]], np.float32)
    assert np.allclose(spherical_median(rows), [3.0, 0.0], atol=1e-4)


def test_a_class_of_two_contributors_has_no_row_in_the_middle() -> None:
    row = np.array([1.0, 0.0], np.float32)
    made = robust_rows({"1": [row, row], "2": [row, row, -row], "3": [np.ones((2, 2), np.float32)] * 3})
    assert set(made) == {"2", "3"}
    assert made["2"].dtype == np.float32
    assert np.allclose(made["2"], row, atol=1e-4)
    assert np.allclose(made["3"], np.ones((2, 2)))


@given(st.integers(0, 200), st.floats(1e-3, 1e6))
def test_one_of_five_contributors_turns_a_row_by_a_bounded_angle(seed: int, length: float) -> None:
    axis, rng = np.eye(8)[0], np.random.default_rng(seed)
    honest = axis + 0.1 * rng.normal(size=(4, 8))
    bad = rng.normal(size=(1, 8)) * length
    made = spherical_median(np.concatenate([honest, bad]))
    assert made @ axis / np.linalg.norm(made) > 0.9
    assert np.linalg.norm(made) <= np.linalg.norm(honest, axis=1).max()
