"""Processes that a command starts and that must not outlive it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

POLITE_S = 10.0


@contextmanager
def interruption() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM take effect only where the yielded function is called.

    A KeyboardInterrupt in the middle of starting a process would lose that process.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask politely, the last one first, then insist."""
    for process in reversed(processes):
        process.terminate()
    until = time.monotonic() + POLITE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
            continue
        process.kill()
        process.wait()
