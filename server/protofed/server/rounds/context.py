"""What one server's runs share: ledger, blobs, presence, clock, worker, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from protofed.common.payload import SiteId
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader


class RunJob(Protocol):
    """Runs a job on a worker thread (or inline), then `done` with its result on the coordinator's thread."""

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job`; an exception of it is a defect, jobs return theirs."""


def inline(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """The `RunJob` of a simulation: both at once, on the caller's thread."""
    done(job())


@dataclass(frozen=True)
class ServerContext:
    """Made by `server.assembly.open_server`; passed to whatever needs the server's parts.

    Attributes:
        clock: seconds, monotonic; stands still in a simulation.
        work: runs aggregations.
        notify: wakes the long polls of these sites, which have something to fetch now; None: of all.
        keep_rounds: rounds behind the newest whose blobs are kept; 0: all.
        reader: the ledger on connections of its own, for what reads long on other threads than the coordinator's; None:
            it lives in memory, and `ledger` does.
        simulated: all sites are in this process, so what protects one from another may be left out.
        metrics: counters and histograms for Prometheus; a simulation has its own.
        check: whether the state still is this server's. Raises StateError: the ledger does not answer now;
            DiskFailureError: the state is another one's, and this process must end.
    """

    ledger: Ledger
    blobs: Blobs
    presence: SitePresence
    clock: Callable[[], float]
    work: RunJob = inline
    notify: Callable[[Iterable[SiteId] | None], None] = lambda _sites: None
    keep_rounds: int = 2
    reader: LedgerReader | None = None
    simulated: bool = False
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    check: Callable[[], None] = lambda: None
