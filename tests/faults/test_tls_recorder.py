"""The recorder hears everything, changes nothing, and what it heard is read strictly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from tests.support import http2
from tests.support.pki import Authority
from tests.support.recorded_messages import handing_in, hiding, messages, uploads
from tests.support.tls_recorder import Recorder

from protofed.common.payload import Part, Payload
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import federation_pb2_grpc as rpc

ENROLL = "/protofed.protos.v1.Federation/Enroll"
WIDE: Payload = {Part.BODY: {"w": np.random.default_rng(7).normal(size=(1100, 600)).astype(np.float32)}}  # two chunks


class Listener(rpc.FederationServicer):
    """Takes everything, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message]] = []

    def _take(self, request: Any, context: Any) -> Any:
        (pem,) = context.auth_context()["x509_pem_cert"]
        self.heard.append((pem.decode("ascii"), request))

    def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollResponse:
        self._take(request, context)
        return pb.EnrollResponse()

    def BeginUpload(self, request: pb.UploadManifest, context: Any) -> pb.UploadTicket:
        self._take(request, context)
        return pb.UploadTicket(upload=pb.Upload(id="up"))

    def PutChunk(self, request: pb.Chunk, context: Any) -> pb.ChunkAck:
        self._take(request, context)
        return pb.ChunkAck()

    def CommitUpload(self, request: pb.CommitRequest, context: Any) -> pb.Receipt:
        self._take(request, context)
        return pb.Receipt()

    NextTask = Heartbeat = GetChunk = ReportScores = _take  # nobody asks for these


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def recorder(listener: Listener, tmp_path: Path) -> Iterator[Recorder]:
    """Before a server; the certificates of all three are in the test's folder."""
    authority = Authority.make()
    for name, party in {"server": Party.SERVER, "recorder": Party.SERVER, "site": Party.SITE}.items():
        authority.issue(tmp_path / name, party, name)
    key, certificate, authorities = pems(tmp_path / "server")
    credentials = grpc.ssl_server_credentials([(key, certificate)], authorities, require_client_auth=True)
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_FederationServicer_to_server(listener, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    recorder = Recorder(f"127.0.0.1:{port}", tmp_path / "recorder", tmp_path / "site")
    yield recorder
    recorder.close()
    server.stop(None)


@pytest.fixture
def site(recorder: Recorder, tmp_path: Path) -> Callable[..., None]:
    """Says messages to the server, by way of the recorder, which then has heard them all."""
    key, certificate, authorities = pems(tmp_path / "site")

    def say(*calls: tuple[str, Message]) -> None:
        with (
            closing(recorder),
            grpc.secure_channel(
                recorder.address, grpc.ssl_channel_credentials(authorities, key, certificate)
            ) as channel,
        ):
            for call, message in calls:
                getattr(rpc.FederationStub(channel), call)(message, timeout=20)

    return say


def pems(folder: Path) -> list[bytes]:
    """Key, certificate and CA."""
    return [(folder / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem")]


def test_both_sides_see_each_other_through_it_and_every_message_is_heard(
    site: Callable[..., None], recorder: Recorder, listener: Listener, tmp_path: Path
) -> None:
    calls = [("Enroll", pb.EnrollRequest(software_version="1", roles=[pb.ROLE_TRAINER])), *handing_in(WIDE)]
    site(*calls)
    said = messages(recorder.said)
    assert [(one.call, one.message) for one in said] == calls
    assert [message for _, message in listener.heard] == [message for _, message in calls]
    assert {pem for pem, _ in listener.heard} == {(tmp_path / "site" / "cert.pem").read_text(encoding="ascii")}
    (whole,) = uploads(said)
    assert len(whole.data) > CHUNK_BYTES
    np.testing.assert_array_equal(whole.payload[Part.BODY]["w"], WIDE[Part.BODY]["w"])


def test_what_is_hidden_in_an_upload_is_found_across_chunks(site: Callable[..., None], recorder: Recorder) -> None:
    site(*handing_in(WIDE))
    said = messages(recorder.said)
    row = WIDE[Part.BODY]["w"][(CHUNK_BYTES - len("header")) // 2400].tobytes()  # what the first chunk ends within
    assert sum(row in one.data for one in said) == 0
    assert hiding({"a row": row, "another": bytes(2400)}, said) == {"a row"}


def test_a_field_that_is_not_known_is_no_message_of_ours(site: Callable[..., None], recorder: Recorder) -> None:
    strange = pb.EnrollRequest.FromString(pb.EnrollRequest(protocol_version=1).SerializeToString() + b"\x9a\x3f\x03abc")
    site(("Enroll", strange))
    with pytest.raises(AssertionError, match="fields that are not known"):
        messages(recorder.said)


def test_a_chunk_that_is_never_handed_in_is_found(site: Callable[..., None], recorder: Recorder) -> None:
    site(("PutChunk", pb.Chunk(upload="aside", data=b"x")))
    with pytest.raises(AssertionError, match="never handed in"):
        uploads(messages(recorder.said))


def test_a_header_of_another_name_or_content_is_not_allowed(recorder: Recorder, tmp_path: Path) -> None:
    key, certificate, authorities = pems(tmp_path / "site")
    credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
    with closing(recorder), grpc.secure_channel(recorder.address, credentials) as channel:
        rpc.FederationStub(channel).Enroll(pb.EnrollRequest(), metadata=(("patient", "Ann"),), timeout=20)
    with pytest.raises(AssertionError, match="header patient"):
        messages(recorder.said)


def frame(kind: int, body: bytes, flags: int = 0, stream: int = 1) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "begins with"),
        (http2.PREFACE + b"\0\0\5\0", "half a frame"),
        (http2.PREFACE + frame(0, b"abc"), "before its headers"),
        (http2.PREFACE + frame(7, bytes(8) + b"Ann has melanoma", stream=0), "kind 7 with 24 bytes"),
        (http2.PREFACE + frame(77, b""), "kind 77"),
        (http2.PREFACE + frame(1, b"\x82", flags=0), "without an end"),
        (http2.PREFACE + frame(1, b"\x82", flags=12), "padding"),
    ],
)
def test_bytes_that_no_call_explains_are_an_error(data: bytes, why: str) -> None:
    with pytest.raises(http2.Stray, match=why):
        http2.calls(data)


@pytest.mark.parametrize(("body", "why"), [(b"\1\0\0\0\0", "compressed"), (b"\0\0\0\0\2x", "of which 6 came")])
def test_half_a_message_and_a_compressed_one_are_errors(body: bytes, why: str) -> None:
    with pytest.raises(http2.Stray, match=why):
        http2.Call([(":path", ENROLL)], bytearray(body)).messages()
