"""First prototypes are as far apart as can be: eq. (1) of FedNH, by its known optima."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protofed.server.methods.maximal_separation import Rows, maxsep, orthogonal, smallest_distance

GOLDEN = Path(__file__).parents[2] / "golden"
OPTIMA = np.load(GOLDEN / "fednh_prototype_optimum_numpy.npz")["K_d_optimal_min_distance"]
TABLE = np.load(GOLDEN / "fednh_prototype_init.npz")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_unit(rows: Rows, classes: int, features: int) -> None:
    assert rows.shape == (classes, features)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize(("classes", "features", "optimum"), OPTIMA.tolist())
def test_the_smallest_distance_is_the_optimum(classes: float, features: float, optimum: float) -> None:
    rows = maxsep(int(classes), int(features), rng())
    assert_unit(rows, int(classes), int(features))
    assert smallest_distance(rows) == pytest.approx(optimum, abs=1e-6)


@pytest.mark.parametrize("row", range(len(TABLE["table"])))
def test_the_released_start_is_reproduced_and_never_further_apart_than_the_optimum(row: int) -> None:
    columns = dict(zip(TABLE["columns"].tolist(), TABLE["table"][row].tolist(), strict=True))
    classes, features = int(columns["K"]), int(columns["d"])
    start = orthogonal(classes, features, rng())
    assert smallest_distance(start) <= columns["optimum_of_eq1"] + 1e-9
    if classes <= features:  # the released code's rows are orthonormal: sqrt(2), as in the file
        assert smallest_distance(start) == pytest.approx(columns["orth_min_pair_dist"], abs=1e-6)
        assert_unit(start, classes, features)


@pytest.mark.parametrize(("classes", "features"), [(2, 1), (2, 2), (2, 7), (3, 2), (5, 4), (10, 9), (10, 64)])
def test_a_simplex_has_all_distances_equal(classes: int, features: int) -> None:
    rows = maxsep(classes, features, rng())
    assert_unit(rows, classes, features)
    gram = rows @ rows.T
    np.testing.assert_allclose(gram[~np.eye(classes, dtype=bool)], -1 / (classes - 1), atol=1e-12)
    np.testing.assert_allclose(rows.sum(axis=0), 0.0, atol=1e-12)


@pytest.mark.parametrize("classes", [4, 5, 10, 100])
def test_in_the_plane_it_is_the_regular_polygon(classes: int) -> None:
    rows = maxsep(classes, 2, rng())
    assert_unit(rows, classes, 2)
    assert smallest_distance(rows) == pytest.approx(2 * np.sin(np.pi / classes), abs=1e-9)


def test_the_polygons_of_the_released_code_are_as_far_apart_as_ours() -> None:
    for classes in (6, 10):
        theirs = TABLE[f"uniform_K{classes}_d2"]
        assert smallest_distance(theirs) == pytest.approx(float(TABLE[f"uniform_K{classes}_min_pair_dist"]), abs=1e-12)
        assert smallest_distance(maxsep(classes, 2, rng())) == pytest.approx(smallest_distance(theirs), abs=1e-9)


@pytest.mark.parametrize(("classes", "features"), [(5, 3), (6, 3), (10, 8), (16, 8), (100, 64)])
def test_between_d_plus_2_and_2d_it_is_rankins_bound(classes: int, features: int) -> None:
    rows = maxsep(classes, features, rng())
    assert_unit(rows, classes, features)
    assert smallest_distance(rows) == pytest.approx(np.sqrt(2), abs=1e-9)


@pytest.mark.parametrize(
    ("classes", "features", "known"),
    [
        (7, 3, 1.256870),  # Tammes: 77.8695 degrees
        (8, 3, 1.215563),  # the square antiprism
        (9, 3, 2 / np.sqrt(3)),
        (10, 3, 1.091426),
        (12, 3, 1.051462),  # the icosahedron
    ],
)
def test_the_optimised_is_within_a_hundredth_of_the_best_known(classes: int, features: int, known: float) -> None:
    rows = maxsep(classes, features, rng())
    assert_unit(rows, classes, features)
    assert known - 1e-2 <= smallest_distance(rows) <= known + 1e-5


@pytest.mark.parametrize("build", [maxsep, orthogonal])
@pytest.mark.parametrize(("classes", "features"), [(4, 6), (7, 2), (6, 4), (10, 3)])
def test_the_same_seed_gives_the_same_rows_and_others_turn_them(
    build: Callable[[int, int, np.random.Generator], Rows], classes: int, features: int
) -> None:
    rows = [build(classes, features, rng(seed)) for seed in (0, 0, 1, 2)]
    assert np.array_equal(rows[0], rows[1])
    for left, right in pairwise(rows[1:]):
        assert np.abs(np.subtract(left, right)).max() > 0.1


def test_turning_changes_no_distance() -> None:
    first, second = (maxsep(6, 9, rng(seed)) for seed in (0, 1))
    np.testing.assert_allclose(first @ first.T, second @ second.T, atol=1e-12)


@pytest.mark.parametrize(("classes", "features"), [(12, 5), (6, 4)])
def test_more_classes_than_features_get_orthonormal_columns(classes: int, features: int) -> None:
    rows = orthogonal(classes, features, rng())
    np.testing.assert_allclose(rows.T @ rows, np.eye(features), atol=1e-12)


def test_the_smallest_distance_is_that_of_the_closest_pair() -> None:
    rows = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 3.0]])
    assert smallest_distance(rows) == 1.0
    assert smallest_distance(np.array([[1.0], [1.0]])) == 0.0
