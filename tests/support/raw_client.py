"""Calls of our services without our clients: what a confused, hostile or broken one could send."""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google_crc32c import value as crc32c

from protofed.common import codec
from protofed.common.payload import Part, Payload, describe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import CHUNK_BYTES, PROTOCOL_VERSION, Manifest
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import operator_pb2
from protofed.server.rpc import interceptor

Code = grpc.StatusCode
FEDERATION = pb.DESCRIPTOR.services_by_name["Federation"]
OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["Operator"]
CALLS = {method.name: method for service in (FEDERATION, OPERATOR) for method in service.methods}
# What the server's own table says, and what is said without an error of ours. INTERNAL is an incident: always a fault.
DOCUMENTED = frozenset(
    {code for _, code, _ in interceptor.CODES} | {Code.OK, Code.PERMISSION_DENIED, Code.RESOURCE_EXHAUSTED}
)
MODEL: Payload = {
    Part.BODY: {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    Part.HEAD: {"weight": np.ones((10, 3), dtype=np.float32)},
}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 7, 8


@dataclass
class RawClient:
    """A site made of raw stubs, which answers its tasks as well as it is told to."""

    address: str
    run: str
    site: str = "site-1"
    instance: str = "a"
    identity: Path | None = None  # None: plain text
    recorded: list[tuple[str, Message]] = field(default_factory=list)  # what it said, for replays

    def __post_init__(self) -> None:
        options = [("grpc.max_receive_message_length", 8 << 20), ("grpc.use_local_subchannel_pool", 1)]
        if self.identity is None:
            self.channel = grpc.insecure_channel(self.address, options)
        else:
            self.channel = grpc.secure_channel(self.address, credentials(self.identity), options)

    @property
    def caller(self) -> pb.Caller:
        return pb.Caller(site=self.site, instance=self.instance)

    def say(self, call: str, message: Message, timeout: float = 20.0) -> Any:
        self.recorded.append((call, message))
        method = CALLS[call]
        answer, path = GetMessageClass(method.output_type), f"/{method.containing_service.full_name}/{call}"
        stub = self.channel.unary_unary(path, type(message).SerializeToString, answer.FromString)
        return stub(message, timeout=timeout)

    def enroll(self) -> RawClient:
        self.say("Enroll", self.enrolment())
        return self

    def enrolment(self, **fields: Any) -> pb.EnrollRequest:
        version: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "software_version": "0"}
        return pb.EnrollRequest(caller=self.caller, roles=[pb.ROLE_TRAINER], **version, **fields)

    def task(self, wait_s: float = 10.0) -> pb.Task:
        """What it is asked for; fails if nothing."""
        reply = self.say("NextTask", pb.NextTaskRequest(caller=self.caller, run=self.run, wait_s=wait_s))
        assert reply.WhichOneof("answer") == "task", reply
        return pb.Task.FromString(reply.task.SerializeToString())

    def announcement(self, task: pb.Task, data: bytes, payload: Payload, **changes: Any) -> pb.UploadManifest:
        """The manifest of `payload`, though `data` be something else."""
        manifest = Manifest(describe(payload), len(data), codec.digest(data))
        fields: dict[str, Any] = {
            "caller": self.caller,
            "run": self.run,
            "round": task.round,
            "task_id": task.task_id,
            "base_digest": task.base_digest,
            "tensors": wire.pack_tensors(manifest),
            "total_bytes": manifest.total_bytes,
            "digest": manifest.digest,
            "digest_algorithm": wire.DIGEST_ALGORITHM,
        }
        return pb.UploadManifest(**{**fields, **changes})

    def put(self, upload: str, index: int, data: bytes, checksum: int | None = None) -> pb.ChunkAck:
        """Send one chunk; with another checksum than its own, if one is said."""
        crc = crc32c(data) if checksum is None else checksum
        chunk = pb.Chunk(caller=self.caller, upload=upload, index=index, data=data, crc32c=crc)
        ack: pb.ChunkAck = self.say("PutChunk", chunk)
        return ack

    def commit(self, task: pb.Task, upload: str, digest: str = "", **changes: Any) -> pb.Receipt:
        """Hand an upload in; by its id, which ends in the digest, unless another one is said."""
        fields: dict[str, Any] = {
            "caller": self.caller,
            "run": self.run,
            "round": task.round,
            "task_id": task.task_id,
            "upload": upload,
            "digest": digest or upload.rpartition(".")[2],
        }
        receipt: pb.Receipt = self.say("CommitUpload", pb.CommitRequest(**{**fields, **changes}))
        return receipt

    def push(self, task: pb.Task, payload: Payload = MODEL, data: bytes = b"", **fields: Any) -> pb.Receipt:
        """Announce `payload`, send its bytes (or `data` in their place), hand in."""
        sent = data or codec.encode(payload)
        ticket = self.say("BeginUpload", self.announcement(task, sent, payload))
        if ticket.WhichOneof("answer") == "receipt":
            return pb.Receipt.FromString(ticket.receipt.SerializeToString())
        for start in range(0, len(sent), CHUNK_BYTES):
            self.put(ticket.upload.id, start // CHUNK_BYTES, sent[start : start + CHUNK_BYTES])
        return self.commit(task, ticket.upload.id, codec.digest(sent), **fields)

    def raw(self, call: str, data: bytes, service: str = FEDERATION.full_name) -> Any:
        """Bytes in place of a message; the call, to be waited for."""
        stub: Any = self.channel.unary_unary(f"/{service}/{call}")
        return stub.future(data, timeout=20.0)


def credentials(identity: Path) -> grpc.ChannelCredentials:
    """What is in an identity folder, unchecked."""
    files = [(identity / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    return grpc.ssl_channel_credentials(*files)


def refused(call: Callable[..., object], *arguments: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, **fields)
    error: Any = raised.value
    return error.code(), error.details()


def zeros(size: int) -> bytes:
    """What gzip makes of that many zero bytes, which are never held."""
    packer, piece, checksum = zlib.compressobj(9, wbits=-15), bytes(1 << 20), 0
    block, end = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH), packer.flush()
    for _ in range(size >> 20):
        checksum = zlib.crc32(piece, checksum)
    head = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    return head + block * (size >> 20) + end + struct.pack("<II", checksum, size & 0xFFFF_FFFF)


def send_compressed(address: str, call: str, packed: bytes) -> bytes:
    """A call whose message is compressed already, over HTTP/2 by hand; the frames' contents that ended it, raw.

    grpcio could only compress what it holds whole.
    """
    host, _, port = address.rpartition(":")
    names = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{FEDERATION.full_name}/{call}",
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-encoding": "gzip",
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in names.items())  # literals, never indexed
    message = b"\1" + struct.pack(">I", len(packed)) + packed
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, 4, 1, block))
        window, sent, ended = 65_535, 0, b""
        for kind, flags, stream, body in _frames(line):
            if kind == _SETTINGS and not flags & 1:
                line.sendall(_frame(_SETTINGS, 1, 0, b""))
            if kind == _WINDOW_UPDATE and stream == 0:
                window += int.from_bytes(body, "big")
            if stream == 1 and kind in (_HEADERS, _RST_STREAM):
                ended += body
            if kind == _GOAWAY or (stream == 1 and (kind == _RST_STREAM or (kind == _HEADERS and flags & 1))):
                return ended
            while sent < len(message) and window > 0:
                piece = message[sent : sent + min(window, 16_384)]
                sent, window = sent + len(piece), window - len(piece)
                line.sendall(_frame(_DATA, int(sent == len(message)), 1, piece))
    return ended


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode("ascii")


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _frames(line: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    stream = line.makefile("rb")
    while len(head := stream.read(9)) == 9:
        body = stream.read(int.from_bytes(head[:3], "big"))
        yield head[3], head[4], int.from_bytes(head[5:], "big"), body
