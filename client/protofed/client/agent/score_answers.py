"""What of a site's own scores a server may have that chose the model: no answer tells how many images have which label.

The share of right answers of a model that always says one class is the share of that class, and so is what a good model
loses that is kept from naming it. So the first is not answered; and what is answered is of a half of the test set that
only this site knows, the same in all rounds and runs: whatever models a server tries, it can count no more than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofed.client.data.site_data import SiteData
from protofed.client.data.stratified import stratified_sample
from protofed.client.training.evaluation import Tally
from protofed.client.training.score_sets import PERSONAL, scores_of
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Scores

# A model is constant if it gives all images but this share, and one, the same class: with one it singles an image out.
CONSTANT = 0.05
# A test set with fewer images, or with a larger share of one class, has no score in a sum: honest models would often be
# constant there, and one site's random numbers take the score of all. That is known before any model is.
MIN_IMAGES, MAX_MAJORITY = 20, 0.9


@dataclass(frozen=True)
class Answers:
    """Scores by name.

    Attributes:
        scores: for the site itself, on all images that it has for them.
        told: the same, for a server that gets no sum; the site's policy still decides which of them leave.
        summed: for a sum, on the secret half, likewise.
        withheld: those of `summed` in whose place random numbers leave.
    """

    scores: Scores
    told: Scores
    summed: Scores
    withheld: frozenset[str] = frozenset()

    def __or__(self, other: Answers) -> Answers:
        """Of both."""
        scores, told = {**self.scores, **other.scores}, {**self.told, **other.told}
        return Answers(scores, told, {**self.summed, **other.summed}, self.withheld | other.withheld)


def answered(
    predictions: Mapping[str, Tally], data: SiteData, recipe: Recipe, secret: bytes, *, withheld: bool
) -> Answers:
    """What the predictions of one model on the site's test sets give, by the prefix of their scores.

    Args:
        withheld: nothing that this model has learnt leaves.
    """
    halves = {
        prefix: predicted.of_some(_half(prefix, len(predicted.labels), data, recipe, secret))
        for prefix, predicted in predictions.items()
        if _is_asked(prefix, predicted, data)
    }
    scores, summed = (scores_of(some, data, recipe) for some in (predictions, halves))
    # In a sum by the half alone: that a site withholds is an answer, too.
    in_sums, outside = (withheld or _tells(some) for some in (halves, predictions))
    return Answers(scores, {} if outside else scores, summed, frozenset(summed if in_sums else ()))


def _tells(predictions: Mapping[str, Tally]) -> bool:
    return any(is_nearly_constant(predicted.logits) for predicted in predictions.values())


def is_nearly_constant(logits: Tensor) -> bool:
    """Whether a model that gives images these logits [N, C] names nearly always one class, whatever the labels are."""
    named = logits.argmax(1)  # of numbers that are none, the first class
    return len(named) - int(named.bincount().max()) <= 1 + CONSTANT * len(named)


def secret_half(secret: bytes, images: int) -> Tensor:
    """Which images [N] bool are in the half, by their places in the test set alone."""
    # Not by their bytes: a server that chooses how large images are would have as many halves as sizes.
    bits = hashlib.shake_256(b"protofed scored half\0" + secret).digest(-(-images // 8))
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=images).astype(bool))


def _is_asked(prefix: str, predicted: Tally, data: SiteData) -> bool:
    """Whether a test set, and of an own model what it was trained on, are such that scores leave; of no model."""
    counts = [predicted.totals, *([data.train.labels.bincount()] if prefix.startswith(PERSONAL) else [])]
    enough = len(predicted.labels) >= MIN_IMAGES
    return enough and all(int(some.max()) <= MAX_MAJORITY * int(some.sum()) for some in counts)


def _half(prefix: str, images: int, data: SiteData, recipe: Recipe, secret: bytes) -> Tensor:
    """Of a run's sample of the shared test set, those that are in the half of the whole."""
    if prefix != PERSONAL or images == len(data.test):
        return secret_half(secret, images)
    rows = stratified_sample(data.test.labels.cpu(), images, recipe.seed)
    return secret_half(secret, len(data.test))[rows]
