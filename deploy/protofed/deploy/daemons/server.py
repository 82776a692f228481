"""The server's composition root: what `protofed server start` runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
from prometheus_client import ProcessCollector

from protofed.common import plugins
from protofed.common.address import check_connection, find_folder
from protofed.common.clock import stamp
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.config.settings import Notify, ServerSettings
from protofed.common.errors import ConfigError, RunFailedError, StateError
from protofed.common.monitoring import Monitor
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy import logs, shipped
from protofed.deploy.daemons.metrics_endpoint import serve_metrics
from protofed.deploy.daemons.signals import ENDING, check_hang_up, forbid_core_dumps
from protofed.deploy.shipped import read_overrides, with_overrides
from protofed.deploy.tracking import follower
from protofed.server.metrics import ServerMetrics
from protofed.server.monitoring.collector import CollectorSources, StateCollector
from protofed.server.monitoring.readiness import ServerReadiness, ledger_writable, state_writable
from protofed.server.notifications.channels import open_channels
from protofed.server.notifications.notifier import Notifier
from protofed.server.notifications.outbox import JOURNAL_FILE as NOTIFICATIONS
from protofed.server.notifications.outbox import Outbox
from protofed.server.notifications.watch import Watch, WatchSources
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import JOURNAL_FILE, ServerContext, open_server
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc.audit import AUDIT_FILE, ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.memory_guard import memory_limit
from protofed.server.rpc.server import Served, serve
from protofed.server.storage.blobs import BLOBS
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.recovery import compare_audit

log = structlog.get_logger()
ADDRESS_FILE = "address"  # in the state folder: host:port, which is not known before if the port is 0


def read_recipes(settings: ServerSettings, assignments: Sequence[str]) -> list[Recipe]:
    """The recipes that a server's settings name, each with the same overrides.

    Args:
        assignments: as of `--set`.

    Raises:
        ConfigError: a recipe cannot be used, or there are assignments and no recipe.
    """
    table = read_overrides(assignments)
    if table and not settings.recipes:
        raise ConfigError("--set changes recipes, and none was given; add --recipe")
    return [with_overrides(read_recipe(shipped.recipe_file(name)), table) for name in settings.recipes]


def checked(settings: ServerSettings, assignments: Sequence[str]) -> tuple[list[Recipe], LiveIdentity | None]:
    """The recipes and the identity that a server starts with.

    Raises:
        ConfigError: a recipe, the address or the identity cannot be used.
    """
    plugins.allow(settings.plugins)
    folder = check_connection(settings.listen, settings.identity)
    identity = None if folder is None else LiveIdentity(folder, Party.SERVER)
    return read_recipes(settings, assignments), identity


def run_server(
    settings: ServerSettings,
    assignments: Sequence[str] = (),
    *,
    until_finished: bool,
    recover: bool,
    on_start: Callable[[str], None],
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP.

    Args:
        until_finished: end also when all runs have ended.
        assignments: the values of `--set`, which override the recipes'.
        recover: start although the ledger has lost some of what the server promised to sites.
        on_start: called with one line (address, TLS or plain text, metrics) once calls are answered.

    Raises:
        ConfigError: a recipe, the address or the identity cannot be used.
        StateError: the state folder is used by another server, damaged, or older than what was promised.
        UnavailableError: the port is taken.
        RunFailedError: a run failed (only with `until_finished`).
        HangUpError: SIGHUP ended it.
    """
    forbid_core_dumps()
    logs.hide_server(settings)
    (recipes, identity), limit = checked(settings, assignments), memory_limit(settings.memory_limit_mb)
    for recipe in recipes:
        if recipe.data is not None:
            log.info(
                "the recipe's data are for simulations: sites train on those of their own settings", run=recipe.name
            )
    monitor, trackers = ServerMonitor(settings), follower.trackers(settings.tensorboard, settings.mlflow)
    notifications = _notifications(settings, identity)
    with ExitStack() as stack:
        executors, notifier = Executors(), TaskNotifier()
        context = open_server(
            settings.state,
            stack,
            ledger_url=ledger_url(settings),
            blobs_folder=settings.blobs,
            recover=recover,
            work=executors.aggregate,
            notify=notifier.notify,
            keep_rounds=settings.keep_rounds,
            metrics=monitor.metrics,
        )
        audit = ServerAudit(settings.state / AUDIT_FILE)
        stack.callback(audit.close)
        compare_audit(settings.state / JOURNAL_FILE, audit.newest.seq)
        _note_audit(context, audit)
        stack.callback(_note_audit, context, audit)
        if notifications is not None:
            notifications.open(settings.state, monitor.metrics, stack)
        runs = RunQueue(recipes, context)
        stack.enter_context(follower.following(ledger_url(settings), trackers))
        operator = OperatorApi(runs, context)
        if (folder := find_folder(settings.identity)) is not None:
            operator.certificates.register_first_operators(folder)
        if notifications is not None:
            notifications.start(runs, operator, context, stack)
        metrics = monitor.start(runs, operator, context, identity, stack)

        def announce(address: str) -> None:
            _announce(settings.state, address, metrics)
            on_start(f"{address} ({_security(identity)}){f', metrics on {metrics}/metrics' if metrics else ''}")

        served = Served(runs, operator, context.blobs, audit, executors, notifier, identity, context.check)
        reason = asyncio.run(
            _serve_until_signal(served, settings, limit, monitor.readiness, announce, until_finished=until_finished)
        )
        check_hang_up(reason)
        if until_finished and runs.failed:
            raise RunFailedError(f"run failed: {'; '.join(runs.failed)}")


def _note_audit(context: ServerContext, audit: ServerAudit) -> None:
    with contextlib.suppress(StateError):  # no more than a second witness; a disk that fails is said elsewhere
        context.ledger.note_audit(audit.newest.seq, audit.newest.hash)


async def _serve_until_signal(
    served: Served,
    settings: ServerSettings,
    memory_limit_bytes: int | None,
    readiness: ServerReadiness,
    announce: Callable[[str], None],
    *,
    until_finished: bool,
) -> str:
    """Returns the name of the signal that ended it; empty if none did."""
    stop, reasons = _stopped_by_signals()
    await serve(
        served,
        settings.listen,
        stop,
        started=announce,
        until_finished=until_finished,
        memory_limit=memory_limit_bytes,
        max_connections=settings.max_connections,
        readiness=readiness,
    )
    return "".join(reasons[:1])


def _notifications(settings: ServerSettings, identity: LiveIdentity | None) -> ServerNotifications | None:
    if settings.notify is None:
        return None

    return ServerNotifications(settings.notify, ledger_url(settings), identity, settings.listen)


def _announce(state: Path, address: str, metrics: str) -> None:
    """Write the address into the state folder and the log."""
    files.write(state / ADDRESS_FILE, address.encode())
    fields = {"metrics": metrics} if metrics else {}
    log.info("serving", address=address, version=VERSION, state=str(state), **fields)


def _stopped_by_signals() -> tuple[asyncio.Event, list[str]]:
    """An event that signals of `ENDING` set, and the names of those that came."""
    stop, reasons = asyncio.Event(), list[str]()

    def on_signal(reason: str) -> None:
        reasons.append(reason)
        stop.set()
        log.info("stopping", reason=reason)

    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number.name)
    return stop, reasons


def _security(identity: LiveIdentity | None) -> str:
    if identity is None:
        return "plain text: any program on this machine may call, as any site and as operator"
    certificate = identity.current().certificate
    return f"TLS 1.3 as '{certificate.name}', certificate until {stamp(certificate.not_after)}"


def read_address(state: Path) -> str | None:
    """host:port of the server of a state folder; None: it has not answered calls yet."""
    with contextlib.suppress(FileNotFoundError):
        return (state / ADDRESS_FILE).read_text(encoding="utf-8")
    return None


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
        self._outbox = Outbox(state / NOTIFICATIONS, self._settings.channels, self._settings.events)
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
