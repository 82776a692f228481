"""Rounds of echo clients with NVFlare over gRPC and mutual TLS, as its proof of concept deploys it; run in .venv-peers.

A server, a process for each site and, as always there, a further process for each job at the server and at each site.
Averaging takes each update as it comes, which is its default and takes the least memory; clients echo within the job's
process, which saves a hop; idle clients ask ten times a second, not once in two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from nvflare.app_common.np.recipes import NumpyFedAvgRecipe
from nvflare.recipe import PocEnv

ECHO = Path(__file__).with_name("nvflare_echo.py")
ASK_EVERY_S = 0.1
LOGIN_S = 60.0  # until its admin has a connection
LONGEST_S = 600.0  # of all rounds


class Usage(threading.Thread):
    """Watches the processes of the server: their highest resident megabytes, and their processor seconds."""

    def __init__(self, workspace: Path) -> None:
        super().__init__(daemon=True)
        self._workspace, self._end = str(workspace), threading.Event()
        self.peaks: dict[int, float] = {}

    def run(self) -> None:
        """Look until stopped."""
        while not self._end.wait(0.2):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    if self._is_servers(folder):
                        self.peaks[int(folder.name)] = _peak(folder)
                except (OSError, StopIteration):  # it has ended
                    continue

    def stop(self) -> float:
        """Megabytes, of all of them together."""
        self._end.set()
        return sum(self.peaks.values())

    def _is_servers(self, process: Path) -> bool:
        command = (process / "cmdline").read_bytes().split(b"\0")
        return any(
            word.decode(errors="replace").startswith(self._workspace) and word.endswith(b"/server") for word in command
        )


def _peak(process: Path) -> float:
    lines = (process / "status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3


def measure(given: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    """One deployment, from its certificates to the end of its job."""
    notes, workspace = folder / "notes", folder / "poc"
    os.environ |= {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(workspace)}
    np.save(folder / "model.npy", np.random.default_rng(0).random(int(given.megabytes * 1e6 / 4), np.float32))
    recipe = NumpyFedAvgRecipe(
        name="echo",
        initial_ckpt=str(folder / "model.npy"),
        min_clients=given.sites,
        num_rounds=given.rounds,
        train_script=str(ECHO),
        train_args=str(notes),
    )
    recipe.add_server_config({"server": {"task_request_interval": ASK_EVERY_S}})
    project, usage = str(_project(folder, given.sites)), Usage(workspace)
    deployment = PocEnv(project_conf_path=project, extra={"login_timeout": LOGIN_S})
    usage.start()
    try:
        recipe.execute(deployment)
        begins = _wait(notes, given.rounds)
    finally:
        deployment.stop(clean_up=True)
    times = [begins[number] for number in sorted(begins)][1:]
    return {"seconds": [after - before for before, after in pairwise(times)], "peak_mb": usage.stop()}


def _project(folder: Path, sites: int) -> Path:
    """The proof of concept's own project with these sites, and gRPC in place of HTTP."""
    import nvflare.lighter

    project = yaml.safe_load((Path(nvflare.lighter.__file__).parent / "dummy_project.yml").read_text(encoding="utf-8"))
    others = [one for one in project["participants"] if one["type"] == "admin"]
    server = {"name": "server", "type": "server", "org": "nvidia", "fed_learn_port": 8002, "default_host": "localhost"}
    clients = [{"name": f"site-{n}", "type": "client", "org": "nvidia"} for n in range(1, sites + 1)]
    project["participants"] = [server, *others, *clients]
    for builder in project["builders"]:
        if builder["path"].endswith("StaticFileBuilder"):
            builder["args"]["scheme"] = "grpc"
    path = folder / "project.yml"
    path.write_text(yaml.safe_dump(project), encoding="utf-8")
    return path


def _wait(notes: Path, rounds: int) -> dict[int, float]:
    """`_begins` once the last round has started; by our own clock, as its admin's connection may be lost meanwhile."""
    deadline, begins = time.monotonic() + LONGEST_S, dict[int, float]()
    while len(begins) < rounds:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(begins)} of {rounds} rounds have started in {LONGEST_S:.0f} s")
        time.sleep(1.0)
        begins = _begins(notes) if notes.exists() else {}
    return begins


def _begins(notes: Path) -> dict[int, float]:
    """By round, when the first site got its task; a line of `notes`: round, Unix time."""
    begins: dict[int, float] = {}
    for line in notes.read_text(encoding="utf-8").splitlines():
        number, at = line.split()
        begins[int(number)] = min(begins.get(int(number), float(at)), float(at))
    return begins


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--identity", help="not used: it has an authority of its own")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-nvflare-", ignore_cleanup_errors=True) as scratch:
            print(json.dumps(measure(asked, Path(scratch))), flush=True)  # noqa: T201
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # its threads do not end by themselves where a connection was lost
