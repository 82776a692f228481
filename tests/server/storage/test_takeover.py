"""A server that dies in a round, and one on another machine that goes on: one ledger, one folder of blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.processes import Process, Processes

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.common.storage.journal import records
from protofed.deploy.simulation.simulation import simulation
from protofed.server.storage.database import open_engine
from protofed.server.storage.reader import LedgerReader

SITES = ("site-1", "site-2")


@pytest.fixture
def processes(
    tmp_path: Path, recipe_of: Callable[..., Recipe], kept_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Processes]:
    """Two sites; what servers share is a database and a folder, their state folders are their own."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("PROTOFED_SERVER_LEDGER", kept_url)
    monkeypatch.setenv("PROTOFED_SERVER_BLOBS", str(tmp_path / "shared"))
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}}
    federation = {"min_sites": 2, "quorum": 1.0, "heartbeat_s": 0.2}
    here = Processes.of(tmp_path, recipe_of("fedavg", name="moved", data=data, federation=federation))
    yield here
    here.end()


def second(here: Processes) -> Process:
    """On the other machine: another state folder, the same address (as a name that leads elsewhere now)."""
    known = (f"--recipe={here.folder / 'recipe.toml'}", f"--listen={here.address}", "--until-finished")
    return here.start("second", "server", "start", *known, party=Party.SERVER)


def undisturbed(recipe: Recipe) -> str:
    with simulation(recipe) as running:
        running.go()
        assert running.run.published is not None
        return running.run.published.address


@pytest.mark.timeout(600)
def test_another_machine_goes_on_with_the_same_round(processes: Processes, kept_url: str) -> None:
    first = processes.server(
        fails="upload-sealed:5=kill"
    )  # two first models, two updates of round 1, the first one of round 2
    assert second(processes).wait(120) == 74  # while the first one serves
    refused = (processes.folder / "second.log").read_text("utf-8")
    assert "in use by another" in refused, refused
    for share, site in enumerate(SITES):
        processes.site(site, f"--partition-index={share}")
    processes.wait_for(lambda: first.poll() is not None)
    assert first.returncode == -9, processes.logs()
    with closing(LedgerReader(kept_url)) as ledger:
        cut = ledger.rounds("moved")[-1]
    assert (cut.round, cut.state) == (2, None)
    second(processes)
    assert processes.finish(["second", *SITES]) == [0] * 3, processes.logs()
    with closing(LedgerReader(kept_url)) as ledger:
        rounds = ledger.rounds("moved")
    assert [(row.round, row.attempt) for row in rounds] == [(number, 1) for number in range(4)]  # none was started anew
    assert rounds[-1].state == undisturbed(processes.recipe)
    assert (processes.folder / "second" / "blobs" / str(rounds[-1].state)).is_file()
    told = [record.event for record in records(processes.folder / "second" / "journal.jsonl")]
    assert told[0] == "adopted"  # what the first one promised


def test_a_server_whose_session_is_cut_while_nobody_calls_ends(processes: Processes, kept_url: str) -> None:
    """As by a restart of the database. It lived on, called itself ready, and refused every call."""
    if not kept_url.startswith("postgresql"):
        pytest.skip("a file has no session")
    server = processes.server()
    look = open_engine(kept_url)
    with look.connect() as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        assert connection.exec_driver_sql(cut).scalar()
    look.dispose()
    processes.wait_for(lambda: server.poll() is not None)
    assert server.returncode == 74, processes.logs()
    assert "the session that kept the ledger for this server was cut" in processes.logs()
