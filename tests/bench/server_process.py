"""A real server process to measure: its memory, processor time, syncs, and how late its event loop runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.deploy.certs import lifecycle
from protofed.deploy.certs.lifecycle import make_authority
from protofed.deploy.operator.connection import Operator

OPERATOR = "bench"
# Counts the syncs of a process in a file that others can read meanwhile; carries them out unless told not to.
SYNCS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static unsigned long *calls;
static int skipped, (*real_fsync)(int), (*real_fdatasync)(int);
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("SYNCS_FILE"), O_RDWR);
    if (file < 0) abort();
    calls = mmap(0, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (calls == MAP_FAILED) abort();
    close(file);
    skipped = getenv("SYNCS_SKIPPED") != 0;
    real_fsync = (int (*)(int)) dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (int (*)(int)) dlsym(RTLD_NEXT, "fdatasync");
}
int fsync(int file) { __sync_fetch_and_add(calls, 1); return skipped ? 0 : real_fsync(file); }
int fdatasync(int file) { __sync_fetch_and_add(calls, 1); return skipped ? 0 : real_fdatasync(file); }
"""


def bench_recipe(name: str, rounds: int, model: str = "mlp", **tables: Any) -> Recipe:
    """FedAvg of ten classes of images of 8 x 8, unless the tables say otherwise."""
    known = {"name": name, "rounds": rounds, "classes": 10, "input": {"shape": [1, 8, 8]}, "method": {"name": "fedavg"}}
    return Recipe.model_validate({**known, "model": {"name": model}, **tables})


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        identities: a folder for each site, with its certificate; None: it has no TLS.
    """

    process: int
    address: str
    folder: Path
    identities: Path | None

    def syncs(self) -> int:
        """How many syncs it has asked for since its start."""
        return int.from_bytes((self.folder / "syncs").read_bytes(), sys.byteorder)

    def lags(self) -> dict[str, float]:
        """By how many milliseconds its event loop ran late at most and in one of a hundred looks; once it has ended."""
        found: dict[str, float] = json.loads((self.folder / "lag.json").read_text(encoding="utf-8"))
        return found


@contextmanager
def server(
    recipe: Recipe, folder: Path, sites: list[str], *, durable: bool = True, tls: bool = True
) -> Iterator[Server]:
    """`protofed server start` with its own state folder, the certificates of these sites registered; ended by SIGTERM.

    Args:
        durable: False: its syncs do nothing.
    """
    identities = make_identities(folder / "identities", [*sites, OPERATOR]) if tls else None
    (folder / "recipe.toml").write_text(_toml(recipe), encoding="utf-8")
    (folder / "syncs").write_bytes(bytes(8))
    environment = os.environ | {"LD_PRELOAD": str(_counter(folder)), "SYNCS_FILE": str(folder / "syncs")}
    environment |= {"BENCH_LAG": str(folder / "lag.json")} | ({} if durable else {"SYNCS_SKIPPED": "1"})
    told = [f"--recipe={folder / 'recipe.toml'}", "--listen=127.0.0.1:0", f"--state={folder / 'state'}"]
    told += ["--identity=none"] if identities is None else [f"--identity={identities / 'server'}"]
    with process(
        [sys.executable, "-m", "tests.bench.watched_server", "server", "start", *told], folder, environment
    ) as one:
        address = written(folder / "state" / "address", one, folder)
        if identities is not None:
            with Operator(address, identities / OPERATOR) as operator:
                for number, site in enumerate(sites):
                    roles = ("trainer", "evaluator") if number == 0 else ("trainer",)
                    operator.register((identities / site / "cert.pem").read_text(encoding="ascii"), roles)
        yield Server(one.pid, address, folder, identities)


def make_identities(folder: Path, names: list[str]) -> Path:
    """A CA, a server's identity for this machine that admits the operator, and the identities of sites; the folder."""
    authority = make_authority(folder / "ca")
    lifecycle.issue(authority, folder / "server", Party.SERVER, "server", ["127.0.0.1", "localhost"])
    for name in names:
        lifecycle.issue(authority, folder / name, Party.OPERATOR if name == OPERATOR else Party.SITE, name)
    if OPERATOR in names:
        (folder / "server" / "operators").mkdir()
        (folder / "server" / "operators" / "bench.pem").write_bytes((folder / OPERATOR / "cert.pem").read_bytes())
    return folder


@contextmanager
def process(
    command: list[str], folder: Path, environment: dict[str, str] | None = None, *, terminated: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log` in a folder; ended by SIGTERM.

    Args:
        terminated: it has no handler for that; else it must end by itself, with code 0.
    """
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            code = started.wait(timeout=60)
    assert code == (-signal.SIGTERM if terminated else 0), (folder / "log").read_text(encoding="utf-8")


def written(path: Path, by: subprocess.Popen[bytes], folder: Path) -> str:
    """The text of a file, once a process has written it."""
    while not (path.exists() and path.read_text(encoding="utf-8")):
        assert by.poll() is None, (folder / "log").read_text(encoding="utf-8")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


def _toml(recipe: Recipe) -> str:
    table = recipe.model_dump(mode="json", exclude_defaults=True)
    tables = {name: table.pop(name) for name in [name for name, value in table.items() if isinstance(value, dict)]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _counter(folder: Path) -> Path:
    source, library = folder / "syncs.c", folder / "syncs.so"
    source.write_text(SYNCS, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def memory(process: int) -> tuple[float, float]:
    """Resident megabytes of a process: now, and at most."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    of = {line.partition(":")[0]: line.split() for line in lines}
    return int(of["VmRSS"][1]) / 1e3, int(of["VmHWM"][1]) / 1e3


def processor(process: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
