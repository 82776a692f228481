"""Whether a run's models are of any use: what its scores, losses and norms say against them. Pure functions.

With these thresholds the shipped recipes on digits and HAM10000, which learn, give no warning at any round. A comment
at each threshold gives the reason. A model is judged by its newest scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import Any, TypeAlias

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.scores import Spread, spreads

BALANCED, ACCURACY, MAJORITY, AUROC = "balanced_accuracy", "accuracy", "majority", "auroc"
RECALL = "recall."
OWN = "personal.local."  # prefix of the scores of a site's own model on its own test set
ALL, NONE = 0.95, 0.05  # recalls of a model that gives (nearly) every image one class: of that class, of all others
# Balanced accuracy counts as chance up to 1/P + min(SLACK of what is left to 1, SHARE of 1/P). Guessing among P classes
# of n test images each has a standard deviation of sqrt((P - 1) / n) / P: 0.022 for P = 7 and n = 35. The first bound
# holds where P is small and the second where it is large (of 100 classes, 5 % is five times chance).
SLACK, SHARE = 0.05, 0.25
RANKS = 0.6  # area under the ROC curve of a model that tells classes apart, whatever it calls them; chance is 0.5
RANKS_NOTHING = 0.55  # up to this mean area under the ROC curve a model does not rank findings
GOOD = 0.1  # share of the way from chance to 1 from which a model has learnt something
DROP = 0.05  # of the score below the first scored round: more than models of neighbouring rounds differ by
DROP_ROUNDS = 3  # scored rounds that all have to be worse than the first one
SAME_ROUNDS = 5  # scored rounds without any change; SAME_FROM_START if nothing ever changed
SAME_FROM_START = 3
LOSS_GROWTH, NORM_GROWTH = 3.0, 10.0  # factors over the run's first rounds; healthy runs stay below 1.6 and 3
FIRST_NORMS, MIN_NORMS = 3, 5  # rounds that the norms are compared with, and that there must be
UNUSABLE = 0.5  # share of a round's sites whose updates are not finite or far too large
_Point: TypeAlias = tuple[int, Mapping[str, float]]  # a round and its scores


class WarningCode(StrEnum):
    """What is wrong with a model, the worst first."""

    ONE_CLASS = "one-class"  # it gives every image the same class
    CHANCE = "chance"  # its balanced accuracy, or its area under the ROC curve, is no better than guessing
    DIVERGING = "diverging"  # updates, losses or norms explode, or a good model fell to chance
    WORSE = "worse-than-first"  # than after the first scored round
    UNCHANGED = "unchanged"  # training changes nothing


@dataclass(frozen=True)
class ModelWarning:
    """Something that speaks against a model.

    Attributes:
        round: in which it was seen, the newest that was looked at.
        site: whose own model it is; None: the global one.
        text: one plain sentence.
        numbers: what the sentence is made from, by name.
    """

    code: WarningCode
    round: int
    site: SiteId | None
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON-ready data, the numbers beside the other keys."""
        named = {"code": self.code.value, "round": self.round, "site": self.site, "text": self.text}
        return named | dict(self.numbers)


@dataclass(frozen=True)
class RoundScores:
    """Scores of one round, by site and name; those that nobody asks for may be missing."""

    round: int
    scores: Mapping[SiteId, Mapping[str, float]]
    sums: Mapping[str, Spread] = field(default_factory=dict)  # from secure aggregation: no site sent them alone

    @cached_property
    def means(self) -> Mapping[str, float]:
        """Over sites, by score; computed once, since each later round looks at some earlier ones."""
        return {name: spread.mean for name, spread in spreads(self.scores, self.sums).items()}


@dataclass(frozen=True)
class TrainedRound:
    """One attempt at a round that is over.

    Attributes:
        state: digest of the published state; None: it was abandoned.
        losses, norms: of the updates that count.
        unusable: number of sites whose training or update was not finite, or whose update was far too large.
    """

    round: int
    state: Digest | None
    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    invited: int = 0
    unusable: int = 0


@dataclass(frozen=True)
class RunHistory:
    """What is known of a run's models.

    Attributes:
        rounds: that the recipe asks for.
        ended: then even a young model is judged: it is what remains.
        global_model: whether its method has one.
        scored, trained: in order of rounds; `trained` needs the first and the last ones only.
    """

    classes: int
    rounds: int
    ended: bool
    global_model: bool
    class_names: Sequence[str] = ()
    scored: Sequence[RoundScores] = ()
    trained: Sequence[TrainedRound] = ()

    def is_young(self, round: int, auroc: float) -> bool:
        """Whether a model of this round may still be at chance although all is well.

        Up to a third of the rounds, between 5 and 20. FedAvg and FedNH on skewed sites begin with one class a round.
        Digits: until round 3 of 20; HAM10000: 6 of 20; CIFAR-10 among 100 sites: 5 of 30. Up to 70 % of the rounds,
        between 5 and 50, while the model ranks the classes. FedProc's cross-entropy counts late: HAM10000 is at chance
        until round 13 of 20, with an area under the ROC curve of 0.72 to 0.78.
        """
        share, most = (0.7, 50) if auroc > RANKS else (1 / 3, 20)
        return not self.ended and round < min(most, max(5, math.ceil(share * self.rounds)))


@dataclass(frozen=True)
class _Model:
    """One model's scores by round, under names without prefix; `site` is None for the global one."""

    site: SiteId | None
    points: Sequence[_Point]

    @property
    def name(self) -> str:
        return "the global model" if self.site is None else f"the own model of {self.site}"


def model_warnings(history: RunHistory) -> list[ModelWarning]:
    """All that speaks against the run's models as they are now: the global one first, the worst first."""
    warnings: list[ModelWarning] = []
    for model in _models(history):
        warnings += _of_scores(model, history)
    if not any(one.code is WarningCode.DIVERGING and one.site is None for one in warnings):
        warnings += _of_training(history)
    if not any(one.code is WarningCode.UNCHANGED for one in warnings) and (same := _same_states(history)) is not None:
        warnings.append(same)
    order = list(WarningCode)
    return sorted(warnings, key=lambda one: (one.site is not None, one.site or "", order.index(one.code)))


def _models(history: RunHistory) -> Iterator[_Model]:
    """The global model by its evaluators, or else by the sites' own test sets; and each site's own by its own one.

    On the test set that all share, a site's own model meets classes that its site has not: it may be at chance there.
    """
    means = [(scored.round, scored.means) for scored in history.scored]
    if points := _under("global.", means) or _under("global.local.", means):
        yield _Model(None, points)
    own = [one for one in history.scored if any(_under(OWN, [(0, scores)]) for scores in one.scores.values())]
    for site in sorted({site for scored in own for site in scored.scores}):
        if points := _under(OWN, [(one.round, one.scores.get(site, {})) for one in own]):
            yield _Model(site, points)


def _under(prefix: str, points: Iterable[_Point]) -> list[_Point]:
    """The scores under a prefix, without it, of the rounds that have any; `global.` is not that of `global.local.`."""
    chosen = (
        (number, {name.removeprefix(prefix): value for name, value in scores.items() if name.startswith(prefix)})
        for number, scores in points
    )
    own = ((number, {n: v for n, v in scores.items() if not n.startswith("local.")}) for number, scores in chosen)
    return [(number, scores) for number, scores in own if scores]


def _of_scores(model: _Model, history: RunHistory) -> Iterator[ModelWarning]:
    number, newest = model.points[-1]
    auroc = newest.get(AUROC, 0.0)
    if history.is_young(number, auroc):
        return
    useless = _one_class(model, history) or _at_chance(model, history) or _ranks_nothing(model)
    if model.site is not None:
        # At a site where nearly all images are of one class, a model that ranks well still calls most of them that.
        # A test set of a site's own may have two images of a class: small changes of its scores say nothing.
        if useless is not None and auroc <= RANKS:
            yield useless
        return
    if useless is not None:
        yield useless
        if (fallen := _fallen(model, history)) is not None:
            yield fallen
    for warning in (_worse(model, history), _same_scores(model)):
        if warning is not None:
            yield warning


def _one_class(model: _Model, history: RunHistory) -> ModelWarning | None:
    number, newest = model.points[-1]
    recalls = _recalls(newest)
    if len(recalls) < 2:
        return None
    top = max(recalls, key=lambda c: recalls[c])
    others = max(value for c, value in recalls.items() if c != top)
    if recalls[top] < ALL or others > NONE:
        return None
    name = f"'{history.class_names[top]}'" if top < len(history.class_names) else f"class {top}"
    every = "every image" if recalls[top] == 1 and others == 0 else "nearly every image"
    balanced, chance = sum(recalls.values()) / len(recalls), 1 / len(recalls)
    text = (
        f"In round {number} {model.name} calls {every} {name}: balanced accuracy {_percent(balanced)}, "
        f"chance {_percent(chance)}."
    )
    numbers = {"class": top, "recall": recalls[top], "other_recalls": others, "classes_present": len(recalls)}
    numbers |= {"balanced_accuracy": balanced, "chance": chance}
    return ModelWarning(WarningCode.ONE_CLASS, number, model.site, text, numbers | _others(newest))


def _at_chance(model: _Model, history: RunHistory) -> ModelWarning | None:
    number, newest = model.points[-1]
    if not _is_chance(newest, history):
        return None
    present, chance = _present(newest, history), _chance(newest, history)
    text = (
        f"In round {number} {model.name} is no better than chance: balanced accuracy {_percent(newest[BALANCED])}, "
        f"chance {_percent(chance)} with {present} classes"
    )
    numbers = {"balanced_accuracy": newest[BALANCED], "chance": chance, "classes_present": present}
    if AUROC in newest:
        text += f"; area under the ROC curve {newest[AUROC]:.2f}, chance 0.50"
    return ModelWarning(WarningCode.CHANCE, number, model.site, f"{text}.", numbers | _others(newest))


def _ranks_nothing(model: _Model) -> ModelWarning | None:
    """A model of findings ranks images no better than chance."""
    number, newest = model.points[-1]
    if BALANCED in newest or ACCURACY in newest or not newest.get(AUROC, 1.0) <= RANKS_NOTHING:
        return None
    text = (
        f"In round {number} {model.name} is no better than chance: mean area under the ROC curve {newest[AUROC]:.2f}, "
        "chance 0.50."
    )
    return ModelWarning(WarningCode.CHANCE, number, model.site, text, {"auroc": newest[AUROC], "chance": 0.5})


def _fallen(model: _Model, history: RunHistory) -> ModelWarning | None:
    """A model at chance that was good before."""
    number, newest = model.points[-1]
    known = [(scores[BALANCED], earlier) for earlier, scores in model.points[:-1] if BALANCED in scores]
    best, best_round = max(known, default=(0.0, 0))
    chance = _chance(newest, history)
    if best < chance + GOOD * (1 - chance) or BALANCED not in newest:
        return None
    text = (
        f"Training diverges: the balanced accuracy of {model.name} fell from {_percent(best)} in round {best_round} to "
        f"{_percent(newest[BALANCED])} in round {number}, which is chance."
    )
    numbers = {"balanced_accuracy": newest[BALANCED], "best": best, "best_round": best_round, "chance": chance}
    return ModelWarning(WarningCode.DIVERGING, number, model.site, text, numbers)


def _worse(model: _Model, history: RunHistory) -> ModelWarning | None:
    """The newest scored rounds are all worse than the first one; of a run that ended, those that there are."""
    name = next((name for name in (BALANCED, ACCURACY, AUROC) if name in model.points[-1][1]), ACCURACY)
    known = [(number, scores[name]) for number, scores in model.points if name in scores]
    later = known[1:][-DROP_ROUNDS:]
    if not later or (len(later) < DROP_ROUNDS and not history.ended):
        return None
    (first_round, first), (number, value) = known[0], later[-1]
    if max(score for _, score in later) > first - DROP:
        return None
    words = "area under the ROC curve" if name == AUROC else name.replace("_", " ")
    text = (
        f"{_capital(model.name)} is worse than after its first scored round: {words} {_percent(value)} in round "
        f"{number}, {_percent(first)} in round {first_round}."
    )
    numbers = {name: value, "first": first, "first_round": first_round}
    return ModelWarning(WarningCode.WORSE, number, model.site, text, numbers)


def _same_scores(model: _Model) -> ModelWarning | None:
    """All scores are equal, bit for bit, over several scored rounds; a model without a fault has nothing to change."""
    needed = min(SAME_ROUNDS, max(SAME_FROM_START, len(model.points)))
    last = model.points[-needed:]
    number, newest = last[-1]
    if len(last) < needed or newest.get(ACCURACY) == 1 or any(scores != newest for _, scores in last):
        return None
    text = (
        f"All scores of {model.name} are the same in the last {len(last)} scored rounds, {last[0][0]} to {number}: "
        "the model no longer learns, or training has no effect."
    )
    numbers = {"since_round": last[0][0], "scored_rounds": len(last)}
    return ModelWarning(WarningCode.UNCHANGED, number, model.site, text, numbers)


def _same_states(history: RunHistory) -> ModelWarning | None:
    """The published state is the same in several rounds; methods without a global model may publish one for ever."""
    last = [one for one in history.trained if one.state is not None][-SAME_FROM_START:]
    if not history.global_model or len(last) < SAME_FROM_START or len({one.state for one in last}) > 1:
        return None
    text = f"Training changes nothing: rounds {last[0].round} to {last[-1].round} published the same model."
    numbers = {"since_round": last[0].round}
    return ModelWarning(WarningCode.UNCHANGED, last[-1].round, None, text, numbers)


def _of_training(history: RunHistory) -> Iterator[ModelWarning]:
    """Signs of divergence that need no score; at most one, so that a round is not told of thrice."""
    for find in (_unusable, _losses_grow, _norms_grow):
        if (warning := find(history)) is not None:
            yield warning
            return


def _unusable(history: RunHistory) -> ModelWarning | None:
    """Half of the newest round's sites gave nothing finite of a sane size, or it was abandoned and one of them did."""
    if not history.trained or not (last := history.trained[-1]).unusable:
        return None
    if last.state is not None and last.unusable < UNUSABLE * last.invited:
        return None
    text = (
        f"Training seems to diverge. In round {last.round}, {last.unusable} of {last.invited} sites had a loss or an "
        "update that was not finite or far too large. plan.lr may be too high."
    )
    numbers = {"unusable": last.unusable, "invited": last.invited}
    return ModelWarning(WarningCode.DIVERGING, last.round, None, text, numbers)


def _losses_grow(history: RunHistory) -> ModelWarning | None:
    losses = [(one.round, median(one.losses)) for one in history.trained if one.losses]
    if len(losses) < 3:
        return None
    first, number = losses[0][1], losses[-1][0]
    newest = min(loss for _, loss in losses[-2:])
    if not newest > max(
        LOSS_GROWTH * first, 2 * math.log(max(2, history.classes))
    ):  # twice a uniform guess's loss, or more
        return None
    text = (
        f"Training seems to diverge: the sites' median loss is {newest:.3g} in round {number}, it began with "
        f"{first:.3g}."
    )
    numbers = {"loss": newest, "first": first, "first_round": losses[0][0]}
    return ModelWarning(WarningCode.DIVERGING, number, None, text, numbers)


def _norms_grow(history: RunHistory) -> ModelWarning | None:
    norms = [(one.round, median(one.norms)) for one in history.trained if one.norms]
    if len(norms) < MIN_NORMS:
        return None
    first, number = max(norm for _, norm in norms[:FIRST_NORMS]), norms[-1][0]
    newest = min(norm for _, norm in norms[-2:])
    if not 0 < NORM_GROWTH * first < newest:
        return None
    text = (
        f"Training seems to diverge: the median norm of the updates is {newest:.3g} in round {number}, it began with "
        f"{first:.3g}."
    )
    numbers = {"norm": newest, "first": first}
    return ModelWarning(WarningCode.DIVERGING, number, None, text, numbers)


def _others(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores that the balanced accuracy is read beside, as far as there are any."""
    return {name: scores[name] for name in (ACCURACY, MAJORITY, AUROC) if name in scores}


def _recalls(scores: Mapping[str, float]) -> dict[int, float]:
    """By class; only classes that the test set has."""
    named = {name.removeprefix(RECALL): value for name, value in scores.items() if name.startswith(RECALL)}
    return {int(name): value for name, value in named.items() if name.isdecimal()}


def _present(scores: Mapping[str, float], history: RunHistory) -> int:
    """Number of classes in the test set; where no recalls are reported, of the run, which makes chance no larger."""
    return len(_recalls(scores)) or history.classes


def _chance(scores: Mapping[str, float], history: RunHistory) -> float:
    return 1 / _present(scores, history)


def _is_chance(scores: Mapping[str, float], history: RunHistory) -> bool:
    """A test set of one class says nothing: guessing is always right."""
    chance = _chance(scores, history)
    return BALANCED in scores and chance < 1 and scores[BALANCED] <= chance + min(SLACK * (1 - chance), SHARE * chance)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
