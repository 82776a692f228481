"""A real server process to measure: its memory, its processor time, and what it is without an fsync that works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protofed.common.config.recipe import Recipe

NO_SYNC = """
#include <stdio.h>
static unsigned long calls;
int fsync(int file) { (void)file; __sync_fetch_and_add(&calls, 1); return 0; }
int fdatasync(int file) { (void)file; __sync_fetch_and_add(&calls, 1); return 0; }
__attribute__((destructor)) static void tell(void) { fprintf(stderr, "skipped syncs: %lu\\n", calls); }
"""


@contextmanager
def server(recipe: Recipe, folder: Path, *, durable: bool) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`protofed server` with its own state folder; ended by SIGTERM."""
    environment = dict(os.environ)
    (folder / "recipe.toml").write_text(_toml(recipe), encoding="utf-8")
    if not durable:
        environment["LD_PRELOAD"] = str(_shim(folder))
    command = [sys.executable, "-c", "from protofed.deploy.cli.main import main; main()", "server", "start"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *command,
                f"--recipe={folder / 'recipe.toml'}",
                "--listen=127.0.0.1:0",
                "--plaintext",
                f"--state={folder / 'state'}",
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            yield process, _address(process, folder)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
    assert code == 0, (folder / "log").read_text(encoding="utf-8")


def skipped_syncs(folder: Path) -> int:
    """How many syncs of an ended server did nothing."""
    return int((folder / "log").read_text(encoding="utf-8").rpartition("skipped syncs: ")[2])


def _address(process: subprocess.Popen[bytes], folder: Path) -> str:
    path = folder / "state" / "address"
    while not path.exists():
        assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


def _toml(recipe: Recipe) -> str:
    table = recipe.model_dump(mode="json", exclude_defaults=True)
    tables = {name: table.pop(name) for name in [name for name, value in table.items() if isinstance(value, dict)]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _shim(folder: Path) -> Path:
    source, library = folder / "no_sync.c", folder / "no_sync.so"
    source.write_text(NO_SYNC, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
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
