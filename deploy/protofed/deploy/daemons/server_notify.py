"""The messages of `protofed server` to people who do not watch: `[notify]` of its settings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from protofed.common.config.notify import Notify
from protofed.common.pki.identity import LiveIdentity
from protofed.server.metrics import ServerMetrics
from protofed.server.notifications.channels import open_channels
from protofed.server.notifications.notifier import Notifier
from protofed.server.notifications.outbox import JOURNAL_FILE, Outbox
from protofed.server.notifications.watch import Watch, WatchSources
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.reader import LedgerReader


class ServerNotifications:
    """Opened in two steps: runs that fail while they are taken up are news, so the outbox comes before the run queue.

    Args:
        url: of the ledger's database.

    Raises:
        ConfigError: a channel's secret, or its CAs, cannot be used.
    """

    def __init__(self, settings: Notify, url: str, identity: LiveIdentity | None, listen: str) -> None:
        self._settings, self._url, self._identity = settings, url, identity
        self._channels = open_channels(settings)
        self._server = server_name(identity, listen)

    def open(self, state: Path, metrics: ServerMetrics, stack: ExitStack) -> None:
        """Read the journal of the state folder, which this process must have locked."""
        self._metrics = metrics
        metrics.notifies(self._settings.channels)
        self._outbox = Outbox(state / JOURNAL_FILE, self._settings.channels, self._settings.events)
        stack.callback(self._outbox.close)

    def start(self, runs: RunQueue, operator: OperatorApi, context: ServerContext, stack: ExitStack) -> None:
        """Look and send on threads of its own until `stack` is closed."""
        records = LedgerReader(self._url)
        stack.callback(records.close)
        sources = WatchSources(
            runs,
            context.presence,
            records,
            operator.certificates,
            self._identity,
            self._outbox.since,
            context.clock,
        )
        watch = Watch(self._settings, sources)
        notifier = Notifier(self._server, watch.look, self._outbox, self._channels, self._metrics.notification)
        stack.callback(notifier.stop)
        notifier.start()


def server_name(identity: LiveIdentity | None, listen: str) -> str:
    """How a server is called in its messages: as in its certificate; in plain text by its address."""
    return listen if identity is None else identity.current().certificate.name
