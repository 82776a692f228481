"""What sums of scores tell of sites' test sets, by models that a server chose: a table of `make leakage`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.attacks.score_questions import QUESTIONS, Rule, Server, Told, ask, recipe, without

WITHOUT: dict[str, Sequence[Rule]] = {
    "without rules": [*Rule],
    "a secret half alone": [Rule.CONSTANT],
    "no constant model alone": [Rule.HALF],
    "standard": [],
}
SECRETS = 10  # of the sites, for the mean over what they drew
COLUMNS = ("a model for each class", *WITHOUT)


def rows() -> list[list[str]]:
    """For each question, of how many classes the images of three sites are counted, and by how many they are missed."""
    server = Server.of(recipe())
    return [[name, *(_cell(_asked(server, name, rules)) for rules in WITHOUT.values())] for name in QUESTIONS]


def _asked(server: Server, name: str, rules: Sequence[Rule]) -> list[Told]:
    found = []
    for secret in range(1 if Rule.HALF in rules else SECRETS):
        with TemporaryDirectory() as folder, without(*rules):
            found.append(ask(server, QUESTIONS[name], Path(folder), secret))
    return found


def _cell(found: Sequence[Told]) -> str:
    """Means over secrets."""
    wrong = np.stack([told.wrong for told in found])
    if np.isnan(wrong).all():
        return "nothing told"
    exact = np.mean([told.exact for told in found])
    return f"{exact:.1f} of {wrong.shape[1]} exact; missed by {np.nanmean(wrong):.1f} images"
