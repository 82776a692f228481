"""What a site said to its server, from the recorded bytes to the tensors; nothing is left that is not understood."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google_crc32c import value as crc32c
from tests.support import http2
from tests.support.raw_client import FEDERATION

from protofed.common import codec
from protofed.common.payload import Payload, describe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import CHUNK_BYTES, Manifest
from protofed.protos.v1 import federation_pb2 as pb

M = TypeVar("M", bound=Message)
CALLS = {f"/{FEDERATION.full_name}/{method.name}": method for method in FEDERATION.methods}
# All headers that leave, with what may stand in them: only the clock, the versions of gRPC and the server's address.
HEADERS = {
    ":method": r"POST",
    ":scheme": r"https",
    ":path": "|".join(CALLS),
    ":authority": r"127\.0\.0\.1:[0-9]+",
    "te": r"trailers",
    "content-type": r"application/grpc",
    "user-agent": r"grpc-python/[0-9.]+ grpc-c/[0-9.]+ \(linux; chttp2\)",
    "grpc-accept-encoding": r"identity(, (deflate|gzip))*",
    "grpc-timeout": r"[0-9]{1,8}[HMSmun]",
}


@dataclass(frozen=True)
class SentMessage:
    """One message, as its call names it and as it was on the wire."""

    call: str
    data: bytes
    message: Message


@dataclass(frozen=True)
class Upload:
    """What was announced, sent in chunks and handed in."""

    manifest: pb.UploadManifest
    commit: pb.CommitRequest
    data: bytes
    payload: Payload


def messages(connections: Iterable[bytes | bytearray]) -> list[SentMessage]:
    """All messages of these connections.

    Raises:
        AssertionError: a header, a call or a field that is not known, or bytes that are no message.
    """
    calls = [call for data in connections if data for call in http2.calls(bytes(data))]
    return [_understood(call.path, data) for call in calls for data in _checked(call).messages()]


def uploads(said: Sequence[SentMessage]) -> list[Upload]:
    """Every upload, whole; no chunk is without one."""
    manifests = {(one.task_id, one.digest): one for one in of(said, pb.UploadManifest)}
    commits = {one.upload: one for one in of(said, pb.CommitRequest)}
    chunks: dict[str, dict[int, bytes]] = {}
    for chunk in of(said, pb.Chunk):
        chunks.setdefault(chunk.upload, {})[chunk.index] = chunk.data
    assert chunks.keys() == commits.keys(), "bytes were sent that were never handed in"
    return [
        _whole(manifests[commit.task_id, commit.digest], commit, chunks[upload]) for upload, commit in commits.items()
    ]


def of(said: Iterable[SentMessage], kind: type[M]) -> list[M]:
    return [one.message for one in said if isinstance(one.message, kind)]


def hiding(needles: Mapping[str, bytes], said: Sequence[SentMessage], connections: Iterable[bytes] = ()) -> set[str]:
    """Which of these bytes were sent, as they are: on a connection, in a message, or across the chunks of an upload."""
    blobs = [upload.data for upload in uploads(said)]
    places = [*map(bytes, connections), *(one.data for one in said), *blobs]
    return {name for name, needle in needles.items() if any(needle in place for place in places)}


def handing_in(payload: Payload) -> list[tuple[str, Message]]:
    """The calls that hand a payload in, as upload `up`."""
    data = codec.encode(payload)
    manifest = Manifest(describe(payload), len(data), codec.digest(data))
    announced = pb.UploadManifest(
        tensors=wire.pack_tensors(manifest),
        total_bytes=manifest.total_bytes,
        digest=manifest.digest,
        digest_algorithm=wire.DIGEST_ALGORITHM,
    )
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    chunks = [pb.Chunk(upload="up", index=n, data=piece, crc32c=crc32c(piece)) for n, piece in enumerate(pieces)]
    commit = pb.CommitRequest(upload="up", digest=manifest.digest)
    return [("BeginUpload", announced), *(("PutChunk", chunk) for chunk in chunks), ("CommitUpload", commit)]


def _checked(call: http2.Call) -> http2.Call:
    names = [name for name, _ in call.headers]
    assert len(names) == len(set(names)), f"a header stands twice: {names}"
    for name, value in call.headers:
        assert re.fullmatch(HEADERS.get(name, r"(?!)"), value), f"header {name}: {value!r} is not allowed"
    return call


def _understood(path: str, data: bytes) -> SentMessage:
    method = CALLS[path]
    message = GetMessageClass(method.input_type).FromString(data)
    assert message.SerializeToString(deterministic=True) == data, f"{method.name}: other bytes than its fields give"
    known = type(message).FromString(data)
    known.DiscardUnknownFields()
    assert known == message, f"{method.name} has fields that are not known"
    assert known.SerializeToString(deterministic=True) == data, f"{method.name} has fields that are not known"
    return SentMessage(method.name, data, message)


def _whole(manifest: pb.UploadManifest, commit: pb.CommitRequest, chunks: Mapping[int, bytes]) -> Upload:
    assert sorted(chunks) == list(range(len(chunks))), f"chunks {sorted(chunks)}"
    data = b"".join(chunks[index] for index in range(len(chunks)))
    assert (codec.digest(data), len(data)) == (manifest.digest, manifest.total_bytes)
    payload = codec.decode(data)
    assert codec.encode(payload) == data, "an upload holds more than its tensors"
    assert describe(payload) == wire.unpack_manifest(manifest).tensors, "an upload is not what was announced"
    assert (manifest.run, manifest.round) == (commit.run, commit.round)
    return Upload(manifest, commit, data, payload)
