"""What an honest but curious server can work out about a site's classes from one update: simple scores, in NumPy.

Every attack gives one score a class, [C]: the higher, the more of the class the attacker believes the site to have.
`BY_CLASS` looks at what is sent by class, `MODEL` at the weights; `WITH_DATA` needs labelled examples of every class
beside, as an evaluator has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from scipy.optimize import nnls
from tests.bench.attack_views import (
    Scores,
    Seen,
    class_means,
    cosines,
    head,
    mean_of,
    nanmean,
    probabilities,
    rows,
    rows_of,
    tightness,
)

from protofed.common.payload import Part, Payload

Attack: TypeAlias = Callable[[Seen], Scores | None]  # None: this method sends nothing that it could use


# What was sent, and nothing else


def presence(seen: Seen) -> Scores | None:
    """Which prototypes or gradients were sent, or what part class-presence says."""
    if Part.CLASS_PRESENCE in seen.sent:
        return np.asarray(seen.sent[Part.CLASS_PRESENCE]["present"], np.float64)
    for part in (Part.PROTOTYPES, Part.CLASS_GRADIENTS):
        if part in seen.sent:
            return np.array([float(str(c) in seen.sent[part]) for c in range(seen.classes)])
    return None


def shares(seen: Seen) -> Scores | None:
    """The estimate that cwFedAVG sends by design."""
    return np.asarray(seen.sent[Part.CLASS_SHARES]["shares"], np.float64) if Part.CLASS_SHARES in seen.sent else None


def head_norms(seen: Seen) -> Scores | None:
    """Norms of the head's rows (Lee and Choi, arXiv 2406.07800v1): what cwFedAVG reads, from any head."""
    weight = head(seen.sent)
    return None if weight is None else np.asarray(np.linalg.norm(weight, axis=1))


def head_gradient(seen: Seen) -> Scores | None:
    """How far the head's bias went up: its gradient is predicted less true frequency (Wainakh et al., PoPETs 2022)."""
    sent, received = seen.sent.get(Part.HEAD, {}), seen.received.get(Part.HEAD, {})
    return np.asarray(sent["bias"] - received["bias"], np.float64) if "bias" in sent else None


def head_movement(seen: Seen) -> Scores | None:
    """How far the head's row moved: by a loss adjusted by class frequencies, an absent class's hardly does."""
    sent, received = head(seen.sent), head(seen.received)
    return None if sent is None or received is None else np.asarray(np.linalg.norm(sent - received, axis=1))


def control_gradient(seen: Seen) -> Scores | None:
    """How far the control variate of the head's bias went down: over all rounds that is -c_i, predicted less true."""
    if (control := seen.sent.get(Part.CONTROL)) is None or "head.bias" not in control:
        return None
    return np.asarray(seen.received[Part.CONTROL]["head.bias"] - control["head.bias"], np.float64)


def feature_gradient(seen: Seen) -> Scores | None:
    """How the biases of the features moved, told by classes through the head that the server knows.

    The gradient of the last layer's biases [D] is the head's transpose times the sum of predicted less true, so far as
    units are active: least squares give it by class. It needs no head that leaves, only one that came.
    """
    weight, body = head(seen.received), seen.sent.get(Part.BODY, {})
    if weight is None:  # FedNH's head is its prototypes
        weight = rows(seen.received, seen.classes)
    if weight is None or np.isnan(weight).any():
        return None
    biases = [name for name, array in body.items() if name.endswith("bias") and array.shape == weight.shape[1:]]
    if not biases:
        return None
    last = max(biases)
    moved = np.asarray(body[last] - seen.received[Part.BODY][last], np.float64)
    return np.asarray(np.linalg.lstsq(weight.T.astype(np.float64), moved, rcond=None)[0])


def head_mixture(seen: Seen) -> Scores | None:
    """Of which received class heads the sent one is made: up to 0.2.0 a site began with its mixture of them."""
    if Part.CLASS_MODELS not in seen.received or Part.HEAD not in seen.sent:
        return None
    heads = [seen.received[Part.CLASS_MODELS][name].reshape(seen.classes, -1) for name in sorted(seen.sent[Part.HEAD])]
    sent = [seen.sent[Part.HEAD][name].ravel() for name in sorted(seen.sent[Part.HEAD])]
    ones = np.full(seen.classes, 1e3)  # shares sum to 1
    mixture, _ = nnls(np.vstack([np.hstack(heads).T, ones]).astype(np.float64), np.append(np.concatenate(sent), 1e3))
    return np.asarray(mixture)


def gradient_mixture(seen: Seen) -> Scores | None:
    """Of which shares of the classes' gradients the head's movement is made: of a first step it is the true ones."""
    gradients, received = seen.sent.get(Part.CLASS_GRADIENTS, {}), seen.received.get(Part.HEAD, {})
    if not gradients or Part.HEAD not in seen.sent:
        return None
    names = [name for name in ("weight", "bias") if name in seen.sent[Part.HEAD]]
    moved = np.column_stack([received[name] - seen.sent[Part.HEAD][name] for name in names]).astype(np.float64)
    mixture, _ = nnls(np.stack([row.ravel() for row in gradients.values()], axis=1).astype(np.float64), moved.ravel())
    found = np.zeros(seen.classes)
    found[[int(c) for c in gradients]] = mixture / max(mixture.sum(), 1e-12)
    return found


def noise_prior(seen: Seen) -> Scores | None:
    """How much more often the sent model takes noise for the class than the received one does."""
    after = probabilities(seen, seen.noise_after, seen.sent)
    before = probabilities(seen, seen.noise_before, seen.received)
    return None if after is None or before is None else np.log(after.mean(axis=0)) - np.log(before.mean(axis=0))


def row_agreement(seen: Seen) -> Scores | None:
    """How well the row agrees with other sites' rows of the class."""
    return cosines(rows(seen.sent, seen.classes), mean_of([rows_of(theirs, seen.classes) for theirs in seen.others]))


def mean_features(sent: Payload) -> dict[int, Scores]:
    """By class, [D]: the row of its own in its gradient, divided by the bias's, of a head that has one.

    The row is the mean of (p_c - 1) f over the class's images, the bias's that of p_c - 1: a mean of features in which
    an image weighs the more, the less the classifier takes it for what it is.
    """
    rows = {int(c): np.asarray(row[int(c)], np.float64) for c, row in sent.get(Part.CLASS_GRADIENTS, {}).items()}
    return {c: row[:-1] / row[-1] for c, row in rows.items() if row[-1]}


# With examples of every class


def public_rows(seen: Seen) -> Scores | None:
    """How well the row agrees with what the sent body makes of the class."""
    sent = rows(seen.sent, seen.classes)
    return None if sent is None else cosines(sent, class_means(seen.after, seen.truth))


def public_recall(seen: Seen) -> Scores | None:
    """How much better the sent model knows the class than the received one."""
    after, before = probabilities(seen, seen.after, seen.sent), probabilities(seen, seen.before, seen.received)
    if after is None or before is None:
        return None
    gain = after - before
    return np.array([gain[has, c].mean() for c, has in enumerate(seen.truth.T)])


def public_prior(seen: Seen) -> Scores | None:
    """How often the sent model says the class, of as many examples of each class: it has learnt its site's."""
    after = probabilities(seen, seen.after, seen.sent)
    return None if after is None else after.mean(axis=0)


def public_spread(seen: Seen) -> Scores | None:
    """How much closer together training brought the class's features: needs the body alone."""
    after, before = (tightness(f, seen.truth) for f in (seen.after, seen.before))
    return np.asarray(before - after)


BY_CLASS: Mapping[str, Attack] = {"what is sent": presence, "shares sent": shares, "row agreement": row_agreement}
MODEL: Mapping[str, Attack] = {
    "head norms": head_norms,
    "head gradient": head_gradient,
    "head movement": head_movement,
    "control gradient": control_gradient,
    "feature gradient": feature_gradient,
    "head mixture": head_mixture,
    "gradient mixture": gradient_mixture,
    "noise prior": noise_prior,
}
WITH_DATA: Mapping[str, Attack] = {
    "public rows": public_rows,
    "public recall": public_recall,
    "public prior": public_prior,
    "public spread": public_spread,
}


def mean_over_rounds(scores: Sequence[Scores]) -> Scores | None:
    """Of one attack, [C]; a class counts in the rounds that say something of it."""
    return nanmean(np.stack(scores), axis=0) if scores else None
