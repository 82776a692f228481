"""A TCP proxy that misbehaves when told to; on a thread of its own, between daemons and their server."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Direction: TypeAlias = Literal["up", "down"]  # client to server, server to client
BOTH: frozenset[Direction] = frozenset({"up", "down"})
PIECE = 1 << 16
PATIENCE_S = 60  # for the loop's thread, on a machine that is busy with other tests


@dataclass(frozen=True)
class Mode:
    """What is wrong with the way; nothing, by default.

    Attributes:
        latency_s: each piece arrives so much later, without making the way any slower.
        rate: bytes a second, of each connection and direction.
        hole: nothing is forwarded that way and nothing closed; what was said meanwhile arrives when the hole is gone.
        refuse: a connection is reset as soon as it is made.
        cut: a connection is reset after so many bytes that way.
        corrupt: this byte of each connection, counted from 0, arrives changed.
        tap: is shown every piece; where it says True, the connection is reset and the piece never arrives.
    """

    latency_s: float = 0.0
    rate: float | None = None
    hole: frozenset[Direction] = frozenset()
    refuse: bool = False
    cut: dict[Direction, int] = field(default_factory=dict)
    corrupt: dict[Direction, int] = field(default_factory=dict)
    tap: Callable[[Direction, bytes], bool] | None = None


PASS = Mode()


@dataclass(eq=False)
class _Connection:
    """Both sockets of one connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter

    def reset(self) -> None:
        for writer in (self.client, self.server):
            _reset(writer)


class Between(ABC):
    """Listens at `address`, and has each connection served on a thread of its own."""

    def __init__(self, **options: Any) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="between", daemon=True)
        self._thread.start()
        opened = asyncio.start_server(self._accept, "127.0.0.1", 0, limit=PIECE, **options)
        self._server: asyncio.Server = self._do(opened).result(PATIENCE_S)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """One connection."""

    @abstractmethod
    async def _let_go(self) -> None:
        """What becomes of those that are open at the end."""

    def close(self) -> None:
        """End all connections and the thread, if that has not been done."""
        if not self._thread.is_alive():
            return
        self._do(self._close()).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _close(self) -> None:
        self._server.close()
        await self._let_go()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._serve(reader, client)


class Proxy(Between):
    """Forwards from `address` to `target`, as `mode` allows; set `mode` and `target` whenever you like.

    Attributes:
        counts: bytes that were forwarded, by direction.
        connections: made until now.
        resets: of live connections.
    """

    def __init__(self, target: str) -> None:
        self.target, self.mode = target, PASS
        self.counts: dict[Direction, int] = {"up": 0, "down": 0}
        self.connections = self.resets = 0
        self._live: set[_Connection] = set()
        super().__init__()

    def reset(self, share: float = 1.0, chance: random.Random | None = None) -> int:
        """Reset this share of the live connections; how many those were."""
        hit: int = self._do(self._reset(share, chance or random.Random(0))).result(PATIENCE_S)  # noqa: S311  (no secret)
        return hit

    def half_close(self, direction: Direction) -> None:
        """Say to whom this direction leads that nothing more will come; the other direction stays."""
        self._do(self._half_close(direction)).result(PATIENCE_S)

    async def _reset(self, share: float, chance: random.Random) -> int:
        hit = {connection for connection in self._live if chance.random() < share}
        self._live -= hit  # now: what forwards them learns of it only later, and would be counted twice
        for connection in hit:
            connection.reset()
        self.resets += len(hit)
        return len(hit)

    async def _half_close(self, direction: Direction) -> None:
        for connection in self._live:
            (connection.server if direction == "up" else connection.client).write_eof()

    async def _let_go(self) -> None:
        for connection in self._live:
            connection.reset()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            if self.mode.refuse:
                raise ConnectionRefusedError
            back, server = await asyncio.open_connection(host, int(port), limit=PIECE)
        except OSError:
            _reset(client)
            return
        connection = _Connection(client, server)
        self._live.add(connection)
        try:
            async with asyncio.TaskGroup() as both:
                self._forward(both, "up", reader, server)
                self._forward(both, "down", back, client)
        except* OSError:  # of either side, or one that we make
            connection.reset()
        except* asyncio.CancelledError:  # by `close`; the callback of a stream would log it as an error
            pass
        finally:
            self._live.discard(connection)
            for writer in (client, server):
                writer.close()

    def _forward(
        self, group: asyncio.TaskGroup, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def read() -> None:
            while data := await reader.read(PIECE):
                await queue.put((self._loop.time() + self.mode.latency_s, data))
            await queue.put((self._loop.time() + self.mode.latency_s, b""))

        group.create_task(read())
        group.create_task(self._deliver(direction, queue, writer))

    async def _deliver(
        self, direction: Direction, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        done = 0
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - self._loop.time())
            if not data:
                await self._passable(direction)
                writer.write_eof()
                return
            while data:
                await self._passable(direction)
                piece = self._piece(direction, data, done)
                data, done = data[len(piece) :], done + len(piece)
                writer.write(self._corrupted(direction, piece, done - len(piece)))
                await writer.drain()
                self.counts[direction] += len(piece)
                if self.mode.cut.get(direction) == done:
                    raise ConnectionResetError
                if self.mode.rate is not None:
                    await asyncio.sleep(len(piece) / self.mode.rate)

    async def _passable(self, direction: Direction) -> None:
        while direction in self.mode.hole:  # noqa: ASYNC110  (set by another thread)
            await asyncio.sleep(0.02)

    def _piece(self, direction: Direction, data: bytes, done: int) -> bytes:
        """The bytes that are forwarded at once, of those that begin at byte `done`."""
        mode = self.mode
        if mode.tap is not None and mode.tap(direction, data):
            raise ConnectionResetError
        most = len(data) if mode.rate is None else max(1, int(mode.rate / 20))
        limit = mode.cut.get(direction, -1)
        return data[: most if limit <= done else min(most, limit - done)]

    def _corrupted(self, direction: Direction, piece: bytes, begins: int) -> bytes:
        at = self.mode.corrupt.get(direction, -1) - begins
        return piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :] if 0 <= at < len(piece) else piece


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
