"""The state of a run that a released protofed left in its middle: made once at a release, kept in tests/golden.

    python -c 'from tests.support.kept_release import *; make(Path("tests/golden/v0_3_0"))'

A server and two sites train on the digits over gRPC and are stopped, in order, in the middle of round 3. Kept are the
server's state folder (its ledger as SQL: a text that a reviewer can read) and both sites' with their audit logs. No
identity is among them: a private key has no place in a repository, so the processes talk plain text, and the keys that
sites drew for secure aggregation stays out.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.processes import Processes

from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped
from protofed.server.storage.database import LEDGER_FILE
from protofed.testing.small_recipe import small_recipe

LEDGER_SQL = "ledger.sql"
SITES = ("site-1", "site-2")
STOPPED_IN = 3  # the round in which the processes were stopped
PARTS = ("server", *SITES)
LEFT_OUT = ("lock", "address", "metrics-address", "sum-identity.pem", ".secret")  # of a process that runs, and private


def kept_recipe() -> Recipe:
    """Five rounds of FedNH with a model of some 1,300 weights; a round takes long enough to be caught in."""
    return small_recipe(
        "fednh",
        name="kept",
        rounds=5,
        model={"name": "mlp", "hidden": [16]},
        plan={"epochs": 60, "batch_size": 4, "lr": 0.01, "momentum": 0.9},
        federation={"min_sites": 2, "quorum": 1.0, "heartbeat_s": 1.0},
        data={"source": "digits", "partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}},
    )


def start(processes: Processes) -> None:
    """The server and its sites, as far as they do not run."""
    policy = processes.folder / "open.toml"  # audit logs name the file, and a machine's path has no place in them
    shutil.copy(shipped.policy("open"), policy)
    processes.server()
    for index, site in enumerate(SITES):
        processes.site(site, f"--partition-index={index}", policy=str(policy))


def make(target: Path) -> None:
    """Play the run as far as `STOPPED_IN` and keep what its processes left."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes.of(Path(folder), kept_recipe())
        try:
            start(processes)
            while processes.wait_until_trains(SITES[1]) < STOPPED_IN:
                pass
            for name in (*SITES, "server"):
                processes.running[name].send_signal(signal.SIGTERM)
                assert processes.running[name].wait(60) == 0, processes.logs()
        finally:
            processes.end()
        for name in PARTS:
            shutil.copytree(processes.folder / name, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    server = target / "server"
    with closing(sqlite3.connect(server / LEDGER_FILE)) as ledger:
        lines = [line.rstrip() for statement in ledger.iterdump() for line in statement.splitlines()]
        (server / LEDGER_SQL).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file in server.glob(f"{LEDGER_FILE}*"):
        file.unlink()


def restore(kept: Path, folder: Path) -> Processes:
    """Processes that go on where the kept one stopped."""
    processes = Processes.of(folder, kept_recipe())
    for name in PARTS:
        shutil.copytree(kept / name, folder / name)
    server = folder / "server"
    with closing(sqlite3.connect(server / LEDGER_FILE)) as ledger:
        ledger.executescript((server / LEDGER_SQL).read_text(encoding="utf-8"))
        ledger.execute("PRAGMA journal_mode=WAL")
    (server / LEDGER_SQL).unlink()
    return processes
