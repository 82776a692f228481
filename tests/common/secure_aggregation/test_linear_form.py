"""Numbers as words of the ring: exact sums, and nothing that could overflow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.errors import ConfigError, SecureAggregationError
from protofed.common.secure_aggregation.keys import add_mask
from protofed.common.secure_aggregation.linear_form import FixedPoint

FORM = FixedPoint(limit=65536.0, bits=40, most=50)


@given(st.lists(st.floats(-65536, 65536), min_size=1, max_size=50))
def test_the_sum_of_encoded_numbers_is_that_of_the_numbers(numbers: list[float]) -> None:
    encoded = np.stack([FORM.encoded(np.array([number])) for number in numbers])
    total = FORM.decoded(encoded.sum(axis=0, dtype=np.uint64))
    assert abs(total[0] - math.fsum(numbers)) <= len(numbers) * 2.0**-41 + abs(total[0]) * 2.0**-52


def test_the_largest_numbers_of_the_most_sites_do_not_overflow() -> None:
    for sign in (1.0, -1.0):
        words = FORM.encoded(np.full(1, sign * 65536.0))
        assert FORM.decoded(words * np.uint64(50)) == [sign * 65536.0 * 50]


@pytest.mark.parametrize("number", [65536.1, -1e9, math.inf, -math.inf])
def test_a_number_beyond_the_limit_is_clipped_to_it(number: float) -> None:
    assert FORM.decoded(FORM.encoded(np.array([1.0, number]))).tolist() == [1.0, math.copysign(65536.0, number)]
    with pytest.raises(SecureAggregationError, match="NaN"):
        FORM.encoded(np.array([0.0, math.nan]))


@pytest.mark.parametrize("shape", [(2, 3), (0,), (), (32_768,), (32_769,), (3, 40_000)])
def test_float32_and_any_shape(shape: tuple[int, ...]) -> None:
    numbers = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 8
    for laid_out in (numbers, numbers.T):
        assert np.array_equal(FORM.decoded(FORM.encoded(laid_out)), laid_out)


def test_a_form_that_could_overflow_is_refused_if_only_by_the_rounding() -> None:
    """2**63 / 50 is no integer: the words of 50 such numbers add up to more than 2**63, which is a negative sum."""
    assert FixedPoint(limit=65536.0, bits=41, most=50).bits == 41
    for limit, bits in ((65536.0, 42), (2.0**23 / 50, 40)):
        with pytest.raises(ConfigError, match="at most 64"):
            FixedPoint(limit=limit, bits=bits, most=50)
    below = math.nextafter(2.0**23 / 50, 0)
    words = FixedPoint(limit=below, bits=40, most=50).encoded(np.full(1, below))
    assert FORM.decoded(words * np.uint64(50)) > 0


@pytest.mark.parametrize("length", [0, 1, 8191, 8192, 8193, 20_000])
def test_a_mask_is_one_stream_whatever_the_blocks(length: int) -> None:
    long, short = np.zeros(30_000, dtype=np.uint64), np.zeros(length, dtype=np.uint64)
    add_mask(long, b"k" * 32)
    add_mask(short, b"k" * 32)
    assert np.array_equal(short, long[:length])
    add_mask(short, b"k" * 32, subtract=True)
    assert not short.any()
