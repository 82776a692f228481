"""What one server's runs share: ledger, blobs, presence, clock, worker, metrics; and what each run is made from.

`open_server` is the one assembly and opens all parts in order. Daemon, simulations and tests use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.common.storage import files
from protofed.server.method import RoundContext, ServerMethod, server_methods
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.blobs import Blobs, MemoryBlobs, open_blobs
from protofed.server.storage.database import IN_MEMORY, LEDGER_FILE
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.recovery import open_journal, sweep_orphans
from protofed.server.storage.rows import RunRow


class RunJob(Protocol):
    """Runs a job on a worker thread (or inline), then `done` with its result on the coordinator's thread."""

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job`. If it raises an exception, that is a defect: jobs return their errors."""


def inline(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """The `RunJob` of a simulation: both at once, on the caller's thread."""
    done(job())


@dataclass(frozen=True)
class ServerContext:
    """Made by `open_server`; passed to whatever needs the server's parts.

    Attributes:
        clock: seconds, monotonic; stands still in a simulation.
        work: runs aggregations.
        notify: wakes the long polls of the given sites, which have something to fetch now; None: of all.
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


def read_recipe(row: RunRow) -> Recipe:
    """The recipe that a run began with.

    Raises:
        ConfigError: this version cannot read it.
    """
    return parse_json(row.recipe, Recipe, f"the recipe of run '{row.run}' in the ledger")


def round_context(recipe: Recipe, round: int, sites: int) -> RoundContext:
    """What a method is told of the round whose state it makes; of a recorded round, `sites` are its row's."""
    seed = recipe.seed % 2**64
    return RoundContext(round=round, rounds=recipe.rounds, sites=sites, classes=recipe.classes, seed=seed)


def build_method(recipe: Recipe) -> ServerMethod:
    """The server half of a run.

    Raises:
        ConfigError: an unknown method or option.
    """
    return server_methods.build(recipe.method.name, recipe.method.options)


def check_same(recipe: Recipe, known: RunRow) -> None:
    """Check that a run continues with the recipe that it began with.

    Raises:
        StateError: it was started with another one.
    """
    if recipe.fingerprint() != read_recipe(known).fingerprint():
        raise StateError(
            f"the state folder holds a run '{recipe.name}' of another recipe; give the recipe another name, "
            "or take another --state"
        )


JOURNAL_FILE = "journal.jsonl"  # of the state folder: what was promised, beside the ledger


def frozen() -> float:
    """The clock of a simulation: every site answers in its turn, so nobody is ever late."""
    return 0.0


def open_server(
    state: Path | None,
    opened: ExitStack,
    *,
    ledger_url: str | None = None,
    blobs_folder: Path | None = None,
    recover: bool = False,
    work: RunJob = inline,
    notify: Callable[[Iterable[SiteId] | None], None] = lambda _sites: None,
    keep_rounds: int = 2,
    metrics: ServerMetrics | None = None,
    simulated: bool = False,
) -> ServerContext:
    """Lock the state folder, open its ledger, journal and blobs; all are closed with `opened`.

    Args:
        state: of this process alone; None: everything lives in memory.
        ledger_url: of a database; None: SQLite in the state folder.
        blobs_folder: where blobs lie outside of the state folder; None: in it.
        recover: go on although the ledger has lost some of what it promised.
        simulated: all sites are in this process: time stands still, and no journal repeats the ledger's promises,
            which nobody but this process was told of.

    Raises:
        ConfigError: the URL cannot be used.
        StateError: the folder is another process's, damaged, or older than what was promised.
    """
    checks = list[Callable[[], None]]()
    if state is not None:
        files.make_private(state)
        lock = files.Lock(state)
        opened.callback(lock.release)
        checks.append(lock.check)
    url = ledger_url or (IN_MEMORY if state is None else f"sqlite:///{state / LEDGER_FILE}")
    ledger = Ledger(url)
    opened.callback(ledger.close)
    reader = LedgerReader(url) if url != IN_MEMORY and not simulated else None
    if reader is not None:
        opened.callback(reader.close)
    blobs: Blobs = MemoryBlobs()
    if state is not None:
        if not simulated:
            journal = open_journal(state / JOURNAL_FILE, ledger, give_up=recover)
            opened.callback(journal.close)
            ledger.attach(journal)
            checks += [journal.check, ledger.check]
        on_disk = open_blobs(state, blobs_folder, ledger, opened)
        sweep_orphans(on_disk, ledger)
        blobs = on_disk

    def check() -> None:
        for each in checks:
            each()

    clock = frozen if simulated else time.monotonic
    return ServerContext(
        ledger,
        blobs,
        SitePresence(ledger, clock),
        clock,
        work=work,
        notify=notify,
        keep_rounds=keep_rounds,
        reader=reader,
        simulated=simulated,
        metrics=metrics or ServerMetrics(),
        check=check,
    )
