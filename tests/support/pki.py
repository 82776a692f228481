"""Certificates for tests: good ones and, by the arguments, bad ones."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from protofed.common.pki.identity import Party

HOSTS = ("127.0.0.1", "localhost")
# A day in the middle of a certificate's time, and that in the middle of its CA's.
NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
BEGINS, ENDS = NOW - timedelta(days=30), NOW + timedelta(days=30)
FIRST, LAST = NOW - timedelta(days=3650), NOW + timedelta(days=3650)
SIGNING = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Authority:
    """A CA; made without protofed's own code, so that tests do not believe it twice."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str = "test CA", begins: datetime | None = None, ends: datetime | None = None) -> Authority:
        """A new one, valid from an hour ago for a year unless told otherwise."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(f"{name} {x509.random_serial_number():x}"[:48])
        certificate = (
            _builder(subject, begins, ends)
            .issuer_name(subject)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(SIGNING, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        folder: Path,
        party: Party,
        name: str,
        hosts: Sequence[str] = HOSTS,
        *,
        begins: datetime | None = None,
        ends: datetime | None = None,
        usage: ObjectIdentifier | None = None,
    ) -> Path:
        """Write cert.pem, key.pem (0600) and ca.pem to `folder` (made if missing), and give it back.

        Args:
            hosts: DNS names and addresses; only a server's certificate has them.
            begins, ends: from a day ago, since tests read the clock when they are collected, for a year from now.
            usage: of the key: serverAuth for a server, clientAuth else, unless told otherwise.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        server = party is Party.SERVER
        names = [x509.UniformResourceIdentifier(f"protofed://{party}/{name}"), *map(_host, hosts if server else ())]
        purpose = usage or (ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(_named(name), begins, ends)
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key.pem").touch(0o600)
        (folder / "key.pem").write_bytes(key_pem(key))
        (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        (folder / "ca.pem").write_bytes(self.pem)
        return folder


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key as it stands in key.pem."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(subject: x509.Name, begins: datetime | None, ends: datetime | None) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins or now - timedelta(days=1))
        .not_valid_after(ends or now + timedelta(days=365))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
