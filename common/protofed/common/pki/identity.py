"""A party's identity: a folder with its certificate, its private key and the authorities (CAs) that it trusts.

    cert.pem   the certificate        key.pem   its private key, for its owner only (0600)
    ca.pem     one CA certificate, or several while one CA takes over from another

A renewal's key waits as `key.next.pem` and is used as soon as cert.pem is its certificate, so every step of an
installation leaves a usable folder.

An `Endorsement` ties a site's identity for secure aggregation to its certificate, whose key signs site and identity.
That identity outlives certificates, which are renewed; who has pinned it needs the endorsement no more.

An HTTPS endpoint has its certificate from such a folder, too, and loads it again when it is renewed.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import structlog
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError, SecureAggregationError
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import (
    UNREADABLE,
    Certificate,
    Party,
    fingerprint,
    has_usage,
    load,
    read_certificate,
    signer,
)


class IdentityProblem(StrEnum):
    """What is wrong with an identity's folder; codes of `doctor` and of the logs."""

    MISSING = "identity-missing"
    UNREADABLE = "identity-unreadable"
    ANOTHERS = "identity-of-another"  # another party, site or key usage
    KEY_OPEN = "key-readable-by-others"
    KEY_OTHER = "key-mismatch"
    EARLY = "certificate-not-yet-valid"
    EXPIRED = "certificate-expired"
    AUTHORITY = "certificate-of-another-authority"
    AUTHORITY_DATES = "authority-not-valid"


class IdentityError(ConfigError):
    """An identity cannot be used."""

    def __init__(self, problem: IdentityProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


__all__ = [
    "Certificate",
    "Identity",
    "LiveIdentity",
    "Party",
    "check_dates",
    "check_identity",
    "fingerprint",
    "read_certificate",
    "read_identity",
]

CERTIFICATE, KEY, NEXT_KEY, AUTHORITIES = "cert.pem", "key.pem", "key.next.pem", "ca.pem"
NAMES = (CERTIFICATE, KEY, NEXT_KEY, AUTHORITIES)
Files: TypeAlias = Mapping[str, bytes]
Version: TypeAlias = tuple[tuple[int, ...] | None, ...]
log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """A folder's certificate, key and CAs, checked against each other."""

    folder: Path
    certificate: Certificate
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    authorities_pem: bytes


def read_identity(folder: Path, party: Party, now: datetime) -> Identity:
    """The identity in a folder, checked for everything that would make a TLS handshake fail without a reason.

    Raises:
        ConfigError: mostly an IdentityError with its problem: a file is missing or unreadable, others can read the key,
            it is not the certificate's, or the certificate is another party's, made for another use, not signed by a CA
            in ca.pem, or not valid now.
    """
    # All files of one moment: an installation may replace them one by one meanwhile.
    for _ in range(10):
        before = _version(folder)
        files = {name: data for name in NAMES if (data := _read(folder / name)) is not None}
        if _version(folder) == before:
            break
    _check_private(folder)
    return check_identity(folder, files, party, now)


def check_identity(folder: Path, files: Files, party: Party, now: datetime) -> Identity:
    """The identity that a folder with these files would have; an installation checks it before it writes them.

    Raises:
        ConfigError: as of `read_identity`, except for the key's permissions.
    """
    _check_complete(folder, files, party)
    path = folder / CERTIFICATE
    certificate = read_certificate(files[CERTIFICATE], str(path))
    if certificate.party != party:
        article = "an" if party is Party.OPERATOR else "a"
        raise IdentityError(
            IdentityProblem.ANOTHERS,
            f"{path} is the {certificate}; expected {article} {party}'s. Give another --identity folder, or make "
            f"one with `protofed certs request --{party}`",
        )
    if not has_usage(load(files[CERTIFICATE], str(path))[0], party):
        raise IdentityError(
            IdentityProblem.ANOTHERS,
            f"{path}: the {certificate} is not made for {_usage(party)}; {_advice(folder)}",
        )
    key = _matching_key(folder, files)
    check_dates(certificate, folder, now)
    _check_signer(folder, files, certificate, now)
    return Identity(folder, certificate, files[CERTIFICATE], key, files[AUTHORITIES])


def check_dates(certificate: Certificate, folder: Path, now: datetime) -> None:
    """Check that the certificate is valid now.

    Raises:
        IdentityError: it is not valid yet, or has expired.
    """
    dates = f"valid from {stamp(certificate.not_before)} until {stamp(certificate.not_after)}; it is {stamp(now)} now"
    if now < certificate.not_before:
        text = f"the {certificate} in {folder} is not yet valid: {dates}. Is this machine's clock right?"
        raise IdentityError(IdentityProblem.EARLY, text)
    if now > certificate.not_after:
        raise IdentityError(
            IdentityProblem.EXPIRED, f"the {certificate} in {folder} has expired: {dates}. {_advice(folder)}"
        )


class LiveIdentity:
    """A folder's identity, reloaded whenever its files change, so that a renewal needs no restart.

    New files that cannot be used are logged once, and the last usable ones stay. Threads may share it.

    Args:
        keeps_name: a certificate of another name is no renewal, and is not used.

    Attributes:
        problem: why the files that `current` found last are not used; empty: they are.

    Raises:
        ConfigError: at the start, the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        party: Party,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        *,
        keeps_name: bool = False,
    ) -> None:
        self._folder, self._party, self._clock, self._keeps_name = folder, party, clock, keeps_name
        self._lock, self.problem = threading.Lock(), ""
        self._version = _version(folder)
        self._refused: Version | None = None
        self._identity = read_identity(folder, party, clock())

    def current(self) -> Identity:
        """The newest usable identity, the same object while nothing changes; it may have expired since it was read."""
        with self._lock:
            version = _version(self._folder)
            if version != self._version:
                self._renew(version)
            else:
                self._refused, self.problem = None, ""
            return self._identity

    def _renew(self, version: Version) -> None:
        try:
            identity = read_identity(self._folder, self._party, self._clock())
            if self._keeps_name:
                self._check_name(identity.certificate)
        except ConfigError as error:
            if version != self._refused:
                log.warning("a renewed identity cannot be used", why=str(error), kept=self._fingerprint())
            self._refused, self.problem = version, str(error)
            return
        if identity != self._identity:
            self._identity = identity
            log.info("identity renewed", folder=str(self._folder), fingerprint=self._fingerprint())
        self._version, self._refused, self.problem = version, None, ""

    def _check_name(self, certificate: Certificate) -> None:
        """Check that a certificate is a renewal of the certificate in use.

        Raises:
            IdentityError: it is of another name.
        """
        if certificate.name != self._identity.certificate.name:
            raise IdentityError(
                IdentityProblem.ANOTHERS,
                f"{self._folder / CERTIFICATE} is the {certificate} now; expected a renewal of the "
                f"{self._identity.certificate}. To act as another party, start this program again",
            )

    def _fingerprint(self) -> str:
        return self._identity.certificate.fingerprint[:16]


def _version(folder: Path) -> Version:
    """A value that changes whenever one of the files is written, replaced or removed."""
    return tuple(_stat(folder / name) for name in NAMES)


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mode, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}; expected a file of this account's"
        raise IdentityError(IdentityProblem.UNREADABLE, text) from error


def _check_complete(folder: Path, files: Files, party: Party) -> None:
    if CERTIFICATE not in files:
        install = f"`protofed certs install BUNDLE --identity {folder}` once the operator has signed the request"
        request = f"make one by `protofed certs request --{party} ... --identity {folder}`, then `certs install`"
        advice = install if KEY in files else request
        raise IdentityError(IdentityProblem.MISSING, f"certificate missing: {folder / CERTIFICATE}; {advice}")
    if KEY not in files and NEXT_KEY not in files:
        raise IdentityError(
            IdentityProblem.MISSING, f"key missing: {folder / KEY}; bring it back, or {_advice(folder)}"
        )
    if AUTHORITIES not in files:
        text = f"CA certificate missing: {folder / AUTHORITIES}; `protofed certs install BUNDLE` writes it again"
        raise IdentityError(IdentityProblem.MISSING, text)


def _check_private(folder: Path) -> None:
    for path in (folder / KEY, folder / NEXT_KEY):
        if (version := _stat(path)) is not None and (mode := version[0] & 0o777) & 0o077:
            raise IdentityError(
                IdentityProblem.KEY_OPEN,
                f"{path} can be read or changed by others (mode {mode:04o}); expected 0600: `chmod 600 {path}`, and if "
                f"somebody may have read it, {_advice(folder)}",
            )


def _matching_key(folder: Path, files: Files) -> bytes:
    certified = load(files[CERTIFICATE], CERTIFICATE)[0].public_key()
    expected = certified.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for name in (KEY, NEXT_KEY):
        if name in files and _public_key(files[name], folder / name) == expected:
            return files[name]
    text = f"{folder / KEY} is not the key of {folder / CERTIFICATE}. Restore the key that belongs to it, or "
    raise IdentityError(IdentityProblem.KEY_OTHER, text + _advice(folder))


def _public_key(key: bytes, path: Path) -> bytes:
    try:
        return (
            load_pem_private_key(key, None).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        )
    except UNREADABLE as error:
        text = f"{path} cannot be read as a key; expected PEM text without a passphrase"
        raise IdentityError(IdentityProblem.UNREADABLE, text) from error


def _check_signer(folder: Path, files: Files, certificate: Certificate, now: datetime) -> None:
    authority = signer(load(files[CERTIFICATE], CERTIFICATE)[0], load(files[AUTHORITIES], str(folder / AUTHORITIES)))
    if authority is None:
        text = f"the {certificate} in {folder} is not signed by a CA in {AUTHORITIES}; "
        text += "install the bundle that the operator sent, or ask for it again"
        raise IdentityError(IdentityProblem.AUTHORITY, text)
    not_before, not_after = authority.not_valid_before_utc, authority.not_valid_after_utc
    if not not_before <= now <= not_after:
        raise IdentityError(
            IdentityProblem.AUTHORITY_DATES,
            f"the CA that signed the {certificate} in {folder} is valid from {stamp(not_before)} until "
            f"{stamp(not_after)}; it is {stamp(now)} now. Is this machine's clock right? If so, ask for a bundle of "
            "the new CA",
        )


def _usage(party: Party) -> str:
    return "answering as a server (serverAuth)" if party is Party.SERVER else "dialling a server (clientAuth)"


def _advice(folder: Path) -> str:
    return f"ask for a new one by `protofed certs request --renew --identity {folder}`"


_PURPOSE = b"protofed secure aggregation identity"


@dataclass(frozen=True)
class Endorsement:
    """A site's certificate, PEM, and the signature by its key; both public."""

    certificate: bytes
    signature: bytes


def endorsed(identity: Identity, key: bytes) -> Endorsement:
    """The site's endorsement of its identity for sums. ECDSA draws at random: other bytes at each call.

    Args:
        key: public half of the identity, Ed25519, raw.

    Raises:
        ConfigError: the certificate's key is not of an elliptic curve.
    """
    private = load_pem_private_key(identity.key_pem, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"the key of the {identity.certificate} cannot endorse the identity for secure aggregation: expected an "
            "elliptic-curve key, as `protofed certs request` makes it"
        )
    signature = private.sign(_statement(identity.certificate.name, key), ec.ECDSA(SHA256()))
    return Endorsement(identity.certificate_pem, signature)


def check_endorsement(endorsement: Endorsement, site: SiteId, key: bytes, authorities: bytes, now: datetime) -> None:
    """Check that the holder of a site's certificate has said that this is the site's identity.

    Args:
        key: as of `endorsed`.
        authorities: the CAs that this site trusts, PEM.

    Raises:
        SecureAggregationError: the certificate is not the site's, not valid or of another CA; or did not sign.
    """
    try:
        certificate = read_certificate(endorsement.certificate, f"the certificate in the name of {site}")
        x509 = load(endorsement.certificate, "certificate")[0]
        trusted = signer(x509, load(authorities, "ca.pem")) is not None
    except ConfigError as error:
        raise _unendorsed(site, str(error)) from error
    if (certificate.party, certificate.name) != (Party.SITE, site) or not has_usage(x509, Party.SITE):
        raise _unendorsed(site, f"it comes with the {certificate}")
    if not trusted or not certificate.not_before <= now <= certificate.not_after:
        raise _unendorsed(site, f"another CA than this site's issued the {certificate}, or it is not valid now")
    public = x509.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise _unendorsed(site, "its certificate's key is not of an elliptic curve")
    try:
        public.verify(endorsement.signature, _statement(site, key), ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise _unendorsed(site, "its certificate's key did not sign it") from error


def _statement(site: SiteId, key: bytes) -> bytes:
    return b"\0".join((_PURPOSE, site.encode(), key))  # no site's id has a zero byte, and keys have one length


def _unendorsed(site: SiteId, why: str) -> SecureAggregationError:
    return SecureAggregationError(
        "unendorsed", f"the identity in the name of {site} is not endorsed by that site: {why}"
    )


class Https:
    """A folder's certificate and key, reloaded when they change.

    New files that cannot be used are logged, and the last usable ones stay. Threads may share it.

    Raises:
        ConfigError: at the start, they cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._version = self._file_versions()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """A TLS context with the newest usable certificate; called for every connection."""
        with self._lock:
            if (version := self._file_versions()) != self._version:
                self._version = version
                try:
                    self._context = self._load()
                except ConfigError as error:
                    log.warning("the new certificate for https cannot be used; the last one stays", why=str(error))
            return self._context

    def _file_versions(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_file_stamp(self._folder / name) for name in (CERTIFICATE, KEY, NEXT_KEY))

    def _load(self) -> ssl.SSLContext:
        certificate = self._folder / CERTIFICATE
        keys = [path for name in (KEY, NEXT_KEY) if (path := self._folder / name).exists()]
        # Either key, as in `identity`: a renewal installs the certificate before it replaces the key.
        for key in keys:
            check_private(key, "`chmod 600` it")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                # An empty password: without one, OpenSSL would ask on the terminal.
                context.load_cert_chain(certificate, key, password=lambda: "")
            except (OSError, ValueError):  # no PEM, not the certificate's key, or with a passphrase
                continue
            return context
        raise ConfigError(f"{self._folder}: expected {CERTIFICATE}, and its private key in {KEY} without a passphrase")


def check_private(path: Path, remedy: str) -> None:
    """Check that only the owner can read or change a file.

    Args:
        remedy: what to do about it, for the error.

    Raises:
        ConfigError: others can, or the file is missing.
    """
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file of this account's") from error
    if mode & 0o077:
        raise ConfigError(f"{path} can be read or changed by others (mode {mode:04o}); expected 0600: {remedy}")


def read_secret(path: Path, what: str) -> str:
    """The one line of a file that only its owner can read, such as a token.

    Args:
        what: it holds, for errors, which never repeat it.

    Raises:
        ConfigError: others can read it, it is missing, or it is not one line of printable ASCII.
    """
    check_private(path, f"`chmod 600 {path}`, and if somebody may have read it, write another one")
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file with the {what}") from error
    if not text or not text.isascii() or not text.decode("ascii").isprintable():
        raise ConfigError(f"{path}: expected one line with the {what}, in printable ASCII")
    return text.decode("ascii")


def _file_stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
