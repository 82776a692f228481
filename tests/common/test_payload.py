"""Payloads and their manifests."""

from __future__ import annotations

import numpy as np
import pytest

from protofed.common.payload import NOT_ON_THE_WIRE, Part, Payload, TensorSpec, describe


def test_no_part_can_hold_data_or_labels() -> None:
    assert set(Part) - NOT_ON_THE_WIRE == {
        "body",
        "head",
        "prototypes",
        "class-presence",
        "class-shares",
        "class-models",
        "secure-sum",
        "control",
        "class-gradients",
        "choice",
        "steps",
        "site-models",
    }
    assert {"label-distribution", "private"} == NOT_ON_THE_WIRE  # see test_wire


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


def test_a_manifest_does_not_depend_on_the_order_of_keys() -> None:
    one, two = np.zeros(1), np.zeros(2)
    left = {Part.BODY: {"x": one, "y": two}, Part.HEAD: {"z": one}}
    right = {Part.HEAD: {"z": one}, Part.BODY: {"y": two, "x": one}}
    assert describe(left) == describe(right)
    assert describe({}) == ()


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (), 4), ("float64", (3, 2), 48), ("int64", (5,), 40), ("float32", (2**32, 2**32), 2**66)],
)
def test_a_tensors_size_is_told_truly_however_large_it_is(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec(Part.BODY, "x", dtype, shape).nbytes == nbytes
