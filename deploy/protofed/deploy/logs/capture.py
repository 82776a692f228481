"""What others say goes the same way as our own events: warnings, libraries' logs, errors that nobody caught."""

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
    """Libraries' logs, from warnings upwards."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record, one event."""
        try:
            text = record.getMessage()
        except Exception:  # whatever a library gave as arguments
            text = str(record.msg)
        tell = log.error if record.levelno >= logging.ERROR else log.warning
        tell("a library says", library=record.name, text=text, exc_info=record.exc_info or None)


class _Hook:
    """In place of one of Python's hooks; somebody's own is asked after it."""

    def __init__(self, event: str, before: Any, default: Any) -> None:
        self._event, self._before = event, None if before is default else before

    def __call__(self, found: Any) -> None:
        kind, error, trace = found.exc_type, found.exc_value, found.exc_traceback
        if kind is not SystemExit:
            thread = getattr(getattr(found, "thread", None), "name", None)
            told = {"thread": thread} if thread else {}
            log.error(self._event, **told, exc_info=(kind, error if error is not None else kind(), trace))
        if self._before is not None:
            self._before(found)


def listen() -> None:
    """Take in what libraries say, from now on."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Records)]:
        root.removeHandler(handler)
    root.addHandler(_Records(logging.WARNING))
    warnings.showwarning = _warned


def take_over(library: str) -> None:
    """Let what a library says, which writes its own lines once it is imported, come this way, too."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == library or name.startswith(f"{library}.")):
            logger.handlers = []
            logger.propagate = True


def catch() -> None:
    """Take in what threads and finalizers die of, too: a daemon's log is all that is left of it."""
    if not isinstance(threading.excepthook, _Hook):
        own = threading.excepthook
        threading.excepthook = _Hook("a thread ended with an error", own, threading.__excepthook__)
    if not isinstance(sys.unraisablehook, _Hook):
        before = sys.unraisablehook
        sys.unraisablehook = _Hook("an error that nobody could catch", before, sys.__unraisablehook__)


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,  # noqa: ARG001  (Python's signature)
    line: str | None = None,  # noqa: ARG001
) -> None:
    """In place of `warnings.showwarning`."""
    log.warning("a library warns", library=_library(filename), kind=category.__name__, text=str(message), line=lineno)


def _library(filename: str) -> str:
    """`torch.nn.modules.conv` of its file; of one that is not installed, only its name."""
    path = Path(filename).with_suffix("")
    parts = path.parts
    installed = parts.index("site-packages") if "site-packages" in parts else len(parts) - 2
    return ".".join(parts[installed + 1 :])
