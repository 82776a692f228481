"""Whether the server can do its work; that its process runs is not enough.

`WaitingLog` says in the server's log why the run does not go on: once for each reason, and not while it changes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog

from protofed.common.clock import stamp, utc_now
from protofed.common.errors import StateError
from protofed.common.pki.identity import LiveIdentity
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import BLOCKED, Waiting
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.ledger import Ledger

MIN_FREE = 1 << 20  # bytes free on the state folder's disk; with less, a record may not be written whole
SLOW_S = 3.0  # a disk that has not answered for so long is not there


@dataclass(frozen=True)
class _Requirement:
    name: str
    missing: Callable[[], str]
    blocks_calls: bool = True


@dataclass(frozen=True)
class Readiness:
    """What one look at all requirements found.

    Attributes:
        missing: a line for each that is not met; empty: the server is ready.
        answers: calls are answered, even if only with "try again later".
    """

    missing: list[str]
    answers: bool


class ServerReadiness:
    """The server's requirements, by name; read from any thread but the event loop's, added while the server starts.

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
            blocks_calls: False: without it /readyz fails, but gRPC's health stays SERVING. Calls are still
                answered, some of them with "try again later".
        """
        self._requirements.append(_Requirement(name, missing, blocks_calls))

    def look(self) -> Readiness:
        """Look at all requirements; some of them ask a disk, for at most `SLOW_S` seconds each."""
        # A copy: the server may still be adding requirements while a health check reads them.
        requirements = [(required, required.missing()) for required in list(self._requirements)]
        missing = [f"{required.name}: {reason}" for required, reason in requirements if reason]
        return Readiness(missing, not any(reason and required.blocks_calls for required, reason in requirements))

    def missing(self) -> list[str]:
        """As of `look`."""
        return self.look().missing

    def _port(self) -> str:
        return "" if self.serving else "calls are not answered: the server starts, or ends"


class OnDisk:
    """A requirement that asks a disk, which may never answer: a mount of NFS with `hard` waits for its server for ever.

    One thread asks at a time, however many look. While it waits, no other thread asks. If a look takes longer than
    `SLOW_S`, the requirement is not met. It is a daemon thread, since the process must be able to end without its
    answer.

    Args:
        what: is asked, for the text.
    """

    def __init__(self, what: str, missing: Callable[[], str]) -> None:
        self._what, self._missing, self._lock = what, missing, threading.Lock()
        self._asked_at, self._answer = 0.0, Future[str]()
        self._answer.set_result("")

    def __call__(self) -> str:
        """What is wrong, or an empty text."""
        with self._lock:
            if self._answer.done():
                answer = Future[str]()
                threading.Thread(target=self._ask, args=(answer,), name="on-disk", daemon=True).start()
                self._asked_at, self._answer = time.monotonic(), answer
            answer, late_at = self._answer, self._asked_at + SLOW_S
        try:
            return answer.result(max(0.0, late_at - time.monotonic()))
        except TimeoutError:
            return f"{self._what} has not answered for {SLOW_S:.0f} s; look at its disk, or the network to it"

    def _ask(self, answer: Future[str]) -> None:
        try:
            answer.set_result(self._missing())
        except Exception as error:  # for whoever looks: nobody sees this thread's errors
            answer.set_exception(error)


def identity_usable(identity: LiveIdentity | None) -> Callable[[], str]:
    """Requirement: the server's certificate is valid now; always met in plain text."""
    if identity is None:
        return lambda: ""

    def missing() -> str:
        certificate, now = identity.current().certificate, utc_now()
        if now < certificate.not_before:
            return f"the server's certificate is valid only from {stamp(certificate.not_before)}; is the clock right?"
        if now > certificate.not_after:
            at = stamp(certificate.not_after)
            return f"the server's certificate expired on {at}; renew it: protofed certs request --renew"
        return ""

    return OnDisk("the folder of the server's identity", missing)


def ledger_writable(ledger: Ledger, check: Callable[[], None]) -> Callable[[], str]:
    """Requirement: the ledger answers, is this server's, and all that it did is in its journal.

    Args:
        check: as `ServerContext.check`.
    """

    def missing() -> str:
        try:
            check()
        except StateError as error:
            return str(error)
        return "" if ledger.is_settled else "the journal cannot be written, and nothing is promised until it can"

    return OnDisk("the ledger", missing)


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

    return OnDisk(f"the {name}", missing)


log = structlog.get_logger()
STEADY_S = 5.0  # a reason that lasts less is not logged: sites that come one after the other, the moment between rounds


class WaitingLog:
    """Remembers what was logged; on the coordinator's thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, runs: RunQueue, certificates: Certificates, clock: Callable[[], float]) -> None:
        self._runs, self._certificates, self._clock = runs, certificates, clock
        self._seen: tuple[str, Waiting] | None = None
        self._since = 0.0
        self._logged: tuple[str, Waiting] | None = None

    def note(self) -> None:
        """Log what the active run has been waiting for; called at every tick."""
        if (blocked := self._blocked()) != self._seen:
            self._seen, self._since = blocked, self._clock()
        if blocked is None or blocked == self._logged or self._clock() < self._since + STEADY_S:
            return
        self._logged = blocked
        run, waiting = blocked
        missing = [site.site for site in waiting.missing]
        log.warning(
            "the run does not go on",
            run=run,
            round=waiting.round,
            reason=waiting.reason.value,
            missing=missing,
            why=waiting.text,
        )

    def _blocked(self) -> tuple[str, Waiting] | None:
        current = self._runs.current
        if current is None or isinstance(current.phase, phases.Collecting | phases.Summing | phases.Evaluating):
            return None  # a round is open: its sites need not be looked at twice a second
        if (waiting := current.waiting(self._certificates)) is None:
            return None
        return (current.name, waiting) if waiting.reason in BLOCKED else None
