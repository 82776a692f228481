"""A block of memory that other processes of this machine can map."""

from __future__ import annotations

import os
from mmap import mmap
from types import TracebackType


class Block:
    """Memory behind a file descriptor, which children inherit.

    Without a name, so nothing is left of it, and not in /dev/shm, of which a container has 64 MB.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("protofed-data")
        self.memory: mmap | None = None

    def sized(self, nbytes: int) -> mmap:
        """The memory, of so many bytes."""
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap(self.descriptor, nbytes)
        return self.memory

    def __enter__(self) -> Block:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _: BaseException | None, _at: TracebackType | None) -> None:
        """Give up the descriptor; what is mapped stays for as long as it is used."""
        os.close(self.descriptor)
