"""What one server's runs share: ledger, blobs, presence, clock, worker, metrics; and what each is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.server.method import RoundContext, ServerMethod, server_methods
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RunRow


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


def recipe_of(row: RunRow) -> Recipe:
    """The recipe that a run began with.

    Raises:
        ConfigError: this version cannot read it.
    """
    return parse_json(row.recipe, Recipe, f"the recipe of run '{row.run}' in the ledger")


def round_context(recipe: Recipe, round: int, sites: int) -> RoundContext:
    """What a method is told of the round whose state it makes; of a recorded round, `sites` are its row's."""
    seed = recipe.seed % 2**64
    return RoundContext(round=round, rounds=recipe.rounds, sites=sites, classes=recipe.classes, seed=seed)


def method_of(recipe: Recipe) -> ServerMethod:
    """The server half of a run.

    Raises:
        ConfigError: an unknown method or option.
    """
    return server_methods.build(recipe.method.name, recipe.method.options)


def check_same(recipe: Recipe, known: RunRow) -> None:
    """Check that a run continues with the recipe that it began with.

    Raises:
        StateError: it was begun with another one.
    """
    if recipe.fingerprint() != recipe_of(known).fingerprint():
        raise StateError(
            f"the state folder holds a run '{recipe.name}' of another recipe; give the recipe another name, "
            "or take another --state"
        )
