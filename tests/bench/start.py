"""How long a server takes from nothing to its first answer."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from tests.bench.report import Row
from tests.bench.timing import seconds

REPETITIONS = 5


def rows() -> Iterator[Row]:
    """A server process beside an interpreter that does nothing."""
    start = statistics.median(seconds(server_start) for _ in range(REPETITIONS))
    python = statistics.median(seconds(python_start) for _ in range(REPETITIONS))
    yield Row("server start to first answer", start, "s", python, "bare Python", at_most=2.0)


def server_start() -> None:
    """A server process until it answers a health check; without torch in it."""
    script = (
        "import sys, threading, grpc, tempfile, pathlib\n"
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
        "told = [f'--recipe={recipe}', '--listen=127.0.0.1:0', '--plaintext', f'--state={tempfile.mkdtemp()}']\n"
        "main(['server', 'start', *told])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr


def python_start() -> None:
    """An interpreter that does nothing."""
    subprocess.run([sys.executable, "-c", ""], check=True)
