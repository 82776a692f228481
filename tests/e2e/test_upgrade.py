"""A server is brought up to date while a run goes on; its sites follow one by one, and the run ends as if nothing was.

The older protofed is a commit of this repository, run in the same environment from folders of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority
from tests.scenes import Scene

from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.version import VERSION
from protofed.deploy.simulation.simulation import simulation
from protofed.server.storage.database import LEDGER_FILE, backup_of
from protofed.server.storage.migrate import NEWEST

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]  # a server and two daemons, some of them twice
ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
ROOTS = ("common", "server", "client", "deploy", "protos")
OLD = "0.1.0-before"  # how the older protofed calls itself here: the logs tell who is who
COMMITS = {  # of older software, and the version of the ledger that it writes
    "1d3b5d27971a6b2669e0ecf02cf87d72c2425a72": "0004",
    "9fa74bf6b52b783077b302c3a3623decc10cca52": "0003",
}
SITES = ("site-1", "site-2")
RECIPE = """\
name = "upgraded"
rounds = 5
classes = 10
input = { shape = [1, 8, 8] }
method = { name = "fednh" }
model = { name = "digits-cnn" }
plan = { epochs = 4, batch = 4, lr = 0.01, momentum = 0.9 }
federation = { min_sites = 2, quorum = 1.0, heartbeat_s = 0.1 }
"""
DATA = """
[data]
source = "digits"
partition = { kind = "dirichlet", sites = 2, beta = 0.5 }
"""


class Upgraded(Scene):
    """A scene whose processes run this protofed or, as long as `older` is set, that of another folder.

    Sites keep the policy that came with the older one.
    """

    older: Path | None = None

    def start(self, name: str, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            if self.older is not None:
                patch.setenv("PYTHONPATH", path_of(self.older))
            policy = f"--policy={self.folder / 'policy.toml'}"
            return super().start(name, *(policy if one.startswith("--policy=") else one for one in arguments), **more)

    def stop(self, name: str) -> None:
        """In order."""
        self.running[name].send_signal(signal.SIGTERM)
        assert self.running[name].wait(60) == 0, self.logs()

    def trains(self, site: str) -> int | None:
        """The round that the site is in the middle of; asked in words that ledgers of all versions understand."""
        query = "SELECT round FROM tasks WHERE site = ? AND kind = 'fit' AND fate = 'started' AND round > 0"
        with closing(sqlite3.connect(self.folder / "server" / LEDGER_FILE)) as ledger:
            found = ledger.execute(query, (site,)).fetchone()
        return None if found is None else int(found[0])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")


def path_of(folder: Path) -> str:
    return os.pathsep.join(str(folder / root) for root in ROOTS)


@pytest.fixture(params=COMMITS, ids=lambda commit: commit[:7])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An older protofed, in a folder of its own named after its ledger's version."""
    commit = str(request.param)
    archive = subprocess.run(["git", "archive", commit, *ROOTS], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"commit {commit[:7]} is not in this clone, which is shallow: git fetch --unshallow")
    folder = tmp_path / COMMITS[commit]
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    (folder / "common/protofed/common/version.py").write_text(f'VERSION = "{OLD}"\n', encoding="utf-8")
    return folder


@pytest.fixture
def here(tmp_path: Path, older: Path) -> Iterator[Upgraded]:
    """A server and two sites of the older protofed, in the middle of a run."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + DATA, encoding="utf-8")
    (tmp_path / "site.toml").write_text(DATA, encoding="utf-8")
    shutil.copy(older / "deploy" / "policies" / "open.toml", tmp_path / "policy.toml")
    scene = Upgraded(tmp_path, read_recipe(recipe), authority=Authority.make())
    scene.older = older
    try:
        scene.server()
        for share, site in enumerate(SITES):
            scene.site(site, f"--partition-index={share}")
        yield scene
    finally:
        scene.end()


def ledger_version(file: Path) -> str:
    with closing(sqlite3.connect(file)) as ledger:
        return str(ledger.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def spoken(log: str, event: str, key: str, site: str | None = None) -> list[str]:
    """What a log says by this key at this event, of this site, in order."""
    told = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line[key] for line in told if line["event"] == event and line.get("site") == site and key in line]


def simulated(recipe: Recipe) -> str:
    with simulation(recipe) as running:
        running.go()
        assert running.coordinator.published is not None
        return running.coordinator.published.address


def test_a_new_server_goes_on_with_the_run_and_its_older_sites_and_then_a_site_is_upgraded(here: Upgraded) -> None:
    ledger, before = here.folder / "server" / LEDGER_FILE, here.older.name if here.older else ""
    here.wait_for(lambda: here.trains("site-1") is not None, PATIENCE_S)
    begun = here.trains("site-1") or 0
    assert 0 < begun < here.recipe.rounds - 2, "the run is too short for this test"
    here.stop("server")
    assert ledger_version(ledger) == before

    here.older = None
    here.server()
    assert ledger_version(ledger) == NEWEST
    assert backup_of(ledger).exists() == (before != NEWEST)
    if before != NEWEST:
        assert ledger_version(backup_of(ledger)) == before

    here.wait_for(
        lambda: here.fates(begun + 1).get("site-2") == "started", PATIENCE_S
    )  # the older sites have ended a round
    assert set(here.fates(begun).values()) == {"reported"}
    assert all(here.running[site].poll() is None for site in SITES), here.logs()
    here.stop("site-2")
    here.site("site-2", "--partition-index=1")
    here.wait_for(lambda: all(process.poll() is not None for process in here.running.values()), PATIENCE_S)
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()

    assert here.final_digest() == simulated(here.recipe)
    with here.ledger() as records:
        rounds = [(row.round, row.attempt) for row in records.rounds(here.recipe.name)]
    assert rounds == [(number, 1) for number in range(here.recipe.rounds + 1)], "a round was begun anew"
    said = here.log("server")
    assert spoken(said, "serving", "version")[-1:] == [VERSION]
    assert OLD not in spoken(said, "serving", "version")[1:]
    assert set(spoken(said, "enrolled", "software", "site-1")) == {OLD}, "once with the old server, once with the new"
    assert spoken(said, "enrolled", "software", "site-2")[-1] == VERSION
    assert set(spoken(said, "enrolled", "software", "site-2")) == {OLD, VERSION}
    assert "Traceback" not in "".join(here.log(name) for name in ("server", *SITES))
