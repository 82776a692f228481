"""What a process that crashes leaves on the disk: nothing of its memory, which has images and keys."""

from __future__ import annotations

import resource


def forbid() -> None:
    """Let no core dump of this process, or of one that it starts, be written, whoever started it.

    A container engine often lets its containers dump whole memories, into the working folder: the volume of the state.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
