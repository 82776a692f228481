"""The one assembly: what a server stands on, opened in order; the daemon, simulations and tests have it from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from protofed.common.payload import SiteId
from protofed.common.storage import files
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds.context import RunJob, ServerContext, inline
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.blobs import Blobs, MemoryBlobs, open_blobs
from protofed.server.storage.database import IN_MEMORY, LEDGER_FILE
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.recovery import open_journal, sweep_orphans

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
    """Lock the state folder, open its ledger, journal and blobs; all of it is closed with `opened`.

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
