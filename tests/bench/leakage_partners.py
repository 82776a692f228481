"""What a sum tells with invented or colluding partners in a site's group: a table of `make leakage`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.attacks.sums import Counted
from tests.support.partners import confirm, identity_of, listed

from protofed.client.secure_aggregation.partners import Partners
from protofed.common.errors import SecureAggregationError
from protofed.common.secure_aggregation.keys import KeyAdvert

SITES = 6
COLUMNS = ("the others of a group of three", "exact label counts of a site, from one sum")


def rows() -> list[list[str]]:
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
