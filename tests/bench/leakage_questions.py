"""What sums of scores tell of sites' test sets, by models that a server chose; what sums tell with invented or
colluding partners in a site's group: two tables of `make leakage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.attacks.score_questions import QUESTIONS, Rule, Server, Told, ask, recipe, without
from tests.attacks.sums import Counted
from tests.support.partners import confirm, identity_of, listed

from protofed.client.secure_aggregation.partners import Partners
from protofed.common.errors import SecureAggregationError
from protofed.common.secure_aggregation.keys import KeyAdvert

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


SITES = 6
PARTNER_COLUMNS = ("the others of a group of three", "exact label counts of a site, from one sum")


def partner_rows() -> list[list[str]]:
    """By who is in the group: of how many sites the counts are exact. The sites have no other rules."""
    counted = Counted.of(SITES, rounds=1)
    told = {number: f"{counted.less(number).recovered} of {SITES} sites" for number in range(3)}
    return [
        ["three confirmed partners", told[0]],
        ["one of them helps the server", told[1]],
        ["both of them help the server", told[2]],
        ["two invented sites, first use", told[2]],
        ["two invented sites, a list is confirmed", _refusal()],
    ]


def _refusal() -> str:
    """Why a site that has confirmed its partners takes part in no sum with two others."""
    with TemporaryDirectory() as place:
        folders = {site: Path(place) / site for site in ("north", "south", "west")}
        confirm_at = folders["north"]
        known = listed(folders)
        confirm(confirm_at, known)
        invented = [KeyAdvert(site, bytes(32), b"", b"", (), (), b"") for site in ("aaa", "zzz")]
        try:
            Partners(confirm_at).trust(("north", identity_of(confirm_at)), invented, required=True)
        except SecureAggregationError as error:
            return f"no sum: the site refuses it ({error.code})"
    return "they are summed"
