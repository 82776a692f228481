"""Every way in which an identity folder cannot be used is said before anything is dialled, with the remedy."""

from __future__ import annotations

import os
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
from protofed.common.pki.identity import Party, fingerprint, read_certificate, read_identity


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
BROKEN: list[tuple[str, Break, str]] = [
    ("no certificate", lambda f: (f / "cert.pem").unlink(), r"certificate missing: .*cert\.pem.*certs install BUNDLE"),
    ("no key", lambda f: (f / "key.pem").unlink(), r"key missing: .*key\.pem.*certs renew --identity"),
    ("no CA", lambda f: (f / "ca.pem").unlink(), r"CA certificate missing: .*ca\.pem.*certs install"),
    ("folder, not file", lambda f: make_a_folder_of(f / "ca.pem"), r"cannot read .*ca\.pem"),
    ("garbage", lambda f: (f / "cert.pem").write_text("hello"), r"cert\.pem cannot be read as a certificate.*BEGIN"),
    ("empty", lambda f: (f / "cert.pem").write_bytes(b""), r"cert\.pem cannot be read as a certificate"),
    ("cut", lambda f: os.truncate(f / "cert.pem", 200), r"cert\.pem cannot be read as a certificate"),
    ("garbage CA", lambda f: (f / "ca.pem").write_bytes(b"\0\xff"), r"ca\.pem cannot be read as a certificate"),
    (
        "garbage key",
        lambda f: (f / "key.pem").write_text("x"),
        r"key\.pem cannot be read as a key.*without a passphrase",
    ),
    (
        "foreign key",
        lambda f: (f / "key.pem").write_bytes(other_key()),
        r"key\.pem is not the key of .*cert\.pem.*renew",
    ),
    ("group", lambda f: (f / "key.pem").chmod(0o640), r"key\.pem can be read .*\(mode 0640\).*chmod 600 .*renew"),
    ("others", lambda f: (f / "key.pem").chmod(0o604), r"\(mode 0604\); expected 0600"),
]


@pytest.mark.parametrize(("break_it", "said"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_what_is_missing_or_damaged_is_said(break_it: Break, said: str, site: Path) -> None:
    break_it(site)
    with pytest.raises(ConfigError, match=said) as found:
        read_identity(site, Party.SITE, NOW)
    assert "PRIVATE" not in str(found.value)
    assert found.value.exit_code == 78


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--site.*--identity"):
        read_identity(tmp_path / "none", Party.SITE, NOW)


def test_an_encrypted_key_is_said_to_be_one(site: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write_key(site / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    with pytest.raises(ConfigError, match="expected PEM text without a passphrase"):
        read_identity(site, Party.SITE, NOW)


def test_a_key_of_another_kind_is_not_the_certificates(site: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    write_key(site / "key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="is not the key of"):
        read_identity(site, Party.SITE, NOW)


@pytest.mark.parametrize("party", [Party.OPERATOR, Party.SERVER])
def test_another_partys_certificate_is_refused(party: Party, site: Path) -> None:
    said = f"is the certificate of site 'hospital-a'; expected a {party}'s.*certs request --{party}"
    with pytest.raises(ConfigError, match=said):
        read_identity(site, party, NOW)


@pytest.mark.parametrize(
    ("party", "usage", "said"),
    [
        (Party.SITE, ExtendedKeyUsageOID.SERVER_AUTH, "not made for dialling a server (clientAuth)"),
        (Party.OPERATOR, ExtendedKeyUsageOID.CODE_SIGNING, "not made for dialling a server (clientAuth)"),
        (Party.SERVER, ExtendedKeyUsageOID.CLIENT_AUTH, "not made for answering as a server (serverAuth)"),
    ],
)
def test_a_certificate_for_another_use_is_refused(
    party: Party, usage: x509.ObjectIdentifier, said: str, authority: Authority, tmp_path: Path
) -> None:
    folder = authority.issue(tmp_path, party, "a", begins=BEGINS, ends=ENDS, usage=usage)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_identity(folder, party, NOW)


def test_a_certificate_of_another_ca_is_refused(authority: Authority, site: Path) -> None:
    (site / "ca.pem").write_bytes(Authority.make("other").pem)
    with pytest.raises(ConfigError, match=r"'hospital-a'.*ca\.pem"):
        read_identity(site, Party.SITE, NOW)


def test_a_certificate_is_no_ca(authority: Authority, site: Path, tmp_path: Path) -> None:
    (site / "ca.pem").write_bytes((site / "cert.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not signed by a CA"):
        read_identity(site, Party.SITE, NOW)


def test_two_cas_are_trusted_while_one_takes_over(authority: Authority, site: Path) -> None:
    (site / "ca.pem").write_bytes(Authority.make("new").pem + authority.pem)
    assert read_identity(site, Party.SITE, NOW).certificate.name == "hospital-a"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEGINS - timedelta(seconds=1), r"is not yet valid: {dates}; it is 2030-04-01T11:59:59Z now\. Is this.*clock"),
        (
            ENDS + timedelta(seconds=1),
            r"has expired: {dates}; it is 2030-05-31T12:00:01Z now\. .*certs renew --identity",
        ),
    ],
)
def test_dates_are_said_with_the_clocks(now: datetime, said: str, site: Path) -> None:
    dates = "valid from 2030-04-01T12:00:00Z until 2030-05-31T12:00:00Z"
    with pytest.raises(ConfigError, match=said.format(dates=dates)):
        read_identity(site, Party.SITE, now)


@pytest.mark.parametrize("now", [BEGINS, ENDS])
def test_both_ends_of_the_validity_count(now: datetime, site: Path) -> None:
    assert read_identity(site, Party.SITE, now).certificate.name == "hospital-a"


def test_an_expired_ca_is_said_to_be_the_reason(tmp_path: Path) -> None:
    old = Authority.make(begins=NOW - timedelta(days=9), ends=NOW - timedelta(days=1))
    folder = old.issue(tmp_path, Party.SITE, "a", begins=BEGINS, ends=ENDS)
    with pytest.raises(
        ConfigError, match=r"the CA that signed .* until 2030-04-30T12:00:00Z; it is 2030-05-01.* new CA"
    ):
        read_identity(folder, Party.SITE, NOW)


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
