"""Which identities a site takes for the other sites'."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.support.partners import confirm, identity_of, listed
from tests.support.pki import Authority

from protofed.client.secure_aggregation.partners import (
    CONFIRMED,
    IDENTITY_FILE,
    MET,
    Partners,
    fingerprint,
    load_or_create_identity,
    open_membership,
)
from protofed.common.errors import ConfigError, SecureAggregationError, StateError
from protofed.common.pki import certificate
from protofed.common.pki.identity import Endorsement, Party, check_endorsement, endorsed, read_identity
from protofed.common.secure_aggregation.keys import KeyAdvert
from protofed.common.secure_aggregation.messages import packed_endorsement, unpack_endorsement

NOW = datetime.now(UTC)


OWN = ("ann", "a" * 64)


def advert(site: str, identity: bytes) -> KeyAdvert:
    return KeyAdvert(site, identity, b"", b"", (), (), b"")


def at_sites(tmp_path: Path, *sites: str) -> dict[str, Path]:
    folders = {site: tmp_path / site for site in sites}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    return folders


def of(folders: dict[str, Path], site: str) -> KeyAdvert:
    return advert(site, bytes.fromhex(identity_of(folders[site])))


def test_first_use_believes_whom_it_meets_first_and_refuses_another_identity(tmp_path: Path) -> None:
    partners = Partners(tmp_path)
    partners.trust(OWN, [advert("bob", b"b" * 32), advert("cleo", b"c" * 32)], required=False)
    partners.trust(OWN, [advert("bob", b"b" * 32)], required=False)
    with pytest.raises(SecureAggregationError, match="bob has another identity") as caught:
        partners.trust(OWN, [advert("bob", b"x" * 32), advert("dan", b"d" * 32)], required=False)
    assert caught.value.code == "changed-identity"
    assert sorted(partners.met()) == ["bob", "cleo"]  # a refused roster is believed of nobody
    assert (tmp_path / MET).stat().st_mode & 0o777 == 0o600
    (tmp_path / MET).write_bytes(b"[]")
    with pytest.raises(StateError, match=r"met-sites\.json cannot be read"):
        partners.trust(OWN, [advert("bob", b"b" * 32)], required=False)


def test_nobody_is_believed_on_first_use_without_an_endorsement_or_beside_a_list(tmp_path: Path) -> None:
    def check(_: KeyAdvert) -> None:
        raise SecureAggregationError("unendorsed", "")

    with pytest.raises(SecureAggregationError) as caught:
        Partners(tmp_path, check).trust(OWN, [advert("bob", b"b" * 32)], required=False)
    assert caught.value.code == "unendorsed"
    with pytest.raises(SecureAggregationError) as caught:
        Partners(tmp_path).trust(OWN, [advert("bob", b"b" * 32)], required=True)
    assert caught.value.code == "unconfirmed-partners"
    assert Partners(tmp_path).met() == {}


@pytest.mark.parametrize("required", [False, True])
def test_a_confirmed_list_is_all_that_is_aggregated_with(tmp_path: Path, required: bool) -> None:
    folders = at_sites(tmp_path, "ann", "bob", "cleo", "zzz")
    known = {site: folders[site] for site in ("ann", "bob", "cleo")}
    confirm(folders["ann"], listed(known))
    partners, own = Partners(folders["ann"]), ("ann", identity_of(folders["ann"]))
    partners.trust(own, [of(folders, "bob"), of(folders, "cleo")], required=required)
    for other, code in ((of(folders, "zzz"), "no-partner"), (advert("cleo", b"x" * 32), "changed-identity")):
        with pytest.raises(SecureAggregationError) as caught:
            partners.trust(own, [of(folders, "bob"), other], required=required)
        assert caught.value.code == code
    renamed = ("bob", own[1])  # the server's certificate gives this site another one's name
    with pytest.raises(SecureAggregationError, match="bob has another identity"):
        partners.trust(renamed, [of(folders, "cleo")], required=required)
    assert partners.met() == {}


def test_a_person_confirms_the_offered_list_by_its_code_alone(tmp_path: Path) -> None:
    folders = at_sites(tmp_path, "ann", "bob", "cleo", "dan")
    own, partners = identity_of(folders["ann"]), Partners(folders["ann"])
    first = listed({site: folders[site] for site in ("ann", "bob", "cleo")})
    with pytest.raises(ConfigError, match="has offered no list"):
        partners.confirm(own, first.code, "eva")
    assert "the server offers none yet" in partners.problem(required=True)
    assert partners.problem(required=False) == ""
    partners.note_offer(first.document)
    assert "list 1 of partners waits for a person here" in partners.problem(required=False)
    second = listed(folders, number=2)
    with pytest.raises(ConfigError, match="group 1, 2, 3, 4 of four differs"):
        partners.confirm(own, second.code, "eva")
    with pytest.raises(ConfigError, match="four groups of four"):
        partners.confirm(own, "1234", "eva")
    with pytest.raises(ConfigError, match="does not have this site's key"):
        partners.confirm("e" * 64, first.code, "eva")
    assert partners.confirmed() is None
    assert partners.confirm(own, first.code.lower().replace("-", " "), "eva").by == "eva"
    assert partners.problem(required=True) == ""
    partners.note_offer(second.document)
    assert "who confirmed list 1" in partners.problem(required=True)
    partners.confirm(own, second.code, "eva")
    partners.note_offer(first.document)  # an operator offers an old list again
    assert "the server offers list 1 of partners, and a person here confirmed list 2" in partners.problem(required=True)
    with pytest.raises(ConfigError, match="No site goes back"):
        partners.confirm(own, first.code, "eva")
    partners.note_offer("")
    assert "offers no list of partners any more" in partners.problem(required=True)


def test_an_offer_that_is_no_list_is_not_kept_and_a_damaged_list_lets_nobody_in(tmp_path: Path) -> None:
    folders = at_sites(tmp_path, "ann", "bob", "cleo")
    partners = Partners(folders["ann"])
    with capture_logs() as lines:
        partners.note_offer('{"number": 1}')
    assert [line["log_level"] for line in lines] == ["error"]
    assert partners.offered() is None
    confirm(folders["ann"], listed(folders))
    (folders["ann"] / CONFIRMED).write_text("{}")
    with pytest.raises(StateError, match="confirm the partners again"):
        partners.trust(("ann", identity_of(folders["ann"])), [of(folders, "bob")], required=True)


def test_the_identity_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    with capture_logs() as lines:
        first = load_or_create_identity(tmp_path)
        assert load_or_create_identity(tmp_path).private_bytes_raw() == first.private_bytes_raw()
    made = certificate.code(fingerprint(first.public_key().public_bytes_raw()))
    assert [(line["event"], line["code"]) for line in lines] == [("identity for secure aggregation made", made)]
    path = tmp_path / IDENTITY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"")
    with pytest.raises(StateError, match="no Ed25519 key"):
        load_or_create_identity(tmp_path)


@pytest.fixture
def endorsement(tmp_path: Path) -> tuple[Endorsement, bytes]:
    """Site ann's, of the key kkk…, and the CA."""
    authority = Authority.make()
    folder = authority.issue(tmp_path / "ann", Party.SITE, "ann")
    return endorsed(read_identity(folder, Party.SITE, NOW), b"k" * 32), authority.pem


def test_a_certificate_endorses_its_own_sites_identity(endorsement: tuple[Endorsement, bytes]) -> None:
    said, authorities = endorsement
    check_endorsement(unpack_endorsement(packed_endorsement(said)), "ann", b"k" * 32, authorities, NOW)


def test_no_other_site_key_or_authority_is_endorsed(endorsement: tuple[Endorsement, bytes], tmp_path: Path) -> None:
    said, authorities = endorsement
    operator = Authority.make().issue(tmp_path / "eva", Party.OPERATOR, "ann")
    of_operator = endorsed(read_identity(operator, Party.OPERATOR, NOW), b"k" * 32)
    for one, site, key, cas, now in (
        (said, "bob", b"k" * 32, authorities, NOW),
        (said, "ann", b"x" * 32, authorities, NOW),
        (said, "ann", b"k" * 32, Authority.make().pem, NOW),
        (said, "ann", b"k" * 32, authorities, NOW + timedelta(days=800)),
        (of_operator, "ann", b"k" * 32, (operator / "ca.pem").read_bytes(), NOW),
        (Endorsement(b"", b""), "ann", b"k" * 32, authorities, NOW),  # plain text, where certificates are known
    ):
        with pytest.raises(SecureAggregationError) as caught:
            check_endorsement(one, site, key, cas, now)
        assert caught.value.code == "unendorsed"


def test_a_renewed_certificate_keeps_the_identity_and_nobody_has_to_believe_it_again(tmp_path: Path) -> None:
    authority, now = Authority.make(), [NOW]
    north, south = (tmp_path / name for name in ("north", "south"))
    for folder in (north, south):
        folder.mkdir()
    first, renewed = (authority.issue(tmp_path / name, Party.SITE, "north") for name in ("first", "renewed"))
    own = lambda: read_identity(tmp_path / "judge", Party.SITE, NOW)  # noqa: E731
    authority.issue(tmp_path / "judge", Party.SITE, "south")
    seen = []
    for folder in (first, renewed):
        member = open_membership(north, "north", partial(read_identity, folder, Party.SITE, NOW))
        public = member.identity.public_key().public_bytes_raw()
        seen.append((public, member.endorsement()))
        told = KeyAdvert("north", public, member.endorsement(), b"", (), (), b"")
        open_membership(south, "south", own, lambda: now[0]).trust([told], required=False)
    (before, endorsed_first), (after, endorsed_again) = seen
    assert before == after
    certificates = {unpack_endorsement(each).certificate for each in (endorsed_first, endorsed_again)}
    assert len(certificates) == 2
    now[0] += timedelta(days=9999)  # all certificates have ended: who was met needs none
    open_membership(south, "south", own, lambda: now[0]).trust([told], required=False)
    assert list(Partners(south).met()) == ["north"]
