"""What each of a site's own scores means, in a sentence for whoever looks after the site."""

from __future__ import annotations

from collections.abc import Iterable

from protofed.client.state.own_scores import OwnRoundScores
from protofed.common.protocol.messages import score_family

_MODELS = {
    "personal.local": "this site's own model on this site's own test images",
    "global.local": "the common model on this site's own test images",
    "personal": "this site's own model on the test set of its settings",
}
_MEASURES = {
    "accuracy": "share of right answers",
    "balanced_accuracy": "mean of the classes' recalls, so that a rare class counts as much as a common one",
    "recall": "of each class, the share that is found",
    "pm_v": "PM(V): share of right answers among the classes that this site trains on, which count alike",
    "pm_l": "PM(L): share of right answers, each class weighted by its frequency at this site",
    "auroc": "area under the ROC curve; 0.5 is chance",
    "ece": "calibration error: how far its stated certainty is from its share of right answers; lower is better",
    "many": "share of right answers on the most frequent fifth of the classes",
    "medium": "share of right answers on the classes of medium frequency",
    "few": "share of right answers on the rarest half of the classes",
    "groups": "mean of many, medium and few",
}


def meaning(name: str) -> str:
    """What a score is, of which model and on which images."""
    family = score_family(name)
    if family == "loss":
        return "mean loss over the training images in the last fit; lower is better"
    prefix, _, measure = family.rpartition(".")
    if prefix not in _MODELS or measure not in _MEASURES:
        return "a number that the method's own code reports of its training"
    return f"{_MODELS[prefix]}: {_MEASURES[measure]}"


def names_of(rounds: Iterable[OwnRoundScores]) -> list[str]:
    """The scores that some of these rounds have, without those of single classes."""
    return sorted({name for scored in rounds for name in scored.scores if score_family(name) == name})
