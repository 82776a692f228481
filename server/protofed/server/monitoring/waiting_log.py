"""Says in the server's log why the run does not go on: once for each reason, and not while it changes."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from protofed.server.access.certificates import Certificates
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import BLOCKED, Waiting
from protofed.server.rounds.queue import RunQueue

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
        if (seen := self._blocked()) != self._seen:
            self._seen, self._since = seen, self._clock()
        if seen is None or seen == self._logged or self._clock() < self._since + STEADY_S:
            return
        self._logged = seen
        run, waiting = seen
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
