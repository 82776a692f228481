"""Shared by all suites; what needs PyTorch or a server is imported by the fixture that does."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from structlog.dev import ConsoleRenderer, plain_traceback

from protofed.common.process import quiet_mlflow

if TYPE_CHECKING:
    from protofed.common.config.recipe import Recipe
    from protofed.testing.live_server import Connect, LiveServer

Mount = Callable[[Path, str], None]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch reads it when it is imported
quiet_mlflow()  # which MONAI imports
# A shell starts what it puts in the background with SIGINT ignored, and every child would inherit that: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: each collection looked through them, a tenth of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Logs are captured with each test's output, and no test leaves its own set-up behind."""
    plain_logs()
    yield
    plain_logs()


def plain_logs() -> None:
    """Set up as structlog is by itself, but for tracebacks: the coloured ones of some tests took half of their time."""
    structlog.reset_defaults()
    *steps, _ = structlog.get_config()["processors"]
    structlog.configure(processors=[*steps, ConsoleRenderer(colors=False, exception_formatter=plain_traceback)])


@pytest.fixture
def live_server(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers; all are stopped at the end of the test."""
    from protofed.testing.live_server import LiveServer

    started: list[LiveServer] = []

    def start(recipe: Recipe, state: Path | None = None, listen: str = "127.0.0.1:0", **options: Any) -> LiveServer:
        started.append(LiveServer(recipe, state or tmp_path / "server", listen, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def linked() -> Iterator[Callable[[str], Connect]]:
    """Links in plain text to the server at an address; all are closed at the end of the test."""
    from protofed.testing.live_server import links

    with ExitStack() as opened:
        yield lambda address: opened.enter_context(links(address))


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    """Small recipes on the digits, by method."""
    from protofed.testing.small_recipe import small_recipe

    return small_recipe


@pytest.fixture(scope="session")
def quick_heartbeats() -> Iterator[None]:
    """Daemons in this process beat as often as their recipe says: tests do not wait a second for each beat."""
    from protofed.client.agent import heartbeat

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heartbeat, "SHORTEST_S", 0.001)
        yield


@pytest.fixture
def unused_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Puts an empty file system in memory on a folder, with these options; none is left mounted."""
    mounted: list[Path] = []

    def make(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "protofed-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")
        mounted.append(folder)

    yield make
    for folder in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
