"""How long a server takes from nothing to its first answer, a site's daemon until it is ready, and help."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.report import Row, seconds

from protofed.deploy import shipped
from protofed.deploy.daemons import readyz
from protofed.deploy.daemons.server import ADDRESS_FILE

REPETITIONS = 5
COMMAND = (sys.executable, "-m", "protofed.deploy.cli")
HELPS = (["--help"], ["client", "start", "--help"], ["runs", "--help"])
PATIENCE_S = 120.0


def rows() -> Iterator[Row]:
    """A server process beside an interpreter that does nothing."""
    start = statistics.median(seconds(server_start) for _ in range(REPETITIONS))
    python = statistics.median(seconds(python_start) for _ in range(REPETITIONS))
    yield Row("server start to first answer", start, "s", python, "bare Python", at_most=2.0)
    torch = statistics.median(seconds(torch_start) for _ in range(REPETITIONS))
    with TemporaryDirectory() as folder:
        ready = statistics.median(daemon_starts(Path(folder)))
    yield Row("client start to ready, digits", ready, "s", torch, "import torch", at_most=2.0)
    for words in HELPS:
        cpu = statistics.median(cpu_seconds(words) for _ in range(REPETITIONS))
        yield Row(f"protofed {' '.join(words)}", cpu, "CPU s", at_most=0.3)


def server_start() -> None:
    """A server process until it answers a health check; without torch in it."""
    script = (
        "import sys, threading, grpc\n"
        "from protofed.deploy.cli.main import main\n"
        "from protofed.deploy import shipped\n"
        "from protofed.deploy.daemons import server as server_process\n"
        "from grpc_health.v1 import health_pb2, health_pb2_grpc\n"
        "import os, signal\n"
        "def check(address):\n"
        "    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))\n"
        "    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1\n"
        "    assert 'torch' not in sys.modules\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "serve = server_process.serve\n"
        "def watched(*a, started, **k):\n"
        "    return serve(*a, started=lambda x: threading.Thread(target=check, args=(x,)).start(), **k)\n"
        "server_process.serve = watched\n"
        "recipe = shipped.folder('recipes') / 'digits-fednh.toml'\n"
        "told = [f'--recipe={recipe}', '--listen=127.0.0.1:0', '--identity=none', f'--state={sys.argv[1]}']\n"
        "main(['server', 'start', *told])\n"
    )
    with TemporaryDirectory() as state:
        ended = subprocess.run([sys.executable, "-c", script, state], capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr


def daemon_starts(folder: Path) -> Iterator[float]:
    """Seconds of a site's daemons, one after the other, until each is ready beside a running server."""
    with _running("server", "start", "--listen=127.0.0.1:0", f"--state={folder / 'server'}"):
        _wait_for(folder / "server" / ADDRESS_FILE)
        address = (folder / "server" / ADDRESS_FILE).read_text(encoding="utf-8")
        settings = shipped.folder("sites") / "digits.toml"
        known = (f"--settings={settings}", "--site=site-1", "--partition-index=0", "--policy=open")
        for number in range(REPETITIONS):
            state = folder / f"site-{number}"
            began = time.perf_counter()
            with _running(
                "client", "start", *known, f"--server={address}", f"--state={state}", "--metrics=127.0.0.1:0"
            ):
                while readyz.missing(state):
                    assert time.perf_counter() - began < PATIENCE_S, readyz.missing(state)
                    time.sleep(0.01)
                yield time.perf_counter() - began


@contextmanager
def _running(*words: str) -> Iterator[None]:
    process = subprocess.Popen(
        [*COMMAND, *words, "--identity=none"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_for(file: Path) -> None:
    began = time.perf_counter()
    while not file.exists():
        assert time.perf_counter() - began < PATIENCE_S, f"{file} does not come"
        time.sleep(0.01)


def cpu_seconds(words: list[str]) -> float:
    """User and system time of one command."""
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def torch_start() -> None:
    """An interpreter that imports PyTorch and nothing else."""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def python_start() -> None:
    """An interpreter that does nothing."""
    subprocess.run([sys.executable, "-c", ""], check=True)
