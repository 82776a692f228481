"""The site's identity for secure sums: an Ed25519 key in its state folder, which partners confirm."""

from __future__ import annotations

import hashlib
from pathlib import Path

import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from protofed.common.errors import StateError
from protofed.common.pki import codes
from protofed.common.storage import files

log = structlog.get_logger()
FILE = "sum-identity.pem"


def fingerprint(identity: bytes) -> str:
    """SHA-256 of a public identity, 64 hexadecimal digits."""
    return hashlib.sha256(identity).hexdigest()


def load_or_create(folder: Path) -> Ed25519PrivateKey:
    """The identity of a state folder; made if there is none.

    Raises:
        StateError: it cannot be read or written, or is damaged. It is never replaced silently: other sites would refuse
            the new one.
    """
    path = folder / FILE
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        files.write(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        code = codes.code(fingerprint(made.public_key().public_bytes_raw()))
        why = "new in this state folder: if partners have confirmed another one of this site's, they need a new list"
        log.info("identity for secure sums made", code=code, folder=str(folder), why=why)
    return load(folder)


def load(folder: Path) -> Ed25519PrivateKey:
    """The identity of a state folder.

    Raises:
        StateError: there is none, or it cannot be read.
    """
    path = folder / FILE
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; let this daemon's user own it") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(
            f"{path} holds no Ed25519 key; restore it, or remove it to have another one, for which all partners must "
            "then confirm a new list (`protofed consortium offer`)"
        )
    return key
