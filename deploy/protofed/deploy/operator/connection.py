"""The operator's client: one method for each call of the server's operator service."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from protofed.client.transport.channels import Channels
from protofed.client.transport.diagnosis import DiagnosisCode, diagnose
from protofed.common import codec
from protofed.common.address import IdentityChoice, check_connection
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DeniedError, ProtocolError, ProtofedError, StateError, UnavailableError
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.protos.v1 import operator_pb2 as pb
from protofed.protos.v1 import operator_pb2_grpc as rpc

Response = TypeVar("Response")
CALL_S = 30.0  # deadline of a call
OPTIONS = [
    ("grpc.enable_retries", 0),  # gRPC must not repeat an order by itself
    ("grpc.max_receive_message_length", 6 << 20),  # the server's MESSAGE_BYTES; gRPC's default is 4 MiB
    ("grpc.max_reconnect_backoff_ms", 2_000),  # `runs watch` notices within seconds that a server is back
    ("grpc.use_local_subchannel_pool", 1),  # else a renewed identity's channel may share the old one's connection
]
PAGE = 50  # attempts in one call
VERIFICATION_S = 3600.0  # deadlines: the server computes a state again,
DOWNLOAD_S = 600.0  # or makes a run record, or checks a large state
# CANCELLED is how a server that stops ends its calls.
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_ERRORS: dict[grpc.StatusCode, type[ProtofedError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.ALREADY_EXISTS: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StateError,
}

_REMEDIES = {  # by a phrase of gRPC's details; a server that refuses a certificate closes the connection, and no more
    "Socket closed": "it hung up: either it does not know the CA of our certificate, or one side speaks plain text",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of a CA in our ca.pem; is it the right server?",
    "Hostname Verification": "its certificate is for another address; give one that it names with --server",
    "Peer name": "its certificate is for another address; give one that it names with --server",
    "WRONG_VERSION_NUMBER": "it speaks plain text; give --identity none",
}


class Operator:
    """Calls one server's operator service. A renewed certificate is used from the next call on; threads may share it.

    Args:
        address: host:port.
        identity: folder with the operator's certificate; `NO_TLS`: on this machine only.

    Attributes:
        waiting_display: entered while the first call waits for its reply, such as a `progress`.

    Raises:
        UnavailableError: from every method: there is no server at the address, or it refuses our certificate.
        ConfigError: the server refuses the order, or the identity cannot be used.
        DeniedError: the certificate does not allow the call.
    """

    def __init__(self, address: str, identity: IdentityChoice) -> None:
        folder = check_connection(address, identity)
        self._address = address
        # The name stays, since pages and people go by it: it is under this one that the server's audit has the orders.
        self._identity = None if folder is None else LiveIdentity(folder, Party.OPERATOR, keeps_name=True)
        self._channels = Channels(address, self._identity, options=OPTIONS)
        self.waiting_display: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._channels.close()

    @property
    def identity_problem(self) -> str:
        """Why the identity's files are not used as they are now, but as they were; empty: they are."""
        if self._identity is None:
            return ""
        self._identity.current()
        return self._identity.problem

    def start(self, recipe: Recipe, *, force: bool = False) -> pb.RunInfo:
        """Queue a run; `force` as in `StartRunRequest`."""
        return self._call(lambda stub: stub.StartRun, pb.StartRunRequest(recipe=recipe.wire(), force=force))

    def runs(self, timeout: float = CALL_S) -> list[pb.RunInfo]:
        """All runs, in the order of the queue; `timeout` in seconds."""
        return list(self._call(lambda stub: stub.ListRuns, pb.ListRunsRequest(), timeout).runs)

    def show(self, run: str, newest: int | None = None, skip: int = 0) -> pb.RunDetail:
        """A run with its rounds and every site's task.

        Args:
            newest: number of attempts, counted from the newest; None: all, in calls of `PAGE` each.
            skip: leave out that many of the newest, and count from there; more than there are leave the oldest ones.
        """
        if newest is not None:
            request = pb.ShowRunRequest(run=run, first=-newest - skip, count=newest)
            return self._call(lambda stub: stub.ShowRun, request)
        detail = self._call(lambda stub: stub.ShowRun, pb.ShowRunRequest(run=run, count=PAGE))
        while len(detail.rounds) < detail.attempts:
            request = pb.ShowRunRequest(run=run, first=len(detail.rounds), count=PAGE)
            detail.rounds.extend(self._call(lambda stub: stub.ShowRun, request).rounds)
        return detail

    def attempts(self, run: str, first: int, count: int) -> list[pb.RoundInfo]:
        """`count` attempts at rounds from index `first` on, the oldest first; fewer where the run has fewer.

        A reply has fewer where there are many sites: the rest is asked for.
        """
        rows: list[pb.RoundInfo] = []
        while len(rows) < count:
            request = pb.ShowRunRequest(run=run, first=first + len(rows), count=count - len(rows))
            if not (more := self._call(lambda stub: stub.ShowRun, request).rounds):
                break
            rows.extend(more)
        return rows

    def opened_at(self, run: str) -> float:
        """The Unix time at which the run's first attempt was opened; 0: none was."""
        first = self._call(lambda stub: stub.ShowRun, pb.ShowRunRequest(run=run, count=1)).rounds
        return first[0].opened_at if first else 0.0

    def pause(self, run: str) -> pb.RunInfo:
        """Open no new round of a run until it is resumed."""
        return self._call(lambda stub: stub.PauseRun, pb.RunName(run=run))

    def resume(self, run: str) -> pb.RunInfo:
        """Open rounds again."""
        return self._call(lambda stub: stub.ResumeRun, pb.RunName(run=run))

    def abort(self, run: str, reason: str) -> pb.RunInfo:
        """End a run for good."""
        return self._call(lambda stub: stub.AbortRun, pb.AbortRunRequest(run=run, reason=reason))

    def roll_back(self, run: str, to: int) -> pb.RunInfo:
        """Continue a run from the state that round `to` published."""
        return self._call(lambda stub: stub.RollBackRun, pb.RollBackRunRequest(run=run, round=to))

    def verify(self, run: str, row: pb.RoundInfo) -> pb.VerifyRoundResponse:
        """Have the server compute a published state again from its updates."""
        request = pb.VerifyRoundRequest(run=run, round=row.round, attempt=row.attempt)
        return self._call(lambda stub: stub.VerifyRound, request, timeout=VERIFICATION_S)

    def run_record(self, run: str) -> dict[str, Any]:
        """All that a report shows of a run, as JSON; `protofed.server.operator.run_record` makes it."""

        def fetch(offset: int, address: str) -> pb.DownloadChunk:
            request = pb.GetRunRecordRequest(run=run, offset=offset, digest=address)
            return self._call(lambda stub: stub.GetRunRecord, request, timeout=DOWNLOAD_S)

        _, data = _download(fetch)
        return cast("dict[str, Any]", json.loads(gzip.decompress(data)))

    def state(self, run: str, round: int | None = None) -> tuple[int, bytes]:
        """The round of a published state, and the state as safetensors; without `round`, the newest."""
        requested = round

        def fetch(offset: int, _address: str) -> pb.DownloadChunk:
            nonlocal requested
            request = pb.GetStateRequest(run=run, round=requested, offset=offset)
            chunk = self._call(lambda stub: stub.GetState, request, timeout=DOWNLOAD_S)
            requested = chunk.round  # pins "the newest": another may be published before the next chunk
            return chunk

        return _download(fetch)

    def sites(self, timeout: float = CALL_S) -> list[pb.SiteInfo]:
        """All sites."""
        return list(self._call(lambda stub: stub.ListSites, pb.ListSitesRequest(), timeout).sites)

    def exclude(self, site: str, reason: str) -> pb.SiteInfo:
        """Exclude a site from runs."""
        return self._call(lambda stub: stub.ExcludeSite, pb.ExcludeSiteRequest(site=site, reason=reason))

    def admit(self, site: str) -> pb.SiteInfo:
        """Admit an excluded site again."""
        return self._call(lambda stub: stub.AdmitSite, pb.AdmitSiteRequest(site=site))

    def forget(self, site: str) -> pb.SiteInfo:
        """Remove a site that is gone from the list; the site as it was."""
        return self._call(lambda stub: stub.ForgetSite, pb.ForgetSiteRequest(site=site))

    def regroup(self, site: str) -> pb.SiteInfo:
        """Dissolve a site's group in secure aggregation; the site as it was, with that group."""
        return self._call(lambda stub: stub.RegroupSite, pb.RegroupSiteRequest(site=site))

    def consortium(self, coordinator: str = "") -> pb.ConsortiumInfo:
        """The list of partners that is offered, who has confirmed it, and the next one."""
        return self._call(lambda stub: stub.ShowConsortium, pb.ShowConsortiumRequest(coordinator=coordinator))

    def offer_consortium(self, document: str) -> pb.ConsortiumInfo:
        """Offer a list of partners to all sites."""
        return self._call(lambda stub: stub.OfferConsortium, pb.OfferConsortiumRequest(consortium=document))

    def register(self, pem: str, roles: Sequence[str] = (), *, renewal: bool = False) -> pb.CertificateInfo:
        """Register a certificate (PEM), so that the server answers its calls.

        Args:
            roles: none: as `RegisterCertificateRequest.roles` in operator.proto says.
            renewal: allow that its name has a valid certificate.
        """
        request = pb.RegisterCertificateRequest(pem=pem, roles=roles, renewal=renewal)
        return self._call(lambda stub: stub.RegisterCertificate, request)

    def revoke(self, name_or_fingerprint: str, reason: str) -> list[pb.CertificateInfo]:
        """Revoke a certificate, or all of a name, at once and for good."""
        request = pb.RevokeCertificateRequest(certificate=name_or_fingerprint, reason=reason)
        return list(self._call(lambda stub: stub.RevokeCertificate, request).certificates)

    def certificates(self) -> list[pb.CertificateInfo]:
        """All certificates that were ever registered, revoked ones too."""
        return list(self._call(lambda stub: stub.ListCertificates, pb.ListCertificatesRequest()).certificates)

    def _call(
        self,
        method: Callable[[rpc.OperatorStub], Callable[..., Response]],
        request: Message,
        timeout: float = CALL_S,
    ) -> Response:
        waiting_display, self.waiting_display = self.waiting_display, nullcontext()  # for the first call alone
        try:
            with waiting_display, self._channels.take() as (channel, _):
                return method(rpc.OperatorStub(channel))(request, timeout=timeout)
        except grpc.RpcError as error:
            code, text = error.code(), str(error.details())
            if code in _UNANSWERED:
                raise UnavailableError(
                    f"no answer from the server at {self._address}; {_remedy(self._address, text)}"
                ) from error
            raise _ERRORS.get(code, ProtocolError)(text) from error


def _download(fetch: Callable[[int, str], pb.DownloadChunk]) -> tuple[int, bytes]:
    """Download a document in chunks.

    Args:
        fetch: the chunk at an offset (bytes) of the document with a digest; an empty digest stands for the current one.

    Returns:
        The round that the document is of, and its bytes.

    Raises:
        ProtocolError: the chunks are not of one document, or it is damaged.
    """
    first = fetch(0, "")
    data = bytearray(first.data)
    while len(data) < first.total_bytes:
        chunk = fetch(len(data), first.digest)
        if chunk.digest != first.digest or not chunk.data:
            raise ProtocolError("the document changed while it was downloaded; ask for it again")
        data += chunk.data
    if codec.digest(memoryview(data)) != first.digest:
        raise ProtocolError("the document arrived damaged; ask for it again")
    return first.round, bytes(data)


def _remedy(address: str, details: str) -> str:
    """What to do about a failed connection, by the details of gRPC's error or, as a daemon does, by another try."""
    for phrase, remedy in _REMEDIES.items():
        if phrase in details:
            return remedy
    diagnosis = diagnose(address, None)  # of the TCP connection: gRPC's words for a wrong name change by version
    if diagnosis.kind is DiagnosisCode.FINE:
        return "start it, or give its address with --server"
    return diagnosis.text


def plain(message: Message) -> dict[str, Any]:
    """A message for `--json`: protobuf's own JSON would have 64-bit integers as strings and leave out zeros."""

    def converted(value: Any) -> Any:
        if isinstance(value, Message):
            return plain(value)
        return value if isinstance(value, str | int | float | bool) else [converted(item) for item in value]

    return {field.name: converted(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}
