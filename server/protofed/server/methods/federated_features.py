"""Federated features: made so that their gradients are those that sites sent; a classifier is trained on them (CReFF,
METHODS §5.11).

A classifier is one matrix [C, E], its gradients are like it: [C, D], or [C, D + 1] with the bias as the last column.
Everything is computed in float64, in an order that follows from the arguments alone, with `einsum`. The products of a
linear algebra library differ in the last digits with the number of its threads. A round would then have other bytes on
another machine.
"""

from __future__ import annotations

import numpy as np

from protofed.server.method import Array, Tensors

EPS = 1e-6  # in the denominator of a cosine, as released
BATCH = 32  # features of a step of `retrained`, about: the release's local batch


def joined(head: Tensors) -> Array:
    """A linear head as one matrix, [C, E]."""
    return np.column_stack([head["weight"], head["bias"]]) if "bias" in head else head["weight"]


def gradients(features: Array, classes: Array, classifier: Array) -> Array:
    """Of the cross-entropy by the classifier, mean over the features of each class, [S, C, E].

    Args:
        features: [S, n, D], of S classes.
        classes: their numbers, [S].
        classifier: [C, E].
    """
    inputs = _inputs(features, classifier)
    return _mean_products(_probabilities(inputs, classifier) - _targets(classes, classifier), inputs)


def distances(actual: Array, wanted: Array, features: int) -> tuple[Array, Array]:
    """How far gradients are from those that they should be, [S], and the derivative by `made`, [S, C, E].

    By class, the sum of 1 - cos over the rows of the weight's gradient, and that of the bias's as one row.

    Args:
        made, wanted: [S, C, E].
        features: D.
    """
    far, slope = _by_row(actual[..., :features], wanted[..., :features])
    if actual.shape[-1] > features:
        bias_far, bias_slope = _by_row(*(some[..., features:].swapaxes(1, 2) for some in (actual, wanted)))
        far, slope = far + bias_far, np.concatenate([slope, bias_slope.swapaxes(1, 2)], axis=2)
    return far, slope


def matched(features: Array, classes: Array, classifier: Array, wanted: Array, epochs: int, lr: float) -> Array:
    """Features [S, n, D] after so many steps of gradient descent on the sum of `distances`.

    A is the derivative by the class's gradient. A feature f is an n-th part of this gradient. With u = A f, the
    derivative by f is (A^T (p - e_c) + W^T (p u - p <p, u>)) / n. f is in the gradient as a factor, and in the
    probabilities p.

    Args:
        classes: [S]; classifier: [C, E].
        wanted: gradients of the classes, [S, C, E].
    """
    wide, inputs = features.shape[-1], _inputs(features, classifier)
    weights, own, goal = classifier.astype(np.float64), _targets(classes, classifier), wanted.astype(np.float64)
    for _ in range(epochs):
        p = _probabilities(inputs, weights)  # [S, n, C]
        errors = p - own
        _, slope = distances(_mean_products(errors, inputs), goal, wide)  # [S, C, E]
        u = np.einsum("sne,sce->snc", inputs, slope)
        through_p = p * (u - (p * u).sum(axis=2, keepdims=True))
        through_own = np.einsum("snc,sce->sne", errors, slope)
        step = through_own + np.einsum("snc,ce->sne", through_p, weights)  # the last column of a bias has no feature
        inputs[..., :wide] -= lr / inputs.shape[1] * step[..., :wide]
    return inputs[..., :wide].astype(features.dtype)


def retrained(features: Array, epochs: int, lr: float, *, bias: bool) -> Array:
    """A classifier [S, E] of S classes alone, trained from zeros on their features [S, n, D] by the cross-entropy.

    Each batch has as many features of each class. The loss is convex: neither start nor order decides where it leads.
    """
    inputs = _inputs(features, np.empty((0, features.shape[-1] + bias)))
    size = max(1, BATCH // len(inputs))
    batches = [inputs[:, at : at + size] for at in range(0, inputs.shape[1], size)]
    classifier, own = np.zeros((len(inputs), inputs.shape[-1])), np.eye(len(inputs))[:, None]
    for _ in range(epochs):
        for batch in batches:
            errors = (_probabilities(batch, classifier) - own).reshape(-1, len(inputs))
            features_of = batch.reshape(-1, batch.shape[-1])
            classifier -= lr / len(errors) * np.einsum("bs,be->se", errors, features_of)
    return classifier


def _inputs(features: Array, classifier: Array) -> Array:
    """Features [S, n, D] as the classifier takes them, float64 [S, n, E]: with a 1 behind them for its bias."""
    inputs = np.ones((*features.shape[:-1], classifier.shape[-1]))
    inputs[..., : features.shape[-1]] = features
    return inputs


def _targets(classes: Array, classifier: Array) -> Array:
    """The unit vectors e_c of the classes, [S, 1, C]."""
    return np.eye(len(classifier))[classes][:, None]


def _probabilities(inputs: Array, classifier: Array) -> Array:
    """[S, n, E] -> [S, n, C]."""
    logits = np.einsum("...e,ce->...c", inputs, classifier)
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=-1, keepdims=True))


def _mean_products(errors: Array, inputs: Array) -> Array:
    """[S, n, C], [S, n, E] -> [S, C, E]."""
    return np.asarray(np.einsum("snc,sne->sce", errors, inputs) / inputs.shape[1])


def _by_row(actual: Array, wanted: Array) -> tuple[Array, Array]:
    """Sum over rows of 1 - cos, [S, R, L] twice -> [S], and its derivative by `made`, [S, R, L].

    The length of a row of zeros counts as constant there: it has no derivative.
    """
    lengths, others = (np.linalg.norm(some, axis=2, keepdims=True) for some in (actual, wanted))  # [S, R, 1]
    product, divisor = (actual * wanted).sum(axis=2, keepdims=True), lengths * others + EPS
    slope = product * others / divisor**2 * actual / np.where(lengths > 0, lengths, 1.0) - wanted / divisor
    return (1 - product / divisor).sum(axis=(1, 2)), slope
