"""Ends the TLS of a site's daemon, writes down what it says, and says the same to the server in the site's name.

The test has the site's key, so that the server sees that site; the daemon trusts the CA that made the recorder's
certificate, so that it sees its server. Nothing of either is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PIECE = 1 << 16
PATIENCE_S = 5.0


class Recorder:
    """Forwards from `address` to `target`, both over TLS.

    Args:
        target: host:port of the server.
        own: identity folder with a server's certificate for 127.0.0.1.
        site: identity folder of the site.

    Attributes:
        said: all that the daemon sent, in plain bytes, one entry a connection.
    """

    def __init__(self, target: str, own: Path, site: Path) -> None:
        self._target, self.said = target, list[bytearray]()
        self._outward = _context(ssl.PROTOCOL_TLS_CLIENT, site)
        inward = _context(ssl.PROTOCOL_TLS_SERVER, own)
        inward.verify_mode = ssl.CERT_REQUIRED
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=inward)).result(10)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """End all connections and the thread, if that has not been done; what was said stays."""
        if not self._thread.is_alive():
            return
        self._do(self._close()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _close(self) -> None:
        self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_S)  # what a daemon said last may be on its way
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        host, _, port = self._target.rpartition(":")
        try:
            back, server = await asyncio.open_connection(host, int(port), ssl=self._outward)
        except OSError:
            client.transport.abort()
            return
        self.said.append(said := bytearray())
        both = [asyncio.create_task(_pass(reader, server, said)), asyncio.create_task(_pass(back, client))]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        for writer in (client, server):
            writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray | None = None) -> None:
    with contextlib.suppress(OSError):  # either side ends a connection as it likes
        while data := await reader.read(PIECE):
            if said is not None:
                said += data
            writer.write(data)
            await writer.drain()


def _context(protocol: ssl._SSLMethod, identity: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    context.load_verify_locations(identity / "ca.pem")
    context.set_alpn_protocols(["h2"])
    return context
