"""Ends a working process on SIGTERM and SIGINT."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedError(BaseException):
    """SIGTERM or SIGINT came; all that counts is on disk. No `except Exception` catches a BaseException."""


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end the work inside the context without an error; main thread only."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(StoppedError):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
