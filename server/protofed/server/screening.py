"""The update firewall: what is wrong with an update, cheapest check first. None means nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from protofed.common import codec
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload, TensorSpec
from protofed.common.task import Manifest
from protofed.server.method import Expected

MAX_UPDATE_BYTES = 4 << 30
MAX_SCALARS = 2048  # a recall for each of some hundred classes, on two test sets
HEADER_ROOM = codec.MAX_HEADER_BYTES


def manifest_fault(manifest: Manifest, expected: Expected) -> str | None:
    """Whether an upload is announced as the method expects it: names, dtypes, shapes, total size."""
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return "a tensor is announced twice"
    required = {spec.path: spec for spec in expected.required}
    known = required | {spec.path: spec for spec in expected.optional}
    if missing := sorted(required.keys() - announced.keys()):
        return f"{missing[0]} is missing ({len(missing)} in all)"
    for path, spec in announced.items():
        if path not in known:
            return f"{path} is not part of this method's update"
        if spec != known[path]:
            return f"{path} is {_shape(spec)}, expected {_shape(known[path])}"
    return _size_fault(manifest)


def first_model_fault(manifest: Manifest, classes: int) -> str | None:
    """Whether an upload is announced as a freshly made model: BODY, and HEAD with a real `weight` [C, D]."""
    if any(spec.part not in (Part.BODY, Part.HEAD) for spec in manifest.tensors):
        return "a first model has only a body and a head"
    heads = [spec for spec in manifest.tensors if spec.path == f"{Part.HEAD}/weight"]
    if not heads or len(heads[0].shape) != 2 or heads[0].shape[0] != classes or heads[0].dtype == "int64":
        return f"a first model needs a head with weight [{classes}, D]"
    return _size_fault(manifest)


def blob_fault(data: bytes, manifest: Manifest) -> str | None:
    """Whether the bytes that came are what was announced, and all their numbers finite."""
    try:
        if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
            return "the upload holds other tensors than were announced"
        payload = codec.decode(data)
    except CodecError as error:
        return str(error)
    return not_finite(payload)


def not_finite(payload: Payload) -> str | None:
    """Names the first tensor with NaN or infinity."""
    path = codec.first_not_finite(payload)
    return f"{path} has values that are not finite" if path else None


def scalars_fault(scalars: Mapping[str, float], weight: float | None, expected: Expected) -> str | None:
    """Whether the numbers beside the tensors can be used."""
    if len(scalars) > MAX_SCALARS or any(len(name) > 64 or not math.isfinite(value) for name, value in scalars.items()):
        return f"metrics: expected at most {MAX_SCALARS} finite numbers"
    if expected.weight and weight is None:
        return "the total example count is missing: this run weights by it, and the site's policy withholds it"
    if weight is not None and not (math.isfinite(weight) and 1 <= weight < 2**53):
        return f"an example count of {weight}"
    return None


def _size_fault(manifest: Manifest) -> str | None:
    numbers = sum(spec.nbytes for spec in manifest.tensors)
    if manifest.total > MAX_UPDATE_BYTES or not numbers < manifest.total <= numbers + HEADER_ROOM:
        return f"{manifest.total} bytes announced for tensors of {numbers} bytes"
    return None


def _shape(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
