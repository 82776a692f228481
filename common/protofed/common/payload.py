"""The one shape of data: model, broadcast, update, state, memory and checkpoint are payloads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

SiteId: TypeAlias = str
Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]


class Part(StrEnum):
    """What a tensor discloses. There is no part for raw data or label counts, and there will be none."""

    BODY = "body"  # weights and buffers of the feature extractor
    HEAD = "head"  # weights of the classifier, or the scalars of a cosine head
    PROTOTYPES = "prototypes"  # class means of features, as unit vectors


Payload: TypeAlias = Mapping[Part, Tensors]


@dataclass(frozen=True)
class Update:
    """What a site's fit gives; it leaves the site only through `Policy.release`.

    Attributes:
        site: who.
        payload: tensors by part.
        metrics: scalars, each allowed by name in the policy.
        weight: total example count, only if the policy discloses it.
    """

    site: SiteId
    payload: Payload
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float | None = None


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a manifest: everything about it but its numbers."""

    part: Part
    name: str
    dtype: str  # NumPy's name: float32, float64, int64
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """`part/name`, its key in a blob."""
        return f"{self.part}/{self.name}"

    @property
    def nbytes(self) -> int:
        """Size of its numbers in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def describe(payload: Payload) -> tuple[TensorSpec, ...]:
    """The payload's manifest, sorted by path."""
    specs = [
        TensorSpec(part, name, array.dtype.name, array.shape)
        for part, tensors in payload.items()
        for name, array in tensors.items()
    ]
    return tuple(sorted(specs, key=lambda spec: spec.path))
