"""What a run stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from protofed.common.payload import SiteId
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger


class RunJob(Protocol):
    """Runs a job, here or on another thread, then `done` with its result on the coordinator's thread."""

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run it."""


def inline(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """`RunJob` of a simulation: at once."""
    done(job())


@dataclass(frozen=True)
class ServerContext:
    """What a coordinator stands on; one server's runs share it.

    Attributes:
        clock: monotonic seconds.
        notify: called with the sites that have something to ask for now; None: all.
        keep_rounds: rounds behind the newest whose blobs are kept; 0: all.
        simulated: all sites are in this process: what protects one from another may be left out.
        metrics: what is counted for Prometheus; a simulation has its own.
    """

    ledger: Ledger
    blobs: Blobs
    presence: SitePresence
    clock: Callable[[], float]
    work: RunJob = inline
    notify: Callable[[Iterable[SiteId] | None], None] = lambda _sites: None
    keep_rounds: int = 2
    simulated: bool = False
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
