"""Which identities a site takes for the other sites'."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.support.pki import Authority

from protofed.client.sums import own_identity
from protofed.client.sums.membership import membership_of
from protofed.client.sums.own_identity import fingerprint
from protofed.client.sums.peers import FILE, Peers
from protofed.common.errors import ConfigError, SecureSumError, StateError
from protofed.common.pki import codes
from protofed.common.pki.endorsement import Endorsement, check_endorsement, endorsed
from protofed.common.pki.identity import Party, read_identity
from protofed.common.protocol.sum_messages import endorsement_of, packed_endorsement
from protofed.common.secure_sums.keys import KeyAdvert

NOW = datetime.now(UTC)


def advert(site: str, identity: bytes) -> KeyAdvert:
    return KeyAdvert(site, identity, b"", b"", (), (), b"")


def test_first_use_pins_and_another_identity_is_refused_until_a_person_pins_it(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    peers.trust([advert("bob", b"b" * 32), advert("cleo", b"c" * 32)])
    peers.trust([advert("bob", b"b" * 32)])
    with pytest.raises(SecureSumError, match="bob has another identity") as caught:
        peers.trust([advert("bob", b"x" * 32), advert("dan", b"d" * 32)])
    assert caught.value.code == "changed-identity"
    pins = peers.pins()
    assert sorted(pins) == ["bob", "cleo"]  # a refused roster pins nobody
    assert pins["bob"].refused == fingerprint(b"x" * 32)
    peers.pin("bob", codes.code(fingerprint(b"x" * 32)).lower(), "eva")
    peers.trust([advert("bob", b"x" * 32)])
    with pytest.raises(SecureSumError):
        peers.trust([advert("bob", b"b" * 32)])
    assert peers.pins()["bob"].by == "eva"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_new_site_is_pinned_only_if_it_is_endorsed(tmp_path: Path) -> None:
    def check(_: KeyAdvert) -> None:
        raise SecureSumError("unendorsed", "")

    peers = Peers(tmp_path, check)
    with pytest.raises(SecureSumError):
        peers.trust([advert("bob", b"b" * 32)])
    assert peers.pins() == {}
    peers.pin("bob", fingerprint(b"b" * 32), "eva")  # a person's word needs no certificate
    peers.trust([advert("bob", b"b" * 32)])


def test_forgotten_and_damaged_pins(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    with pytest.raises(ConfigError, match="no site is pinned"):
        peers.forget("bob")
    with pytest.raises(ConfigError, match="four groups"):
        peers.pin("bob", "1234", "eva")
    peers.trust([advert("bob", b"b" * 32)])
    peers.forget("bob")
    peers.trust([advert("bob", b"x" * 32)])
    (tmp_path / FILE).write_bytes(b"[]")
    with pytest.raises(StateError, match="pin every site anew"):
        peers.trust([advert("bob", b"x" * 32)])


def test_the_identity_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    with capture_logs() as lines:
        first = own_identity.load_or_create(tmp_path)
        assert own_identity.load_or_create(tmp_path).private_bytes_raw() == first.private_bytes_raw()
    made = codes.code(fingerprint(first.public_key().public_bytes_raw()))
    assert [(line["event"], line["code"]) for line in lines] == [("identity for secure sums made", made)]
    path = tmp_path / own_identity.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"")
    with pytest.raises(StateError, match="no Ed25519 key"):
        own_identity.load_or_create(tmp_path)


@pytest.fixture
def endorsement(tmp_path: Path) -> tuple[Endorsement, bytes]:
    """Site ann's, of the key kkk…, and the CA."""
    authority = Authority.make()
    folder = authority.issue(tmp_path / "ann", Party.SITE, "ann")
    return endorsed(read_identity(folder, Party.SITE, NOW), b"k" * 32), authority.pem


def test_a_certificate_endorses_its_own_sites_identity(endorsement: tuple[Endorsement, bytes]) -> None:
    said, authorities = endorsement
    check_endorsement(endorsement_of(packed_endorsement(said)), "ann", b"k" * 32, authorities, NOW)


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
        with pytest.raises(SecureSumError) as caught:
            check_endorsement(one, site, key, cas, now)
        assert caught.value.code == "unendorsed"


def test_a_renewed_certificate_keeps_the_identity_and_nobody_has_to_pin_it_again(tmp_path: Path) -> None:
    authority, now = Authority.make(), [NOW]
    north, south = (tmp_path / name for name in ("north", "south"))
    for folder in (north, south):
        folder.mkdir()
    first, renewed = (authority.issue(tmp_path / name, Party.SITE, "north") for name in ("first", "renewed"))
    own = lambda: read_identity(tmp_path / "judge", Party.SITE, NOW)  # noqa: E731
    authority.issue(tmp_path / "judge", Party.SITE, "south")
    seen = []
    for certificate in (first, renewed):
        member = membership_of(north, partial(read_identity, certificate, Party.SITE, NOW))
        public = member.identity.public_key().public_bytes_raw()
        seen.append((public, member.endorsement()))
        told = KeyAdvert("north", public, member.endorsement(), b"", (), (), b"")
        membership_of(south, own, lambda: now[0]).peers.trust([told])
    (before, endorsed_first), (after, endorsed_again) = seen
    assert before == after
    certificates = {endorsement_of(each).certificate for each in (endorsed_first, endorsed_again)}
    assert len(certificates) == 2
    now[0] += timedelta(days=9999)  # all certificates have ended: who is pinned needs none
    membership_of(south, own, lambda: now[0]).peers.trust([told])
    assert list(Peers(south).pins()) == ["north"]
