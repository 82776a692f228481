"""What a gRPC client said, read from the plain bytes of its connection: each byte is accounted for, or an error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
# Frames about the connection itself, by the most bytes that one may hold. A GOAWAY's reason is free text: none here.
_CONNECTION = {_RST_STREAM: 4, _SETTINGS: 96, _PING: 8, _GOAWAY: 8, _WINDOW_UPDATE: 4}
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32


class Stray(AssertionError):
    """Bytes that no unary gRPC call explains."""


@dataclass
class Call:
    """One stream: its headers in order, and the bytes of each whole message."""

    headers: list[tuple[str, str]]
    body: bytearray = field(default_factory=bytearray)

    @property
    def path(self) -> str:
        """`/package.Service/Method`."""
        return dict(self.headers)[":path"]

    def messages(self) -> list[bytes]:
        """The messages of the body.

        Raises:
            Stray: one is compressed, or more follows than a message.
        """
        found, at = [], 0
        while at + 5 <= len(self.body):
            compressed, length = struct.unpack_from(">BI", self.body, at)
            if compressed:
                raise Stray(f"{self.path}: a compressed message")
            found.append(bytes(self.body[at + 5 : at + 5 + length]))
            at += 5 + length
        if at != len(self.body):
            raise Stray(f"{self.path}: a message of {at} bytes, of which {len(self.body)} came")
        return found


def frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and content of each frame behind the preface.

    Raises:
        Stray: no preface, or half a frame at the end.
    """
    if not data.startswith(PREFACE):
        raise Stray(f"the connection begins with {data[:24]!r}")
    at = len(PREFACE)
    while at < len(data):
        head = data[at : at + 9]
        body = data[at + 9 : at + 9 + int.from_bytes(head[:3], "big")]
        if len(head) < 9 or len(body) < int.from_bytes(head[:3], "big"):
            raise Stray(f"half a frame at byte {at}")
        yield head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFF_FFFF, body
        at += 9 + len(body)


def calls(data: bytes) -> list[Call]:
    """The calls of one connection, from all that the client sent on it.

    Raises:
        Stray: a frame of another kind or form than a gRPC client needs.
    """
    decoder, made, block = Decoder(), dict[int, Call](), bytearray()
    for kind, flags, stream, body in frames(data):
        if kind in (_HEADERS, _CONTINUATION):
            if flags & (_PADDED | _PRIORITY):
                raise Stray(f"headers of stream {stream} with padding or priority")
            block += body
            if flags & _END_HEADERS:
                if stream in made:
                    raise Stray(f"stream {stream} has trailers")
                made[stream] = Call([(str(name), str(value)) for name, value in decoder.decode(bytes(block))])
                block.clear()
        elif kind == _DATA:
            if flags & _PADDED or stream not in made:
                raise Stray(f"data of stream {stream} with padding, or before its headers")
            made[stream].body += body
        elif len(body) > _CONNECTION.get(kind, -1):
            raise Stray(f"a frame of kind {kind} with {len(body)} bytes")
    if block:
        raise Stray("headers without an end")
    return list(made.values())
