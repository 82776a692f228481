"""Ends a working process on SIGTERM and SIGINT."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog

log = structlog.get_logger()


class StoppedError(BaseException):
    """SIGTERM or SIGINT came; all that counts is on disk. No `except Exception` catches a BaseException."""


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end the work inside the context without an error, which is logged; main thread only."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except StoppedError as stopped:
        log.info("stopped", reason=str(stopped))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
