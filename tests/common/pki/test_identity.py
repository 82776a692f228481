"""Every way in which an identity folder cannot be used is said before anything is dialled, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.pki import BEGINS, ENDS, NOW, Authority, key_pem

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import (
    IdentityError,
    IdentityProblem,
    Party,
    fingerprint,
    read_certificate,
    read_identity,
)


def other_key() -> bytes:
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


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
    der = x509.load_pem_x509_certificate(found.certificate_pem).fingerprint(SHA256())
    assert found.certificate.fingerprint == fingerprint(found.certificate_pem) == der.hex()


def test_a_servers_certificate_tells_its_hosts(authority: Authority, tmp_path: Path) -> None:
    hosts = ("fl.example.org", "192.0.2.7", "2001:db8::7")
    folder = authority.issue(tmp_path, Party.SERVER, "main", hosts, begins=BEGINS, ends=ENDS)
    assert read_identity(folder, Party.SERVER, NOW).certificate.hosts == hosts


def test_a_key_is_in_no_text(site: Path) -> None:
    found = read_identity(site, Party.SITE, NOW)
    assert "PRIVATE" not in repr(found)
    assert "PRIVATE" not in str(found)


def make_a_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


Break = Callable[[Path], object]
BROKEN: list[tuple[str, Break, IdentityProblem, str]] = [
    ("no certificate", lambda f: (f / "cert.pem").unlink(), IdentityProblem.MISSING, "certs install BUNDLE"),
    ("no key", lambda f: (f / "key.pem").unlink(), IdentityProblem.MISSING, "certs request --renew --identity"),
    ("no CA", lambda f: (f / "ca.pem").unlink(), IdentityProblem.MISSING, "ca.pem; `protofed certs install"),
    ("folder, not file", lambda f: make_a_folder_of(f / "ca.pem"), IdentityProblem.UNREADABLE, "ca.pem"),
    ("garbage key", lambda f: (f / "key.pem").write_text("x"), IdentityProblem.UNREADABLE, "key.pem"),
    ("foreign key", lambda f: (f / "key.pem").write_bytes(other_key()), IdentityProblem.KEY_OTHER, "key.pem"),
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


@pytest.mark.parametrize("content", [b"", b"hello", b"\0\xff", b"-----BEGIN CERTIFICATE-----\nMIIB"])
@pytest.mark.parametrize("name", ["cert.pem", "ca.pem"])
def test_a_file_without_certificates_is_named(name: str, content: bytes, site: Path) -> None:
    (site / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(name)) as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.exit_code == 78


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--site.*--identity"):
        read_identity(tmp_path / "none", Party.SITE, NOW)


def test_an_encrypted_key_is_said_to_be_one(site: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write_key(site / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    with pytest.raises(IdentityError, match="without a passphrase") as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.UNREADABLE


def test_a_key_of_another_kind_is_not_the_certificates(site: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    write_key(site / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
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


def test_a_certificate_of_another_ca_is_refused(authority: Authority, site: Path) -> None:
    (site / "ca.pem").write_bytes(Authority.make("other").pem)
    with pytest.raises(IdentityError, match=r"'hospital-a'.*ca\.pem") as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.AUTHORITY


def test_a_certificate_is_no_ca(authority: Authority, site: Path, tmp_path: Path) -> None:
    (site / "ca.pem").write_bytes((site / "cert.pem").read_bytes())
    with pytest.raises(IdentityError) as found:
        read_identity(site, Party.SITE, NOW)
    assert found.value.problem is IdentityProblem.AUTHORITY


def test_two_cas_are_trusted_while_one_takes_over(authority: Authority, site: Path) -> None:
    (site / "ca.pem").write_bytes(Authority.make("new").pem + authority.pem)
    assert read_identity(site, Party.SITE, NOW).certificate.name == "hospital-a"


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


@pytest.mark.parametrize("now", [BEGINS, ENDS])
def test_both_ends_of_the_validity_count(now: datetime, site: Path) -> None:
    assert read_identity(site, Party.SITE, now).certificate.name == "hospital-a"


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
    [
        (),
        ("https://site/a",),
        ("protofed://clinic/a",),
        ("site/a",),
        ("protofed://site/a", "protofed://operator/a"),
    ],
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
