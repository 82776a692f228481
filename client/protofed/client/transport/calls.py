"""Calls over gRPC; with `channels`, the only client file that imports it.

Calls retry with full jitter while the server is away: without end, unless `give_up_after_s` is set. If the server says
when to try again, they wait until then. The retries are ours because gRPC's run a handler twice. Each message is in the
audit log before it is sent; chunks are there as one transfer.

How many chunks are under way at once, and how long one may take: on a slow link one, and longer.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from protofed.client.transport.audit import PLAINTEXT, ChunkedTransfer, ClientAudit
from protofed.client.transport.channels import Channels
from protofed.client.transport.diagnosis import DiagnosisCode
from protofed.client.transport.proxy import Proxy
from protofed.client.transport.server_check import ServerProbe
from protofed.common.address import check_loopback
from protofed.common.codec import Digest, digest
from protofed.common.errors import (
    CodecError,
    ConflictError,
    DiskFailureError,
    ExcludedError,
    FencedError,
    IncidentError,
    IncompleteUploadError,
    NotEnrolledError,
    OutOfSpaceError,
    ProtocolError,
    RevokedError,
    UnavailableError,
    WithdrawnError,
    incident_in,
)
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol import wire
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.protocol.call_metadata import is_revoked, retry_after_s
from protofed.common.storage.journal import Fact

IN_FLIGHT = 4  # chunks at a time: with 2 MiB each, unary calls reach 2 GB/s on loopback
CHUNK_S = 120.0  # of one attempt at a chunk
LONGEST_S = 8 * CHUNK_S  # 2 KB/s, with one chunk of 2 MiB at a time
# A chunk that took no longer by itself: then `IN_FLIGHT` at once, each a share of the link, need half of `CHUNK_S`.
QUICK_S = CHUNK_S / (2 * IN_FLIGHT)
# Of a connection that breaks only after this long, the end of a ping's patience (`channels`) is the likely reason: on a
# slow link the ping waits behind the chunks.
PINGED_S = 20.0


@dataclass(frozen=True)
class Turn:
    """One attempt at one chunk.

    Attributes:
        deadline_s: seconds that it may take.
        waited_s: for others' attempts, before it began.
    """

    deadline_s: float
    waited_s: float


class ChunkPace:
    """The pace of one direction of a link, which threads share.

    Each deadline that passes costs what has arrived of a chunk, and of those beside it. So there is one chunk at a time
    until one arrives within `QUICK_S`, and again after a deadline, which then doubles up to `LONGEST_S`.
    """

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._under_way, self._most, self._deadline_s = 0, 1, CHUNK_S

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait until another chunk may be under way; it is, for as long as the context lasts."""
        asked_at = time.monotonic()
        with self._ended:
            self._ended.wait_for(lambda: self._under_way < self._most)
            self._under_way += 1
            turn = Turn(self._deadline_s, time.monotonic() - asked_at)
        try:
            yield turn
        finally:
            with self._ended:
                self._under_way -= 1
                self._ended.notify_all()

    def arrived(self, took_s: float) -> None:
        """A chunk arrived, in so many seconds."""
        if took_s <= QUICK_S:
            with self._ended:
                self._most, self._deadline_s = IN_FLIGHT, CHUNK_S
                self._ended.notify_all()

    def late(self, turn: Turn) -> None:
        """A chunk's deadline passed."""
        with self._ended:
            self._most = 1
            if turn.deadline_s >= self._deadline_s:  # those that were under way beside it double it no more
                self._deadline_s = min(2 * self._deadline_s, LONGEST_S)

    def broke(self, took_s: float) -> None:
        """The connection broke while a chunk was under way, after so many seconds."""
        if took_s >= PINGED_S:
            with self._ended:
                self._most = 1


log = structlog.get_logger()
A = TypeVar("A", bound=Message)
WARN_EVERY_S = 30.0
_SERVICE = "/protofed.protos.v1.Federation/"
_CLOSED = "the connection was closed"
_LEFT = "WITHDRAWN"  # in place of gRPC's code: of a message that was not sent, or cut short, as the site left the run
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# Retried. CANCELLED is how a server that stops ends its calls; RESOURCE_EXHAUSTED, a rate limit or a full disk there.
_RETRIED = (*_UNANSWERED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_ERRORS: dict[grpc.StatusCode, type[ProtocolError] | type[CodecError]] = {
    grpc.StatusCode.UNAUTHENTICATED: NotEnrolledError,
    grpc.StatusCode.ABORTED: FencedError,
    grpc.StatusCode.PERMISSION_DENIED: ExcludedError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: IncompleteUploadError,
    grpc.StatusCode.DATA_LOSS: CodecError,
    grpc.StatusCode.INTERNAL: IncidentError,
}


@dataclass(frozen=True)
class _Request:
    """A serialised request, the same bytes at every attempt."""

    call: str
    data: bytes
    facts: Mapping[str, Fact]  # for the audit log
    timeout: float  # seconds, of one attempt; of a chunk its pace decides
    run: str = ""  # of a call that moves models, updates or scores: sent only while the site takes part in that run
    transfer: ChunkedTransfer | None = None  # that it is a chunk of

    @property
    def digest(self) -> Digest:
        """What its line of the audit log is found by."""
        return digest(self.data) if self.transfer is None else self.transfer.digest


class Calls:
    """All calls of one daemon; threads share them.

    Args:
        address: host:port.
        identity: this site's certificate and key; None: plain text, on loopback only.
        proxy: between the site and the server; used only with an identity.
        audit: gets a line before each attempt.
        give_up_after_s: seconds without an answer after which calls raise `UnavailableError`; None: never.
        check_run: raises WithdrawnError for a run that the site has left; called before each attempt of its calls.

    Attributes:
        answered_at: monotonic time of the last successful call; -inf before the first.

    Raises:
        ConfigError: plain text would leave the machine.
    """

    def __init__(
        self,
        address: str,
        *,
        identity: LiveIdentity | None,
        proxy: Proxy | None,
        audit: ClientAudit,
        give_up_after_s: float | None,
        check_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        if identity is None:
            check_loopback(address)
        self._address, self._audit, self._give_up_after_s = address, audit, give_up_after_s
        self._probe = identity and ServerProbe(address, identity, proxy, audit, self._record)
        self._channels = Channels(address, identity, proxy)
        self._closed = threading.Event()
        self._check_run, self._in_flight = check_run, Counter[str]()  # calls under way, by run
        self._flight_lock = threading.Lock()
        self._paces = {call: ChunkPace() for call in ("GetChunk", "PutChunk")}  # a link may be slow in one direction
        self._offered: Mapping[str, Fact] = {}  # the newest run that the log has a line of
        self._audit_failure: DiskFailureError | None = None  # once set, nothing is sent any more, by any thread
        self._warned_at = -WARN_EVERY_S
        self.answered_at = -math.inf

    def close(self) -> None:
        """Close the connection; calls that wait for the server raise UnavailableError."""
        self._closed.set()
        self._channels.close()

    def cancel(self, run: str) -> None:
        """End the calls of a run that are under way; `check_run` refuses it already, so that none begins after this.

        Calls of other runs on the same connection are repeated.
        """
        with self._flight_lock:
            under_way = self._in_flight[run]
        if under_way:
            self._channels.hang_up()

    def call(self, name: str, message: Message, reply_type: type[A], timeout: float = 30.0, run: str = "") -> A:
        """Call a method of the service and wait for its reply, however long the server is away.

        Args:
            timeout: seconds of one attempt.
            run: of a call that moves models, updates or scores.

        Raises:
            WithdrawnError: the site has left this run; a call that was under way was cut short.
            ProtocolError, CodecError: the server refuses the call.
            ConfigError: the server cannot be trusted, from the first calls only; nothing was sent.
            DiskFailureError: the audit log cannot be written; nothing was sent.
            UnavailableError: the connection was closed, or nothing answered for `give_up_after_s`.
        """
        return self._until_answered(replace(_serialise(name, message, timeout), run=run), reply_type)

    def call_chunk(self, transfer: ChunkedTransfer, data: bytes, reply_type: type[A], run: str) -> A:
        """Call the method that moves one chunk, as `call` does. Threads may move chunks of one transfer at once.

        Args:
            data: the serialised message.
        """
        return self._until_answered(_Request(transfer.call, data, transfer.facts, CHUNK_S, run, transfer), reply_type)

    def call_once(self, name: str, message: Message, reply_type: type[A], timeout: float) -> A | None:
        """The reply to a single attempt; None: it failed.

        Raises:
            RevokedError: this site's certificate was revoked.
        """
        try:
            return self._send(_serialise(name, message, timeout), reply_type)
        except grpc.RpcError as error:
            _raise_if_revoked(error)
            return None
        # DiskFailureError: the heartbeat's thread cannot end the daemon, but the agent's next `call` raises it again.
        except (ProtocolError, UnavailableError, DiskFailureError):
            return None

    def record_task(self, task: Message) -> None:
        """Write the audit log's line of a task that the server gave.

        Raises:
            DiskFailureError: the audit log cannot be written; nothing is sent any more.
            UnavailableError: the connection was closed while the disk was full.
        """
        fields = audit_fields(task, values=True)
        self._record(lambda: self._audit.task(fields))

    def record_run(self, assignment: Message) -> None:
        """Write the audit log's line of a run that the server offers, unless it offered the same before.

        Raises:
            DiskFailureError, UnavailableError: as of `record_task`.
        """
        fields = audit_fields(assignment, values=True)
        if fields != self._offered:
            self._record(lambda: self._audit.run(fields))
            self._offered = fields

    def _until_answered(self, request: _Request, reply_type: type[A]) -> A:
        started_at, pause = time.monotonic(), 0.25
        while True:
            pushback = 0.0  # seconds that the server asks to wait
            try:
                diagnosis = self._probe and self._probe.before_call()
                if not diagnosis:
                    if (transfer := request.transfer) is None:
                        return self._send(request, reply_type)
                    pace = self._paces[transfer.call]
                    with pace.turn() as turn:
                        started_at += turn.waited_s  # while other chunks moved
                        return self._send_chunk(request, reply_type, pace, turn)
                reason = diagnosis.text
            except grpc.RpcError as error:
                self._raise_if_final(error)
                reason = self._explain(error)
                pushback = retry_after_s(error.trailing_metadata())
            self._raise_if_late(started_at, reason)
            if self._may_warn():
                log.warning("the server does not answer; trying again", server=self._address, why=reason)
            if self._closed.wait(pushback + random.uniform(0, pause)):  # noqa: S311  (full jitter, no secret)
                raise UnavailableError(_CLOSED)
            pause = min(2 * pause, 8.0)

    def _send(self, request: _Request, reply_type: type[A]) -> A:
        """One attempt."""
        if self._closed.is_set():
            raise UnavailableError(_CLOSED)
        with self._channels.take() as (channel, identity), self._counted(request):
            if request.run:  # `cancel` ends what is on this channel by now; what is not there yet is refused here
                self._check_run(request.run)
            self._record_sent(request, PLAINTEXT if identity is None else identity.certificate.fingerprint)
            self._raise_if_left(request)
            try:
                method: Any = channel.unary_unary(_SERVICE + request.call)  # bytes to bytes
                data: bytes = method(request.data, timeout=request.timeout)
            except ValueError as error:  # what gRPC raises on a channel that was closed
                self._raise_if_left(request, error)
                if self._closed.is_set():
                    raise UnavailableError(_CLOSED) from error
                return self._send(request, reply_type)  # `cancel` of another run closed it
            except grpc.RpcError as error:
                if (code := _code(error)) is grpc.StatusCode.CANCELLED:
                    self._raise_if_left(request, error)
                _log_incident(request, error)
                if code not in _UNANSWERED:
                    self._record(lambda: self._audit.answered(request.call, request.digest, code=code.name))
                raise
        try:
            reply, verdict = reply_type.FromString(data), wire.read_verdict(request.call, data)
        except DecodeError as error:
            raise ProtocolError(
                f"the server's answer to {request.call} cannot be read; its version may differ"
            ) from error
        if verdict:
            self._record(lambda: self._audit.answered(request.call, request.digest, verdict=verdict))
        self.answered_at = time.monotonic()
        return reply

    def _send_chunk(self, request: _Request, reply_type: type[A], pace: ChunkPace, turn: Turn) -> A:
        """One attempt at a chunk, from which the pace of later ones follows."""
        started_at = time.monotonic()
        try:
            reply = self._send(replace(request, timeout=turn.deadline_s), reply_type)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                pace.late(turn)
            elif _code(error) is grpc.StatusCode.UNAVAILABLE:
                pace.broke(time.monotonic() - started_at)
            raise
        pace.arrived(time.monotonic() - started_at)
        return reply

    @contextmanager
    def _counted(self, request: _Request) -> Iterator[None]:
        """While it lasts, `cancel` knows of the call."""
        with self._flight_lock:
            self._in_flight[request.run] += 1
        try:
            yield
        finally:
            with self._flight_lock:
                self._in_flight[request.run] -= 1
                if not self._in_flight[request.run]:
                    del self._in_flight[request.run]

    def _record_sent(self, request: _Request, certificate: str) -> None:
        """Write the line of a message; of a transfer, once, and again when a renewed certificate sends the rest."""
        if (transfer := request.transfer) is None:
            facts, data = request.facts, request.data
            self._record(lambda: self._audit.sent(self._address, certificate, request.call, facts, data))
            return
        with transfer.lock:  # the other chunks wait until the line is durable
            if certificate not in transfer.certificates:
                self._record(lambda: self._audit.moves(self._address, certificate, transfer))
                transfer.certificates.add(certificate)

    def _raise_if_left(self, request: _Request, error: Exception | None = None) -> None:
        """Raise WithdrawnError if the site has left the run of a call whose line is written; it gets no answer."""
        if not request.run:
            return
        try:
            self._check_run(request.run)
        except WithdrawnError:
            self._record(lambda: self._audit.answered(request.call, request.digest, code=_LEFT))
            text = f"a {request.call} was stopped: this site has left run {request.run}"
            raise WithdrawnError(text) from error

    def _record(self, write: Callable[[], None]) -> None:
        """Write a line of the audit log; wait for space while the disk is full."""
        while True:
            if self._audit_failure is not None:
                raise self._audit_failure
            try:
                return write()
            except OutOfSpaceError as error:
                if self._may_warn():
                    log.warning("nothing is sent while the audit log cannot be written; trying again", why=str(error))
            except DiskFailureError as error:
                self._audit_failure = error
                raise
            if self._closed.wait(random.uniform(0, 4.0)):  # noqa: S311
                raise UnavailableError(_CLOSED)

    def _explain(self, error: grpc.RpcError) -> str:
        """Why a call failed, for the log: gRPC's own words, or a diagnosis where those say nothing."""
        status = f"{_code(error).name.lower()}: {error.details()}"[:160]
        diagnosis = self._probe and _code(error) is grpc.StatusCode.UNAVAILABLE and self._probe.after_failure()
        if not diagnosis:
            return status
        if diagnosis.kind is DiagnosisCode.FINE:
            # The server is back; the old channel may still wait for its own back-off.
            self._channels.redial()
            return f"{status}; {diagnosis.text} now"
        return diagnosis.text

    def _may_warn(self) -> bool:
        """Whether the last warning is `WARN_EVERY_S` old; if so, its time is now."""
        due = time.monotonic() >= self._warned_at + WARN_EVERY_S
        self._warned_at = time.monotonic() if due else self._warned_at
        return due

    def _raise_if_final(self, error: grpc.RpcError) -> None:
        code, text = _code(error), str(error.details())
        if self._closed.is_set():
            raise UnavailableError(_CLOSED) from error
        # gRPC reports a message over the size limit as RESOURCE_EXHAUSTED, too; that would never pass.
        if code not in _RETRIED or "larger than max" in text:
            _raise_if_revoked(error)
            raise _ERRORS.get(code, ProtocolError)(text) from error

    def _raise_if_late(self, started_at: float, reason: str) -> None:
        elapsed = time.monotonic() - started_at
        if self._give_up_after_s is not None and elapsed >= self._give_up_after_s:
            raise UnavailableError(
                f"no answer from {self._address} for {elapsed:.0f} s ({reason}); "
                "start the server, or check the address and the firewall"
            )


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    """The code of a failed call. A connection that breaks within a TLS record has none of its own in gRPC."""
    broke = error.code() is grpc.StatusCode.UNKNOWN and "Stream removed" in str(error.details())
    return grpc.StatusCode.UNAVAILABLE if broke else error.code()


def _raise_if_revoked(error: grpc.RpcError) -> None:
    if error.code() is grpc.StatusCode.PERMISSION_DENIED and is_revoked(error.trailing_metadata()):
        remedy = "make a new key and certificate (`protofed certs request`), and ask the operator to register it"
        raise RevokedError(f"{error.details()}. This does not change by itself: {remedy}") from error


def _log_incident(request: _Request, error: grpc.RpcError) -> None:
    """Log the number of an incident on the server: the server's log says under that number what happened."""
    if error.code() is grpc.StatusCode.INTERNAL and (incident := incident_in(str(error.details()))):
        at = {key: request.facts[key] for key in ("site", "run", "round") if key in request.facts}
        log.error("the server failed in a call", call=request.call, incident=incident, **at)


def _serialise(call: str, message: Message, timeout: float) -> _Request:
    # Deterministic, so that equal messages have equal digests in the audit log.
    return _Request(call, message.SerializeToString(deterministic=True), audit_fields(message, values=True), timeout)
