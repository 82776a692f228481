"""/metrics, /healthz and /readyz of `protofed server`."""

from __future__ import annotations

from contextlib import ExitStack

from prometheus_client import ProcessCollector

from protofed.common.config.settings import ServerSettings
from protofed.common.monitoring.http import Monitor
from protofed.common.pki.identity import LiveIdentity
from protofed.deploy.daemons.metrics_endpoint import serve_metrics
from protofed.server.metrics import ServerMetrics
from protofed.server.monitoring.collector import CollectorSources, StateCollector
from protofed.server.monitoring.readiness import ServerReadiness, ledger_writable, state_writable
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import BLOBS
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader


def ledger_url(settings: ServerSettings) -> str:
    """SQLAlchemy URL of the ledger's database: a file in the state folder, unless the settings name another one."""
    return settings.ledger or f"sqlite:///{settings.state / LEDGER_FILE}"


class ServerMonitor:
    """The server's metrics and readiness, served over HTTP if the settings have a [metrics].

    Raises:
        ConfigError: the [metrics] of the settings cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.metrics, self.readiness = ServerMetrics(), ServerReadiness()
        self._settings = settings
        endpoint, registry = settings.metrics, self.metrics.registry
        self._monitor = None if endpoint is None else Monitor(endpoint, registry, self.readiness.missing)

    def start(
        self,
        runs: RunQueue,
        operator: OperatorApi,
        context: ServerContext,
        identity: LiveIdentity | None,
        stack: ExitStack,
    ) -> str:
        """Serve until `stack` is closed; returns the URL before /metrics, empty if nothing is served.

        Raises:
            UnavailableError: the port is taken.
        """
        state = self._settings.state
        self.readiness.require("ledger", ledger_writable(context.ledger, context.check), blocks_calls=False)
        self.readiness.require("state", state_writable(state), blocks_calls=False)
        if (state / BLOBS).is_symlink():  # blobs on a disk of their own, which can be full while the state's is not
            self.readiness.require("blobs", state_writable(state / BLOBS, "folder of the blobs"), blocks_calls=False)
        if self._monitor is None:
            return ""
        records = LedgerReader(ledger_url(self._settings))
        stack.callback(records.close)
        metrics = self.metrics
        # `serve` sets `metrics.lag` later, hence the lambda.
        sources = CollectorSources(
            runs, context.presence, records, operator.certificates, identity, state, lambda: metrics.lag()
        )
        metrics.registry.register(StateCollector(sources))
        ProcessCollector(registry=metrics.registry)
        return stack.enter_context(serve_metrics(self._monitor, state))
