"""Every way in which an identity folder cannot be used is said before anything is dialled, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.pki import BEGINS, ENDS, NOW, Authority, key_pem

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import (
    IdentityError,
    IdentityProblem,
    LiveIdentity,
    Party,
    fingerprint,
    read_certificate,
    read_identity,
)


def write_key(path: Path, data: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(data)


def test_a_good_folder_is_read(authority: Authority, site: Path) -> None:
    found = read_identity(site, Party.SITE, NOW)
    assert (found.folder, found.certificate.party, found.certificate.name) == (site, Party.SITE, "hospital-a")
    assert (found.certificate.not_before, found.certificate.not_after) == (BEGINS, ENDS)
    assert found.certificate_pem == (site / "cert.pem").read_bytes()
    assert found.key_pem == (site / "key.pem").read_bytes()
    assert found.authorities_pem == authority.pem
    assert "PRIVATE" not in repr(found) + str(found)
    der = x509.load_pem_x509_certificate(found.certificate_pem).fingerprint(SHA256())
    assert found.certificate.fingerprint == fingerprint(found.certificate_pem) == der.hex()


def test_a_servers_certificate_tells_its_hosts(authority: Authority, tmp_path: Path) -> None:
    hosts = ("fl.example.org", "192.0.2.7", "2001:db8::7")
    folder = authority.issue(tmp_path, Party.SERVER, "main", hosts, begins=BEGINS, ends=ENDS)
    assert read_identity(folder, Party.SERVER, NOW).certificate.hosts == hosts


def make_a_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


Break = Callable[[Path], object]
OTHER_KEY = key_pem(ec.generate_private_key(ec.SECP256R1()))
BROKEN: list[tuple[str, Break, IdentityProblem, str]] = [
    ("no certificate", lambda f: (f / "cert.pem").unlink(), IdentityProblem.MISSING, "certs install BUNDLE"),
    ("no key", lambda f: (f / "key.pem").unlink(), IdentityProblem.MISSING, "certs request --renew --identity"),
    ("no CA", lambda f: (f / "ca.pem").unlink(), IdentityProblem.MISSING, "ca.pem; `protofed certs install"),
    ("folder, not file", lambda f: make_a_folder_of(f / "ca.pem"), IdentityProblem.UNREADABLE, "ca.pem"),
    ("garbage key", lambda f: (f / "key.pem").write_text("x"), IdentityProblem.UNREADABLE, "key.pem"),
    ("foreign key", lambda f: (f / "key.pem").write_bytes(OTHER_KEY), IdentityProblem.KEY_OTHER, "key.pem"),
    ("group", lambda f: (f / "key.pem").chmod(0o640), IdentityProblem.KEY_OPEN, "0640"),
    ("others", lambda f: (f / "key.pem").chmod(0o604), IdentityProblem.KEY_OPEN, "0604"),
]


@pytest.mark.parametrize(
    ("break_it", "problem", "names"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_what_is_missing_or_damaged_is_said(break_it: Break, problem: IdentityProblem, names: str, site: Path) -> None:
    break_it(site)
    with pytest.raises(IdentityError, match=re.escape(names)) as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is problem
    assert "PRIVATE" not in str(found.value)
    assert found.value.exit_code == 78


@pytest.mark.parametrize("content", [b"", b"\0\xff", b"-----BEGIN CERTIFICATE-----\nMIIB"])
@pytest.mark.parametrize("name", ["cert.pem", "ca.pem"])
def test_a_file_without_certificates_is_named(name: str, content: bytes, site: Path) -> None:
    (site / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(name)) as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.exit_code == 78


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--site.*--identity"):
        read_identity(tmp_path / "none", Party.SITE, NOW)


def test_an_encrypted_key_is_said_to_be_one_and_one_of_another_kind_is_not_the_certificates(site: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write_key(site / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    with pytest.raises(IdentityError, match="without a passphrase") as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.UNREADABLE
    rsa_key = rsa.generate_private_key(65537, 2048)
    write_key(site / "key.pem", rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(IdentityError) as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.KEY_OTHER


@pytest.mark.parametrize(("party", "whose"), [(Party.OPERATOR, "an operator's"), (Party.SERVER, "a server's")])
def test_another_partys_certificate_is_refused(party: Party, whose: str, site: Path) -> None:
    with pytest.raises(IdentityError, match=f"'hospital-a'; expected {whose}.*certs request --{party}") as found:
        read_identity(site, party, NOW)
    assert found.value.problem is IdentityProblem.ANOTHERS


@pytest.mark.parametrize(
    ("party", "usage", "wanted"),
    [
        (Party.SITE, ExtendedKeyUsageOID.SERVER_AUTH, "(clientAuth)"),
        (Party.OPERATOR, ExtendedKeyUsageOID.CODE_SIGNING, "(clientAuth)"),
        (Party.SERVER, ExtendedKeyUsageOID.CLIENT_AUTH, "(serverAuth)"),
    ],
)
def test_a_certificate_for_another_use_is_refused(
    party: Party, usage: x509.ObjectIdentifier, wanted: str, authority: Authority, tmp_path: Path
) -> None:
    folder = authority.issue(tmp_path, party, "a", begins=BEGINS, ends=ENDS, usage=usage)
    with pytest.raises(IdentityError, match=re.escape(wanted)) as found:
        read_identity(folder, party, NOW)
    assert found.value.problem is IdentityProblem.ANOTHERS


def test_one_of_another_ca_is_refused_and_two_are_trusted_meanwhile(authority: Authority, site: Path) -> None:
    new = Authority.make("new").pem
    for pem in (new, (site / "cert.pem").read_bytes()):
        (site / "ca.pem").write_bytes(pem)
        with pytest.raises(IdentityError, match=r"'hospital-a'.*ca\.pem") as found:
            read_identity(site, Party.SITE, NOW)
        assert found.value.problem is IdentityProblem.AUTHORITY
    (site / "ca.pem").write_bytes(new + authority.pem)
    for now in (BEGINS, NOW, ENDS):  # both ends of its validity count
        assert read_identity(site, Party.SITE, now).certificate.name == "hospital-a"


@pytest.mark.parametrize(
    ("now", "problem", "remedy"),
    [
        (BEGINS - timedelta(seconds=1), IdentityProblem.EARLY, r"2030-04-01T11:59:59Z .*clock"),
        (
            ENDS + timedelta(seconds=1),
            IdentityProblem.EXPIRED,
            r"2030-05-31T12:00:01Z .*certs request --renew --identity",
        ),
    ],
)
def test_dates_are_said_with_the_clocks(now: datetime, problem: IdentityProblem, remedy: str, site: Path) -> None:
    with pytest.raises(IdentityError, match=rf"2030-04-01T12:00:00Z.*2030-05-31T12:00:00Z.*{remedy}") as found:
        read_identity(site, Party.SITE, now)
    assert found.value.problem is problem


def test_an_expired_ca_is_said_to_be_the_reason(tmp_path: Path) -> None:
    old = Authority.make(begins=NOW - timedelta(days=9), ends=NOW - timedelta(days=1))
    folder = old.issue(tmp_path, Party.SITE, "a", begins=BEGINS, ends=ENDS)
    with pytest.raises(IdentityError, match=r"2030-04-30T12:00:00Z.*2030-05-01") as found:
        read_identity(folder, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.AUTHORITY_DATES


@pytest.mark.parametrize("name", ["../../x", "A", "a b", "", "a" * 65, "%D0%B0", "a/b", "a\0"])
def test_a_name_that_is_no_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no id"):
        read_certificate(self_signed(f"protofed://site/{name}"), "here")


@pytest.mark.parametrize(
    "uris",
    [(), ("https://site/a",), ("protofed://clinic/a",), ("site/a",), ("protofed://site/a", "protofed://operator/a")],
)
def test_a_certificate_that_names_nobody_is_refused(uris: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="here names nobody whom protofed knows"):
        read_certificate(self_signed(*uris), "here")


def test_several_certificates_are_not_one(authority: Authority, site: Path) -> None:
    with pytest.raises(ConfigError, match="2 certificates; expected exactly one"):
        read_certificate((site / "cert.pem").read_bytes() + authority.pem, "here")


def self_signed(*uris: str) -> bytes:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, BEGINS, ENDS)
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=True)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


# A running daemon takes a renewal up by itself, and is never left without an identity on the way


@pytest.fixture
def live(site: Path) -> LiveIdentity:
    return LiveIdentity(site, Party.SITE, lambda: NOW)


def renewed(authority: Authority, folder: Path) -> dict[str, bytes]:
    made = authority.issue(folder, Party.SITE, "hospital-a", begins=BEGINS, ends=ENDS)
    return {path.name: path.read_bytes() for path in made.iterdir()}


def test_a_renewal_is_taken_up_half_of_it_not(
    authority: Authority, site: Path, live: LiveIdentity, tmp_path: Path
) -> None:
    before, new = live.current(), renewed(authority, tmp_path / "new")
    with structlog.testing.capture_logs() as logs:
        (site / "cert.pem").write_bytes(new["cert.pem"])
        assert live.current() is before
        assert live.current() is before
        (site / "key.pem").write_bytes(new["key.pem"])
        after = live.current()
    assert after.certificate_pem == new["cert.pem"]
    assert after.key_pem == new["key.pem"]
    assert [entry["event"] for entry in logs] == ["a renewed identity cannot be used", "identity renewed"]
    assert "is not the key of" in logs[0]["why"]
    assert "PRIVATE" not in str(logs)


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_the_last_good_identity_stays_when_a_file_vanishes(name: str, site: Path, live: LiveIdentity) -> None:
    before, data = live.current(), (site / name).read_bytes()
    (site / name).unlink()
    assert live.current() is before
    write_key(site / name, data)
    assert live.current() == before


def test_a_certificate_of_tomorrow_is_taken_up_tomorrow(authority: Authority, site: Path) -> None:
    now = [NOW]
    live = LiveIdentity(site, Party.SITE, lambda: now[-1])
    before = live.current()
    tomorrow = NOW + timedelta(days=1)
    authority.issue(site, Party.SITE, "hospital-a", begins=tomorrow, ends=ENDS)
    assert live.current() is before
    now.append(tomorrow)
    assert live.current().certificate.not_before == tomorrow


def test_a_pending_key_waits_for_its_certificate(
    authority: Authority, site: Path, live: LiveIdentity, tmp_path: Path
) -> None:
    before, new = live.current(), renewed(authority, tmp_path / "new")
    assert live.current() is before
    write_key(site / "key.next.pem", new["key.pem"])
    assert live.current() == before
    (site / "cert.pem").write_bytes(new["cert.pem"])
    assert live.current().key_pem == new["key.pem"]
    assert read_identity(site, Party.SITE, NOW).key_pem == new["key.pem"]
    (site / "ca.pem").write_bytes(authority.pem + Authority.make("next").pem)
    assert live.current().authorities_pem == (site / "ca.pem").read_bytes()


def test_it_is_known_why_new_files_are_not_used(site: Path, live: LiveIdentity) -> None:
    assert live.problem == ""
    before = (site / "cert.pem").read_bytes()
    for _ in range(2):
        (site / "cert.pem").unlink()
        live.current()
        assert "certificate missing" in live.problem
        (site / "cert.pem").write_bytes(before)
        live.current()
        assert live.problem == ""
    site.rename(away := site.with_name("away"))
    live.current()
    assert live.problem
    away.rename(site)
    live.current()
    assert live.problem == ""
    with pytest.raises(ConfigError, match="certificate missing"):
        LiveIdentity(away, Party.SITE)


@pytest.mark.parametrize("keeps_name", [False, True])
def test_another_name_is_no_renewal_where_the_name_counts(authority: Authority, site: Path, keeps_name: bool) -> None:
    live = LiveIdentity(site, Party.SITE, lambda: NOW, keeps_name=keeps_name)
    authority.issue(site, Party.SITE, "hospital-b", begins=BEGINS, ends=ENDS)
    assert live.current().certificate.name == ("hospital-a" if keeps_name else "hospital-b")
    assert ("hospital-b" in live.problem) is keeps_name
    authority.issue(site, Party.SITE, "hospital-a", begins=BEGINS, ends=ENDS)
    assert live.current().certificate_pem == (site / "cert.pem").read_bytes()
    assert live.problem == ""
