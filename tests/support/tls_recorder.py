"""Ends the TLS of a site's daemon, writes down what it says, and says the same to the server in the site's name.

The test has the site's key, so that the server sees that site; the daemon trusts the CA that made the recorder's
certificate, so that it sees its server. Nothing of either is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

from tests.support.fault_proxy import PIECE, Between

LAST_WORDS_S = 5.0  # what a daemon said may be on its way


class Recorder(Between):
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
        super().__init__(ssl=inward)

    async def _let_go(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_S)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
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
