"""Child processes of a command, which must not outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

TERMINATE_S = 10.0  # between SIGTERM and SIGKILL, for all processes together


@contextmanager
def interruption() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C and SIGTERM raise KeyboardInterrupt only where the yielded function is called.

    An interrupt between a process's start and its assignment to a variable would leave nobody to end it.
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
    """Send SIGTERM, to the last one first (clients before their server), and SIGKILL after `TERMINATE_S` seconds."""
    for process in reversed(processes):
        process.terminate()
    until = time.monotonic() + TERMINATE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
            continue
        process.kill()
        process.wait()


def usable_cores() -> int:
    """Cores that this process may use: a container or taskset may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
