"""A site's secret: random bytes in its state folder, which nobody else may read and which never leave it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from protofed.common.errors import StateError
from protofed.common.storage import files

FILE, BYTES = ".secret", 32  # no run's name begins with a dot


def load_or_create(folder: Path) -> bytes:
    """The folder's, made when it is first asked for.

    Raises:
        StateError: it is damaged, and no other one may take its place silently; or it cannot be written.
    """
    path = folder / FILE
    if not path.exists():
        _make(path)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; let this daemon's user own it") from error
    if len(secret) != BYTES:
        raise StateError(f"{path} holds {len(secret)} bytes, not {BYTES}; restore it, or remove it to have another one")
    return secret


def _make(path: Path) -> None:
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
