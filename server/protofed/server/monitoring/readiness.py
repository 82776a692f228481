"""Whether the server can do its work: never merely that its process lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protofed.common.clock import stamp, utc_now
from protofed.common.pki.identity import LiveIdentity
from protofed.server.storage.ledger import Ledger

ROOM = 1 << 20  # bytes on the state folder's disk below which nothing can be promised


@dataclass(frozen=True)
class _Required:
    what: str
    missing: Callable[[], str]
    polite: bool = False


class ServerReadiness:
    """What has to hold, by name; asked from any thread, added to while the server starts.

    Attributes:
        serving: calls are answered.
    """

    def __init__(self) -> None:
        self.serving = False
        self._required: list[_Required] = [_Required("port", self._port)]

    def require(self, what: str, missing: Callable[[], str], *, polite: bool = False) -> None:
        """Look at one thing more.

        Args:
            missing: says what is wrong, or nothing.
            polite: without it calls are answered all the same: those that have to wait are told so.
        """
        self._required.append(_Required(what, missing, polite))

    def missing(self) -> list[str]:
        """A line for each thing that does not hold; empty: it is ready."""
        return [f"{one.what}: {why}" for one in list(self._required) if (why := one.missing())]

    @property
    def answers(self) -> bool:
        """Whether calls are answered, be it that they have to wait."""
        return not any(one.missing() for one in list(self._required) if not one.polite)

    def _port(self) -> str:
        return "" if self.serving else "calls are not answered: the server starts, or ends"


def identity_usable(identity: LiveIdentity | None) -> Callable[[], str]:
    """The server's certificate is within its dates; in plain text there is none to look at."""

    def missing() -> str:
        if identity is None:
            return ""
        own, now = identity.now().certificate, utc_now()
        if now < own.not_before:
            return f"the server's certificate is valid only from {stamp(own.not_before)}; is the clock right?"
        if now > own.not_after:
            return f"the server's certificate has expired on {stamp(own.not_after)}; renew it: protofed certs renew"
        return ""

    return missing


def ledger_writable(ledger: Ledger) -> Callable[[], str]:
    """The journal holds all that the ledger does."""
    return lambda: "" if ledger.is_settled else "the journal cannot be written, and nothing is promised until it can"


def state_writable(state: Path, what: str = "state folder") -> Callable[[], str]:
    """Something can be written to the disk of the state folder, or of another one."""

    def missing() -> str:
        try:
            found = os.statvfs(state)
        except OSError as error:
            return f"the {what} cannot be looked at: {error.strerror}"
        if found.f_flag & os.ST_RDONLY:
            return f"the {what}'s file system is read-only"
        free = found.f_bavail * found.f_frsize
        return f"{free} bytes are free for the {what}; make room" if free < ROOM else ""

    return missing
