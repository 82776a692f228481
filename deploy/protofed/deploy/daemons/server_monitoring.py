"""/metrics, /healthz and /readyz of `protofed server`."""

from __future__ import annotations

from contextlib import ExitStack

from prometheus_client import ProcessCollector

from protofed.common.config.settings import ServerSettings
from protofed.common.monitoring.http import Monitor
from protofed.common.pki.identity import LiveIdentity
from protofed.deploy.daemons.metrics_endpoint import answering
from protofed.server.metrics import ServerMetrics
from protofed.server.monitoring.collector import CollectorSources, StateCollector
from protofed.server.monitoring.readiness import ServerReadiness, ledger_writable, state_writable
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.storage.blobs import BLOBS
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader


def ledger_url(settings: ServerSettings) -> str:
    """Of the database, which is in the state folder unless the settings name another one."""
    return settings.ledger or f"sqlite:///{settings.state / LEDGER_FILE}"


class ServerMonitor:
    """What is counted and what has to hold, and where both can be asked for, if the settings say so.

    Raises:
        ConfigError: the [metrics] of the settings cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.metrics, self.readiness = ServerMetrics(), ServerReadiness()
        self._settings = settings
        where, registry = settings.metrics, self.metrics.registry
        self._monitor = None if where is None else Monitor(where, registry, self.readiness.missing)

    def start(
        self,
        runs: RunQueue,
        operation: OperatorApi,
        context: ServerContext,
        identity: LiveIdentity | None,
        held: ExitStack,
    ) -> str:
        """Answer until `held` is closed; the URL before /metrics, or nothing.

        Raises:
            Unavailable: the port is taken.
        """
        state = self._settings.state
        self.readiness.require("ledger", ledger_writable(context.ledger), blocks_calls=False)
        self.readiness.require("state", state_writable(state), blocks_calls=False)
        if (state / BLOBS).is_symlink():
            self.readiness.require("blobs", state_writable(state / BLOBS, "folder of the blobs"), blocks_calls=False)
        if self._monitor is None:
            return ""
        records = LedgerReader(ledger_url(self._settings))
        held.callback(records.close)
        metrics = self.metrics
        watched = CollectorSources(
            runs, context.presence, records, operation.certificates, identity, state, lambda: metrics.lag()
        )
        metrics.registry.register(StateCollector(watched))
        ProcessCollector(registry=metrics.registry)
        return held.enter_context(answering(self._monitor, state))
