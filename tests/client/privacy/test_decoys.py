"""Decoys move as a site's own prototypes do, and are the same again after a restart."""

from __future__ import annotations

import numpy as np
import pytest

from protofed.client.privacy.decoys import by_class, decoys, run_secret
from protofed.common.payload import Array

SECRET = run_secret(b"s" * 32, "run")
CLASSES, D = 20, 48


def units(seed: int, count: int) -> Array:
    rows = np.random.default_rng(seed).normal(size=(count, D))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def length(row: Array) -> float:
    return float(np.linalg.norm(row.astype(np.float64)))


@pytest.fixture
def received() -> dict[int, Array]:
    return dict(enumerate(units(0, CLASSES)))


@pytest.fixture
def own(received: dict[int, Array]) -> dict[int, Array]:
    """Of the even classes: they moved by a few tenths, each by its own."""
    moved = {}
    for c in range(0, CLASSES, 2):
        step = units(c + 1, 1)[0] * (0.2 + 0.02 * c)
        moved[c] = np.asarray((received[c] + step) / length(received[c] + step), dtype=np.float32)
    return moved


def absent(own: dict[int, Array]) -> list[int]:
    return [c for c in range(CLASSES) if c not in own]


def test_every_absent_class_gets_one_that_looks_like_a_prototype(
    own: dict[int, Array], received: dict[int, Array]
) -> None:
    made = decoys(own, absent(own), received, SECRET)
    assert sorted(made) == absent(own)
    for c, row in made.items():
        assert row.dtype == np.float32
        assert row.shape == (D,)
        assert length(row) == pytest.approx(1, abs=1e-6)
        assert not np.array_equal(row, received[c])


def test_decoys_move_as_far_as_the_sites_own_prototypes(own: dict[int, Array], received: dict[int, Array]) -> None:
    made = decoys(own, absent(own), received, SECRET)
    real, false = (sorted(length(row - received[c]) for c, row in rows.items()) for rows in (own, made))
    assert real[0] * 0.8 < false[0] < false[-1] < real[-1] * 1.2
    assert np.median(false) == pytest.approx(np.median(real), rel=0.3)
    assert len(set(np.round(false, 6))) == len(false)  # one and the same distance would tell them apart


def ways(rows: dict[int, Array], received: dict[int, Array]) -> Array:
    """Unit movements [K, D] on the sphere, without what makes a row of length 1 again."""
    steps = []
    for c, row in rows.items():
        base = received[c].astype(np.float64)
        step = row - (row @ base) * base
        steps.append(step / length(step))
    return np.array(steps)


def test_decoys_move_within_the_space_of_the_sites_own_movements_and_each_its_own_way(
    received: dict[int, Array],
) -> None:
    plane = units(99, 3)
    own = {c: received[c] + plane[c % 3] * 0.2 + plane[(c + 1) % 3] * 0.02 * c for c in range(0, CLASSES, 2)}
    own = {c: np.asarray(row / length(row), dtype=np.float32) for c, row in own.items()}
    made = decoys(own, absent(own), received, SECRET)
    basis = np.linalg.qr(np.concatenate([plane, *[received[c][None] for c in made]]).T)[0]
    steps = ways(made, received)
    assert np.linalg.norm(steps @ basis, axis=1).min() > 0.95  # 0.5 at random
    assert len({tuple(np.round(step, 3)) for step in steps}) == len(steps)


def test_a_decoy_goes_the_same_way_in_every_round(own: dict[int, Array], received: dict[int, Array]) -> None:
    first = decoys(own, absent(own), received, SECRET)
    later = {
        c: np.asarray((row + 0.01 * units(c, 1)[0]) / length(row + 0.01 * units(c, 1)[0])) for c, row in own.items()
    }
    again = decoys(later, absent(own), received, SECRET)
    cosines = np.sum(ways(first, received) * ways(again, received), axis=1)
    assert cosines.min() > 0.9


def test_they_are_the_same_again_and_others_with_another_secret_or_run(
    own: dict[int, Array], received: dict[int, Array]
) -> None:
    keys = [(b"s" * 32, "run"), (b"t" * 32, "run"), (b"s" * 32, "other")]
    made = [decoys(own, [1], received, run_secret(*key))[1].tobytes() for key in [*keys, keys[0]]]
    assert made[0] == made[-1]
    assert len(set(made)) == len(keys)


def test_where_no_own_prototype_has_a_negative_number_no_decoy_has(received: dict[int, Array]) -> None:
    own = {c: np.abs(received[c]) for c in range(0, CLASSES, 2)}  # such as means of features behind a ReLU
    made = decoys(own, absent(own), received, SECRET)
    assert min(row.min() for row in made.values()) == 0
    assert all(length(row) == pytest.approx(1, abs=1e-6) for row in made.values())


def test_before_anything_was_received_they_lie_among_the_sites_own(own: dict[int, Array]) -> None:
    centre = np.mean(list(own.values()), axis=0)
    long = {c: 3 * row for c, row in own.items()}
    for rows, scale in ((own, 1.0), (long, 3.0)):
        made = decoys(rows, absent(own), {}, SECRET)
        false = [length(row - scale * centre) for row in made.values()]
        real = [length(row - scale * centre) for row in rows.values()]
        assert min(real) * 0.5 < min(false) <= max(false) < max(real) * 2
        assert all((length(row) == pytest.approx(1, abs=1e-6)) == (scale == 1.0) for row in made.values())


def test_a_class_that_the_server_does_not_know_is_measured_by_those_that_it_does_not_know(
    own: dict[int, Array], received: dict[int, Array]
) -> None:
    half = {c: row for c, row in received.items() if c < 10}
    made = decoys(own, absent(own), half, SECRET)
    for c, row in made.items():
        if c < 10:
            assert length(row - half[c]) < 0.6
        else:
            assert min(length(row - old) for old in half.values()) > 0.6


def test_without_any_prototype_of_its_own_a_site_still_moves_what_it_received(received: dict[int, Array]) -> None:
    made = decoys({}, range(CLASSES), received, SECRET)
    assert all(0 < length(made[c] - received[c]) < 0.5 for c in received)


@pytest.mark.parametrize("size", [1, 2])
def test_few_features_are_enough(size: int) -> None:
    received = {c: np.eye(size)[c % size] for c in range(4)}
    made = decoys({0: received[0]}, [1, 2, 3], received, SECRET)
    assert all(np.isfinite(row).all() and row.dtype == np.float64 for row in made.values())


def test_rows_are_found_in_a_matrix_and_one_by_one() -> None:
    matrix = np.arange(6.0).reshape(3, 2)
    assert {c: row.tolist() for c, row in by_class({"mean": matrix}).items()} == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert by_class({"2": matrix[2]})[2].tolist() == [4, 5]
    assert by_class({"x": np.array(1.0), "3": np.array(1.0)}) == {}
