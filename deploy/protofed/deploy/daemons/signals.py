"""How a process that works is told to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedError(BaseException):
    """The process was told to end (SIGTERM, SIGINT); everything that counts is on disk."""


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end what runs inside, quietly."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(StoppedError):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
