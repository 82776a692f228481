"""Whether the server can do its work; that its process runs is not enough."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protofed.common.clock import stamp, utc_now
from protofed.common.pki.identity import LiveIdentity
from protofed.server.storage.ledger import Ledger

MIN_FREE = 1 << 20  # bytes free on the state folder's disk; with less, a record may not be written whole


@dataclass(frozen=True)
class _Requirement:
    name: str
    missing: Callable[[], str]
    blocks_calls: bool = True


class ServerReadiness:
    """The server's requirements, by name; read from any thread, added while the server starts.

    Attributes:
        serving: calls are answered.
    """

    def __init__(self) -> None:
        self.serving = False
        self._requirements: list[_Requirement] = [_Requirement("port", self._port)]

    def require(self, name: str, missing: Callable[[], str], *, blocks_calls: bool = True) -> None:
        """Add a requirement.

        Args:
            missing: returns what is wrong, or an empty text.
            blocks_calls: False: without it /readyz fails, but gRPC's health stays SERVING, because calls are still
                answered, some of them with "try again later".
        """
        self._requirements.append(_Requirement(name, missing, blocks_calls))

    def missing(self) -> list[str]:
        """A line for each requirement that is not met; empty: the server is ready."""
        # A copy: the server may still be adding requirements while a health check reads them.
        return [f"{required.name}: {reason}" for required in list(self._requirements) if (reason := required.missing())]

    @property
    def answers(self) -> bool:
        """Whether calls are answered, even if only with "try again later"."""
        return not any(required.missing() for required in list(self._requirements) if required.blocks_calls)

    def _port(self) -> str:
        return "" if self.serving else "calls are not answered: the server starts, or ends"


def identity_usable(identity: LiveIdentity | None) -> Callable[[], str]:
    """Requirement: the server's certificate is valid now; always met in plain text."""

    def missing() -> str:
        if identity is None:
            return ""
        certificate, now = identity.current().certificate, utc_now()
        if now < certificate.not_before:
            return f"the server's certificate is valid only from {stamp(certificate.not_before)}; is the clock right?"
        if now > certificate.not_after:
            return f"the server's certificate expired on {stamp(certificate.not_after)}; renew it: protofed certs renew"
        return ""

    return missing


def ledger_writable(ledger: Ledger) -> Callable[[], str]:
    """Requirement: all that the ledger did is in its journal; until then no call is promised anything."""
    return lambda: "" if ledger.is_settled else "the journal cannot be written, and nothing is promised until it can"


def state_writable(folder: Path, name: str = "state folder") -> Callable[[], str]:
    """Requirement: the folder's file system is writable and has `MIN_FREE` bytes free; `name` is for the text."""

    def missing() -> str:
        try:
            file_system = os.statvfs(folder)
        except OSError as error:
            return f"the {name} cannot be read: {error.strerror}"
        if file_system.f_flag & os.ST_RDONLY:
            return f"the {name}'s file system is read-only"
        free = file_system.f_bavail * file_system.f_frsize
        return f"{free} bytes are free for the {name}; make room" if free < MIN_FREE else ""

    return missing
