"""What a process must do itself when it is process 1 of a container."""

from __future__ import annotations

import os
import signal


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does; a daemon later sets its own handler.

    Process 1 ignores every signal that it has no handler for, and importing PyTorch can take longer than the 10 s
    after which a container's engine kills it.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
