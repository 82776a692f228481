"""Shared by all suites."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Role
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.rpc.audit import AUDIT_FILE, ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.server import serve
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.ledger import Ledger
from tests.audits import audit

Mount = Callable[[Path, str], None]
Connect = Callable[[str, frozenset[Role]], Any]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Logs are captured with each test's output, and no test leaves its own set-up behind."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


class LiveServer:
    """A real server on a thread of this process.

    Args:
        identity: folder with the server's; None: it speaks plain text.
        options: of `serve`.

    Attributes:
        address: where it listens.
        runs, operation, around: what it serves; read them only.
    """

    def __init__(
        self, recipe: Recipe, state: Path, listen: str = "127.0.0.1:0", identity: Path | None = None, **options: Any
    ) -> None:
        self._address: Future[str] = Future()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        state.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(f"sqlite:///{state / 'ledger.sqlite'}")
        self.blobs, threads, bells = FolderBlobs(state / "blobs"), Executors(), TaskNotifier()
        roster = SitePresence(self.ledger, time.monotonic)
        around = ServerContext(
            self.ledger, self.blobs, roster, time.monotonic, work=threads.aggregate, notify=bells.ring
        )
        self.around, self.runs = around, RunQueue([recipe], around)
        self.operation = OperatorApi(self.runs, around)
        if identity is not None:
            self.operation.certificates.welcome(identity)
        self.audit_file = state / AUDIT_FILE
        self._audit = ServerAudit(self.audit_file)
        main = serve(
            self.runs,
            self.operation,
            self.blobs,
            threads,
            bells,
            listen,
            self._stop,
            audit=self._audit,
            identity=None if identity is None else LiveIdentity(identity, Party.SERVER),
            started=self._address.set_result,
            until_finished=False,
            **options,
        )
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(main), name="live-server")
        self._thread.start()
        self.address = self._address.result(timeout=20)

    def join(self) -> None:
        """Wait until it has ended by itself."""
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """End it in order."""
        if not self._loop.is_closed():
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
            self.join()
            self._loop.close()
            self._audit.close()
            self.ledger.close()


@pytest.fixture
def live_server(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers; all are stopped at the end of the test."""
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
    from protofed.client.transport.grpc_link import GrpcLink

    with ExitStack() as links:

        def to(address: str) -> Connect:
            def connect(site: str, roles: frozenset[Role]) -> Any:
                link = GrpcLink(address, site, "tested", roles, identity=None, audit=audit(), give_up_after_s=20)
                links.callback(link.close)
                return link

            return connect

        yield to


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    """Small recipes on the digits, by method."""

    def make(method: str, **changes: object) -> Recipe:
        table: dict[str, object] = {
            "name": f"small-{method}",
            "rounds": 3,
            "classes": 10,
            "input": {"shape": [1, 8, 8]},
            "method": {"name": method},
            "model": {"name": "digits-cnn"},
            "plan": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
            "federation": {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1},
            "data": {
                "source": "digits",
                "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.5},
            },
        }
        return Recipe.model_validate({**table, **changes})

    return make


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
