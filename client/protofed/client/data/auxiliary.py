"""Auxiliary images: public ones with labels that an evaluator refines models on (FEDIC), as many of each class."""

from __future__ import annotations

import hashlib

import numpy as np

from protofed.client.data.partition import Indices
from protofed.client.data.site_data import Examples
from protofed.common.errors import DataError

_STREAM = 3  # seeds them together with data.seed: their draw must not move others


def draw_auxiliary(train: Examples, test: Examples, each: int, classes: int, seed: int) -> Indices:
    """Indices into the training examples of `each` of every class, sorted; none of them is an image of the test set.

    A score on images that a model was refined on would say nothing, so images are compared, and not only sets.

    Args:
        test: what models are scored on; may be empty.
        classes: C.

    Raises:
        DataError: a class has fewer.
    """
    scored = set(_digests(test)) if len(test) else set()
    free = np.array([image not in scored for image in _digests(train)] if scored else [True] * len(train), bool)
    labels, rng = train.labels.numpy(), np.random.default_rng([seed, _STREAM])
    drawn: list[Indices] = []
    for c in range(classes):
        rows = np.flatnonzero((labels == c) & free)
        if len(rows) < each:
            raise DataError(
                f"data.auxiliary_per_class = {each}: class {c} has fewer training images that are not in the test set "
                "(what models are scored on is nothing to refine them on); add images of it, or lower the key"
            )
        drawn.append(rng.choice(rows, each, replace=False))
    return np.sort(np.concatenate(drawn))


def _digests(examples: Examples) -> list[bytes]:
    return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in examples.images.numpy()]
