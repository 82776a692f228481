"""Certificates from request to installation. Keys are made where they are used; one small file goes each way.

A party sends the request (a CSR) to the operator of the CA and gets the bundle back: its certificate and all CA
certificates. Neither is secret.

To replace a CA without a stop, renew every certificate three times:

1. with the old CA and `--also` the new one, so that everybody trusts both;
2. with the new CA and `--also` the old one;
3. with the new CA alone.

The certificate authority (CA) is a folder, on a machine that needs no network:

ca-key.pem   its key, readable by its owner only (0600)      issued/   every certificate that it signed
ca.pem       its certificate, which all parties get
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError, short
from protofed.common.ids import check_id
from protofed.common.pki.certificate import USAGES, differences, is_authority, load
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
from protofed.deploy.certs.request import Request, check_hosts, make_request, read_request, subject

CA_CERTIFICATE, CA_KEY, ISSUED = "ca.pem", "ca-key.pem", "issued"
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
    if certs_files.is_there(folder / CA_KEY) and not certs_files.is_there(folder / CA_CERTIFICATE):
        raise ConfigError(
            f"{folder} has a CA's key but lacks its certificate {CA_CERTIFICATE}. Restore the certificate. If "
            f"`protofed certs init` was interrupted, there never was a certificate: remove {folder / CA_KEY}"
        )
    if certs_files.is_there(folder / CA_CERTIFICATE):
        raise ConfigError(
            f"{folder} has a CA already: `protofed certs issue` and `sign` use it; take another folder for a new one"
        )
    if not (name.isprintable() and 0 < len(name.strip()) <= 48):
        raise ConfigError(f"name {short(name)!r}: expected 1 to 48 printable characters")
    key = certs_files.make_key(folder / CA_KEY, passphrase)
    certificate = _self_signed(name.strip(), key, now or datetime.now(UTC), days)
    certs_files.make_folder(folder / ISSUED)
    storage_files.write(folder / CA_CERTIFICATE, certificate.public_bytes(Encoding.PEM))
    return Authority(folder, certificate, key)


def read_authority(folder: Path, passphrase: bytes | None = None) -> Authority:
    """Read the CA in a folder.

    Raises:
        ConfigError: there is none, its key cannot be read, or the key belongs to another certificate.
    """
    if not certs_files.is_there(folder / CA_CERTIFICATE):
        raise ConfigError(f"{folder} has no CA; make one by `protofed certs init --ca {folder}`")
    certificate = load(certs_files.read(folder / CA_CERTIFICATE), str(folder / CA_CERTIFICATE))[0]
    key = certs_files.read_key(folder / CA_KEY, passphrase)
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"{folder / CA_KEY} is not the key of {folder / CA_CERTIFICATE}; restore the key of this certificate"
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
            f"the CA in {authority.folder} is valid from {stamp(begins)} until {stamp(ends)}, but it is {stamp(now)} "
            "now. Make a new CA with `protofed certs init`, or correct this machine's clock"
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


@dataclass(frozen=True)
class Bundle:
    """The CA's answer to a request: the party's certificate and the CAs to trust."""

    certificate: Certificate
    certificate_pem: bytes
    authorities: tuple[x509.Certificate, ...]

    @property
    def authorities_pem(self) -> bytes:
        """The CA certificates as PEM text, as in ca.pem."""
        return b"".join(authority.public_bytes(Encoding.PEM) for authority in self.authorities)


def request(folder: Path, party: Party, name: str, hosts: Sequence[str] = ()) -> bytes:
    """A request for the first certificate of an identity folder, as PEM text; makes the folder's key if it has none.

    Args:
        hosts: DNS names and addresses at which sites dial a server; other parties have none.

    Raises:
        ConfigError: the folder has a certificate already, or the name or a host is invalid.
    """
    check_issue(folder, party, name, hosts)
    return make_request(party, name, hosts, _key(folder / KEY))


def renew(folder: Path) -> bytes:
    """A request for the next certificate of an identity folder: a new key; the same party, name and hosts.

    The old key and certificate stay in use until `install`.

    Raises:
        ConfigError: the folder has no certificate.
    """
    if not certs_files.is_there(folder / CERTIFICATE):
        raise ConfigError(f"{folder} has no certificate to renew; `protofed certs request` asks for the first one")
    old = read_certificate(certs_files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))
    return make_request(old.party, old.name, old.hosts, _key(folder / NEXT_KEY))


def sign_request(
    request: Request,
    authority: Authority,
    days: int = 365,
    also: bytes | None = None,
    now: datetime | None = None,
    *,
    renewal: bool = False,
) -> bytes:
    """Sign a request; the bundle as PEM text. A copy of the certificate stays in the CA's folder `issued`.

    Args:
        also: PEM text of further CA certificates that the party shall trust, while a CA is being replaced.
        renewal: allow that the CA has signed a certificate of this party and name that is still valid.

    Raises:
        ConfigError: the CA is not valid now, or `also` has certificates that are not a CA's. Or the name has a
            certificate, and this is no renewal.
    """
    now = now or datetime.now(UTC)
    further = load(also, "--also") if also else []
    if not all(is_authority(certificate) for certificate in further):
        raise ConfigError("--also: expected CA certificates only, such as the ca.pem of the other CA")
    if not renewal:
        _check_first(request, authority, now)
    pem = sign(authority, request, days, now)
    issued = read_certificate(pem, "certificate")
    storage_files.write(authority.folder / ISSUED / f"{issued.party}-{issued.name}-{issued.fingerprint[:16]}.pem", pem)
    header = f"protofed: {issued}, valid until {stamp(issued.not_after)}\nfingerprint: {issued.fingerprint}\n"
    return header.encode() + pem + _joined((authority.certificate, *further))


def issue(
    authority: Authority,
    folder: Path,
    party: Party,
    name: str,
    hosts: Sequence[str] = (),
    days: int = 365,
    *,
    renewal: bool = False,
) -> Bundle:
    """Make the identity of a party that lives on the CA's own machine: its key, the certificate, both installed.

    Args:
        renewal: as of `sign_request`; an interrupted call signs for the name again.

    Raises:
        ConfigError: the folder has a certificate, the name has a valid one, or the name or a host is invalid.
        StateError: a folder cannot be made or written.
    """
    check_issue(folder, party, name, hosts)
    csr = read_request(request(folder, party, name, hosts), "the request")
    return install(folder, sign_request(csr, authority, days, renewal=renewal))


def check_issue(folder: Path, party: Party, name: str, hosts: Sequence[str] = ()) -> None:
    """Check, before anything is made, that a party's identity can be made in a folder.

    Raises:
        ConfigError: the folder has a certificate already, or the name or a host is invalid.
    """
    if certs_files.is_there(folder / CERTIFICATE):
        raise ConfigError(
            f"{folder} has a certificate already; `protofed certs request --renew --identity {folder}` asks for the "
            "next one"
        )
    check_id(party, name)
    check_hosts(party, hosts)


def read_bundle(data: bytes, where: str, *, with_authorities: bool = True) -> Bundle:
    """Parse a bundle; dates and signatures are checked by `install`.

    Args:
        with_authorities: it must have a CA's certificate; an identity's cert.pem has none.

    Raises:
        ConfigError: it is no bundle; `where` names it.
    """
    certs_files.refuse_keys(data, where)
    if b"CERTIFICATE REQUEST-----" in data:
        raise ConfigError(f"{where} is the request; send it to the operator, who signs it and sends a bundle")
    certificates = load(data, where)
    authorities = tuple(certificate for certificate in certificates if is_authority(certificate))
    pems = [certificate.public_bytes(Encoding.PEM) for certificate in certificates if not is_authority(certificate)]
    if len(pems) != 1 or (with_authorities and not authorities):
        raise ConfigError(
            f"{where}: {len(pems)} certificates and {len(authorities)} CA certificates; expected one and at least one, "
            "as `protofed certs sign` writes them"
        )
    return Bundle(read_certificate(pems[0], where), pems[0], authorities)


def install(
    folder: Path,
    data: bytes,
    *,
    new_ca: bool = False,
    ca_codes: Sequence[str] = (),
    now: datetime | None = None,
) -> Bundle:
    """Install a bundle; a daemon that reads the folder meanwhile finds the old or the new set, never a mixture.

    Args:
        data: the bundle's bytes.
        new_ca: allow that the set of trusted CAs changes.
        ca_codes: codes of the keys of all CAs that may be in the bundle, as the operator read them out; none: any.

    Raises:
        ConfigError: the data are no bundle, or not for this folder's key, party and name. Or the certificate is not
            valid now, a CA is not in `ca_codes`, or the CAs change without `new_ca`.
        StateError: the folder cannot be entered or written; installing again continues where it stopped.
    """
    bundle = read_bundle(data, "the bundle")
    _check_authorities(bundle, ca_codes)
    key = _own_key(folder, bundle)
    _check_same_name(folder, bundle.certificate)
    files = {CERTIFICATE: bundle.certificate_pem, KEY: key.read_bytes(), AUTHORITIES: bundle.authorities_pem}
    check_identity(folder, files, bundle.certificate.party, now or datetime.now(UTC))
    before = _authorities(folder)
    if before and set(before) != set(bundle.authorities) and not new_ca:
        raise ConfigError(_changed(before, bundle.authorities))
    # The old certificate needs the old CAs, the new one the new CAs: both are there while the certificates change.
    storage_files.write(folder / AUTHORITIES, _joined((*bundle.authorities, *before)))
    # From here on key.next.pem is the key: `identity` uses whichever of the two belongs to the certificate.
    storage_files.write(folder / CERTIFICATE, bundle.certificate_pem)
    key.replace(folder / KEY)
    storage_files.write(folder / AUTHORITIES, bundle.authorities_pem)
    return bundle


def authority_name(authority: x509.Certificate) -> str:
    """A CA's name and the code of its key, for people to compare."""
    return f"{_common_name(authority)} (key {certs_files.key_code(authority.public_key())})"


def _check_first(request: Request, authority: Authority, now: datetime) -> None:
    for path in (authority.folder / ISSUED).glob(f"{request.party}-{request.name}-*.pem"):
        other = read_certificate(certs_files.read(path), str(path))
        if (other.party, other.name) == (request.party, request.name) and other.not_after > now:
            raise ConfigError(
                f"this CA has signed a certificate of {request.party} '{request.name}' that is valid until "
                f"{stamp(other.not_after)} ({path}). If {request.party} '{request.name}' itself asks for another one, "
                "sign with --renewal. Otherwise do not sign, and ask who sent the request"
            )


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    return certs_files.read_key(path) if path.exists() else certs_files.make_key(path)


def _own_key(folder: Path, bundle: Bundle) -> Path:
    signed = load(bundle.certificate_pem, "the bundle")[0].public_key()
    paths = [path for path in (folder / KEY, folder / NEXT_KEY) if path.exists()]
    keys = {path: certs_files.read_key(path).public_key() for path in paths}
    for path, key in keys.items():
        if key == signed:
            return path
    expected = certs_files.key_code(signed)
    present = " or ".join(certs_files.key_code(key) for key in keys.values()) or "none"
    raise ConfigError(
        f"the bundle with the {bundle.certificate} is for another key ({expected}) than {folder} has ({present}); "
        "give the --identity folder in which the request was made"
    )


def _check_authorities(bundle: Bundle, codes: Sequence[str]) -> None:
    """Every CA of a bundle, for one that somebody added on its way could let a foreign server in."""
    for authority in bundle.authorities if codes else ():
        fingerprint = certs_files.key_fingerprint(authority.public_key())
        if all(differences(code, fingerprint) for code in codes):
            raise ConfigError(
                f"the bundle trusts {authority_name(authority)}, which is not the CA whose code you gave; do not "
                "install it, and ask the operator over the telephone"
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
    added = [f"new: {authority_name(authority)}" for authority in after if authority not in before]
    removed = [f"gone: {authority_name(authority)}" for authority in before if authority not in after]
    return (
        f"the bundle changes which CAs this party trusts; {'; '.join([*added, *removed])}. Ask the operator over the "
        "telephone whether this is meant, then install it with --new-ca"
    )


def _joined(authorities: Sequence[x509.Certificate]) -> bytes:
    return b"".join(authority.public_bytes(Encoding.PEM) for authority in dict.fromkeys(authorities))


def _common_name(authority: x509.Certificate) -> str:
    names = authority.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
    return str(names[0].value) if names else "CA"
