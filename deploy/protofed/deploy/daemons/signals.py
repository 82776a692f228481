"""What a daemon does about its system: signals end it, and no core dump is written."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog

from protofed.common.errors import ProtofedError

log = structlog.get_logger()
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StoppedError(BaseException):
    """One of `ENDING` came; all that counts is on disk. No `except Exception` catches a BaseException."""


class HangUpError(ProtofedError):
    """SIGHUP came: a terminal was closed, or a rotation of logs sent it. An error, so that a supervisor restarts."""

    exit_code = 128 + signal.SIGHUP


def check_hang_up(reason: str) -> None:
    """Say of a process that has ended in good order whether a supervisor should start it again.

    Args:
        reason: the signal's name.

    Raises:
        HangUpError: it was SIGHUP.
    """
    if reason == signal.SIGHUP.name:
        raise HangUpError("ended by SIGHUP: its terminal was closed, or a rotation of logs sent it; start it again")


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals of `ENDING` end the work inside the context; main thread only.

    Raises:
        HangUpError: it was SIGHUP. After the others there is no error, but a line in the log.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in ENDING}
    try:
        yield
    except StoppedError as stopped:
        log.info("stopped", reason=str(stopped))
        check_hang_up(str(stopped))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def forbid_core_dumps() -> None:
    """Let no core dump of this process, or of one that it starts, be written, whoever started it.

    A container engine often lets its containers dump whole memories, into the working folder: the volume of the state.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
