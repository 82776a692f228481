"""What the server sees of a site in one round, and what can be read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from protofed.common.payload import Part, Payload, Tensors, unit

Scores: TypeAlias = NDArray[np.float64]  # [C]; NaN: nothing to say of a class
Truth: TypeAlias = NDArray[np.bool_]
SCALE = 10.0  # of cosines, where a method has none


@dataclass(frozen=True)
class Seen:
    """One site's update as the server sees it.

    Attributes:
        sent, received: the update, and the model that it starts from.
        others: prototypes of the round's other sites.
        after, before: what the sent and the received body make of the attacker's own examples, [N, D].
        truth: which classes or findings each of those has, [N, C].
        noise_after, noise_before: what they make of images of noise, for which nobody needs data, [M, D].
        findings: an image may have several: outputs have a sigmoid each, in place of the softmax.
    """

    classes: int
    sent: Payload
    received: Payload
    others: Sequence[Tensors]
    after: Scores
    before: Scores
    truth: Truth
    noise_after: Scores
    noise_before: Scores
    findings: bool = False


def head(payload: Payload) -> Scores | None:
    """Weights of the classifier, [C, D]."""
    weight = payload.get(Part.HEAD, {}).get("weight")
    return None if weight is None else np.asarray(weight, np.float64)


def rows(payload: Payload, classes: int) -> Scores | None:
    """Prototypes [C, D], NaN where there is none; however they are laid out."""
    return None if Part.PROTOTYPES not in payload else rows_of(payload[Part.PROTOTYPES], classes)


def rows_of(tensors: Tensors, classes: int) -> Scores | None:
    """Likewise, of that part alone."""
    if "mean" in tensors:
        return np.asarray(tensors["mean"], np.float64)
    if not tensors:
        return None
    wide = next(iter(tensors.values())).shape[0]
    nothing = np.full(wide, np.nan)
    return np.stack([np.asarray(tensors.get(str(c), nothing), np.float64) for c in range(classes)])


def cosines(left: Scores | None, right: Scores | None) -> Scores | None:
    """Row by row, [C]."""
    if left is None or right is None:
        return None
    return np.asarray((unit(left) * unit(right)).sum(axis=1))


def mean_of(found: Sequence[Scores | None]) -> Scores | None:
    """Of the matrices [C, D] that are there, element by element."""
    known = [matrix for matrix in found if matrix is not None]
    return nanmean(np.stack(known), axis=0) if known else None


def nanmean(values: Scores, axis: int) -> Scores:
    """Of what is there; NaN, without a warning, where nothing is."""
    count = np.isfinite(values).sum(axis=axis)
    return np.asarray(np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), np.nan))


def class_means(features: Scores, truth: Truth) -> Scores:
    """Mean directions, [C, D]."""
    directions = unit(features)
    return np.stack([directions[has].mean(axis=0) for has in truth.T])


def tightness(features: Scores, truth: Truth) -> Scores:
    """Mean distance of unit features from their class's mean, by class."""
    directions, means = unit(features), class_means(features, truth)
    away = [np.linalg.norm(directions[has] - mean, axis=1) for has, mean in zip(truth.T, means, strict=True)]
    return np.array([distances.mean() for distances in away])


def probabilities(seen: Seen, features: Scores, payload: Payload) -> Scores | None:
    """[N, C] of the head that came with these features, else of the prototypes that the site was sent."""
    weight = head(payload)
    if weight is not None and Part.HEAD in seen.sent:
        logits = features @ weight.T + np.asarray(payload[Part.HEAD].get("bias", 0.0), np.float64)
        return np.asarray(expit(logits)) if seen.findings else _softmax(logits)
    prototypes = rows(seen.received, seen.classes)
    if prototypes is None:
        return None
    scale = float(payload.get(Part.HEAD, {}).get("scale", SCALE))
    return _softmax(scale * unit(features) @ unit(np.nan_to_num(prototypes)).T)


def _softmax(logits: Scores) -> Scores:
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=1, keepdims=True))
