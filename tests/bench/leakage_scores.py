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

from protofed.client.training.progress import sgd_length
from protofed.common.config.recipe import Plan
from protofed.common.payload import Part, weights

Counts: TypeAlias = NDArray[np.int64]  # examples by class, [C]
ROUNDS = {"round 1": slice(0, 1), "all rounds": slice(None)}


@dataclass(frozen=True)
class Victim:
    """One site of one run: what the server saw of it, round by round, and what it has."""

    seen: Sequence[Seen]
    counts: Counts
    run: int = 0


@dataclass(frozen=True)
class Found:
    """What an attack came to: area under the ROC curve of presence, correlation with shares.

    Whichever way it points: who has simulated the method knows that. Chance is 0.5 to 0.6 and 0 to 0.2.

    Attributes:
        auc, correlation: over all pairs of a site and a class: how common a class is at all sites together counts, too.
        own_auc, own_correlation: between the sites of a run, class by class: what it tells of one site.
    """

    attack: str
    rounds: str
    auc: float
    correlation: float
    own_auc: float = 0.5
    own_correlation: float = 0.0


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
    shares, present = np.concatenate([c / c.sum() for c in counts]), np.concatenate(counts) > 0
    runs = np.concatenate(
        [np.full(len(v.counts), v.run) for v, s in zip(victims, scores, strict=True) if s is not None]
    )
    classes = np.concatenate([np.arange(len(c)) for c in counts])
    groups = [(runs == run) & (classes == c) for run in np.unique(runs) for c in np.unique(classes)]
    ranked, own = auc(every, present), auc_between(every, present, groups)
    line, own_line = correlation(every, shares), correlation(*(without_means(x, groups) for x in (every, shares)))
    return [Found(name, rounds, max(ranked, 1 - ranked), abs(line), max(own, 1 - own), abs(own_line))]


def of_all(victims: Sequence[Victim]) -> list[Found]:
    """No attack: what is true of all sites of a run together, and what a perfect reading of a sum would tell."""
    shares, contributors = {}, {}
    for run in {victim.run for victim in victims}:
        counts = np.stack([victim.counts for victim in victims if victim.run == run]).astype(np.float64)
        shares[run], contributors[run] = (
            (counts / counts.sum(axis=1, keepdims=True)).mean(axis=0),
            (counts > 0).sum(axis=0),
        )
    found = []
    for name, told in (("mean shares of all sites", shares), ("how many sites have it", contributors)):
        found += _judged(name, "–", [np.asarray(told[victim.run], np.float64) for victim in victims], victims)
    return found


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


def auc_between(scores: Scores, truth: NDArray[np.bool_], groups: Sequence[NDArray[np.bool_]]) -> float:
    """`auc` of the pairs within each group alone; groups that are all true, or all false, have none."""
    known, ahead, pairs = np.nan_to_num(scores, nan=-np.inf), 0.0, 0
    for group in groups:
        few = known[group & truth], known[group & ~truth]
        ahead += sum(float(a > b) + float(a == b) / 2 for a in few[0] for b in few[1])
        pairs += len(few[0]) * len(few[1])
    return ahead / pairs if pairs else 0.5


def without_means(scores: Scores, groups: Sequence[NDArray[np.bool_]]) -> Scores:
    """Each score less the mean of its group; what an attack says nothing of counts as its lowest score."""
    known = np.nan_to_num(scores, nan=float(np.nanmin(scores)))
    for group in groups:
        known[group] -= known[group].mean()
    return known


# How many examples a site has, from how many steps it trained: what parts `steps` and `control` tell besides

MOST = 500  # steps that are tried


def steps_told(seen: Seen, plan: Plan, lr: float) -> int | None:
    """J of one fit; None: nothing that was sent tells it.

    FedNova sends the length of J steps, which grows with J. SCAFFOLD's model has moved by this length, in learning
    rates, times what is sent beside it.
    """
    if Part.STEPS in seen.sent:
        return _steps_of(float(seen.sent[Part.STEPS]["steps"]), plan)
    if Part.CONTROL not in seen.sent:
        return None
    before, after, control = weights(seen.received), weights(seen.sent), seen.sent[Part.CONTROL]
    moved = np.concatenate([(before[path] - after[path]).ravel() for path in sorted(control)]).astype(np.float64)
    by = np.concatenate([control[path].ravel() for path in sorted(control)]).astype(np.float64)
    return _steps_of(float(moved @ by / (by @ by)) / lr, plan)


def _steps_of(length: float, plan: Plan) -> int:
    """The number of steps whose length is nearest."""
    lengths = [abs(sgd_length(steps, plan.momentum) - length) for steps in range(1, MOST)]
    return 1 + int(np.argmin(lengths))


def told_to_a_batch(victims: Sequence[Victim], plan: Plan) -> tuple[int, int] | None:
    """Of how many sites, of all, the number of examples is known to within a batch; None: nothing tells it."""
    told = [(steps_told(victim.seen[0], plan, plan.lr), int(victim.counts.sum())) for victim in victims]
    known = [(round(steps / plan.epochs), examples) for steps, examples in told if steps is not None]
    # An epoch has as many steps as batches, the last one of which may have a single example.
    right = [(batches - 1) * plan.batch_size < n <= batches * plan.batch_size for batches, n in known]
    return (sum(right), len(told)) if known else None
