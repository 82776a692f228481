"""Payloads, tensors by part and name: the form of models, broadcasts, updates and memories."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    SECURE_SUM = "secure-sum"
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
    Exchange.RECEIVE: "This site is sent models of other sites, or of a few that are like it: it can study what they "
    "tell of those sites' images.",
    Exchange.SHARE: "What this site sends goes on to other sites, as it is or in a model of a few: they can study what "
    "it tells of this site's images.",
}
_DISCLOSES = {
    Part.BODY: "Weights and buffers of the feature extractor, trained on the site's examples.",
    Part.HEAD: "Weights of the classifier, whose biases and rows tell about how common each class is; "
    "or the scalars of a cosine head.",
    Part.PROTOTYPES: "Class means of features; which ones are there tells which classes the site has.",
    Part.CLASS_PRESENCE: "Which classes the site has; not how much of each.",
    Part.CLASS_SHARES: "An estimate of the site's class distribution, read from the norms of its head.",
    Part.CLASS_MODELS: "Global models by class, or what they are made of; only the server sends them.",
    Part.LABEL_DISTRIBUTION: "The site's true class distribution: only in simulations, no policy can allow it.",
    Part.SECURE_SUM: "Keys, shares, a masked vector: with the other sites' the sum of all; of one site nothing.",
    Part.CONTROL: "Control variates, the mean gradient of the site's examples along its training: what body and head "
    "tell, once more.",
    Part.CLASS_GRADIENTS: "For each class the classifier's mean gradient, from which its mean features can be "
    "computed, or those of the few images that the classifier gets wrong; which ones are there tells which classes the "
    "site has.",
    Part.CHOICE: "Which of several models suits the site's examples, or how well each does: so which sites have "
    "classes like its own.",
    Part.STEPS: "How many steps the site trained: with epochs and batch size, about how many examples it has.",
    Part.SITE_MODELS: "Models of single sites, for others to use; only the server sends them.",
    Part.PRIVATE: "Nothing: it stays with the server, or with the site.",
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
    """The result of a site's fit; it leaves the site only through `Policy.release`.

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
    dtype: str  # NumPy's name: float32, float64, int64; of a secure sum uint64, uint8
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
