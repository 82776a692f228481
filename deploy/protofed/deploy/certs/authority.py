"""The certificate authority (CA) of a federation: a folder, on a machine that needs no network.

ca-key.pem   its key, readable by its owner only (0600)      issued/   every certificate that it signed
ca.pem       its certificate, which all parties get
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protofed.common.errors import ConfigError, short
from protofed.common.forms import stamp
from protofed.common.pki.certificate import USAGES, load
from protofed.common.storage import files as storage_files
from protofed.deploy.certs import files as certs_files
from protofed.deploy.certs.request import Request, subject

CERTIFICATE, KEY, ISSUED = "ca.pem", "ca-key.pem", "issued"
SKEW = timedelta(hours=1)  # certificates begin this much in the past, because the hospitals' clocks differ
NO_OTHER_USAGE = dict.fromkeys(  # x509.KeyUsage wants each of them named
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)


@dataclass(frozen=True)
class Authority:
    """A CA with its key, which never leaves the CA's machine."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        """Its certificate as PEM text."""
        return self.certificate.public_bytes(Encoding.PEM)


def make_authority(
    folder: Path,
    name: str = "protofed CA",
    days: int = 3650,
    passphrase: bytes | None = None,
    now: datetime | None = None,
) -> Authority:
    """Make a new CA in `folder`.

    Args:
        name: shown to people; digits of the key's fingerprint are added, so that no two CAs have the same name.
        days: until its certificate ends.
        passphrase: encrypts its key; None: the key is stored unencrypted.

    Raises:
        ConfigError: the folder has a CA already, or part of one, or the name is invalid.
        StateError: the folder cannot be entered or written.
    """
    if certs_files.is_there(folder / KEY) and not certs_files.is_there(folder / CERTIFICATE):
        raise ConfigError(
            f"{folder} has a CA's key and not its certificate {CERTIFICATE}: bring that back; if there never was one, "
            f"for `protofed certs init` was interrupted, remove {folder / KEY}"
        )
    if certs_files.is_there(folder / CERTIFICATE):
        raise ConfigError(
            f"{folder} has a CA already: `protofed certs issue` and `sign` use it; take another folder for a new one"
        )
    if not (name.isprintable() and 0 < len(name.strip()) <= 48):
        raise ConfigError(f"name {short(name)!r}: expected 1 to 48 printable characters")
    key = certs_files.make_key(folder / KEY, passphrase)
    certificate = _self_signed(name.strip(), key, now or datetime.now(UTC), days)
    certs_files.make_folder(folder / ISSUED)
    storage_files.write(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM))
    return Authority(folder, certificate, key)


def read_authority(folder: Path, passphrase: bytes | None = None) -> Authority:
    """Read the CA in a folder.

    Raises:
        ConfigError: there is none, its key cannot be read, or the key belongs to another certificate.
    """
    if not certs_files.is_there(folder / CERTIFICATE):
        raise ConfigError(f"{folder} has no CA; make one by `protofed certs init --ca {folder}`")
    certificate = load(certs_files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))[0]
    key = certs_files.read_key(folder / KEY, passphrase)
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"{folder / KEY} is not the key of {folder / CERTIFICATE}; bring back the one that belongs to it"
        )
    return Authority(folder, certificate, key)


def sign(authority: Authority, request: Request, days: int, now: datetime) -> bytes:
    """Sign a request; the certificate as PEM text. It is valid for `days`, but never beyond the CA's own end.

    Raises:
        ConfigError: the CA is not valid now.
    """
    begins, ends = authority.certificate.not_valid_before_utc, authority.certificate.not_valid_after_utc
    if not begins <= now <= ends:
        raise ConfigError(
            f"the CA in {authority.folder} is valid from {stamp(begins)} until {stamp(ends)}; it is {stamp(now)} now: "
            "make a new one by `protofed certs init`, or set this machine's clock"
        )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        # Within the CA's dates: outside of them the chain would not verify.
        _builder(max(begins, now - SKEW), min(ends, now + timedelta(days=days)))
        .subject_name(subject(request.name))
        .issuer_name(authority.certificate.subject)
        .public_key(request.key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_others=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([USAGES[request.party]]), critical=False)
        .add_extension(request.names, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(request.key), critical=False)
        .add_extension(issuer, critical=False)
    )
    return builder.sign(authority.key, SHA256()).public_bytes(Encoding.PEM)


def _self_signed(name: str, key: ec.EllipticCurvePrivateKey, now: datetime, days: int) -> x509.Certificate:
    public = key.public_key()
    full_name = subject(f"{name} {certs_files.key_fingerprint(public)[:8]}")
    builder = (
        _builder(now - SKEW, now + timedelta(days=days))
        .subject_name(full_name)
        .issuer_name(full_name)
        .public_key(public)
        # path_length=0: it signs parties, never another CA.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_others=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return builder.sign(key, SHA256())


def _builder(begins: datetime, ends: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(begins).not_valid_after(ends)


def _usage(*, signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others, key_cert_sign=signs_others, crl_sign=signs_others, **NO_OTHER_USAGE
    )
