"""Who reads a site's update alone, in sentences."""

from __future__ import annotations

import pytest

from protofed.common.protocol.consortium import Consortium, Partner
from protofed.deploy.site.partners import who_reads

LISTED = Consortium(2, "The Hub", tuple(Partner(site, site.title(), site) for site in ("ann", "bob", "cleo", "dan")))


@pytest.mark.parametrize(
    ("required", "said", "unsaid"),
    [
        (True, "so this site is in no secure aggregation. With a confirmed list", "invent"),
        (False, "can invent the other sites of the group", "no secure aggregation"),
        (None, 'until one is. With "first-use": whoever runs', "With a confirmed"),
    ],
)
def test_without_a_list_it_depends_on_the_policy(required: bool | None, said: str, unsaid: str) -> None:
    text = who_reads("ann", (), None, 3, required=required)
    assert said in text
    assert unsaid not in text


def test_partners_are_counted_before_the_first_sum_and_then_named() -> None:
    assert "with 2 or more partners of list 2" in who_reads("ann", (), LISTED, 3, required=True)
    assert "partners of list" not in who_reads("ann", (), LISTED, None, required=True)
    grouped = who_reads("ann", ("ann", "bob", "cleo"), LISTED, 3, required=True)
    assert grouped == "The server can read this site's own update only together with Bob (bob), Cleo (cleo)."
    of_bob = Consortium(2, "BOB", LISTED.partners)
    text = who_reads("ann", ("ann", "bob", "cleo"), of_bob, 3, required=True)
    assert text.startswith("BOB runs the server and is in this site's group as bob.")
    assert text.endswith("only together with Cleo (cleo).")


def test_of_many_partners_fewer_than_all_are_enough() -> None:
    names = [f"s{number:02}" for number in range(10)]
    ten = Consortium(1, "The Hub", tuple(Partner(name, name.title(), name) for name in names))
    assert "only together with 5 of S01 (s01)," in who_reads("s00", names[:7], ten, 3, required=True)
    three = who_reads("s00", names[:3], ten, 3, required=True)
    assert three.endswith("(s02), or with 4 partners outside the group, if it lies about who is missing.")
    for own, said in ((1, "or with 3 partners outside the group"), (4, "or alone, by its sites s06, s07, s08, s09")):
        partners = tuple(Partner(name, "Hub" if int(name[1:]) >= 10 - own else name, name) for name in names)
        assert said in who_reads("s00", names[:3], Consortium(1, "Hub", partners), 3, required=True)
