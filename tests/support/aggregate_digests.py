"""What every server method makes of made-up updates; run as a module, it prints the digests of the states."""

from __future__ import annotations

import json
import zlib

import numpy as np
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.payload import Part, Payload, TensorSpec, Update
from protofed.server.method import ExpectedUpdate, server_methods

METHODS = sorted(server_methods)
SITES = ("ann", "bob", "cyd", "dee")
OPTIONS = {"creff": {"match_epochs": 10, "crt_epochs": 10}}  # by default hundreds of steps, all alike


def first_model(classes: int, features: int) -> Payload:
    """A body of two tensors and a head [C, D]."""
    rng = np.random.default_rng(0)
    body = {"w": rng.normal(size=(4 * features, features)), "b": rng.normal(size=features)}
    return {
        Part.BODY: {name: array.astype(np.float32) for name, array in body.items()},
        Part.HEAD: {"weight": rng.normal(size=(classes, features)).astype(np.float32)},
    }


def made_up(site: str, expected: ExpectedUpdate) -> Payload:
    """What a site could send: all that is required, and its share of what is optional."""
    rng = np.random.default_rng(zlib.crc32(site.encode()))
    chosen = [*expected.required, *(spec for spec in expected.optional if rng.random() < 0.7)]
    payload: dict[Part, dict[str, np.ndarray]] = {}
    for spec in chosen:
        payload.setdefault(spec.part, {})[spec.name] = _numbers(spec, rng)
    return payload


def _numbers(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.dtype.startswith("int"):
        return rng.integers(0, 9, size=spec.shape).astype(spec.dtype)
    numbers = rng.normal(size=spec.shape).astype(spec.dtype)
    unit = numbers / np.linalg.norm(numbers) if spec.part is Part.PROTOTYPES else numbers
    return np.asarray(unit, dtype=spec.dtype)


def aggregated(method: str, classes: int, features: int) -> Payload:
    half = server_methods.build(method, OPTIONS.get(method, {}))
    state = half.init(first_model(classes, features), round_context(classes))
    expected = half.expects(state)
    return half.aggregate(state, (Update(site, made_up(site, expected), {}, 10.0) for site in SITES), round_context())


if __name__ == "__main__":
    found = {method: codec.digest(codec.encode(aggregated(method, 40, 256))) for method in METHODS}
    print(json.dumps(found))  # noqa: T201
