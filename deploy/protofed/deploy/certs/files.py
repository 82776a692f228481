"""Reads and writes the files of certificates and keys."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from protofed.common.errors import ConfigError, StateError
from protofed.common.pki.certificate import UNREADABLE, code
from protofed.common.storage import files

LONGEST = 256 << 10  # bytes; a larger file cannot be a certificate and is not read


def read(path: Path) -> bytes:
    """Read a file of certificates or a request.

    Raises:
        ConfigError: it cannot be read, is too long, or contains a private key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file of PEM text") from error
    if len(data) > LONGEST:
        raise ConfigError(f"{path} is longer than {LONGEST >> 10} KiB; expected a request, a bundle or a certificate")
    refuse_keys(data, str(path))
    return data


def refuse_keys(data: bytes, where: str) -> None:
    """Refuse what somebody sent if it contains a private key: a key that was sent is no secret any more.

    Raises:
        ConfigError: it does; `where` names it.
    """
    if b"PRIVATE KEY-----" in data:
        raise ConfigError(
            f"{where} holds a private key; expected a file without one. A private key must stay on the machine that "
            "made it. Ask the sender to delete the folder and to start again with `protofed certs request`"
        )


def make_key(path: Path, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Make a P-256 key and write it durably to `path` (mode 0600); missing folders are made with mode 0700.

    Raises:
        StateError: it, or its folder, cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    make_folder(path.parent)
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return key


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, if it is not there yet.

    Raises:
        StateError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(f"cannot make the folder {folder}: {error.strerror}; name a folder of yours") from error


def is_there(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        StateError: its folder cannot be entered.
    """
    try:
        return path.exists()
    except OSError as error:
        raise StateError(f"cannot look into {path.parent}: {error.strerror}; name a folder of yours") from error


def read_key(path: Path, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Read a P-256 key.

    Raises:
        ConfigError: the file has none, the passphrase is missing or wrong, or other users can read the file.
    """
    try:
        mode, data = path.stat().st_mode & 0o777, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected the key that was made here") from error
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read or changed by others (mode {mode:04o}); expected 0600: `chmod 600 {path}`"
        )
    try:
        key = load_pem_private_key(data, passphrase)
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} cannot be read as a key: it is damaged, or its passphrase is missing, wrong or not needed"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ConfigError(f"{path} is no ECDSA P-256 key; move it away, and one is made")
    return key


def is_encrypted(path: Path) -> bool:
    """Whether the file has a key that needs a passphrase."""
    return path.is_file() and b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()


def key_fingerprint(key: CertificatePublicKeyTypes) -> str:
    """SHA-256 of a public key (SubjectPublicKeyInfo, DER), 64 hexadecimal digits."""
    digest = Hash(SHA256())
    digest.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize().hex()


def key_code(key: CertificatePublicKeyTypes) -> str:
    """The key's short code, for people to compare."""
    return code(key_fingerprint(key))


def _write_private(path: Path, data: bytes) -> None:
    """As `storage.files.write`, but the file has mode 0600 from its creation: other users can never open it."""
    temporary = path.with_name(f"{files.TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        files.sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise files.write_error(path, error) from error
