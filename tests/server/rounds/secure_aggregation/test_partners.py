"""The list of partners that a server offers: what is proposed, and who may be summed under it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from protofed.common.errors import ConfigError, ConflictError
from protofed.common.protocol.consortium import Consortium, Member, Partner, changes, checked, read
from protofed.common.protocol.messages import PauseReason, Role
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.secure_aggregation.partners import MAX_AHEAD, PartnerList
from protofed.server.storage.ledger import Ledger

SITES = ("ann", "bob", "cleo")
KEYS = {site: digit * 64 for site, digit in zip((*SITES, "dan"), "abcd", strict=True)}


class Server:
    """A ledger, who is present, and the list."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.presence = SitePresence(self.ledger, lambda: 0.0)
        self.partners = PartnerList(self.ledger, self.presence)

    def enroll(self, site: str, confirmed: Consortium | None = None, **changes: object) -> None:
        digest, number = ("", 0) if confirmed is None else (confirmed.digest, confirmed.number)
        known: dict[str, object] = {"institution": site.title(), "identity": KEYS[site], "number": number}
        member = Member(**{"consortium": digest, **known, **changes})  # type: ignore[arg-type]
        self.presence.enroll(site, {Role.TRAINER}, "daemon", PauseReason.NONE, member)


@pytest.fixture
def server() -> Server:
    made = Server()
    for site in SITES:
        made.enroll(site)
    return made


def test_a_list_has_what_the_daemons_say_and_counts_from_the_offer_on(server: Server) -> None:
    assert all(server.partners.admits(site) for site in SITES)  # nothing is offered, and nothing confirmed
    proposed = server.partners.proposed(SITES, "The Hub")
    assert proposed.partners == tuple(Partner(site, site.title(), KEYS[site]) for site in SITES)
    server.partners.offer(server.partners.checked(proposed.document))
    assert not any(server.partners.admits(site) for site in SITES)
    server.enroll("ann", proposed)
    assert server.partners.confirmations() == (["ann"], ["bob", "cleo"])
    assert PartnerList(server.ledger, server.presence).offered == proposed  # after a restart
    with pytest.raises(ConflictError, match="not newer than list 1"):
        server.partners.checked(proposed.document)


def test_a_site_that_is_away_keeps_its_key_and_one_without_a_key_is_named(server: Server) -> None:
    with pytest.raises(ConfigError, match="--coordinator"):
        server.partners.proposed(SITES)
    server.partners.offer(server.partners.proposed(SITES, "The Hub"))
    server.presence.forget("cleo")
    again = server.partners.proposed(SITES)
    assert (again.number, again.coordinator, again.identities) == (2, "The Hub", {site: KEYS[site] for site in SITES})
    with pytest.raises(ConfigError, match="no key for secure aggregation is known of dan: start the daemon"):
        server.partners.proposed([*SITES, "dan"])
    with pytest.raises(ConfigError, match="3 to 1000 partners; this list has 2"):
        server.partners.proposed(SITES[:2])


@pytest.mark.parametrize(("number", "expected"), [(7, 8), (MAX_AHEAD, MAX_AHEAD + 1), (MAX_AHEAD + 1, 1)])
def test_a_ledger_that_lost_lists_goes_on_behind_those_that_sites_have(
    server: Server, number: int, expected: int
) -> None:
    """And one site that lies cannot use up the numbers."""
    server.enroll("bob", number=number, consortium="e" * 64)
    assert server.partners.proposed(SITES, "The Hub").number == expected


SOUND: Mapping[str, object] = {"number": 1, "coordinator": "The Hub"}
PARTNERS = tuple(Partner(site, site.title(), KEYS[site]) for site in SITES)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"number": 0}, "numbered from 1"),
        ({"partners": PARTNERS[::-1]}, "sorted by site"),
        ({"partners": (*PARTNERS, PARTNERS[-1])}, "each site once"),
        ({"partners": PARTNERS[:2]}, "3 to 1000 partners"),
        ({"partners": (*PARTNERS, Partner("dan", "Dan", KEYS["ann"]))}, "the same identity"),
        ({"partners": (*PARTNERS, Partner("dan", "Dan", "key"))}, "an identity is an Ed25519 key"),
        ({"partners": (Partner("Ann", "Ann", KEYS["dan"]), *PARTNERS)}, "is no id"),
        ({"partners": (*PARTNERS, Partner("dan", "Dan\u202e", KEYS["dan"]))}, "printable characters"),
        ({"coordinator": ""}, "printable characters"),
    ],
)
def test_a_list_that_a_person_could_misread_is_none(changed: Mapping[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked(Consortium(**{**SOUND, "partners": PARTNERS, **changed}))  # type: ignore[arg-type]


def test_two_lists_have_two_codes_and_what_changed_is_said() -> None:
    before = Consortium(1, "The Hub", PARTNERS)
    renewed = (PARTNERS[0], Partner("bob", "Bobby", "e" * 64), Partner("dan", "Dan", KEYS["dan"]))
    after = Consortium(2, "Dan", renewed)
    assert read(before.document) == before
    assert before.code != after.code
    assert (before.coordinating, after.coordinating) == ((), (renewed[-1],))
    assert changes(before, after) == [
        "Dan (dan) is new.",
        "Cleo (cleo) is no longer a partner.",
        "Bobby (bob) has another identity for secure aggregation: ask that hospital why.",
        "bob is called Bobby; the list before said Bob.",
        "Dan runs the server; the list before said The Hub.",
    ]
