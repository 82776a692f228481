"""How good an attack is, over all pairs of a site and a class: ranks against presence, numbers against shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from tests.bench.attack_views import Scores, Seen
from tests.bench.attacks import Attack, mean_over_rounds

Counts: TypeAlias = NDArray[np.int64]  # examples by class, [C]
ROUNDS = {"round 1": slice(0, 1), "all rounds": slice(None)}


@dataclass(frozen=True)
class Victim:
    """One site: what the server saw of it, round by round, and what it has."""

    seen: Sequence[Seen]
    counts: Counts


@dataclass(frozen=True)
class Found:
    """What an attack came to: area under the ROC curve of presence, correlation with shares.

    Whichever way it points: who has simulated the method knows that. Chance is 0.5 to 0.6 and 0 to 0.2.
    """

    attack: str
    rounds: str
    auc: float
    correlation: float


def tried(attacks: Mapping[str, Attack], victims: Sequence[Victim]) -> list[Found]:
    """Every attack that a method gives something to work on, on the first round and on the mean over all of them."""
    found = []
    for name, attack in attacks.items():
        for rounds, which in ROUNDS.items():
            scores = [
                mean_over_rounds([s for seen in victim.seen[which] if (s := attack(seen)) is not None])
                for victim in victims
            ]
            found += _judged(name, rounds, scores, victims)
    return found


def _judged(name: str, rounds: str, scores: Sequence[Scores | None], victims: Sequence[Victim]) -> list[Found]:
    known = [(score, victim.counts) for score, victim in zip(scores, victims, strict=True) if score is not None]
    if not known:
        return []
    every = np.concatenate([score for score, _ in known])
    counts = [count for _, count in known]
    ranked = auc(every, np.concatenate(counts) > 0)
    line = correlation(every, np.concatenate([c / c.sum() for c in counts]))
    return [Found(name, rounds, max(ranked, 1 - ranked), abs(line))]


def strongest(found: Iterable[Found], by: str) -> Found | None:
    """Of several attacks, the one that an attacker would wish to have chosen."""
    return max(found, key=lambda one: float(getattr(one, by)), default=None)


def auc(scores: Scores, truth: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a pair with the class scores higher than one without; 0.5 is guessing.

    What an attack says nothing of (NaN) scores lowest.

    Raises:
        ValueError: all pairs have the class, or none.
    """
    positive, negative = int(truth.sum()), int((~truth).sum())
    if not positive or not negative:
        raise ValueError("expected pairs with and without the class")
    ranks = rankdata(np.nan_to_num(scores, nan=-np.inf))
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))


def correlation(scores: Scores, truth: Scores) -> float:
    """Pearson's; what an attack says nothing of counts as its lowest score, and constant scores say nothing: 0."""
    known = np.nan_to_num(scores, nan=float(np.nanmin(scores)))
    return 0.0 if np.ptp(known) < 1e-12 else float(np.corrcoef(known, truth)[0, 1])
