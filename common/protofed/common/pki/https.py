"""The certificate of an HTTPS endpoint, from a folder; reloaded when it is renewed."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

import structlog

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import CERTIFICATE, KEY, NEXT_KEY

log = structlog.get_logger()


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
        return tuple(_stat(self._folder / name) for name in (CERTIFICATE, KEY, NEXT_KEY))

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


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
