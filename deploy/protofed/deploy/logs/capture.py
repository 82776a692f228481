"""Turns warnings, libraries' logs and uncaught errors into events of our own log, redacted like all others."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO

import structlog

log = structlog.get_logger()


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
