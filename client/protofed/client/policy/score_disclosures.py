"""What a server can compute from each score that leaves a site: for whoever decides about the policy's `metrics`."""

from __future__ import annotations

from collections.abc import Collection

from protofed.common.protocol.messages import Role, score_family

GLOBAL, PERSONAL, LOSS, TRAINING, LOCAL = "global.", "personal.", "loss", "train.", ".local."


def is_own(name: str) -> bool:
    """Whether a score is of the site's own data or its own model: all but an evaluator's of the global model."""
    return not name.startswith(GLOBAL) or LOCAL in name


def tells_of_classes(name: str) -> bool:
    """Whether a score tells which classes the site has, or may (a plug-in's): `hide_class_presence` excludes it."""
    return is_own(name) and name != LOSS


def answers_about_classes(name: str) -> bool:
    """Whether a score of a model that a server chose tells of the site's classes what a sum over three does not hide.

    It is no mean over images, or over other images at each site: what it adds up to depends on who has what. A loss is
    a mean of numbers that a server likes, one for each class of the training images.
    """
    return name in ("personal.pm_v", LOSS) or (LOCAL in name and name.rpartition(".")[2] != "accuracy")


def on_own_images(roles: Collection[Role], names: Collection[str]) -> list[str]:
    """The evaluator's scores among `names` if the site trains, too: most often on a part held out of its images."""
    return sorted(name for name in names if not is_own(name)) if set(roles) >= {*Role} else []


def discloses(name: str) -> str:
    """What a server can compute from a score, with the site's updates and the shared test set: one sentence."""
    family = score_family(name)
    if family in _BY_NAME:
        return _BY_NAME[family]
    if family.startswith(TRAINING):
        return _TRAINING
    if LOCAL in family:
        return _BY_LOCAL_SCORE.get(family.rpartition(".")[2], _LOCAL)
    return _PERSONAL if is_own(family) else _GLOBAL


_BY_NAME = {
    "loss": "The mean over the site's own training examples: with models that a server chooses for it, how many "
    "examples of each class the site has.",
    "personal.pm_l": "It weighs each class by its frequency at the site: over some rounds, exactly how many examples "
    "of each class the site has.",
    "personal.pm_v": "The mean over the classes that the site has: which classes these are.",
}
_BY_LOCAL_SCORE = {
    "accuracy": "k right answers of m: how many examples the site's own test set has; over some rounds, how many of "
    "each class.",
    "recall": "One fraction k/m a class: which classes the site's own test set has, and how many examples of each.",
}
_TRAINING = "A number of a plug-in's own, computed on the site's training examples: its author knows what it tells."
_LOCAL = "Taken over the site's own test set: which classes it has; over some rounds, how many examples of each."
_PERSONAL = "How well the site's own model knows each class: which classes the site has, and which are common there."
_GLOBAL = (
    "How many examples of each class the evaluator's test set has, which all may know; nothing of what a site trains "
    "on, unless that test set was held out of it."
)
