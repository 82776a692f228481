"""Who one is on the wire: a folder with a certificate, its key and the authorities (CAs) that one trusts.

    cert.pem   the certificate        key.pem   its private key, for its owner only (0600)
    ca.pem     one CA certificate, or several while one CA takes over from another

A renewed key waits as `key.next.pem`, and counts as the key as soon as cert.pem belongs to it: every step of an
installation leaves a folder that can be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import structlog
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError
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
    """Of an identity's folder."""

    MISSING = "identity-missing"
    UNREADABLE = "identity-unreadable"
    ANOTHERS = "identity-of-another"  # party, site or use
    KEY_OPEN = "key-readable-by-others"
    KEY_OTHER = "key-mismatch"
    EARLY = "certificate-not-yet-valid"
    EXPIRED = "certificate-expired"
    AUTHORITY = "certificate-of-another-authority"
    AUTHORITY_DATES = "authority-not-valid"


class IdentityError(ConfigError):
    """An identity that cannot be used."""

    def __init__(self, flaw: IdentityProblem, message: str) -> None:
        super().__init__(message)
        self.flaw = flaw


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
    """A folder's certificate, key and CAs, which fit each other."""

    folder: Path
    certificate: Certificate
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    authorities_pem: bytes


def read_identity(folder: Path, party: Party, now: datetime) -> Identity:
    """The identity in a folder, checked for all that would make a handshake fail without a word.

    Raises:
        ConfigError: a file is missing or unreadable, others can read the key, it is not the certificate's, or the
            certificate is another party's, made for another use, not signed by a CA in ca.pem, or not valid now.
    """
    for _ in range(10):
        before = _version(folder)
        files = {name: data for name in NAMES if (data := _read(folder / name)) is not None}
        if _version(folder) == before:
            break
    _check_private(folder)
    return check_identity(folder, files, party, now)


def check_identity(folder: Path, files: Files, party: Party, now: datetime) -> Identity:
    """The identity that a folder with these files has.

    Raises:
        ConfigError: as `read_identity`, but for who may read the key.
    """
    _check_complete(folder, files, party)
    path = folder / CERTIFICATE
    certificate = read_certificate(files[CERTIFICATE], str(path))
    if certificate.party != party:
        raise IdentityError(
            IdentityProblem.ANOTHERS,
            f"{path} is the {certificate}; expected a {party}'s: give another --identity folder, "
            f"or make one by `protofed certs request --{party}`",
        )
    if not has_usage(load(files[CERTIFICATE], str(path))[0], party):
        raise IdentityError(
            IdentityProblem.ANOTHERS, f"{path}: the {certificate} is not made for {_use(party)}; {_ask(folder)}"
        )
    key = _matching_key(folder, files)
    check_dates(certificate, folder, now)
    _check_signer(folder, files, certificate, now)
    return Identity(folder, certificate, files[CERTIFICATE], key, files[AUTHORITIES])


def check_dates(certificate: Certificate, folder: Path, now: datetime) -> None:
    """The certificate is valid now.

    Raises:
        ConfigError: it is not yet, or no longer.
    """
    dates = f"valid from {stamp(certificate.not_before)} until {stamp(certificate.not_after)}; it is {stamp(now)} now"
    if now < certificate.not_before:
        text = f"the {certificate} in {folder} is not yet valid: {dates}. Is this machine's clock right?"
        raise IdentityError(IdentityProblem.EARLY, text)
    if now > certificate.not_after:
        raise IdentityError(
            IdentityProblem.EXPIRED, f"the {certificate} in {folder} has expired: {dates}. {_ask(folder)}"
        )


class LiveIdentity:
    """A folder's identity, read again whenever its files change, so that a renewal needs no restart.

    New files that cannot be used are logged once, and the last good ones stay. Threads may share it.

    Raises:
        ConfigError: the folder cannot be used at the start.
    """

    def __init__(self, folder: Path, party: Party, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._folder, self._party, self._clock = folder, party, clock
        self._lock = threading.Lock()
        self._version = _version(folder)
        self._refused: Version | None = None
        self._identity = read_identity(folder, party, clock())

    def now(self) -> Identity:
        """The newest usable identity: the very same object while nothing has changed. It may have expired since."""
        with self._lock:
            version = _version(self._folder)
            if version != self._version:
                self._renew(version)
            return self._identity

    def _renew(self, version: Version) -> None:
        try:
            identity = read_identity(self._folder, self._party, self._clock())
        except ConfigError as error:
            if version != self._refused:
                log.warning("a renewed identity cannot be used", why=str(error), kept=self._fingerprint())
            self._refused = version
            return
        if identity != self._identity:
            self._identity = identity
            log.info("identity renewed", folder=str(self._folder), fingerprint=self._fingerprint())
        self._version, self._refused = version, None

    def _fingerprint(self) -> str:
        return self._identity.certificate.fingerprint[:16]


def _version(folder: Path) -> Version:
    """Changes whenever one of the files is written, replaced or removed."""
    return tuple(_stat(folder / name) for name in NAMES)


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mode, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


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
        waiting = f"`protofed certs install BUNDLE --identity {folder}` once the operator has approved the request"
        begin = f"make one by `protofed certs request --{party} ... --identity {folder}`, then `certs install`"
        todo = waiting if KEY in files else begin
        raise IdentityError(IdentityProblem.MISSING, f"certificate missing: {folder / CERTIFICATE}; {todo}")
    if KEY not in files and NEXT_KEY not in files:
        raise IdentityError(IdentityProblem.MISSING, f"key missing: {folder / KEY}; bring it back, or {_ask(folder)}")
    if AUTHORITIES not in files:
        text = f"CA certificate missing: {folder / AUTHORITIES}; `protofed certs install BUNDLE` writes it again"
        raise IdentityError(IdentityProblem.MISSING, text)


def _check_private(folder: Path) -> None:
    for path in (folder / KEY, folder / NEXT_KEY):
        if (found := _stat(path)) is not None and (mode := found[0] & 0o777) & 0o077:
            raise IdentityError(
                IdentityProblem.KEY_OPEN,
                f"{path} can be read or changed by others (mode {mode:04o}); expected 0600: `chmod 600 {path}`, and if "
                f"somebody may have read it, {_ask(folder)}",
            )


def _matching_key(folder: Path, files: Files) -> bytes:
    wanted = load(files[CERTIFICATE], CERTIFICATE)[0].public_key()
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for name in (KEY, NEXT_KEY):
        if name in files and _public(files[name], folder / name) == wanted.public_bytes(*form):
            return files[name]
    text = f"{folder / KEY} is not the key of {folder / CERTIFICATE}; bring back the one that belongs to it, or "
    raise IdentityError(IdentityProblem.KEY_OTHER, text + _ask(folder))


def _public(key: bytes, path: Path) -> bytes:
    try:
        return (
            load_pem_private_key(key, None).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        )
    except UNREADABLE as error:
        text = f"{path} cannot be read as a key; expected PEM text without a passphrase"
        raise IdentityError(IdentityProblem.UNREADABLE, text) from error


def _check_signer(folder: Path, files: Files, certificate: Certificate, now: datetime) -> None:
    found = signer(load(files[CERTIFICATE], CERTIFICATE)[0], load(files[AUTHORITIES], str(folder / AUTHORITIES)))
    if found is None:
        text = f"the {certificate} in {folder} is not signed by a CA in {AUTHORITIES}; "
        text += "install the bundle that the operator sent, or ask for it again"
        raise IdentityError(IdentityProblem.AUTHORITY, text)
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    if not begins <= now <= ends:
        raise IdentityError(
            IdentityProblem.AUTHORITY_DATES,
            f"the CA that signed the {certificate} in {folder} is valid from {stamp(begins)} until {stamp(ends)}; "
            f"it is {stamp(now)} now. Is this machine's clock right? If so, ask for a bundle of the new CA",
        )


def _use(party: Party) -> str:
    return "answering as a server (serverAuth)" if party is Party.SERVER else "dialling a server (clientAuth)"


def _ask(folder: Path) -> str:
    return f"ask for a new one by `protofed certs renew --identity {folder}`"
