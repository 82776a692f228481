"""Logs: one event a line; for people on a terminal, JSON elsewhere. On standard error, so that results stay apart.

Three keys find what belongs together: `run`, `round` and `site`; a fourth, `incident`, is in the logs of both sides.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from protofed.common.config.data import common_folder
from protofed.common.errors import ConfigError, unknown
from protofed.deploy.logs import capture
from protofed.deploy.logs.redaction import Hidden
from protofed.deploy.logs.rendering import KEPT, LineRenderer, plain, printable

if TYPE_CHECKING:
    from protofed.common.config.settings import ClientSettings, Monitoring, ServerSettings

FORMAT, LEVEL = "PROTOFED_LOG_FORMAT", "PROTOFED_LOG_LEVEL"  # environment variables
FORMATS = ("json", "console")
LEVELS = {name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error")}
_MLFLOW_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
Known = Mapping[str, object]
log = structlog.get_logger()


class _Setup:
    """Of this process."""

    hidden = Hidden()
    about: Callable[[], Known] = staticmethod(dict)
    debug = False
    stream = False  # standard error is a daemon's log, in JSON, and nothing else


def configure(*, debug: bool = False, daemon: bool = False) -> None:
    """Set up logging for this process, anew.

    Args:
        debug: debug logs, whatever the environment says.
        daemon: the process lives on, and its log is all that is known of it.

    Raises:
        ConfigError: the environment asks for a format or a level that there is not.
    """
    if sys.stderr is None:  # closed by whoever started us: the next file that is opened must not take its place
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for good)
    console = _chosen(FORMAT, FORMATS, "console" if sys.stderr.isatty() else "json") == "console"
    level = LEVELS["debug" if debug else _chosen(LEVEL, tuple(LEVELS), "info")]
    _Setup.hidden, _Setup.about = Hidden(), dict
    _Setup.debug, _Setup.stream = debug, daemon and not console
    structlog.configure(
        processors=_processors(console),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: LineRenderer(),
    )
    capture.listen()
    if daemon:
        capture.catch()


def about(known: Callable[[], Known]) -> None:
    """What every event of this process says, asked when it is logged, from any thread; its own keys come first."""
    _Setup.about = known


def hide(*folders: Path | None, secrets: tuple[str, ...] = (), urls: tuple[str | None, ...] = ()) -> None:
    """Never show these folders (or files) of data and what is in them, these secrets, and passwords of these URLs."""
    for folder in folders:
        if folder is not None:
            _Setup.hidden.folder(folder)
    for secret in secrets:
        _Setup.hidden.secret(secret)
    for url in urls:
        if url is not None:
            _Setup.hidden.url(url)


def hide_site(settings: ClientSettings) -> None:
    """Of a client daemon: its data, its proxy's password, its token."""
    proxy = None if settings.proxy is None else settings.proxy.get_secret_value()
    data = settings.data
    hide(data.root, data.place, common_folder(), secrets=_token(settings.metrics), urls=(proxy,))


def hide_server(settings: ServerSettings) -> None:
    """Of a server: the passwords of its database and of its tracker, its token."""
    tracker = tuple(os.environ[name] for name in _MLFLOW_SECRETS if os.environ.get(name))
    hide(secrets=(*_token(settings.metrics), *tracker), urls=(settings.ledger, settings.mlflow))


def last_words(message: str, exit_code: int, error: Exception) -> bool:
    """Of a daemon that ends, where its log is JSON: as its last event; else False.

    Raises:
        Exception: the error itself, with `debug`, where there is no such event to show its traceback.
    """
    if _Setup.stream:
        log.error("the process ends", why=message, exit_code=exit_code, exc_info=error if _Setup.debug else None)
    elif _Setup.debug:
        raise error
    return _Setup.stream


def _token(monitoring: Monitoring | None) -> tuple[str, ...]:
    if monitoring is not None and monitoring.token is not None:
        with suppress(OSError, UnicodeDecodeError):  # whoever needs it says what is wrong with it
            return (monitoring.token.read_text(encoding="utf-8").strip(),)
    return ()


def _chosen(variable: str, known: tuple[str, ...], default: str) -> str:
    said = os.environ.get(variable, "").lower() or default
    if said not in known:
        raise ConfigError(f"{variable}: {unknown('value', said, known)}")
    return said


def _processors(console: bool) -> list[Processor]:
    # plain tracebacks: others show the values of every frame, and a site's values are its patients'
    render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return [
        _with_known,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        _with_traceback,
        _cleaned,
        *([_printable, render] if console else [structlog.processors.JSONRenderer()]),
    ]


def _with_known(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    try:
        return {**_Setup.about(), **event}
    except Exception:  # a log line is written, whatever becomes of what it would have told
        return event


def _with_traceback(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    found = event.get("exc_info")
    kind = sys.exc_info()[0] if found is True else type(found)
    try:
        return structlog.processors.format_exc_info(logger, method, event)
    except Exception:  # an error whose text cannot be had
        return {**event, "exception": str(kind and kind.__name__)}


def _cleaned(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """As JSON has it, and nothing that is hidden; what cannot even be looked at is left out."""
    told: dict[str, Any] = {}
    first = [key for key in KEPT if key in event]
    for key in (*first, *(key for key in event if key not in {*KEPT, "exc_info"})):
        value = event[key]
        try:
            told[key] = plain(value, str if key in KEPT else _Setup.hidden.clean)
        except Exception:  # a value that fails when it is looked at
            told[key] = f"<{type(value).__name__}>"
    return told


def _printable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Of a traceback, which is not quoted as other values are."""
    return {**event, "exception": printable(event["exception"])} if "exception" in event else event
