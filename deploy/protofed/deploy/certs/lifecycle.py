"""Certificates from request to installation: keys are made where they are used, and one small file goes each way.

The request (a CSR) goes from a party to the operator of the CA, the bundle (the certificate and all CA certificates)
comes back; neither is secret.

One CA takes over from another while all goes on: renew every certificate with the old CA and `--also` the new one, so
that everybody trusts both; then with the new one and `--also` the old one; then with the new one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import is_authority, load
from protofed.common.pki.identity import (
    AUTHORITIES,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    Certificate,
    Party,
    check_identity,
    read_certificate,
)
from protofed.common.storage import files as storage_files
from protofed.deploy.certs import files as certs_files
from protofed.deploy.certs.authority import ISSUED, Authority, make_authority, read_authority, sign
from protofed.deploy.certs.request import Request, check_hosts, make_request, read_request

__all__ = [
    "Authority",
    "Bundle",
    "authority_name",
    "install",
    "make_authority",
    "read_authority",
    "read_bundle",
    "read_request",
    "renew",
    "request",
    "sign_request",
]


@dataclass(frozen=True)
class Bundle:
    """What comes back for a request."""

    certificate: Certificate
    certificate_pem: bytes
    authorities: tuple[x509.Certificate, ...]

    @property
    def authorities_pem(self) -> bytes:
        """As in ca.pem."""
        return b"".join(authority.public_bytes(Encoding.PEM) for authority in self.authorities)


def request(folder: Path, party: Party, name: str, hosts: Sequence[str] = ()) -> bytes:
    """A request for the first certificate of an identity folder, as PEM text; makes its key, or takes the one there.

    Args:
        hosts: DNS names and addresses at which a server is dialled; nobody else has any.

    Raises:
        ConfigError: the folder has a certificate already, or the name or a host is none.
    """
    if (folder / CERTIFICATE).exists():
        raise ConfigError(
            f"{folder} has a certificate already; `protofed certs renew --identity {folder}` asks for the next one"
        )
    check_hosts(party, hosts)
    return make_request(party, name, hosts, _key(folder / KEY))


def renew(folder: Path) -> bytes:
    """A request for the next certificate of an identity folder: a new key, the same party, name and hosts.

    Raises:
        ConfigError: the folder has no certificate.
    """
    if not (folder / CERTIFICATE).exists():
        raise ConfigError(f"{folder} has no certificate to renew; `protofed certs request` asks for the first one")
    old = read_certificate(certs_files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))
    return make_request(old.party, old.name, old.hosts, _key(folder / NEXT_KEY))


def sign_request(
    asked: Request, authority: Authority, days: int = 365, also: bytes | None = None, now: datetime | None = None
) -> bytes:
    """The bundle for a request, as PEM text; a copy of the certificate stays in the CA's folder `issued`.

    Args:
        also: further CA certificates for everybody to trust, while one CA takes over from another.

    Raises:
        ConfigError: the CA is not valid now, or `also` has something else than CA certificates.
    """
    others = load(also, "--also") if also else []
    if not all(is_authority(one) for one in others):
        raise ConfigError("--also: expected CA certificates only, such as the ca.pem of the other CA")
    pem = sign(authority, asked, days, now or datetime.now(UTC))
    made = read_certificate(pem, "certificate")
    storage_files.write(authority.folder / ISSUED / f"{made.party}-{made.name}-{made.fingerprint[:16]}.pem", pem)
    told = f"protofed: {made}, valid until {stamp(made.not_after)}\nfingerprint: {made.fingerprint}\n"
    return told.encode() + pem + _joined((authority.certificate, *others))


def read_bundle(data: bytes, where: str) -> Bundle:
    """A bundle; dates and signatures are not checked yet.

    Raises:
        ConfigError: it is none.
    """
    certs_files.refuse_keys(data, where)
    if b"CERTIFICATE REQUEST-----" in data:
        raise ConfigError(f"{where} is the request; send it to the operator, who approves it and sends a bundle")
    found = load(data, where)
    authorities = tuple(one for one in found if is_authority(one))
    own = [one.public_bytes(Encoding.PEM) for one in found if not is_authority(one)]
    if len(own) != 1 or not authorities:
        raise ConfigError(
            f"{where}: {len(own)} certificates and {len(authorities)} CA certificates; expected one and at least one, "
            "as `protofed certs sign` writes them"
        )
    return Bundle(read_certificate(own[0], where), own[0], authorities)


def install(folder: Path, data: bytes, *, new_ca: bool = False, now: datetime | None = None) -> Bundle:
    """Put a bundle into use; a daemon that reads the folder meanwhile finds the old or the new set, never a mixture.

    Args:
        data: the bundle as it came.
        new_ca: whether other CAs than before may be trusted from now on.

    Raises:
        ConfigError: the bundle is none, or not for this folder's key, party and name, or it could not be used.
        OutOfSpace, DiskFailure: the folder cannot be written; the same again goes on where it stopped.
    """
    bundle = read_bundle(data, "the bundle")
    key = _own_key(folder, bundle)
    _check_same_name(folder, bundle.certificate)
    files = {CERTIFICATE: bundle.certificate_pem, KEY: key.read_bytes(), AUTHORITIES: bundle.authorities_pem}
    check_identity(folder, files, bundle.certificate.party, now or datetime.now(UTC))
    before = _authorities(folder)
    if before and set(before) != set(bundle.authorities) and not new_ca:
        raise ConfigError(_changed(before, bundle.authorities))
    # The old certificate needs the old CAs, the new one the new CAs: both are there while the certificates change.
    storage_files.write(folder / AUTHORITIES, _joined((*bundle.authorities, *before)))
    # From here on key.next.pem is the key (`identity` takes whichever of the two belongs to the certificate) ...
    storage_files.write(folder / CERTIFICATE, bundle.certificate_pem)
    # ... and now by its proper name.
    key.replace(folder / KEY)
    storage_files.write(folder / AUTHORITIES, bundle.authorities_pem)
    return bundle


def authority_name(authority: x509.Certificate) -> str:
    """As people know a CA: its name and its fingerprint."""
    return f"{_common_name(authority)} (SHA-256 {authority.fingerprint(SHA256()).hex()})"


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    return certs_files.read_key(path) if path.exists() else certs_files.make_key(path)


def _own_key(folder: Path, bundle: Bundle) -> Path:
    wanted = load(bundle.certificate_pem, "the bundle")[0].public_key()
    present = [path for path in (folder / KEY, folder / NEXT_KEY) if path.exists()]
    own = {path: certs_files.read_key(path).public_key() for path in present}
    for path, key in own.items():
        if key == wanted:
            return path
    shown = certs_files.key_fingerprint(wanted) if isinstance(wanted, ec.EllipticCurvePublicKey) else "no P-256 key"
    have = " or ".join(certs_files.key_fingerprint(key) for key in own.values()) or "none"
    raise ConfigError(
        f"the bundle with the {bundle.certificate} is for another key ({shown}) than {folder} has ({have}); "
        "give the --identity folder in which the request was made"
    )


def _check_same_name(folder: Path, new: Certificate) -> None:
    path = folder / CERTIFICATE
    if not path.exists():
        return
    old = read_certificate(certs_files.read(path), str(path))
    if (old.party, old.name) != (new.party, new.name):
        raise ConfigError(f"{folder} holds the {old}, the bundle the {new}; expected the same party and name")


def _authorities(folder: Path) -> tuple[x509.Certificate, ...]:
    path = folder / AUTHORITIES
    return tuple(load(certs_files.read(path), str(path))) if path.exists() else ()


def _changed(before: Sequence[x509.Certificate], after: Sequence[x509.Certificate]) -> str:
    added = [f"new: {authority_name(one)}" for one in after if one not in before]
    gone = [f"gone: {authority_name(one)}" for one in before if one not in after]
    return (
        f"the bundle changes which CAs this party trusts; {'; '.join([*added, *gone])}. Ask the operator over the "
        "telephone whether this is meant, then install it with --new-ca"
    )


def _joined(authorities: Sequence[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(Encoding.PEM) for one in dict.fromkeys(authorities))


def _common_name(authority: x509.Certificate) -> str:
    found = authority.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
    return str(found[0].value) if found else "CA"
