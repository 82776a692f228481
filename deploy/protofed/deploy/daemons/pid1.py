"""What a process has to do itself when it is the first of its container."""

from __future__ import annotations

import os
import signal


def end_when_told() -> None:
    """SIGTERM ends this process from now on, as Ctrl-C does; a daemon replaces it by its own handler later.

    The kernel gives process 1 no default action: what it has no handler for it ignores, and loading PyTorch takes
    longer than the patience of whoever stops a container.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
