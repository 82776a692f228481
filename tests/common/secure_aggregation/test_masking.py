"""The sum is the survivors', whoever drops and whenever; and nobody learns more than it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from Crypto.Protocol.SecretSharing import Shamir
from scipy.stats import chisquare
from tests.common.secure_aggregation.parties import CONTEXT, Party, Sum, identity_of, numbers_of

from protofed.common.codec import digest
from protofed.common.errors import SecureAggregationError
from protofed.common.payload import Array, SiteId
from protofed.common.protocol.messages import SumOf
from protofed.common.secure_aggregation import keys, masking
from protofed.common.secure_aggregation.groups import Groups, alone
from protofed.common.secure_aggregation.keys import KeyAdvert, Roster, SiteSecrets, Vector, threshold
from protofed.common.secure_aggregation.masking import Masks, Opened, Revealed


def added(numbers: dict[SiteId, Array], alive: list[SiteId]) -> Array:
    return np.asarray(np.sum([numbers[site] for site in alive], axis=0, dtype=np.uint64))


def agreed(count: int) -> tuple[Sum, list[SiteId], dict[SiteId, Revealed], Opened]:
    """A sum of so many sites, all of them, what they reveal, and what that opens."""
    here = Sum.of(count)
    alive = list(here.included)
    told = here.reveal(alive)
    return here, alive, told, masking.opened(here.masks(), alive, told)


def refused(code: str) -> pytest.RaisesExc[SecureAggregationError]:
    return pytest.RaisesExc(SecureAggregationError, check=lambda error: error.code == code)


@pytest.mark.parametrize("count", [3, 4, 10, 20])
def test_the_sum_of_all_sites(count: int) -> None:
    here = Sum.of(count)
    numbers = numbers_of(here.included)
    assert np.array_equal(here.total(numbers, list(here.included)), added(numbers, list(here.included)))


def test_sites_that_drop_after_their_keys_their_shares_and_their_vectors() -> None:
    """Of ten: one deals no shares, one sends no vector, one does not reveal; seven are needed."""
    here = Sum.of(10, silent_after_keys=["site-04"])
    numbers = numbers_of(here.included)
    alive = [site for site in here.included if site != "site-07"]
    total = here.total(numbers, alive, by=[site for site in alive if site != "site-09"])
    assert np.array_equal(total, added(numbers, alive))


def test_any_threshold_of_sites_opens_the_sum_and_one_fewer_does_not() -> None:
    """More than two thirds."""
    assert [threshold(sites) for sites in (3, 4, 5, 6, 10, 50)] == [3, 3, 4, 5, 7, 34]
    here = Sum.of(5)
    numbers, all_sites = numbers_of(here.included), list(here.included)
    assert np.array_equal(here.total(numbers, all_sites, by=all_sites[1:]), added(numbers, all_sites))
    with refused("too-few-shares"):
        here.total(numbers, all_sites, by=all_sites[2:])


def test_a_daemon_that_was_killed_sends_the_same_bytes_again() -> None:
    here = Sum.of(4)
    numbers = numbers_of(here.included)
    again = Party("site-02")
    assert again.advert() == here.parties["site-02"].advert()
    sent = masking.masked(here.masks(), again.secrets, numbers["site-02"])
    assert np.array_equal(sent, here.masked(numbers)["site-02"])


def test_a_false_share_does_no_harm_where_enough_others_are_sound() -> None:
    here, alive, told, expected = agreed(5)
    told["site-01"] = Revealed(dict.fromkeys(alive, bytes(16)), {})
    assert masking.opened(here.masks(), alive, told) == expected
    told["site-02"] = told["site-01"]
    with refused("false-shares"):
        masking.opened(here.masks(), alive, told)


def test_false_shares_of_two_of_many_sites_do_no_harm_wherever_they_stand() -> None:
    """The first choices of 14 among 20 shares all have the first site's."""
    here = Sum.of(20)
    alive = list(here.included)[:-1]
    expected = masking.opened(here.masks(), alive, here.reveal(alive))
    for liars in (alive[:2], alive[-2:]):
        told = here.reveal(alive)
        for site in liars:
            told[site] = Revealed(dict.fromkeys(alive, bytes(16)), dict.fromkeys(["site-20"], bytes(16)))
        assert masking.opened(here.masks(), alive, told) == expected


def test_sites_that_each_lie_of_another_seed_do_no_harm() -> None:
    here, alive, told, expected = agreed(5)
    for liar, victim in (("site-01", "site-01"), ("site-05", "site-02")):
        told[liar] = Revealed({**told[liar].self_seeds, victim: bytes(16)}, {})
    assert masking.opened(here.masks(), alive, told) == expected


def test_who_dealt_false_shares_is_named_and_of_whoever_reveals_them_how_many_they_are() -> None:
    here, alive, told, _ = agreed(5)
    for seeds in told.values():
        seeds.self_seeds["site-03"] = bytes(16)  # type: ignore[index]  # as it was dealt to them
    with pytest.raises(
        SecureAggregationError, match=r"^the shares of site-03 do not .* site-03 promised: they were dealt false"
    ):
        masking.opened(here.masks(), alive, told)
    told = here.reveal(alive)
    for liar in ("site-01", "site-05"):
        told[liar] = Revealed(dict.fromkeys(alive, bytes(16)), {})
    with pytest.raises(SecureAggregationError, match=f"2 or more of {', '.join(alive)} revealed false"):
        masking.opened(here.masks(), alive, told)


def test_a_site_that_deals_false_shares_among_many_is_named_though_others_lie_as_well() -> None:
    here, alive, told, _ = agreed(12)
    for seeds in told.values():
        seeds.self_seeds["site-01"] = bytes(16)  # type: ignore[index]
    told["site-02"] = Revealed(dict.fromkeys(alive, bytes(16)), {})
    with pytest.raises(SecureAggregationError, match=r"^the shares of site-01 do not"):
        masking.opened(here.masks(), alive, told)


def test_a_share_of_another_size_is_as_good_as_none() -> None:
    here, alive, told, expected = agreed(5)
    told["site-01"] = Revealed({**told["site-01"].self_seeds, "site-03": b"short"}, {})
    assert masking.opened(here.masks(), alive, told) == expected
    told["site-02"] = Revealed({**told["site-02"].self_seeds, "site-03": bytes(17)}, {})
    with refused("too-few-shares"):
        masking.opened(here.masks(), alive, told)


# What leaves tells nothing


def uniformity(words: Array) -> float:
    """P-value of the bytes' chi-square test against the uniform distribution."""
    return float(chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue)


@pytest.mark.parametrize("vector", list(Vector))
def test_a_masked_vector_is_uniform_though_the_numbers_are_not(vector: Vector) -> None:
    here = Sum.of(3)
    numbers = {site: np.full(100_000, 7, dtype=np.uint64) for site in here.included}
    assert uniformity(numbers["site-01"]) < 1e-6
    assert all(uniformity(sent) > 1e-6 for sent in here.masked(numbers, vector).values())


def test_fewer_sites_than_the_threshold_learn_nothing_of_another_and_as_many_learn_all() -> None:
    """The server and they take away every mask that they can make; the second half shows that the test can fail."""
    here, victim, vector = Sum.of(6), "site-01", Vector.VALUES
    masks, secret = here.masks(), np.full(100_000, 7, dtype=np.uint64)
    others = [site for site in here.included if site != victim]
    assert len(others) == threshold(6)
    rest = here.masked({victim: secret})[victim]
    for site in others:  # their halves of the masks that they share with it
        pair = masks.pair_key(site, here.parties[site].secrets.mask_key(vector), victim)
        keys.add_mask(rest, pair, subtract=victim < site)
    assert uniformity(rest) > 1e-6

    def seed_known_to(sites: list[SiteId]) -> bytes:
        dealt = {here.roster.places[site]: [here.parties[site].shares[victim][vector].self_seed] for site in sites}
        promised = here.roster.by_site[victim].commitments[1]
        keeps = [lambda seed: keys.commitment(CONTEXT, victim, vector, seed) == promised]
        found = keys.combined(dealt, threshold(6), keeps)[0]
        assert found is not None
        return found

    with refused("too-few-shares"):
        seed_known_to(others[1:])
    four = [(place, here.parties[site].shares[victim][vector].self_seed) for place, site in enumerate(others[1:], 3)]
    assert Shamir.combine(four) != here.parties[victim].secrets.self_seed(vector)
    keys.add_mask(rest, masks.own_key(victim, seed_known_to(others)), subtract=True)
    assert np.array_equal(rest, secret)


def test_opening_one_vector_opens_no_other() -> None:
    """The counts' masks, all of them known to the server, are none of the values'."""
    here = Sum.of(3)
    secrets = here.parties["site-01"].secrets
    assert secrets.self_seed(Vector.CONTRIBUTORS) != secrets.self_seed(Vector.VALUES)
    assert secrets.mask_seed(Vector.CONTRIBUTORS) != secrets.mask_seed(Vector.VALUES)
    one, other = (here.masks(vector).own_key("site-01", bytes(16)) for vector in Vector)
    assert one != other


# What a malicious server tries


def test_a_key_that_the_server_put_in_place_of_a_sites_is_refused() -> None:
    here = Sum.of(3)
    own = here.roster.by_site["site-02"]
    forged = replace(own, share_key=Party("site-09").advert().share_key)
    with refused("bad-signature"):
        with_advert(here.roster, forged).check_signatures()
    other = replace(forged, identity=Party("site-09").advert().identity)  # pinned identities are compared elsewhere
    with refused("bad-signature"):
        with_advert(here.roster, other).check_signatures()


def roster_of(adverts: Sequence[KeyAdvert]) -> Roster:
    return Roster(CONTEXT, tuple(adverts), alone({advert.site for advert in adverts}))


def with_advert(roster: Roster, advert: KeyAdvert) -> Roster:
    adverts = tuple(advert if a.site == advert.site else a for a in roster.adverts)
    return Roster(roster.context, adverts, roster.groups)


def test_keys_of_one_sum_are_none_of_another() -> None:
    """So a site that was given another base cannot be summed with the others."""
    changes: dict[str, Any] = {"round": 4, "attempt": 2, "run": "other", "sum_of": SumOf.SCORES}
    changes |= {"base": digest(b"x"), "recipe": digest(b"x")}
    for field, value in changes.items():
        other = Party("site-3", replace(CONTEXT, **{field: value}))
        with refused("bad-signature"):
            roster_of([*(Party(f"site-{n}").advert() for n in (1, 2)), other.advert()]).check_signatures()


def test_a_roster_of_too_few_or_too_many_sites_with_one_twice_or_two_equal_keys() -> None:
    for count in (2, 51):
        with refused("too-few-sites"):
            roster_of([Party(f"site-{n:02}").advert() for n in range(count)])
    adverts = [Party(f"site-{n}").advert() for n in (1, 2, 3)]
    equal = replace(adverts[0], site="site-4")
    for wrong in ([*adverts, adverts[2]], [adverts[1], adverts[0], adverts[2]], [*adverts, equal]):
        with refused("bad-keys"):
            roster_of(wrong)
    with refused("bad-keys"):
        roster_of([replace(a, mask_keys=a.mask_keys[:1]) for a in adverts]).check_signatures()


def test_shares_that_another_site_sealed_or_that_were_sealed_for_another() -> None:
    here = Sum.of(3)
    parties = here.parties
    sent = {site: party.deal(here.roster) for site, party in parties.items()}
    receiver = Party("site-03")
    for deliveries in (
        {"site-01": sent["site-02"]["site-03"]},
        {"site-01": sent["site-01"]["site-02"]},
        {"site-01": sent["site-01"]["site-03"][:-1]},
        {"site-07": sent["site-01"]["site-03"]},
    ):
        with refused("bad-shares"):
            receiver.take(here.roster, deliveries)


def test_two_sets_of_survivors_cannot_both_be_signed_by_enough() -> None:
    """Each site signs one; the server claims that another set has been signed, too."""
    here = Sum.of(5)
    all_sites = list(here.included)
    fewer = all_sites[:4]
    signatures = here.signatures(all_sites)
    with refused("bad-signature"):
        masking.check_signatures(here.masks(), fewer, {site: signatures[site] for site in fewer})
    with refused("too-few-sites"):
        masking.check_signatures(here.masks(), all_sites, {site: signatures[site] for site in all_sites[:3]})
    with refused("too-few-sites"):  # of a site that is no survivor
        masking.check_signatures(here.masks(), fewer, signatures)


@pytest.mark.parametrize(
    ("alive", "code"),
    [
        (["site-01", "site-02", "site-03"], "too-few-sites"),
        (["site-01", "site-02", "site-03", "site-03"], "other-survivors"),
        (["site-02", "site-01", "site-03", "site-04"], "other-survivors"),
        (["site-01", "site-02", "site-03", "site-09"], "other-survivors"),
        (["site-01", "site-02", "site-03", "site-05"], "other-survivors"),  # it dealt no shares
    ],
)
def test_survivors_that_no_site_signs(alive: list[SiteId], code: str) -> None:
    here = Sum.of(5, silent_after_keys=["site-05"])
    with refused(code):
        masking.signed(here.masks(), alive, identity_of("site-01"))


def test_of_one_site_never_both_shares_are_revealed() -> None:
    here = Sum.of(5)
    alive = list(here.included)[:4]
    told = here.reveal(alive)["site-01"]
    assert told.self_seeds.keys() == set(alive)
    assert told.mask_seeds.keys() == {"site-05"}


def counting(here: Sum, present: dict[SiteId, Array]) -> tuple[Masks, dict[SiteId, Array], dict[SiteId, bytes], Opened]:
    masks, sent = here.masks(Vector.CONTRIBUTORS), here.masked(present, Vector.CONTRIBUTORS)
    signatures = {
        site: masking.signed_vector(masks, vector, here.parties[site].identity) for site, vector in sent.items()
    }
    seeds = masking.opened(masks, list(sent), here.reveal(list(sent), vector=Vector.CONTRIBUTORS))
    return masks, sent, signatures, seeds


PRESENT = {
    "site-01": np.array([1, 0, 0], dtype=np.uint64),
    "site-02": np.array([1, 1, 0], dtype=np.uint64),
    "site-03": np.array([1, 0, 0], dtype=np.uint64),
}


def test_each_site_counts_the_contributors_for_itself() -> None:
    masks, sent, signatures, seeds = counting(Sum.of(3), PRESENT)
    assert masking.counted(masks, list(sent), sent, signatures, seeds).tolist() == [3, 1, 0]


def test_a_server_cannot_make_a_class_of_one_site_look_like_one_of_two() -> None:
    masks, sent, signatures, seeds = counting(Sum.of(3), PRESENT)
    raised = {**sent, "site-01": sent["site-01"] + np.array([0, 1, 0], dtype=np.uint64)}
    with refused("bad-signature"):
        masking.counted(masks, list(sent), raised, signatures, seeds)
    with refused("false-shares"):
        others = Opened({**seeds.self_seeds, "site-01": bytes(16)}, {})
        masking.counted(masks, list(sent), sent, signatures, others)
    with refused("false-shares"):
        fewer = Opened({site: seeds.self_seeds[site] for site in ("site-01", "site-02")}, {})
        masking.counted(masks, list(sent), sent, signatures, fewer)
    with refused("other-survivors"):
        masking.counted(masks, ["site-01", "site-02"], sent, signatures, seeds)


def test_a_site_that_sends_no_flags_is_found_by_the_sum() -> None:
    lies = {**PRESENT, "site-03": np.array([2, 0, 2**63], dtype=np.uint64)}
    masks, sent, signatures, seeds = counting(Sum.of(3), lies)
    with refused("bad-vector"):
        masking.counted(masks, list(sent), sent, signatures, seeds)


def test_a_site_that_lies_about_a_class_is_not_found_and_the_pages_say_so() -> None:
    """One site has class 1. With min_contributors = 3 its row leaves."""
    lies = {**PRESENT, "site-03": np.array([1, 2, 0], dtype=np.uint64)}
    masks, sent, signatures, seeds = counting(Sum.of(3), lies)
    assert masking.counted(masks, list(sent), sent, signatures, seeds).tolist() == [3, 3, 0]


def test_packed_shares_of_another_length_and_pieces_cut_elsewhere() -> None:
    assert keys.framed([b"ab", b"c"]) != keys.framed([b"a", b"bc"])
    assert keys.framed([b"", b"a"]) != keys.framed([b"a", b""])
    dealt = masking.dealt(SiteSecrets(bytes(32), CONTEXT, "site-01"), Sum.of(3).roster)["site-02"]
    assert masking.unpacked(masking.packed(dealt), CONTEXT.vectors) == dealt
    with refused("bad-shares"):
        masking.unpacked(masking.packed(dealt)[:-1], CONTEXT.vectors)


def test_vectors_of_different_lengths_and_no_vector() -> None:
    here = Sum.of(3)
    numbers = numbers_of(here.included)
    numbers["site-02"] = numbers["site-02"][:-1]
    with refused("bad-vector"):
        here.total(numbers, list(here.included))
    with refused("too-few-sites"):
        masking.unmasked(here.masks(), [], [], Opened({}, {}))


OF_THREE: Groups = (("site-01", "site-02", "site-03"), ("site-04", "site-05", "site-06"))


def test_sites_that_were_told_other_groups_cannot_be_aggregated() -> None:
    """What one signs the other does not take, and the masks of the two do not cancel."""
    here = Sum.of(6, groups=OF_THREE)
    told = Roster(CONTEXT, here.roster.adverts, (tuple(here.included),))
    assert told.digest != here.roster.digest
    alive = list(here.included)
    others = replace(here.masks(), roster=told)
    signature = masking.signed(others, alive, identity_of("site-01"))
    with refused("bad-signature"):
        masking.check_signed(here.masks(), alive, "site-01", signature)
    numbers = numbers_of(alive)
    sent = here.masked(numbers)
    sent["site-01"] = masking.masked(others, here.parties["site-01"].secrets, numbers["site-01"])
    seeds = masking.opened(here.masks(), alive, here.reveal(alive))
    total = masking.unmasked(here.masks(), alive, sent.values(), seeds)
    assert not np.array_equal(total, added(numbers, alive))
    assert len(np.intersect1d(total, added(numbers, alive))) == 0
    sealed = {"site-01": here.parties["site-01"].deal(told)["site-02"]}
    masking.opened_shares(here.parties["site-02"].secrets, told, sealed)
    with refused("bad-shares"):
        masking.opened_shares(here.parties["site-02"].secrets, here.roster, sealed)


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (*OF_THREE, ("site-07", "site-08", "site-09")),
        (("site-01", "site-02", "site-03", "site-04"), ("site-04", "site-05", "site-06")),
        (("site-03", "site-02", "site-01"), ("site-04", "site-05", "site-06")),
        OF_THREE[::-1],
        ((), *OF_THREE),
    ],
)
def test_groups_that_are_no_partition_of_the_roster(groups: Groups) -> None:
    with refused("other-group"):
        Sum.of(6, groups=groups)


def test_survivors_that_split_a_group_are_signed_by_nobody_nor_taken_as_signed() -> None:
    twelve = [f"site-{number:02}" for number in range(1, 13)]
    groups = tuple(tuple(twelve[first : first + 3]) for first in range(0, 12, 3))
    here = Sum.of(12, groups=groups)
    alive, split = twelve[:9], [*twelve[:8], *twelve[9:]]
    assert np.array_equal(here.total(numbers_of(twelve), alive), added(numbers_of(twelve), alive))
    for site in split:
        with refused("broken-group"):
            masking.signed(here.masks(), split, identity_of(site))
    with refused("broken-group"):
        masking.check_signatures(here.masks(), split, dict.fromkeys(split, b""))
