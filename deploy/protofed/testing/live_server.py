"""A real gRPC server, and links to it, in the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from protofed.client.transport.audit import ClientAudit, Entry
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Role
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import open_server
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc.audit import AUDIT_FILE, ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.server import Served, serve

Connect: TypeAlias = Callable[[str, frozenset[Role]], GrpcLink]


class LiveServer:
    """A real server on a thread of this process; ready when the constructor returns.

    Args:
        state: its state folder; created if missing.
        listen: host:port; port 0 picks a free one.
        identity: the server's identity folder; None: no TLS.
        clock: of rounds' deadlines, in seconds.
        options: of `serve`.

    Attributes:
        address: host:port on which it listens.
        runs, operation, context: what the server thread uses; tests only read them.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: Path,
        listen: str = "127.0.0.1:0",
        identity: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._address: Future[str] = Future()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        state.mkdir(parents=True, exist_ok=True)
        executors, notifier, self._resources = Executors(), TaskNotifier(), ExitStack()
        opened = open_server(state, self._resources, work=executors.aggregate, notify=notifier.notify)
        context = replace(opened, clock=clock, presence=SitePresence(opened.ledger, clock))
        self.context, self.ledger, self.blobs = context, context.ledger, context.blobs
        self.runs = RunQueue([recipe], context)
        self.operation = OperatorApi(self.runs, context)
        if identity is not None:
            self.operation.certificates.register_first_operators(identity)
        self.audit_file = state / AUDIT_FILE
        audit = ServerAudit(self.audit_file)
        self._resources.callback(audit.close)
        server_identity = None if identity is None else LiveIdentity(identity, Party.SERVER)
        main = serve(
            Served(self.runs, self.operation, self.blobs, audit, executors, notifier, server_identity),
            listen,
            self._stop,
            started=self._address.set_result,
            until_finished=False,
            **options,
        )
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(main), name="live-server")
        self._thread.start()
        self.address = self._address.result(timeout=20)

    def join(self) -> None:
        """Wait until the server has ended by itself.

        Raises:
            TimeoutError: it still runs after 20 seconds.
        """
        self._thread.join(timeout=20)
        if self._thread.is_alive():
            raise TimeoutError("the server does not end")

    def stop(self) -> None:
        """Shut the server down and close its files; may be called twice."""
        if not self._loop.is_closed():
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
            self.join()
            self._loop.close()
            self._resources.close()


class NoAudit:
    """An audit log that keeps nothing."""

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Discard the entries."""


@contextmanager
def links(address: str) -> Iterator[Connect]:
    """A function that opens links without TLS to the server at an address; all are closed on exit."""
    with ExitStack() as resources:

        def connect(site: str, roles: frozenset[Role]) -> GrpcLink:
            audit = ClientAudit(NoAudit())
            link = GrpcLink(address, site, "tested", roles, identity=None, audit=audit, give_up_after_s=20)
            resources.callback(link.close)
            return link

        yield connect
