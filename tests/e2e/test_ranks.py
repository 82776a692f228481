"""A site's daemon as two processes under torchrun, in a run with a site that is one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.processes import Process, Processes

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Payload
from protofed.common.pki.identity import Party
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import simulation
from protofed.server.storage.blobs import FolderBlobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # half a dozen processes that import PyTorch
PATIENCE_S = 700
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
PLAN = {"epochs": 3, "batch_size": 16, "lr": 0.01, "momentum": 0.5, "checkpoint": True}


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    """Two sites; training goes on calmly, so that the order in which numbers are added is not blown up."""
    partition = {"kind": "dirichlet", "sites": 2, "beta": 0.5}
    return recipe_of(
        "fednh",
        rounds=2,
        plan=PLAN,
        federation={"min_sites": 2, "quorum": 1.0, "heartbeat_s": 0.1, "score_every": 0},
        data={"source": "digits", "partition": partition},
    )


@pytest.fixture
def here(processes_of: Callable[[Recipe], Processes], recipe: Recipe) -> Iterator[Processes]:
    """Processes whose torchrun is told to end: one that is killed leaves its ranks behind."""
    made = processes_of(recipe)
    yield made
    if (launcher := made.running.get("site-1")) is not None and launcher.poll() is None:
        launcher.terminate()
        launcher.wait(PATIENCE_S)


def start_ranks(here: Processes, name: str, *more: str) -> Process:
    """The site's daemon under torchrun, as a user starts it."""
    policy = shipped.folder("policies") / "open.toml"
    site = (f"--settings={here.folder / 'site.toml'}", f"--site={name}", f"--server={here.address}")
    own = (f"--policy={policy}", f"--identity={here.identity(Party.SITE, name)}", f"--state={here.folder / name}")
    start = (*TORCHRUN, *["-m", "protofed.deploy.cli", "client", "start"])
    command = [*start, *site, *own, "--device=cpu", "--until-finished", *more]
    with (here.folder / f"{name}.log").open("ab") as log:
        here.running[name] = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return here.running[name]


def rank(launcher: int, number: int) -> int:
    """The process of that rank, which this torchrun has started."""
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={number}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except (OSError, ValueError, IndexError):
            continue
    raise AssertionError(f"no process of rank {number}")


def ends(here: Processes, *names: str) -> list[int]:
    """Exit codes, however long processes take that import PyTorch once more."""
    return [here.running[name].wait(PATIENCE_S) for name in names]


def final(here: Processes) -> Payload:
    """The run's last state."""
    return codec.decode(FolderBlobs(here.folder / "server" / "blobs").get(codec.Digest(str(here.final_digest()))))


def simulated(recipe: Recipe) -> Payload:
    """The same of one process."""
    with simulation(recipe) as running:
        running.go()
        assert running.run.published is not None
        return codec.decode(running.blobs.get(running.run.published.address))


def check_equal(here: Processes, recipe: Recipe) -> None:
    """As far as the order in which numbers are added lets them be: little of all movement apart."""
    expected, found = (_flat(payload) for payload in (simulated(recipe), final(here)))
    with here.ledger() as ledger:
        first = next(row.state for row in ledger.rounds(recipe.name) if row.round == 0)
    start = _flat(codec.decode(FolderBlobs(here.folder / "server" / "blobs").get(codec.Digest(str(first)))))
    apart = np.linalg.norm(found - expected) / np.linalg.norm(expected - start)
    assert 0 < apart < 0.03  # one ReLU that is on instead of off is all that it takes for 0.007


def _flat(payload: Payload) -> Array:
    return np.concatenate([array.ravel() for part in sorted(payload) for _, array in sorted(payload[part].items())])


def has_kept_an_epoch(here: Processes) -> bool:
    """Whether a checkpoint is whole: its folder is there before."""
    return any((here.folder / "site-1" / ".fit").glob("*.safetensors"))


def test_a_follower_killed_in_a_fit_costs_a_restart_and_nothing_else(here: Processes, recipe: Recipe) -> None:
    here.server()
    here.site("site-2", "--partition-index=1")
    launcher = start_ranks(here, "site-1", "--partition-index=0")
    here.wait_for(partial(has_kept_an_epoch, here), PATIENCE_S)
    os.kill(rank(launcher.pid, 1), signal.SIGKILL)
    assert ends(here, "server", "site-1", "site-2") == [0] * 3, here.logs()
    assert set(here.task_statuses(1).values()) == {"reported"}
    log = (here.folder / "site-1.log").read_text()
    assert log.count("following the daemon") == 2
    assert "the process ends" not in log or "another process of this site has ended" in log
    check_equal(here, recipe)


def test_sigterm_ends_all_ranks_and_one_process_goes_on_with_what_they_kept(here: Processes, recipe: Recipe) -> None:
    here.server()
    launcher = start_ranks(here, "site-1", "--partition-index=0")
    here.site("site-2", "--partition-index=1")
    here.wait_for(partial(has_kept_an_epoch, here), PATIENCE_S)
    follower = rank(launcher.pid, 1)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(29)  # torchrun kills after 30 s
    assert not Path(f"/proc/{follower}").exists()
    here.site("site-1", "--partition-index=0")
    assert ends(here, "server", "site-1", "site-2") == [0] * 3, here.logs()
    check_equal(here, recipe)
