"""A crew without processes: the same messages and the same computations, in an order that no test depends on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from io import BytesIO

from protofed.deploy.simulation.messages import Beginning, Message, read
from protofed.deploy.simulation.shared_block import Block
from protofed.deploy.simulation.site_worker import SiteWorker
from protofed.deploy.simulation.workers import Lost


class CrewHere:
    """Workers in this process that answer as late as they can, the last worker first."""

    def __init__(self, size: int, block: Block) -> None:
        self.size, self._block = size, block
        self._workers: dict[int, SiteWorker] = {}
        self._received: dict[int, deque[Message]] = {}

    def begin(self, worker: int, beginning: Message) -> None:
        """See `Crew.begin`."""
        assert self._block.memory is not None
        header = Beginning.model_validate_json(beginning.header)
        self._workers[worker] = SiteWorker(header, self._block.memory)
        self._received[worker] = deque()

    def send(self, worker: int, message: Message) -> None:
        """See `Crew.send`."""
        self._received[worker].append(_sent(message))

    def receive(self, *, wait: bool) -> Sequence[tuple[int, Message | Lost]]:
        """See `Crew.receive`: nothing has come before it is waited for."""
        busy = [worker for worker, received in self._received.items() if received]
        if not wait or not busy:
            return []
        worker = max(busy)
        return [(worker, _sent(self._workers[worker].carry_out(self._received[worker].popleft())))]

    def end(self) -> None:
        """See `Crew.end`."""
        self._workers.clear()


def _sent(message: Message) -> Message:
    """The message after its way over a connection."""
    return read(BytesIO(b"".join(message.buffers)).read)
