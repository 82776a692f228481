"""Sets up logging: one event a line on standard error, readable on a terminal and JSON elsewhere.

Standard output is for results alone. The keys `run`, `round` and `site` connect events; `incident` connects the logs of
both sides of a failed call. Values become plain JSON and are redacted; lines are written whole or not at all. Warnings,
libraries' logs and uncaught errors become events of this log, redacted like all others.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime
from enum import Enum
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote, unquote, urlsplit

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from protofed.common.errors import ConfigError, unknown

if TYPE_CHECKING:
    from protofed.common.config.settings import ClientSettings, Monitoring, Notify, ServerSettings

LONGEST_TEXT = 20_000  # characters of one value
MAX_ITEMS = 200
DEEPEST = 4
FIRST_KEYS = ("timestamp", "level", "event", "site", "run", "round", "incident")  # not redacted: our own words and ids
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LAST_WORD = re.compile(r"\S*\Z")


def plain(value: Any, clean: Callable[[str], str], depth: int = 0) -> Any:
    """A value as plain JSON, its texts redacted by `clean`.

    Of arrays, lists of numbers and other objects only the type is shown: they could be pixels, labels or weights.
    """
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value, clean, depth)
        case Integral():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(value)
        case str():
            return _cut(clean(_cut(value)))
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Path() | date():
            return clean(str(value))
        case BaseException():
            return _cut(clean(f"{type(value).__name__}: {_text(value)}"))
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
    return _collection(value, clean, depth)


def _collection(value: Any, clean: Callable[[str], str], depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, Mapping | Sequence | Set):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        if any(isinstance(key, Integral) for key in value):
            return "<numbers>"
        items = list(value.items())[:MAX_ITEMS]
        return {clean(str(key)): plain(item, clean, depth + 1) for key, item in items}
    first_items = list(value)[:MAX_ITEMS]
    if any(isinstance(item, Integral | float) for item in first_items):
        return "<numbers>"
    return [plain(item, clean, depth + 1) for item in first_items]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a library's __str__ may itself fail
        return "<no text>"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return _LAST_WORD.sub("…", text[:LONGEST_TEXT])  # not within a word: half a secret would not be recognized


def printable(text: str) -> str:
    """Text with its control characters escaped, except for newlines: it cannot move a terminal's cursor."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class LineRenderer:
    """A structlog logger that writes to the current standard error; a line that cannot be written is dropped.

    Lock and state belong to the class, as structlog makes many loggers for the one stream.
    """

    _writing = threading.Lock()
    _torn = False  # the last write broke off within a line

    def msg(self, message: str) -> None:
        """Write one line; never raises, since logging must not end a daemon."""
        with suppress(OSError, ValueError, AttributeError), LineRenderer._writing:  # closed, full, or None
            self._write(f"{message}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _write(self, data: bytes) -> None:
        try:
            handle = sys.stderr.fileno()
        except (OSError, ValueError):  # a replacement without a file, as in tests and notebooks
            sys.stderr.write(data.decode(errors="replace"))
            return
        # os.write, unbuffered: a killed process leaves no line in a buffer, and one call per line keeps lines whole.
        remaining = b"\n" + data if LineRenderer._torn else data
        whole = len(remaining)
        try:
            while remaining:
                remaining = remaining[os.write(handle, remaining) :]
        finally:
            LineRenderer._torn = LineRenderer._torn if len(remaining) == whole else bool(remaining)


DATA, SECRET, NUMBERS = "<data>", "<secret>", "<numbers>"
MAX_NAMES = 20_000  # files of one folder hidden by name; further ones are still hidden by suffix or folder
SHORTEST_NAME = 5  # characters of a name without suffix: a shorter one would hide ordinary words
SHORTEST_SECRET = 6  # characters: a shorter secret is hidden only where it is a whole word
_SUFFIXES = (
    r"avif|bmp|dcm|dicom|gif|h5|hdf5|jp2|jpe?g|mha|mhd|mrxs|ndpi|nii|nii\.gz|npy|npz|nrrd|png|svs|tga|tiff?|webp"
)
_QUOTED = re.compile(rf"""(['"])[^'"\n]*\.(?:{_SUFFIXES})\1""", re.IGNORECASE)
_WORD = re.compile(r"""[^\s'"<>|,;:()\[\]{}=]+""")
_IMAGE = re.compile(rf"[^./]\.(?:{_SUFFIXES})$", re.IGNORECASE)
_NUMBERS = re.compile(r"\b(?:tensor|array)\([^()]*(?:\([^()]*\)[^()]*)*\)|\[\s*[-+.\de]+(?:[,\s]+[-+.\de]+){5,}\s*\]")
_COUNT = re.compile(r"\b\d[\d,]*(?= (?:examples?|images?|labels?|rows?)\b)")
_ALWAYS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^\s/@'\"]+(?=@)"),  # user:password of a URL
    re.compile(r"(?<=\bBearer )[^\s'\"]+|(?<=\bBasic )[^\s'\"]+", re.IGNORECASE),
)


class Hidden:
    """What a process hides; any thread may use it.

    Tuples are replaced, never changed, so that `clean` needs no lock.
    """

    def __init__(self) -> None:
        self._folders: tuple[re.Pattern[str], ...] = ()
        self._secrets: tuple[re.Pattern[str], ...] = _ALWAYS
        self._names: frozenset[str] = frozenset()

    def folder(self, root: Path) -> None:
        """Hide a data file or folder with every path below it, and its files' names wherever they occur."""
        text, absolute = str(root), os.path.abspath(root)
        # Libraries write a path as they were given it, resolved, or quoted in a URL. A bare word would hide too much.
        paths = {absolute, os.path.realpath(root)} | ({text} if "/" in text or root.suffix else set())
        paths |= {quote(path) for path in paths}
        # The longest first: a shorter one would leave the rest of a longer one behind.
        self._folders += tuple(_below(path) for path in sorted(paths - {"/"}, key=len, reverse=True))
        names = set(islice(_files(root), MAX_NAMES))
        spaced = {name for name in names if not _WORD.fullmatch(name)}  # `clean` compares names word by word
        self._folders += tuple(re.compile(re.escape(name)) for name in spaced)
        self._names |= {name for name in names - spaced if "." in name.strip(".") or len(name) >= SHORTEST_NAME}

    def secret(self, text: str) -> None:
        """Hide a secret, also in its quoted form of URLs."""
        for form in {text, quote(text, safe=""), unquote(text)} - {""}:
            pattern = re.escape(form) if len(form) >= SHORTEST_SECRET else rf"(?<!\w){re.escape(form)}(?!\w)"
            self._secrets += (re.compile(pattern),)

    def url(self, url: str) -> None:
        """Hide the password of a URL, and the Basic authorization header made from them; an invalid URL wholly."""
        try:
            parts = urlsplit(url)
        except ValueError:
            self.secret(url)
            return
        if parts.password:
            self.secret(parts.password)
            credentials = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
            self.secret(b64encode(credentials.encode()).decode("ascii"))

    def clean(self, text: str) -> str:
        """The text with "<data>", "<secret>" and "<numbers>" in place of all that is hidden."""
        for secret in self._secrets:
            text = secret.sub(SECRET, text)
        for folder in self._folders:
            text = folder.sub(DATA, text)
        text = _QUOTED.sub(rf"\1{DATA}\1", text)
        text = _WORD.sub(self._word, text)
        return _COUNT.sub(NUMBERS, _NUMBERS.sub(NUMBERS, text))

    def _word(self, match: re.Match[str]) -> str:
        word = match[0].rstrip(".")
        is_data = word.rpartition("/")[2] in self._names or _IMAGE.search(word)
        return DATA + match[0][len(word) :] if is_data else match[0]


def _below(path: str) -> re.Pattern[str]:
    """Matches a path and what follows it; since names may have spaces, it may take more of the text than the path."""
    itself = rf"(?<![\w.-]){re.escape(path)}(?![\w-])(?!\.\w)"
    return re.compile(rf"""{itself}(?:/+(?:(?!; | \(|: |, )[^'"\n])*)?""")


def _files(root: Path) -> Iterable[str]:
    if root.is_file():
        yield root.name
    for _, _, files in os.walk(root):  # leaves out folders that cannot be read
        yield from files


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
    install_handlers()
    if daemon:
        install_hooks()


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
    """Hide a client daemon's data, its PACS, its proxy's password and its metrics' token."""
    from protofed.common.config.data import data_folder

    proxy = None if settings.proxy is None else settings.proxy.get_secret_value()
    data = settings.data
    pacs = () if data.dicomweb is None else (data.dicomweb.url, *_content(data.dicomweb.token_file))
    hide(data.root, data.place, data_folder(), secrets=(*_token(settings.metrics), *pacs), urls=(proxy,))


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


class _Records(logging.Handler):
    """Logs libraries' records of level warning and above."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record as one event."""
        try:
            text = record.getMessage()
        except Exception:  # the library's arguments do not fit its format
            text = str(record.msg)
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write("a library says", library=record.name, text=text, exc_info=record.exc_info or None)


class _Hook:
    """Replaces one of Python's exception hooks; a hook that another library had set is still called."""

    def __init__(self, event: str, previous: Any, default: Any) -> None:
        # Python's default would print the traceback a second time, and unredacted.
        self._event, self._previous = event, None if previous is default else previous

    def __call__(self, args: Any) -> None:
        kind, error, trace = args.exc_type, args.exc_value, args.exc_traceback
        if kind is not SystemExit:
            thread = getattr(getattr(args, "thread", None), "name", None)
            fields = {"thread": thread} if thread else {}
            log.error(self._event, **fields, exc_info=(kind, error if error is not None else kind(), trace))
        if self._previous is not None:
            self._previous(args)


def install_handlers() -> None:
    """Log warnings and libraries' records from now on; calling it again changes nothing."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Records)]:
        root.removeHandler(handler)
    root.addHandler(_Records(logging.WARNING))
    warnings.showwarning = _warned


def redirect(library: str) -> None:
    """Remove a library's own log handlers, so that its records reach ours; call it after the import that sets them."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == library or name.startswith(f"{library}.")):
            logger.handlers = []
            logger.propagate = True


def install_hooks() -> None:
    """Log errors that end threads or occur in finalizers, too; for daemons, whose log is all that is left of them."""
    if not isinstance(threading.excepthook, _Hook):
        thread_hook = threading.excepthook
        threading.excepthook = _Hook("a thread ended with an error", thread_hook, threading.__excepthook__)
    if not isinstance(sys.unraisablehook, _Hook):
        unraisable_hook = sys.unraisablehook
        sys.unraisablehook = _Hook("an error that nobody could catch", unraisable_hook, sys.__unraisablehook__)


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,  # noqa: ARG001  (Python's signature)
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Replaces `warnings.showwarning`."""
    log.warning("a library warns", library=_library(filename), kind=category.__name__, text=str(message), line=lineno)


def _library(filename: str) -> str:
    """The module's name by its file, such as `torch.nn.modules.conv`; outside of site-packages, only the file's."""
    path = Path(filename).with_suffix("")
    parts = path.parts
    installed = parts.index("site-packages") if "site-packages" in parts else len(parts) - 2
    return ".".join(parts[installed + 1 :])
