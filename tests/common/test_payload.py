"""Payloads, their manifests, and the verbs of the fold, worked by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.common import codec
from protofed.common.payload import (
    ContributorMeans,
    Mean,
    Part,
    Payload,
    TensorSpec,
    describe,
    relative_bound,
    same_tensors,
    towards,
    unit,
)
from protofed.common.payload import weights as weights_of


def test_a_manifest_names_every_tensor_in_the_order_of_its_path() -> None:
    payload: Payload = {
        Part.HEAD: {"weight": np.zeros((3, 2), np.float32)},
        Part.BODY: {"b": np.zeros((), np.int64), "a.b": np.zeros(4), "a": np.zeros(1)},
    }
    assert describe(payload) == (
        TensorSpec(Part.BODY, "a", "float64", (1,)),
        TensorSpec(Part.BODY, "a.b", "float64", (4,)),
        TensorSpec(Part.BODY, "b", "int64", ()),
        TensorSpec(Part.HEAD, "weight", "float32", (3, 2)),
    )
    shuffled = {part: dict(reversed([*tensors.items()])) for part, tensors in reversed([*payload.items()])}
    assert describe(shuffled) == describe(payload)
    assert describe({}) == ()


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (), 4), ("float64", (3, 2), 48), ("int64", (5,), 40), ("float32", (2**32, 2**32), 2**66)],
)
def test_a_tensors_size_is_told_truly_however_large_it_is(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec(Part.BODY, "x", dtype, shape).nbytes == nbytes


def body(*values: float, dtype: str = "float32") -> Payload:
    return {Part.BODY: {"x": np.array(values, dtype)}}


def mean(*payloads: Payload, weights: tuple[float, ...] = (), parts: tuple[Part, ...] = (Part.BODY,)) -> Payload:
    fold = Mean(parts)
    for payload, weight in zip(payloads, weights or (1.0,) * len(payloads), strict=True):
        fold.add(payload, weight)
    return fold.result()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_means_by_hand(dtype: str) -> None:
    one, two, four, eight = (body(value, dtype=dtype) for value in (1.0, 2.0, 4.0, 8.0))
    result = mean(one, two, eight, weights=(1.0, 2.0, 5.0))[Part.BODY]["x"]
    assert (result.dtype.name, result.tolist()) == (dtype, [(1 + 4 + 40) / 8])
    assert mean(body(1.0, 2.0), body(3.0, 6.0))[Part.BODY]["x"].tolist() == [2.0, 4.0]
    assert mean(one, four, weights=(64.0, 64.0))[Part.BODY]["x"].tolist() == [2.5]
    assert mean(one, body(1e9, dtype=dtype), weights=(2.0, 0.0))[Part.BODY]["x"].tolist() == [1.0]


def test_the_mean_of_one_is_that_one_bit_for_bit() -> None:
    odd = body(0.1, -0.0, 5e-324, dtype="float64")
    assert codec.encode(mean(odd)) == codec.encode(odd)


def test_integers_take_the_maximum_whatever_the_weights() -> None:
    result = mean(*(body(n, dtype="int64") for n in (3, 11, 7)), weights=(100.0, 0.5, 100.0))
    assert (result[Part.BODY]["x"].dtype.name, result[Part.BODY]["x"].tolist()) == ("int64", [11])


def test_scalars_are_averaged_to_arrays_as_others_are() -> None:
    scales = [{Part.HEAD: {"scale": np.array(value, np.float32)}} for value in (1.0, 2.0)]
    for weights in ((1.0, 1.0), (1.0, 3.0)):
        scaled = mean(*({**scale, **body(1.0)} for scale in scales), weights=weights, parts=(Part.HEAD,))
        assert scaled.keys() == {Part.HEAD}, "what was asked for"
        scale = scaled[Part.HEAD]["scale"]
        assert isinstance(scale, np.ndarray)
        assert (scale.shape, scale.dtype.name) == ((), "float32")
        assert float(scale) == (1.0 * weights[0] + 2.0 * weights[1]) / sum(weights)
    largest = mean(*({Part.BODY: {"batches": np.array(value)}} for value in (3, 5)))[Part.BODY]["batches"]
    assert isinstance(largest, np.ndarray)
    assert (largest.shape, int(largest)) == ((), 5)


def test_what_goes_in_is_left_as_it_was() -> None:
    first, second = body(1.0), body(3.0)
    counters = body(1, dtype="int64"), body(2, dtype="int64")
    mean(first, second, weights=(2.0, 2.0))
    mean(*counters)
    assert same_tensors(first, body(1.0))
    assert same_tensors(second, body(3.0))
    assert same_tensors(counters[0], body(1, dtype="int64"))


def test_the_result_is_taken_once_and_shares_nothing_with_what_went_in() -> None:
    fold, first = Mean((Part.BODY,)), body(4.0)
    fold.add(first)
    fold.add(body(2.0))
    result = fold.result()
    assert not np.shares_memory(result[Part.BODY]["x"], first[Part.BODY]["x"])
    assert same_tensors(result, body(3.0))
    with pytest.raises(ValueError, match="no updates"):
        fold.result()
    with pytest.raises(ValueError, match="no updates"):
        mean(body(1.0), weights=(0.0,))
    fold.add(first)  # anew
    assert same_tensors(fold.result(), body(4.0))
    assert same_tensors(result, body(3.0))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=2, max_size=8))
def test_dyadic_values_have_the_same_mean_in_any_order(values: list[float]) -> None:
    forward, backward = (mean(*(body(value) for value in order)) for order in (values, values[::-1]))
    assert codec.encode(forward) == codec.encode(backward)
    assert codec.encode(mean(*(body(value) for value in sorted(values)))) == codec.encode(forward)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_many_updates_take_the_memory_of_one_model(weight: float) -> None:
    size = 1 << 18
    fold, one = Mean((Part.BODY,)), {Part.BODY: {"x": np.ones(size, np.float32)}}
    tracemalloc.start()
    for _ in range(50):
        fold.add(one, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 4 * size  # the sum, and one buffer for a weighted term
    tracemalloc.start()
    assert fold.result()[Part.BODY]["x"][0] == 1.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 4 * size  # in the sum's place


def test_rows_get_norm_one_and_keep_their_direction() -> None:
    rows = unit(np.array([[3.0, 4.0], [0.0, -2.0], [1e-6, 0.0]]))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.0, -1.0], [1.0, 0.0]], rtol=1e-15)
    assert unit(np.zeros((2, 3), np.float32)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_last_axis_is_divided_and_shape_and_dtype_kept(shape: tuple[int, ...], dtype: str) -> None:
    rows = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    result = unit(rows)
    assert (result.shape, result.dtype.name) == (shape, dtype)
    np.testing.assert_allclose(np.linalg.norm(result, axis=-1), 1.0, rtol=1e-6)


def contributors(*sites: dict[str, list[float]], dtype: str = "float32") -> dict[str, list[float]]:
    fold = ContributorMeans()
    for rows in sites:
        fold.add({name: np.array(row, dtype) for name, row in rows.items()})
    return {name: row.tolist() for name, row in fold.result().items()}


def test_the_mean_of_a_class_is_over_its_contributors_alone() -> None:
    second = {"0": [2.0, 2.0], "10": [0.0, -1.0]}
    means = contributors({"0": [1.0, 2.0], "3": [6.0, 0.0]}, {}, {"0": [3.0, 8.0]}, second)
    assert means == {"0": [2.0, 4.0], "3": [6.0, 0.0], "10": [0.0, -1.0]}
    assert contributors({}, {}) == contributors() == {}
    assert contributors({"0": [0.0]}, {"0": [4.0]}) == {"0": [2.0]}


def test_means_of_contributors_keep_dtype_and_shape_and_share_nothing_with_what_went_in() -> None:
    fold, rows = ContributorMeans(), {"0": np.arange(6, dtype=np.float32).reshape(2, 3), "1": np.array(3.0, np.float32)}
    fold.add(rows)
    alone = fold.result()
    fold.add({"0": np.ones((2, 3), np.float32), "1": np.array(4.0, np.float32)})
    for name, row in rows.items():
        assert isinstance(fold.result()[name], np.ndarray)
        assert (fold.result()[name].dtype, fold.result()[name].shape) == (row.dtype, row.shape)
        assert not np.shares_memory(alone[name], row)
        np.testing.assert_array_equal(alone[name], row)
    assert rows["0"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert fold.result()["1"] == 3.5


def test_a_bound_relative_to_a_model_of_zeros_is_none() -> None:
    assert (relative_bound(2.0, 3.0), relative_bound(0.0, 3.0)) == (6.0, float("inf"))


def test_same_tensors_sees_every_difference() -> None:
    assert same_tensors(body(1.0, 2.0), body(1.0, 2.0))
    assert not same_tensors(body(1.0), body(2.0))
    assert not same_tensors(body(1.0), body(1.0, 1.0))
    assert not same_tensors(body(1.0), {})
    assert not same_tensors(body(1.0), {Part.HEAD: body(1.0)[Part.BODY]})
    assert not same_tensors(body(1.0), {Part.BODY: {"y": np.ones(1, np.float32)}})
    assert not same_tensors(body(1.0), {**body(1.0), Part.HEAD: {}})


def model(weight: float, variance: float, seen: int, scale: float) -> Payload:
    statistics = {"bn.running_var": np.array([variance], np.float32), "bn.num_batches_tracked": np.array(seen)}
    body = {"bn.weight": np.array([weight], np.float32), **statistics}
    return {Part.BODY: body, Part.HEAD: {"scale": np.array(scale, np.float32)}, Part.PROTOTYPES: {"0": np.ones(2)}}


def test_weights_go_towards_a_mean_by_any_factor_and_statistics_all_the_way() -> None:
    moved = towards(model(1.0, 1.0, 1, 2.0), model(3.0, 4.0, 9, 1.0), 2.5, (Part.BODY, Part.HEAD))
    expected = model(1 + 2.5 * 2, 4.0, 9, 2 - 2.5 * 1)
    assert same_tensors(moved, {part: expected[part] for part in (Part.BODY, Part.HEAD)})
    assert all(isinstance(array, np.ndarray) for array in moved[Part.HEAD].values())
    assert weights_of(moved).keys() == {"body.bn.weight", "head.scale"}
    rng = np.random.default_rng(0)
    old, new = (body(*rng.standard_normal(10_000)) for _ in range(2))
    assert same_tensors(towards(old, new, 1.0, (Part.BODY,)), new), "all the way, to the bit"
