"""Logs: one event a line; for people on a terminal, JSON elsewhere. On standard error, so that results stay apart."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(*, debug: bool = False) -> None:
    """Set up logging for this process; tracebacks only with `debug`."""
    pretty = sys.stderr.isatty()
    # plain tracebacks: others show the values of every frame, and a site's values are its patients'
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if pretty
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if pretty else "iso", utc=not pretty),
        *([] if pretty else [structlog.processors.format_exc_info]),
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
