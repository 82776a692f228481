"""A worker as a process of this machine: `python -m protofed.deploy.simulation.worker SOCKET BLOCK`, two descriptors.

It ends when the simulation does, however that came about.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from mmap import ACCESS_COPY, mmap

import torch

from protofed.common.process import keep_memory
from protofed.deploy import logs
from protofed.deploy.simulation.messages import Beginning, Message, read
from protofed.deploy.simulation.site_worker import SiteWorker


class Connection:
    """Messages over a connected socket, whole ones."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; blocks while the other end does not read.

        Raises:
            OSError: the other end is gone.
        """
        for buffer in message.buffers:
            self._socket.sendall(buffer)

    def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        return read(self._exactly)

    def close(self) -> None:
        """Tell the other end that nothing comes any more."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            piece = self._socket.recv(left, socket.MSG_WAITALL)  # in one piece, but for a signal
            if not piece:
                raise EOFError("the other end has closed the connection")
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def serve(connection: Connection, block: int) -> None:
    """Carry out what comes, in its order; never returns.

    Reading, computing and sending are three threads: the simulation may be busy with a site, and never waits for us.
    """
    received: queue.SimpleQueue[Message] = queue.SimpleQueue()
    finished: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def forever(move: Callable[[], None]) -> None:
        try:
            while True:
                move()
        except (EOFError, OSError):
            os._exit(0)  # nobody waits for what is computed now
        finally:
            os._exit(1)  # as short of memory: the simulation must not wait for a worker that hears or says nothing

    for move in (lambda: received.put(connection.receive()), lambda: connection.send(finished.get())):
        threading.Thread(target=forever, args=[move], daemon=True).start()
    beginning = Beginning.model_validate_json(received.get().header)
    worker = SiteWorker(beginning, mmap(block, beginning.data.nbytes, access=ACCESS_COPY))
    while True:
        finished.put(worker.carry_out(received.get()))


def main(connection: int, block: int) -> None:
    """Entry point of the process."""
    logs.configure()
    keep_memory()
    torch.set_num_threads(1)  # workers share the cores, and a sum's last bits depend on the number of threads
    serve(Connection(socket.socket(fileno=connection)), block)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
