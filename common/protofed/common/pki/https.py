"""A certificate for HTTPS: a folder's, taken up again when it is renewed."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

import structlog

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import CERTIFICATE, KEY, NEXT_KEY

log = structlog.get_logger()


class Https:
    """A folder's certificate and key, read again when they change; what cannot be used is logged, and the last stays.

    Raises:
        ConfigError: they cannot be used at the start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._version = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """With the newest usable certificate."""
        with self._lock:
            if (version := self._look()) != self._version:
                self._version = version
                try:
                    self._context = self._load()
                except ConfigError as error:
                    log.warning("the new certificate for https cannot be used; the last one stays", why=str(error))
            return self._context

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_stat(self._folder / name) for name in (CERTIFICATE, KEY, NEXT_KEY))

    def _load(self) -> ssl.SSLContext:
        certificate = self._folder / CERTIFICATE
        keys = [path for name in (KEY, NEXT_KEY) if (path := self._folder / name).exists()]
        for key in keys:
            check_private(key, "`chmod 600` it")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_cert_chain(certificate, key, password=lambda: "")
            except (OSError, ValueError):  # no PEM, another key's, or with a passphrase
                continue
            return context
        raise ConfigError(f"{self._folder}: expected {CERTIFICATE}, and its private key in {KEY} without a passphrase")


def check_private(path: Path, remedy: str) -> None:
    """Nobody else can read or change a file.

    Raises:
        ConfigError: somebody can, or there is none.
    """
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file of this account's") from error
    if mode & 0o077:
        raise ConfigError(f"{path} can be read or changed by others (mode {mode:04o}); expected 0600: {remedy}")


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
