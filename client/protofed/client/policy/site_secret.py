"""A site's secret: random bytes in its state folder, readable by the daemon's user only, which never leave it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from protofed.common.errors import StateError
from protofed.common.storage import files

FILE, BYTES = ".secret", 32  # run names cannot begin with a dot


def load_or_create(folder: Path) -> bytes:
    """The secret of a state folder, `BYTES` long; created if there is none.

    Raises:
        StateError: it cannot be read or written, or is damaged. It is never replaced silently: a fit that is resumed
            with another secret would not be the one that was begun.
    """
    path = folder / FILE
    if not path.exists():
        _create(path)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; let this daemon's user own it") from error
    if len(secret) != BYTES:
        raise StateError(f"{path} holds {len(secret)} bytes, not {BYTES}; restore it, or remove it to have another one")
    return secret


def run_seed(secret: bytes, run: str) -> int:
    """A run's seed that only this site can make, 32 bytes: the same after a restart, unlinkable between runs."""
    return int.from_bytes(hashlib.blake2b(run.encode(), key=secret, digest_size=32).digest(), "big")


def _create(path: Path) -> None:
    # Not `files.write`: the mode must be 0600 before the first byte is in the file.
    temporary = path.with_name(f"{files.TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        files.sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise files.write_error(path, error) from error
