"""The server's composition root: what `protofed server start` runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from protofed.common import plugins
from protofed.common.address import check_connection
from protofed.common.clock import stamp
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.config.settings import ServerSettings
from protofed.common.errors import ConfigError, RunFailedError, StateError
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy import shipped
from protofed.deploy.daemons import core_dumps
from protofed.deploy.daemons.server_monitoring import ServerMonitor, ledger_url
from protofed.deploy.daemons.signals import ENDING, check_hang_up
from protofed.deploy.logs import setup
from protofed.deploy.overrides import read_overrides, with_overrides
from protofed.deploy.tracking import follower
from protofed.server.assembly import JOURNAL_FILE, open_server
from protofed.server.monitoring.readiness import ServerReadiness
from protofed.server.operator.service import OperatorApi
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc.audit import AUDIT_FILE, ServerAudit
from protofed.server.rpc.executors import Executors, TaskNotifier
from protofed.server.rpc.memory_guard import memory_limit
from protofed.server.rpc.server import Served, serve
from protofed.server.storage.recovery import compare_audit

if TYPE_CHECKING:
    from protofed.deploy.daemons.server_notify import ServerNotifications

log = structlog.get_logger()
ADDRESS_FILE = "address"  # in the state folder: host:port, which is not known before if the port is 0


def recipes_of(settings: ServerSettings, assignments: Sequence[str]) -> list[Recipe]:
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
    check_connection(settings.listen, settings.identity, settings.plaintext)
    identity = None if settings.identity is None else LiveIdentity(settings.identity, Party.SERVER)
    return recipes_of(settings, assignments), identity


def run_server(
    settings: ServerSettings,
    assignments: Sequence[str] = (),
    *,
    until_finished: bool,
    recover: bool,
    started: Callable[[str], None],
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP.

    Args:
        until_finished: end also when all runs have ended.
        assignments: the values of `--set`, which override the recipes'.
        recover: start although the ledger has lost some of what the server promised to sites.
        started: called with one line (address, TLS or plain text, metrics) once calls are answered.

    Raises:
        ConfigError: a recipe, the address or the identity cannot be used.
        StateError: the state folder is used by another server, damaged, or older than what was promised.
        UnavailableError: the port is taken.
        RunFailedError: a run failed (only with `until_finished`).
        HangUpError: SIGHUP ended it.
    """
    core_dumps.forbid()
    setup.hide_server(settings)
    (recipes, identity), limit = checked(settings, assignments), memory_limit(settings.memory_limit_mb)
    for recipe in recipes:
        if recipe.data is not None:
            log.info(
                "the recipe's data are for simulations: sites train on those of their own settings", run=recipe.name
            )
    monitor, trackers = ServerMonitor(settings), follower.trackers(settings.tensorboard, settings.mlflow)
    told = _notifications(settings, identity)
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
        if told is not None:
            told.open(settings.state, monitor.metrics, stack)
        runs = RunQueue(recipes, context)
        stack.enter_context(follower.following(ledger_url(settings), trackers))
        operator = OperatorApi(runs, context)
        if settings.identity is not None:
            operator.certificates.register_first_operators(settings.identity)
        if told is not None:
            told.start(runs, operator, context, stack)
        metrics = monitor.start(runs, operator, context, identity, stack)

        def announce(address: str) -> None:
            _announce(settings.state, address, metrics)
            started(f"{address} ({_security(identity)}){f', metrics on {metrics}/metrics' if metrics else ''}")

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
    from protofed.deploy.daemons.server_notify import ServerNotifications  # and with it smtplib and urllib

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
