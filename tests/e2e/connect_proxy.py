"""A hospital's web proxy: lets CONNECT through for those who know the password, and sees no more than bytes.

Usage: python -m tests.e2e.connect_proxy ADDRESS PORT USER:PASSWORD
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys

PIECE = 1 << 16


async def main(address: str, port: str, password: str) -> None:
    """Serve until killed."""
    known = b"Basic " + base64.b64encode(password.encode("ascii"))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _serve(reader, writer, known)
        writer.close()

    server = await asyncio.start_server(accept, address, int(port), limit=PIECE)
    await server.serve_forever()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: bytes) -> None:
    request, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    verb, target, _ = request.split(b" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if verb != b"CONNECT":
        _say(405, target)
        return writer.write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
    if headers.get(b"proxy-authorization") != known:
        _say(407, target)
        return writer.write(
            b'HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="x"\r\n\r\n'
        )
    host, _, port = target.decode("ascii").rpartition(":")
    back, forth = await asyncio.open_connection(host, int(port), limit=PIECE)
    _say(200, target)
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    ways = [asyncio.create_task(_pass(reader, forth)), asyncio.create_task(_pass(back, writer))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    forth.close()
    return None


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()


def _say(code: int, target: bytes) -> None:
    sys.stderr.write(f"{code} {target.decode('ascii', 'replace')}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
