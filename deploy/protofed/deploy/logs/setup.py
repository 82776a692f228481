"""Sets up logging: one event a line on standard error, readable on a terminal and JSON elsewhere.

Standard output is for results alone. The keys `run`, `round` and `site` connect events; `incident` connects the logs of
both sides of a failed call.
"""

from __future__ import annotations

import logging
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from protofed.common.errors import ConfigError, unknown
from protofed.deploy.logs import capture
from protofed.deploy.logs.rendering import FIRST_KEYS, Hidden, LineRenderer, plain, printable

if TYPE_CHECKING:
    from protofed.common.config.settings import ClientSettings, Monitoring, Notify, ServerSettings

FORMAT, LEVEL = "PROTOFED_LOG_FORMAT", "PROTOFED_LOG_LEVEL"  # environment variables
FORMATS = ("json", "console")
LEVELS = {name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error")}
_MLFLOW_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
Fields = Mapping[str, object]
log = structlog.get_logger()


class _Setup:
    """The logging state of this process."""

    hidden = Hidden()
    fields: Callable[[], Fields] = staticmethod(dict)
    debug = False
    stream = False  # standard error is a daemon's JSON log and must have nothing else


def configure(*, debug: bool = False, daemon: bool = False) -> None:
    """Set up logging for this process; a second call starts anew.

    Args:
        debug: log debug events, whatever the environment says.
        daemon: log errors of threads too, and the process's end.

    Raises:
        ConfigError: PROTOFED_LOG_FORMAT or PROTOFED_LOG_LEVEL has an unknown value.
    """
    if sys.stderr is None:  # started with it closed: the next file opened would get its descriptor, and our log lines
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (open until the end)
    console = _chosen(FORMAT, FORMATS, "console" if sys.stderr.isatty() else "json") == "console"
    level = LEVELS["debug" if debug else _chosen(LEVEL, tuple(LEVELS), "info")]
    _Setup.hidden, _Setup.fields = Hidden(), dict
    _Setup.debug, _Setup.stream = debug, daemon and not console
    structlog.configure(
        processors=_processors(console),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: LineRenderer(),
    )
    capture.install_handlers()
    if daemon:
        capture.install_hooks()


def bind_fields(fields: Callable[[], Fields]) -> None:
    """Add fields to every event of this process; `fields` is called at each event, on any thread.

    An event's own fields win over these.
    """
    _Setup.fields = fields


def hide(*folders: Path | None, secrets: tuple[str, ...] = (), urls: tuple[str | None, ...] = ()) -> None:
    """Never show these data folders (or files), their files' names, these secrets, and these URLs' passwords."""
    for folder in folders:
        if folder is not None:
            _Setup.hidden.folder(folder)
    for secret in secrets:
        _Setup.hidden.secret(secret)
    for url in urls:
        if url is not None:
            _Setup.hidden.url(url)


def hide_site(settings: ClientSettings) -> None:
    """Hide a client daemon's data, its proxy's password and its metrics' token."""
    from protofed.common.config.data import data_folder

    proxy = None if settings.proxy is None else settings.proxy.get_secret_value()
    data = settings.data
    hide(data.root, data.place, data_folder(), secrets=_token(settings.metrics), urls=(proxy,))


def hide_server(settings: ServerSettings) -> None:
    """Hide the passwords of a server's database and tracker, and its metrics' token."""
    tracker = tuple(os.environ[name] for name in _MLFLOW_SECRETS if os.environ.get(name))
    hide(secrets=(*_token(settings.metrics), *tracker), urls=(settings.ledger, settings.mlflow))
    if settings.notify is not None:
        _hide_notify(settings.notify)


def log_exit(message: str, exit_code: int, error: Exception) -> bool:
    """Log the error that ends a daemon as its last event; False if its log is not JSON: print the message instead.

    Raises:
        Exception: `error` itself, with `debug` and without a JSON log: Python then prints the traceback.
    """
    if _Setup.stream:
        log.error("the process ends", why=message, exit_code=exit_code, exc_info=error if _Setup.debug else None)
    elif _Setup.debug:
        raise error
    return _Setup.stream


def _hide_notify(notify: Notify) -> None:
    """Hide what gives access to a channel: tokens, passwords, and the URLs of webhooks, which often are tokens."""
    urls = [webhook.url.get_secret_value() for webhook in notify.webhooks if webhook.url is not None]
    files = [path for one in notify.webhooks for path in (one.url_file, one.hmac_secret, one.bearer_token)]
    smtp = notify.smtp
    passwords = _content(None if smtp is None else smtp.password)
    logins = [] if smtp is None else [f"\0{smtp.username}\0{password}" for password in passwords]
    encoded = [b64encode(text.encode()).decode("ascii") for text in (*passwords, *logins)]
    hide(secrets=(*encoded, *passwords, *urls, *(text for path in files for text in _content(path))))
    hide(urls=(None if notify.proxy is None else notify.proxy.get_secret_value(),))


def _token(monitoring: Monitoring | None) -> tuple[str, ...]:
    return _content(None if monitoring is None else monitoring.token)


def _content(path: Path | None) -> tuple[str, ...]:
    if path is not None:
        with suppress(OSError, UnicodeDecodeError):  # whoever needs the file reports what is wrong with it
            return (path.read_text(encoding="utf-8").strip(),)
    return ()


def _chosen(variable: str, options: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").lower() or default
    if value not in options:
        raise ConfigError(f"{variable}: {unknown('value', value, options)}")
    return value


def _processors(console: bool) -> list[Processor]:
    # Plain tracebacks: rich ones show the local variables of every frame, which at a site are patients' data.
    render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return [
        _with_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        _with_traceback,
        _cleaned,  # after all that adds text, before all that renders it
        *([_printable, render] if console else [structlog.processors.JSONRenderer()]),
    ]


def _with_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    try:
        return {**_Setup.fields(), **event}
    except Exception:  # the event is logged even without them
        return event


def _with_traceback(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    exc_info = event.get("exc_info")
    kind = sys.exc_info()[0] if exc_info is True else type(exc_info)
    try:
        return structlog.processors.format_exc_info(logger, method, event)
    except Exception:  # an error whose __str__ fails
        return {**event, "exception": str(kind and kind.__name__)}


def _cleaned(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The event with plain, redacted values; of a value whose conversion fails only the type."""
    cleaned: dict[str, Any] = {}
    first = [key for key in FIRST_KEYS if key in event]
    for key in (*first, *(key for key in event if key not in {*FIRST_KEYS, "exc_info"})):
        value = event[key]
        try:
            cleaned[key] = plain(value, str if key in FIRST_KEYS else _Setup.hidden.clean)
        except Exception:  # any object may be logged, and its methods may fail
            cleaned[key] = f"<{type(value).__name__}>"
    return cleaned


def _printable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escapes control characters in the traceback: structlog quotes all other values, but not this one."""
    return {**event, "exception": printable(event["exception"])} if "exception" in event else event
