"""The update firewall names what is wrong, and has nothing to say of an update that is right."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protofed.common import codec
from protofed.common.payload import Array, Part, Payload, Tensors, TensorSpec, describe
from protofed.common.task import Manifest
from protofed.server.method import Expected
from protofed.server.methods.fedavg import FedAvg
from protofed.server.methods.fednh import FedNH
from protofed.server.methods.solo import Solo
from protofed.server.screening import (
    HEADER_ROOM,
    MAX_SCALARS,
    blob_fault,
    first_model_fault,
    manifest_fault,
    scalars_fault,
)

CLASSES, FEATURES = 4, 3
BODY: Tensors = {"conv.weight": np.zeros((2, 3), np.float32), "bn.batches": np.zeros((), np.int64)}
MODEL: Payload = {Part.BODY: BODY, Part.HEAD: {"weight": np.zeros((CLASSES, FEATURES), np.float32)}}
FEDAVG = FedAvg().expects(MODEL)
FEDNH = FedNH().expects(FedNH().init(MODEL, CLASSES))


def manifest(payload: Payload, **changes: Any) -> Manifest:
    data = codec.encode(payload)
    return replace(Manifest(describe(payload), len(data), codec.digest(data)), **changes)


def spec(path: str, dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> TensorSpec:
    part, _, name = path.partition("/")
    return TensorSpec(Part(part), name, dtype, shape)


def body(**tensors: Array) -> Payload:
    return {**MODEL, Part.BODY: {**BODY, **tensors}}


def prototypes(**rows: Array) -> Payload:
    """A FedNH update; `c2=row` is the prototype of class 2."""
    named = {name.removeprefix("c"): row for name, row in rows.items()}
    return {Part.BODY: BODY, Part.HEAD: {"scale": np.ones((), np.float32)}, Part.PROTOTYPES: named}


ROW = np.ones(FEATURES, np.float32)

# Announcements


def test_an_update_as_expected_has_no_fault() -> None:
    assert manifest_fault(manifest(MODEL), FEDAVG) is None
    assert manifest_fault(manifest({}), Solo().expects(MODEL)) is None


@pytest.mark.parametrize("held", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_a_prototype_may_come_for_any_class_or_none(held: tuple[int, ...]) -> None:
    assert manifest_fault(manifest(prototypes(**{f"c{c}": ROW for c in held})), FEDNH) is None


def without(payload: Payload, part: Part, name: str) -> Payload:
    return {**payload, part: {key: array for key, array in payload[part].items() if key != name}}


FAULTS: dict[str, tuple[Payload, Expected, str]] = {
    "nothing": ({}, FEDAVG, "body/bn.batches is missing (3 in all)"),
    "missing": (without(MODEL, Part.BODY, "conv.weight"), FEDAVG, "body/conv.weight is missing (1 in all)"),
    "missing part": ({Part.BODY: BODY}, FEDAVG, "head/weight is missing (1 in all)"),
    "extra": (body(evil=ROW), FEDAVG, "body/evil is not part of this method's update"),
    "extra part": ({**MODEL, Part.PROTOTYPES: {"0": ROW}}, FEDAVG, "prototypes/0 is not part of this method's update"),
    "something for solo": (MODEL, Solo().expects(MODEL), "body/bn.batches is not part of this method's update"),
    "renamed": (
        {**MODEL, Part.BODY: {"conv.weights": BODY["conv.weight"], "bn.batches": BODY["bn.batches"]}},
        FEDAVG,
        "body/conv.weight is missing (1 in all)",
    ),
    "transposed": (
        body(**{"conv.weight": np.zeros((3, 2), np.float32)}),
        FEDAVG,
        "body/conv.weight is float32 [3, 2], expected float32 [2, 3]",
    ),
    "flattened": (
        body(**{"conv.weight": np.zeros(6, np.float32)}),
        FEDAVG,
        "body/conv.weight is float32 [6], expected float32 [2, 3]",
    ),
    "wrong dtype": (
        body(**{"conv.weight": np.zeros((2, 3))}),
        FEDAVG,
        "body/conv.weight is float64 [2, 3], expected float32 [2, 3]",
    ),
    "float counter": (
        body(**{"bn.batches": np.zeros((), np.float32)}),
        FEDAVG,
        "body/bn.batches is float32 [], expected int64 []",
    ),
    "moved to another part": (
        {Part.BODY: {**BODY, "weight": MODEL[Part.HEAD]["weight"]}},
        FEDAVG,
        "head/weight is missing (1 in all)",
    ),
    "class behind the last": (prototypes(c4=ROW), FEDNH, "prototypes/4 is not part of this method's update"),
    "negative class": (
        {**prototypes(), Part.PROTOTYPES: {"_1": ROW}},
        FEDNH,
        "prototypes/_1 is not part of this method's update",
    ),
    "class with a leading zero": (prototypes(c01=ROW), FEDNH, "prototypes/01 is not part of this method's update"),
    "class that is no number": (prototypes(mean=ROW), FEDNH, "prototypes/mean is not part of this method's update"),
    "prototype of another length": (
        prototypes(c1=np.ones(4, np.float32)),
        FEDNH,
        "prototypes/1 is float32 [4], expected float32 [3]",
    ),
    "head where none is sent": (
        {**prototypes(), Part.HEAD: {"scale": np.ones((), np.float32), "weight": ROW}},
        FEDNH,
        "head/weight is not part of this method's update",
    ),
}


@pytest.mark.parametrize(("payload", "expected", "said"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_named(payload: Payload, expected: Expected, said: str) -> None:
    assert manifest_fault(manifest(payload), expected) == said


def test_a_tensor_announced_twice_is_a_fault() -> None:
    twice = manifest(MODEL, tensors=(*describe(MODEL), describe(MODEL)[0]))
    assert manifest_fault(twice, FEDAVG) == "a tensor is announced twice"


NUMBERS = sum(tensor.nbytes for tensor in describe(MODEL))


@pytest.mark.parametrize("total", [0, NUMBERS - 1, NUMBERS, NUMBERS + HEADER_ROOM + 1, 5 << 30, 2**63])
def test_a_total_that_cannot_be_is_a_fault(total: int) -> None:
    said = manifest_fault(manifest(MODEL, total=total), FEDAVG)
    assert said == f"{total} bytes announced for tensors of {NUMBERS} bytes"


def test_an_update_of_no_bytes_at_all_is_a_fault_even_where_no_tensor_is_expected() -> None:
    assert manifest_fault(manifest({}, total=0), Expected(())) == "0 bytes announced for tensors of 0 bytes"


# First models


def test_a_first_model_has_a_body_and_a_head() -> None:
    assert first_model_fault(manifest(MODEL), CLASSES) is None


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({}, "a first model needs a head with weight [4, D]"),
        ({Part.BODY: BODY}, "a first model needs a head with weight [4, D]"),
        ({Part.BODY: BODY, Part.HEAD: {"bias": ROW}}, "a first model needs a head with weight [4, D]"),
        ({Part.HEAD: {"weight": np.zeros((3, 4), np.float32)}}, "a first model needs a head with weight [4, D]"),
        ({Part.HEAD: {"weight": np.zeros(4, np.float32)}}, "a first model needs a head with weight [4, D]"),
        ({Part.HEAD: {"weight": np.zeros((4, 3, 1), np.float32)}}, "a first model needs a head with weight [4, D]"),
        ({Part.HEAD: {"weight": np.zeros((4, 3), np.int64)}}, "a first model needs a head with weight [4, D]"),
        ({**MODEL, Part.PROTOTYPES: {"0": ROW}}, "a first model has only a body and a head"),
    ],
)
def test_a_first_model_without_a_proper_head_is_a_fault(payload: Payload, said: str) -> None:
    assert first_model_fault(manifest(payload), CLASSES) == said


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**20, 2**20, 2**20)])
def test_a_first_models_size_is_not_believed(shape: tuple[int, ...]) -> None:
    huge = manifest(MODEL, tensors=(*describe(MODEL), spec("body/huge", shape=shape)))
    assert "bytes announced for tensors of" in (first_model_fault(huge, CLASSES) or "")


# Blobs


def test_a_blob_as_announced_has_no_fault() -> None:
    assert blob_fault(codec.encode(MODEL), manifest(MODEL)) is None
    reversed_ = manifest(MODEL, tensors=describe(MODEL)[::-1])
    assert blob_fault(codec.encode(MODEL), reversed_) is None


@pytest.mark.parametrize("other", [{}, body(evil=ROW), {Part.BODY: BODY}, body(**{"conv.weight": np.zeros((3, 2))})])
def test_a_blob_of_other_tensors_than_announced_is_a_fault(other: Payload) -> None:
    assert blob_fault(codec.encode(other), manifest(MODEL)) == "the upload holds other tensors than were announced"


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(100), b"\x7fELF" + bytes(100)])
def test_bytes_that_are_no_payload_are_a_fault(data: bytes) -> None:
    assert blob_fault(data, manifest(MODEL)) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [Part.BODY, Part.HEAD])
def test_a_number_that_is_not_finite_is_a_fault_by_name(part: Part, value: float) -> None:
    payload = {**MODEL, part: {name: array.copy() for name, array in MODEL[part].items()}}
    name = "conv.weight" if part is Part.BODY else "weight"
    payload[part][name].flat[-1] = value
    assert blob_fault(codec.encode(payload), manifest(payload)) == f"{part}/{name} has values that are not finite"


@pytest.mark.parametrize("value", [-0.0, 1e-45, 3e38, -3e38])
def test_odd_but_finite_numbers_are_no_fault(value: float) -> None:
    payload = body(**{"conv.weight": np.full((2, 3), value, np.float32)})
    assert blob_fault(codec.encode(payload), manifest(payload)) is None


# Scalars


@pytest.mark.parametrize("weight", [1.0, 2.5, 2.0**53 - 1, None])
def test_a_usable_count_is_no_fault(weight: float | None) -> None:
    assert scalars_fault({"loss": 0.5}, weight, Expected(())) is None


@pytest.mark.parametrize("weight", [0.0, -0.0, 0.5, 1e-60, -1.0, math.nan, math.inf, -math.inf, 2.0**53, 2.0**63])
def test_a_count_that_is_none_is_a_fault(weight: float) -> None:
    for needed in (True, False):
        assert scalars_fault({}, weight, Expected((), weight=needed)) == f"an example count of {weight}"


def test_a_withheld_count_is_a_fault_only_where_it_is_needed() -> None:
    assert "total example count is missing" in (scalars_fault({}, None, Expected((), weight=True)) or "")
    assert scalars_fault({}, None, Expected(())) is None
    assert FedAvg(weighting="examples").expects(MODEL).weight
    assert not FedAvg().expects(MODEL).weight


@pytest.mark.parametrize(
    "scalars",
    [
        {"a": math.nan},
        {"a": math.inf},
        {"ok": 1.0, "a": -math.inf},
        {"n" * 65: 1.0},
        {str(n): 1.0 for n in range(MAX_SCALARS + 1)},
    ],
)
def test_scalars_that_cannot_be_used_are_a_fault(scalars: dict[str, float]) -> None:
    assert scalars_fault(scalars, None, Expected(())) == "metrics: expected at most 2048 finite numbers"


def test_as_many_and_as_long_as_allowed_are_no_fault() -> None:
    assert scalars_fault({f"{n:064}": 1.0 for n in range(64)}, None, Expected(())) is None
