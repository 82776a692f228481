"""What a run stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from protofed.common.payload import SiteId
from protofed.server.metrics import Meters
from protofed.server.rounds.presence import Roster
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger


class Work(Protocol):
    """Runs a job, here or on another thread, then `done` with its result on the coordinator's thread."""

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run it."""


def inline(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """`Work` of a simulation: at once."""
    done(job())


@dataclass(frozen=True)
class Surroundings:
    """What a coordinator stands on; one server's runs share it.

    Attributes:
        clock: monotonic seconds.
        notify: called with the sites that have something to ask for now; None: all.
        keep_rounds: rounds behind the newest whose blobs are kept; 0: all.
        simulated: all sites are in this process: what protects one from another may be left out.
        meters: what is counted for Prometheus; a simulation has its own.
    """

    ledger: Ledger
    blobs: Blobs
    roster: Roster
    clock: Callable[[], float]
    work: Work = inline
    notify: Callable[[Iterable[SiteId] | None], None] = lambda _sites: None
    keep_rounds: int = 2
    simulated: bool = False
    meters: Meters = field(default_factory=Meters)
