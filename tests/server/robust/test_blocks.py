"""Passes over models in blocks: the same numbers as over whole tensors, and the same bytes however they are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.payload import Array, Part, Payload, norm_of
from protofed.server.robust import blocks
from protofed.server.robust.rules import squared_distances

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
def test_the_network_sorts(count: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(-3, 4, (count, 50)).astype(np.float32)
    assert np.array_equal(np.stack(blocks.ordered(block.copy())), np.sort(block, axis=0))


def test_the_network_is_right_for_any_zeros_and_ones() -> None:
    """The 0-1 principle (Knuth, 5.3.4): what sorts all of these sorts everything."""
    for count in range(1, 12):
        all_inputs = (np.arange(2**count)[None, :] >> np.arange(count)[:, None]) & 1
        assert np.array_equal(np.stack(blocks.ordered(all_inputs.copy())), np.sort(all_inputs, axis=0))


@given(COUNTS, st.integers(0, 100))
def test_the_median_is_numpys(count: int, seed: int) -> None:
    block = np.random.default_rng(seed).normal(size=(count, 40)).astype(np.float32)
    expected = np.median(block, axis=0)
    assert np.array_equal(blocks.median(block.copy()).astype(np.float32), expected)
    assert np.array_equal(blocks.median(block[::-1].copy()).astype(np.float32), expected)


def test_the_trimmed_mean_by_hand() -> None:
    block = np.array([[1.0], [9.0], [2.0], [1e9], [-1e9]], np.float32)
    assert blocks.trimmed(block, 1).tolist() == [4.0]


@given(st.integers(1, 3), st.integers(0, 50), st.floats(-(2.0**99), 2.0**99, width=32))
def test_f_bad_values_keep_the_trimmed_mean_within_the_honest_ones(bad: int, seed: int, value: float) -> None:
    honest = np.random.default_rng(seed).normal(size=(bad + 1, 30)).astype(np.float32)
    made = blocks.trimmed(np.concatenate([honest, np.full((bad, 30), value, np.float32)]), bad)
    assert (made >= honest.min(axis=0)).all()
    assert (made <= honest.max(axis=0)).all()


def test_a_centre_is_made_of_every_element_and_keeps_shapes_and_types() -> None:
    models = [model(seed) for seed in range(5)]
    made = blocks.centred(models, MODEL, blocks.median)
    assert np.array_equal(flat(made), np.median([flat(one) for one in models], axis=0))
    assert made[Part.BODY]["bn.num_batches_tracked"] == 2
    assert {array.dtype.name for array in made[Part.BODY].values()} == {"float32", "int64"}
    assert made[Part.HEAD]["scale"].shape == ()


def test_a_weighted_centre_is_the_weighted_mean() -> None:
    models, weights = [model(seed) for seed in range(3)], np.array([0.5, 0.25, 0.25])
    made = blocks.centred(models, MODEL, partial(blocks.weighted, weights=weights))
    assert np.allclose(flat(made), weights @ np.stack([flat(one) for one in models]), atol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["one start", "a start of each site's own"])
def test_inner_products_are_of_the_moves(own: bool) -> None:
    models = [model(seed) for seed in range(4)]
    starts = [model(10 + seed) for seed in range(4)] if own else [model(10)] * 4
    moves = np.stack([flat(one).astype(float) - flat(start) for one, start in zip(models, starts, strict=True)])
    made = blocks.inner_products(models, starts, MODEL)
    assert np.allclose(made, moves @ moves.T)
    assert np.array_equal(made, made.T)


def test_inner_products_of_float32_are_as_precise_as_they_say() -> None:
    """Moves of like directions, as those of one round: their distances are small beside their lengths."""
    rng, size = np.random.default_rng(0), 300_000
    start, common = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    arrays = [start + common + np.float32(0.01) * rng.normal(size=size).astype(np.float32) for _ in range(4)]
    models: list[Payload] = [{Part.BODY: {"w": array}} for array in arrays]
    made = blocks.inner_products(models, [{Part.BODY: {"w": start}}] * 4, [Part.BODY])
    moves = np.stack([(array - start).astype(np.float64) for array in arrays])
    exact, lengths = moves @ moves.T, np.linalg.norm(moves, axis=1)
    assert (np.abs(made - exact) <= 2.0**-22 * np.outer(lengths, lengths)).all()
    np.testing.assert_allclose(squared_distances(made), squared_distances(exact), rtol=1e-3, atol=1e-6)


def test_a_tensor_without_a_start_counts_as_it_is() -> None:
    models: list[Payload] = [{Part.CONTROL: {"c": np.array([3.0, 4.0], np.float32)}}] * 2
    assert blocks.inner_products(models, [{}, {}], [Part.CONTROL]).tolist() == [[25.0, 25.0], [25.0, 25.0]]


def test_a_scaled_move_has_the_scaled_length_and_leaves_counters() -> None:
    start, update = model(1), model(2)
    made = blocks.moved(update, start, 0.25, MODEL)
    assert norm_of(made, start) == pytest.approx(norm_of(update, start) / 4, rel=1e-6)
    assert made[Part.BODY]["bn.num_batches_tracked"] == 2


PROGRAM = """
import hashlib, numpy as np
from protofed.common.payload import Part
from protofed.server.robust import blocks, rules
models = [{Part.BODY: {"w": np.random.default_rng(s).normal(size=300_000).astype(np.float32)}} for s in range(6)]
products = blocks.inner_products(models, models[:1] * 6, [Part.BODY])
weights = rules.centre_weights(products)
made = blocks.centred(models, [Part.BODY], lambda block: blocks.weighted(block, weights))
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
