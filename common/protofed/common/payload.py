"""Payloads, tensors by part and name: the form of models, broadcasts, updates and memories.

Functions on their arrays stand here, too; every result has the dtype of its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

SiteId: TypeAlias = str
Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]


class Part(StrEnum):
    """A tensor's kind by what it discloses. None is for raw data or label counts, and none ever will be."""

    BODY = "body"
    HEAD = "head"
    PROTOTYPES = "prototypes"
    CLASS_PRESENCE = "class-presence"
    CLASS_SHARES = "class-shares"
    CLASS_MODELS = "class-models"
    LABEL_DISTRIBUTION = "label-distribution"
    SECURE_AGGREGATION = "secure-aggregation"
    CONTROL = "control"
    CLASS_GRADIENTS = "class-gradients"
    CHOICE = "choice"
    STEPS = "steps"
    SITE_MODELS = "site-models"
    PRIVATE = "private"

    @property
    def discloses(self) -> str:
        """What a site discloses by sending it: a sentence for those who decide about the policy."""
        return _DISCLOSES[self]


class Exchange(StrEnum):
    """What a method moves between single sites; a mean of many is none."""

    RECEIVE = "receive"
    SHARE = "share"

    @property
    def discloses(self) -> str:
        """What a site takes part in by it: a sentence for those who decide about the policy."""
        return _EXCHANGES[self]


_EXCHANGES = {
    Exchange.RECEIVE: "The server sends this site models of other sites, or of a few sites that are like it. This "
    "site can study what these models tell about those sites' images.",
    Exchange.SHARE: "The server sends on what this site sends, alone or mixed with the models of a few sites. The "
    "other sites can study what it tells about this site's images.",
}
_DISCLOSES = {
    Part.BODY: "Weights and buffers of the feature extractor, trained on the site's examples.",
    Part.HEAD: "Weights of the classifier, or the scalars of a cosine head. The biases and rows tell roughly how "
    "common each class is.",
    Part.PROTOTYPES: "Class means of features. The classes that have a mean tell which classes the site has.",
    Part.CLASS_PRESENCE: "Which classes the site has, but not how many examples of each.",
    Part.CLASS_SHARES: "An estimate of the site's class distribution, read from the norms of its head.",
    Part.CLASS_MODELS: "Global models by class, or what they are made of. Only the server sends them.",
    Part.LABEL_DISTRIBUTION: "The site's true class distribution. It is never sent by itself, and a policy that names "
    "it is refused. Method cwfedavg with shares = true adds it to a secure aggregation.",
    Part.SECURE_AGGREGATION: "Keys, shares and a masked vector. Together with the other sites' vectors they give the "
    "aggregate. Alone they tell nothing about one site.",
    Part.CONTROL: "Control variates: the mean gradient of the site's training. They tell again what body and head "
    "tell. Together with body and head they tell how many steps the site trained, and so roughly how many examples it "
    "has.",
    Part.CLASS_GRADIENTS: "For each class the classifier's mean gradient. From it the server can compute the mean "
    "features of the class, or those of the few images that the classifier gets wrong. The classes that have one tell "
    "which classes the site has.",
    Part.CHOICE: "Which of several models suits the site's examples, or how well each one does. This tells which "
    "sites have similar classes.",
    Part.STEPS: "How many steps the site trained. With epochs and batch size this tells roughly how many examples it "
    "has.",
    Part.SITE_MODELS: "Models of single sites, for other sites to use. Only the server sends them.",
    Part.PRIVATE: "Nothing: it is never sent, and a policy that names it is refused.",
}
# True distributions exist in simulations alone; what a server or a site keeps for itself leaves in no message.
NOT_ON_THE_WIRE = frozenset({Part.LABEL_DISTRIBUTION, Part.PRIVATE})
FROM_THE_SERVER = frozenset({Part.CLASS_MODELS, Part.SITE_MODELS})  # no site sends them
# Who counts, which one, how long, or what another classifier gets wrong: not how far an update moves the model.
NOT_A_MOVE = frozenset(
    {
        *(Part.CLASS_PRESENCE, Part.CLASS_SHARES, Part.LABEL_DISTRIBUTION, Part.CHOICE, Part.STEPS),
        Part.CLASS_GRADIENTS,
    }
)
Payload: TypeAlias = Mapping[Part, Tensors]


@dataclass(frozen=True)
class Update:
    """The result of a site's fit; it is sent only through `Policy.release`.

    Attributes:
        site: whose.
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
    """A tensor's part, name, dtype and shape, without its data: an entry of a manifest."""

    part: Part
    name: str
    dtype: str  # NumPy's name: float32, float64, int64; of a secure aggregation uint64, uint8
    shape: tuple[int, ...]

    @cached_property
    def path(self) -> str:
        """`part/name`, its key in a blob."""
        return f"{self.part}/{self.name}"

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a dtype, which NumPy puts together anew at each look."""
    return dtype.name


def describe(payload: Payload) -> tuple[TensorSpec, ...]:
    """The specs of a payload's tensors of any shapes, sorted by path."""
    return _specs(
        tuple(
            (part, name, dtype_name(array.dtype), array.shape)
            for part, tensors in payload.items()
            for name, array in tensors.items()
        )
    )


@lru_cache(maxsize=16)
def _specs(entries: tuple[tuple[Part, str, str, tuple[int, ...]], ...]) -> tuple[TensorSpec, ...]:
    """The same objects for all payloads of one structure, as the updates of a run are."""
    return tuple(sorted((TensorSpec(*entry) for entry in entries), key=lambda spec: spec.path))


TINY = 1e-12
BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
BLOCK = 1 << 16  # elements of a difference in memory at a time: 512 KiB in float64


def unit(rows: Array) -> Array:
    """Rows [N, D], or [D] alone, divided by their norms; a zero row stays zero."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, TINY), dtype=rows.dtype)


def is_buffer(name: str) -> bool:
    """Whether a tensor of a model is a statistic that training keeps, and no weight.

    These are the tensors of PyTorch's normalisation layers, by the last component of the name. A server averages them;
    an optimiser's step means nothing to them.
    """
    return name.rpartition(".")[2] in BUFFERS


def weights(model: Payload) -> Tensors:
    """What training moves of a model's BODY and HEAD, tensors [...] by `body.conv1.weight`, …; no statistics."""
    return {
        f"{part}.{name}": array
        for part in (Part.BODY, Part.HEAD)
        for name, array in model.get(part, {}).items()
        if array.dtype.kind == "f" and not is_buffer(name)
    }


def towards(old: Payload, mean: Payload, by: float, parts: Iterable[Part]) -> dict[Part, Tensors]:
    """Each weight x of these parts as x + by (mean - x), computed in float64: by = 1 gives float32's mean to the bit.

    Of statistics and integers it is the mean, whatever `by`. Tensors of any shapes, by the same names in both.
    """
    return {
        part: {
            name: _towards(old[part][name], array, by) if array.dtype.kind == "f" and not is_buffer(name) else array
            for name, array in mean[part].items()
        }
        for part in parts
    }


def _towards(old: Array, mean: Array, by: float) -> Array:
    start = old.astype(np.float64)
    return np.asarray(start + by * (mean - start), dtype=mean.dtype)


class Mean:
    """A weighted mean of payload parts, added one by one: it needs one model's memory, whatever the number of sites.

    Floating-point tensors of any shapes are averaged; of integer ones (BatchNorm's counters) it is the maximum
    (METHODS §9.9).
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(parts)
        self._sums: dict[Part, dict[str, Array]] = {}
        self._scratch: dict[tuple[tuple[int, ...], np.dtype[np.generic]], Array] = {}
        self._weight = 0.0

    def add(self, payload: Payload, weight: float = 1.0) -> None:
        """Add one payload. The caller fixes the order of payloads: floating-point sums depend on it."""
        self._weight += weight
        for part in self._parts:
            sums = self._sums.setdefault(part, {})
            for name, array in payload.get(part, {}).items():
                if array.dtype.kind != "f":
                    sums[name] = np.asarray(np.maximum(sums[name], array)) if name in sums else array.copy()
                elif name not in sums:
                    sums[name] = np.asarray(array * array.dtype.type(weight))  # NumPy makes a scalar of a 0-d product
                else:
                    sums[name] += self._weighted(array, weight)

    def result(self) -> dict[Part, Tensors]:
        """The mean of the payloads added, each tensor of its own shape; asked for once, as it takes the sums' memory.

        Raises:
            ValueError: nothing was added, or all weights were zero.
        """
        if self._weight <= 0:
            raise ValueError("a mean of no updates")
        sums, self._sums = self._sums, {}
        for total in (array for tensors in sums.values() for array in tensors.values() if array.dtype.kind == "f"):
            total /= total.dtype.type(self._weight)
        self._weight = 0.0
        return dict(sums)

    def _weighted(self, array: Array, weight: float) -> Array:
        if weight == 1.0:
            return array
        key = (array.shape, array.dtype)  # one buffer for all tensors of a shape, of all sites
        if key not in self._scratch:
            self._scratch[key] = np.empty_like(array)
        buffer = self._scratch[key]
        np.multiply(array, array.dtype.type(weight), out=buffer)
        return buffer


class ContributorMeans:
    """The mean of each class's rows over the sites that have the class, each site with the same weight."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._contributors: dict[str, int] = {}

    def add(self, rows: Tensors) -> None:
        """Add one site's rows, {class: [D]}. The caller fixes the order of sites: floating-point sums depend on it."""
        for name, row in rows.items():
            self._sums[name] = self._sums[name] + row if name in self._sums else row
            self._contributors[name] = self._contributors.get(name, 0) + 1

    def result(self) -> dict[str, Array]:
        """{class: [D]}, without classes that no site has."""
        return {
            name: np.asarray(total / total.dtype.type(self._contributors[name]))
            for name, total in sorted(self._sums.items())
        }


def distance_norm(payload: Payload, base: Payload) -> float:
    """The Euclidean norm of (payload - base) over all floating-point tensors together, of any shapes.

    A tensor counts as it is where the base has none under its path and of its shape. Computed in float64, in which no
    square of a float32 overflows; a huge float64 makes the norm infinite.
    """
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for part, tensors in payload.items():
            for name, array in tensors.items():
                if array.dtype.kind == "f":
                    total += _squares(array, base.get(part, {}).get(name))
    return math.sqrt(total)


def _squares(array: Array, base: Array | None) -> float:
    """Sum of squares, block by block: no temporary of the tensor's size, and the same sum on any number of threads."""
    flat, total = array.reshape(-1), 0.0
    origin = base.reshape(-1) if base is not None and base.shape == array.shape else None
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK].astype(np.float64)
        if origin is not None:
            block -= origin[start : start + BLOCK]
        total += float(np.einsum("i,i->", block, block))
    return total


def relative_bound(norm: float, factor: float) -> float:
    """What an update of a model of this norm may have; infinite for a model of zeros, which nothing measures by."""
    return factor * norm if norm else math.inf


def same_tensors(left: Mapping[Part, Tensors], right: Mapping[Part, Tensors]) -> bool:
    """Whether two payloads have equal tensors, of any shapes, under the same names."""
    return left.keys() == right.keys() and all(
        left[part].keys() == right[part].keys()
        and all(np.array_equal(array, right[part][name]) for name, array in left[part].items())
        for part in left
    )
