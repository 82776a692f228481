"""Mixtures of models, by hand; shares of sites that say anything at all."""

from __future__ import annotations

import numpy as np
import pytest

from protofed.common import codec
from protofed.common.payload import Array, Part, Payload, same_tensors
from protofed.server.methods.mixtures import FACTORS, distribution, mixed, row, stacked

MODEL = (Part.BODY, Part.HEAD)


def model(value: float, dtype: str = "float64") -> Payload:
    """With a name that has dots, a scalar, and BatchNorm's counter."""
    body = {"conv.0.weight": np.full((2, 3), value, dtype), "scale": np.array(value, dtype)}
    return {Part.BODY: {**body, "bn.seen": np.array(int(value))}, Part.HEAD: {"weight": np.array([value, 2.0], dtype)}}


def rows(*values: float, dtype: str = "float64") -> dict[str, Array]:
    return {**stacked([model(value, dtype) for value in values], MODEL), FACTORS: np.eye(len(values))}


def test_models_come_back_row_by_row_of_the_parts_that_were_asked_for() -> None:
    stack = rows(1.0, 5.0, 9.0)
    assert stack["body.conv.0.weight"].shape == (3, 2, 3)
    assert stack["body.scale"].shape == (3,)
    for r, value in enumerate((1.0, 5.0, 9.0)):
        assert same_tensors(row(stack, r), model(value))
    assert stacked([model(1.0)], (Part.HEAD,)).keys() == {"head.weight"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mixture_by_hand(dtype: str) -> None:
    made = mixed(rows(1.0, 5.0, 9.0, dtype=dtype), np.array([0.25, 0.0, 0.75]))
    assert made[Part.BODY]["conv.0.weight"].tolist() == [[7.0] * 3] * 2
    assert made[Part.BODY]["scale"] == 7.0
    assert made[Part.HEAD]["weight"].tolist() == [7.0, 2.0]
    assert {t.dtype.name for part in made.values() for t in part.values()} == {dtype, "int64"}


def test_a_mixture_is_made_of_arrays_and_what_goes_in_is_left_as_it_was() -> None:
    made = mixed(rows(1.0, 5.0), np.array([0.0, 1.0]))
    assert all(isinstance(tensor, np.ndarray) for part in made.values() for tensor in part.values())
    assert same_tensors(codec.decode(codec.encode(made)), model(5.0))
    stack = rows(1.0, 5.0)
    mixed(stack, np.array([0.5, 0.5]))[Part.BODY]["scale"][...] = 99.0
    assert same_tensors(row(stack, 0), model(1.0))
    assert same_tensors(row(stack, 1), model(5.0))
    assert mixed(rows(1.0, 5.0, 9.0), np.array([0.5, 0.5, 0.0]))[Part.BODY]["bn.seen"] == 5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_model_alone_is_that_model_bit_for_bit(dtype: str) -> None:
    stack = rows(0.1, 1 / 3, dtype=dtype)
    assert codec.encode(mixed(stack, np.array([0.0, 1.0]))) == codec.encode(model(1 / 3, dtype))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]),
        ([2.0, 6.0, 0.0], [0.25, 0.75, 0.0]),
        ([-5.0, 1.0, 3.0], [0.0, 0.25, 0.75]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([-1.0, -2.0, -0.0], [0.0, 0.0, 0.0]),
        ([1e308, 1e308, 1e308], [1 / 3] * 3),
        ([1e308, 1.0, -1e308], [1.0, 0.0, 0.0]),
        ([1e-320, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([3e-30, 1e-30, 0.0], [0.75, 0.25, 0.0]),
    ],
)
def test_shares_are_a_distribution_or_nothing(shares: list[float], expected: list[float]) -> None:
    given = np.array(shares)
    np.testing.assert_allclose(distribution(given), expected, rtol=1e-12, atol=1e-300)
    assert given.tolist() == shares


def test_shares_are_computed_in_double_precision() -> None:
    made = distribution(np.full(10, 0.1, np.float32))
    assert made.dtype == np.float64
    assert made.sum() == pytest.approx(1.0, abs=1e-15)
    largest = np.full(4, np.finfo(np.float32).max, np.float32)
    assert distribution(largest).tolist() == [0.25] * 4
