"""The operator's side of the wire: `protofed runs …` and `protofed sites …`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from protofed.common import codec
from protofed.common.address import check_connection
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DeniedError, ProtocolError, ProtofedError, StateError, UnavailableError
from protofed.common.pki.identity import Party, read_identity
from protofed.protos.v1 import operator_pb2 as pb
from protofed.protos.v1 import operator_pb2_grpc as rpc

A = TypeVar("A")
ANSWER_S = 30.0
OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 6 << 20),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # who watches sees within seconds that a server is back
]
PAGE = 50  # attempts in one call
VERIFICATION_S = 3600.0
DOCUMENT_S = 600.0  # until a run record is made, or a large state is checked
_ERRORS: dict[grpc.StatusCode, type[ProtofedError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.ALREADY_EXISTS: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StateError,
}

_REMEDIES = {  # a server that does not take a certificate closes the connection without a word
    "Socket closed": "it hung up: either it does not know the CA of our certificate, or one of us speaks plain text",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of a CA in our ca.pem; is it the right server?",
    "Hostname Verification": "its certificate is for another address; give one that stands in it with --server",
    "Peer name": "its certificate is for another address; give one that stands in it with --server",
    "WRONG_VERSION_NUMBER": "it speaks plain text; give --plaintext in place of --identity",
}


class Operator:
    """Calls one server's operator service.

    Args:
        address: host:port.
        identity: folder with the operator's certificate.
        plaintext: in place of it; on this machine only.

    Attributes:
        patience: entered while the first call waits for its answer, such as a `progress`.

    Raises:
        Unavailable: from every method: there is no server at the address, or it does not take our certificate.
        ConfigError: the server refuses the order, or the identity cannot be used; the text says why.
        Denied: our certificate does not allow it.
    """

    def __init__(self, address: str, identity: Path | None = None, plaintext: bool = False) -> None:
        check_connection(address, identity, plaintext)
        self._address = address
        self._channel = _channel(address, identity)
        self._stub = rpc.OperatorStub(self._channel)
        self.patience: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def start(self, recipe: Recipe) -> pb.RunInfo:
        """Queue a run."""
        return self._call(self._stub.StartRun, pb.StartRunRequest(recipe=recipe.wire()))

    def runs(self) -> list[pb.RunInfo]:
        """All runs, in the order of the queue."""
        return list(self._call(self._stub.ListRuns, pb.ListRunsRequest()).runs)

    def show(self, run: str, newest: int | None = None) -> pb.RunDetail:
        """A run with its rounds and every site's task: the newest so many attempts, or all, in as many calls."""
        if newest is not None:
            return self._call(self._stub.ShowRun, pb.ShowRunRequest(run=run, first=-newest, count=newest))
        detail = self._call(self._stub.ShowRun, pb.ShowRunRequest(run=run, count=PAGE))
        while len(detail.rounds) < detail.attempts:
            request = pb.ShowRunRequest(run=run, first=len(detail.rounds), count=PAGE)
            detail.rounds.extend(self._call(self._stub.ShowRun, request).rounds)
        return detail

    def opened_at(self, run: str) -> float:
        """When its first attempt at a round was opened, in seconds of the Unix epoch; 0: none was."""
        first = self._call(self._stub.ShowRun, pb.ShowRunRequest(run=run, count=1)).rounds
        return first[0].opened_at if first else 0.0

    def pause(self, run: str) -> pb.RunInfo:
        """Open no round of it from now on."""
        return self._call(self._stub.PauseRun, pb.RunName(run=run))

    def resume(self, run: str) -> pb.RunInfo:
        """Open rounds again."""
        return self._call(self._stub.ResumeRun, pb.RunName(run=run))

    def abort(self, run: str, reason: str) -> pb.RunInfo:
        """End it."""
        return self._call(self._stub.AbortRun, pb.AbortRunRequest(run=run, reason=reason))

    def roll_back(self, run: str, to: int) -> pb.RunInfo:
        """Go on from the state that a round published."""
        return self._call(self._stub.RollBackRun, pb.RollBackRunRequest(run=run, round=to))

    def verify(self, run: str, row: pb.RoundInfo) -> pb.VerifyRoundResponse:
        """Compute a published state again, on the server."""
        request = pb.VerifyRoundRequest(run=run, round=row.round, attempt=row.attempt)
        return self._call(self._stub.VerifyRound, request, timeout=VERIFICATION_S)

    def run_record(self, run: str) -> dict[str, Any]:
        """All that a report says of a run, as the server's `run_record` has it."""

        def ask(offset: int, address: str) -> pb.DownloadChunk:
            request = pb.GetRunRecordRequest(run=run, offset=offset, digest=address)
            return self._call(self._stub.GetRunRecord, request, timeout=DOCUMENT_S)

        _, data = _whole(ask)
        return cast("dict[str, Any]", json.loads(gzip.decompress(data)))

    def state(self, run: str, round: int | None = None) -> tuple[int, bytes]:
        """A state that a run published (None: the newest) as safetensors, and the round that it is of."""
        wanted = round

        def ask(offset: int, _address: str) -> pb.DownloadChunk:
            nonlocal wanted
            request = pb.GetStateRequest(run=run, round=wanted, offset=offset)
            piece = self._call(self._stub.GetState, request, timeout=DOCUMENT_S)
            wanted = piece.round  # a newer one may be published meanwhile
            return piece

        return _whole(ask)

    def sites(self) -> list[pb.SiteInfo]:
        """All sites."""
        return list(self._call(self._stub.ListSites, pb.ListSitesRequest()).sites)

    def exclude(self, site: str, reason: str) -> pb.SiteInfo:
        """Keep a site out."""
        return self._call(self._stub.ExcludeSite, pb.ExcludeSiteRequest(site=site, reason=reason))

    def admit(self, site: str) -> pb.SiteInfo:
        """Let an excluded site in again."""
        return self._call(self._stub.AdmitSite, pb.AdmitSiteRequest(site=site))

    def register(self, pem: str) -> pb.CertificateInfo:
        """Let a certificate call."""
        return self._call(self._stub.RegisterCertificate, pb.RegisterCertificateRequest(pem=pem))

    def revoke(self, name_or_fingerprint: str, reason: str) -> list[pb.CertificateInfo]:
        """Let a certificate, or all of a name, call no more: at once and for ever."""
        request = pb.RevokeCertificateRequest(certificate=name_or_fingerprint, reason=reason)
        return list(self._call(self._stub.RevokeCertificate, request).certificates)

    def certificates(self) -> list[pb.CertificateInfo]:
        """All that were ever registered."""
        return list(self._call(self._stub.ListCertificates, pb.ListCertificatesRequest()).certificates)

    def _call(self, call: Callable[..., A], request: Message, timeout: float = ANSWER_S) -> A:
        patience, self.patience = self.patience, nullcontext()
        try:
            with patience:
                return call(request, timeout=timeout)
        except grpc.RpcError as error:
            code, text = error.code(), str(error.details())
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"no answer from the server at {self._address}; {_remedy(text)}") from error
            raise _ERRORS.get(code, ProtocolError)(text) from error


def _whole(ask: Callable[[int, str], pb.DownloadChunk]) -> tuple[int, bytes]:
    """A document of which each piece is asked for with its offset and the digest that the first one named.

    Raises:
        ProtocolError: the pieces are not those of one document.
    """
    first = ask(0, "")
    data = bytearray(first.data)
    while len(data) < first.total_bytes:
        piece = ask(len(data), first.digest)
        if piece.digest != first.digest or not piece.data:
            raise ProtocolError("the document became another one while it was fetched; ask for it again")
        data += piece.data
    if codec.digest(memoryview(data)) != first.digest:
        raise ProtocolError("the document arrived damaged; ask for it again")
    return first.round, bytes(data)


def _channel(address: str, identity: Path | None) -> grpc.Channel:
    if identity is None:
        return grpc.insecure_channel(address, OPTIONS)
    own = read_identity(identity, Party.OPERATOR, datetime.now(UTC))
    credentials = grpc.ssl_channel_credentials(own.authorities_pem, own.key_pem, own.certificate_pem)
    return grpc.secure_channel(address, credentials, OPTIONS)


def _remedy(said: str) -> str:
    """By what gRPC says of a connection that failed."""
    for phrase, remedy in _REMEDIES.items():
        if phrase in said:
            return remedy
    return "start it, or give its address with --server"


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON takes it, numbers as numbers."""

    def value(found: Any) -> Any:
        if isinstance(found, Message):
            return plain(found)
        return found if isinstance(found, str | int | float | bool) else [value(item) for item in found]

    return {field.name: value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}
