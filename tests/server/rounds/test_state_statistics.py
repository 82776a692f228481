"""What a state says of its prototypes, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protofed.common.payload import Array, Part, Payload
from protofed.server.rounds import state_statistics
from protofed.server.rounds.state_statistics import prototype_statistics

EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
NORTH_EAST = [1.0, 1.0]


def matrix(*rows: list[float]) -> Payload:
    """As FedNH keeps them: a prototype for every class."""
    return {Part.PROTOTYPES: {"mean": np.array(rows, np.float32)}}


def rows(**by_class: list[float]) -> Payload:
    """As FedProc keeps them: c0, c2 … for the classes that have one."""
    named: dict[str, Array] = {name[1:]: np.array(row, np.float32) for name, row in by_class.items()}
    return {Part.PROTOTYPES: named}


def test_a_state_without_prototypes_says_nothing() -> None:
    body: Payload = {Part.BODY: {"w": np.ones((2, 2), np.float32)}}
    assert prototype_statistics(None, body) == {}
    assert prototype_statistics(body, {**body, Part.PROTOTYPES: {}}) == {}


def test_one_of_three_prototypes_turns() -> None:
    before, after = matrix(EAST, NORTH, WEST), matrix(NORTH_EAST, NORTH, WEST)
    turned = 1 - 1 / math.sqrt(2)  # east to north-east: cos 45 degrees
    found = prototype_statistics(before, after)
    assert found == pytest.approx(
        {"prototype_shift": turned / 3, "prototype_min_distance": turned, "classes_covered": 1.0}
    )


def test_nothing_moves_and_the_first_state_has_no_round_before_it() -> None:
    state = matrix(EAST, NORTH)
    assert prototype_statistics(state, state) == {
        "prototype_shift": 0.0,
        "prototype_min_distance": 1.0,
        "classes_covered": 0.0,
    }
    assert prototype_statistics(None, state) == {"prototype_min_distance": 1.0, "classes_covered": 0.0}


def test_length_is_no_distance_but_it_is_a_move() -> None:
    found = prototype_statistics(matrix(EAST, NORTH), matrix([3.0, 0.0], NORTH))
    assert found == {"prototype_shift": 0.0, "prototype_min_distance": 1.0, "classes_covered": 1.0}


def test_opposite_prototypes_are_two_apart() -> None:
    assert prototype_statistics(None, matrix(EAST, WEST))["prototype_min_distance"] == 2.0
    assert prototype_statistics(matrix(EAST), matrix(WEST)) == {"prototype_shift": 2.0, "classes_covered": 1.0}


def test_classes_that_come_new_are_covered_and_have_not_shifted() -> None:
    first = prototype_statistics({Part.BODY: {}}, rows(c0=EAST, c7=NORTH))
    assert first == {"prototype_min_distance": 1.0, "classes_covered": 2.0}
    then = prototype_statistics(rows(c0=EAST, c7=NORTH), rows(c0=EAST, c7=EAST, c3=WEST))
    assert then == {"prototype_shift": 0.5, "prototype_min_distance": 0.0, "classes_covered": 2.0}


def test_a_prototype_of_length_zero_has_no_distance() -> None:
    found = prototype_statistics(matrix([0.0, 0.0], EAST), matrix([0.0, 0.0], NORTH))
    assert found == {"prototype_shift": 1.0, "classes_covered": 1.0}


def test_what_a_method_of_ones_own_keeps_there_breaks_nothing() -> None:
    odd: Payload = {Part.PROTOTYPES: {"scale": np.full((), 2.0, np.float32), "1": np.ones((2, 2), np.float32)}}
    assert prototype_statistics(rows(c1=EAST), odd) == {"classes_covered": 1.0}
    ragged: Payload = {Part.PROTOTYPES: {"1": np.ones(2, np.float32), "2": np.ones(3, np.float32)}}
    assert prototype_statistics(ragged, ragged) == {}


def test_blocks_find_what_one_matrix_would(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    state: Payload = {Part.PROTOTYPES: {"mean": rng.standard_normal((11, 5)).astype(np.float32)}}
    whole = prototype_statistics(None, state)["prototype_min_distance"]
    monkeypatch.setattr(state_statistics, "BLOCK", 4)
    assert prototype_statistics(None, state)["prototype_min_distance"] == whole
    unit = state[Part.PROTOTYPES]["mean"].astype(float)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    pairs = [1 - unit[a] @ unit[b] for a in range(11) for b in range(a)]
    assert whole == pytest.approx(min(pairs))
