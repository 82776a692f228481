"""Calls over gRPC: with `channels`, the only file of the client that knows it.

Our own retries, with full jitter: gRPC's run a handler twice. A server that is not there yet, restarts or goes away is
waited for; without end, unless told otherwise. What is sent was written to the audit log before, byte for byte.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from protofed.client.transport.audit import PLAINTEXT, ClientAudit
from protofed.client.transport.channels import Channels
from protofed.client.transport.diagnosis import DiagnosisCode
from protofed.client.transport.proxy import Proxy
from protofed.client.transport.server_check import ServerProbe
from protofed.common.address import check_loopback
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
    UnavailableError,
)
from protofed.common.incident import incident_in
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol import wire
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
A = TypeVar("A", bound=Message)
SAY_EVERY_S = 30.0
_SERVICE = "/protofed.protos.v1.Federation/"
_CLOSED = "the connection was closed"
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_AWAY = (*_UNANSWERED, grpc.StatusCode.RESOURCE_EXHAUSTED)  # CANCELLED: a server that ends cancels what is under way
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
class _Sending:
    """A call's message as it is sent, however often."""

    call: str
    data: bytes
    facts: Mapping[str, Fact]
    timeout: float


class Calls:
    """One daemon's calls; threads share them.

    Args:
        address: host:port.
        identity: this site's; None: plain text, which never leaves the machine.
        proxy: on the way to the server; with an identity only.
        give_up_after_s: seconds without an answer after which calls raise `UnavailableError`; None: never.

    Attributes:
        answered_at: when the server last did what a call asked for, in monotonic seconds.

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
    ) -> None:
        if identity is None:
            check_loopback(address)
        self._address, self._audit, self._give_up = address, audit, give_up_after_s
        self._lookout = identity and ServerProbe(address, identity, proxy, audit, self._record)
        self._channels = Channels(address, identity, proxy)
        self._closed, self._broken = threading.Event(), list[DiskFailureError]()
        self._said_at = -SAY_EVERY_S
        self.answered_at = -math.inf

    def close(self) -> None:
        """End the connection; calls that wait for the server end, too."""
        self._closed.set()
        self._channels.close()

    def ask(self, call: str, message: Message, answer: type[A], timeout: float = 30.0) -> A:
        """The call's answer, however long the server is away.

        Raises:
            ProtocolError, CodecError: the server refuses the call.
            ConfigError: the server cannot be trusted, from the first calls only; nothing was sent.
            DiskFailure: the audit log cannot be written; nothing was sent.
            Unavailable: the connection was closed, or nothing answered for too long.
        """
        sending = _prepare(call, message, timeout)
        began, pause = time.monotonic(), 0.25
        while True:
            try:
                found = self._lookout and self._lookout.before_call()
                if not found:
                    return self._send(sending, answer)
                why = found.text
            except grpc.RpcError as error:
                self._raise_if_final(error)
                why = self._why(error)
            self._raise_if_late(began, why)
            if self._is_due():
                log.warning("the server does not answer; trying again", server=self._address, why=why)
            if self._closed.wait(random.uniform(0, pause)):  # noqa: S311  (full jitter, no secret)
                raise UnavailableError(_CLOSED)
            pause = min(2 * pause, 8.0)

    def once(self, call: str, message: Message, answer: type[A], timeout: float) -> A | None:
        """The call's answer, or None; it is not repeated."""
        try:
            return self._send(_prepare(call, message, timeout), answer)
        except (grpc.RpcError, ProtocolError, UnavailableError, DiskFailureError):  # a broken disk ends the next `ask`
            return None

    def _send(self, sending: _Sending, answer: type[A]) -> A:
        """One attempt."""
        if self._closed.is_set():
            raise UnavailableError(_CLOSED)
        with self._channels.take() as (channel, identity):
            own = PLAINTEXT if identity is None else identity.certificate.fingerprint
            self._record(lambda: self._audit.sent(self._address, own, sending.call, sending.facts, sending.data))
            try:
                make: Any = channel.unary_unary(_SERVICE + sending.call)  # bytes to bytes
                reply: bytes = make(sending.data, timeout=sending.timeout)
            except ValueError as error:  # gRPC's word for a channel that was closed
                raise UnavailableError(_CLOSED) from error
            except grpc.RpcError as error:
                _tell_incident(sending, error)
                if (code := error.code()) not in _UNANSWERED:
                    self._record(lambda: self._audit.answered(sending.call, sending.data, code=code.name))
                raise
        try:
            found, verdict = answer.FromString(reply), wire.verdict_of(sending.call, reply)
        except DecodeError as error:
            raise ProtocolError(
                f"the server's answer to {sending.call} cannot be read; its version may differ"
            ) from error
        if verdict:
            self._record(lambda: self._audit.answered(sending.call, sending.data, verdict=verdict))
        self.answered_at = time.monotonic()
        return found

    def _record(self, write: Callable[[], None]) -> None:
        """Write a line of the audit log, however long there is no room for it."""
        while True:
            if self._broken:
                raise self._broken[0]
            try:
                return write()
            except OutOfSpaceError as error:
                if self._is_due():
                    log.warning("nothing is sent while the audit log cannot be written; trying again", why=str(error))
            except DiskFailureError as error:
                self._broken.append(error)
                raise
            if self._closed.wait(random.uniform(0, 4.0)):  # noqa: S311
                raise UnavailableError(_CLOSED)

    def _why(self, error: grpc.RpcError) -> str:
        """What a failed call means."""
        said = f"{error.code().name.lower()}: {error.details()}"[:160]
        found = self._lookout and error.code() is grpc.StatusCode.UNAVAILABLE and self._lookout.after_failure()
        if not found:
            return said
        if found.kind is DiagnosisCode.FINE:
            self._channels.dial_again()
        return found.text if found.kind is not DiagnosisCode.FINE else f"{said}; {found.text} now"

    def _is_due(self) -> bool:
        """Whether it is time to say again that something keeps the calls from being made."""
        due = time.monotonic() >= self._said_at + SAY_EVERY_S
        self._said_at = time.monotonic() if due else self._said_at
        return due

    def _raise_if_final(self, error: grpc.RpcError) -> None:
        code, text = error.code(), str(error.details())
        if self._closed.is_set():
            raise UnavailableError(_CLOSED) from error
        if code not in _AWAY or "larger than max" in text:
            raise _ERRORS.get(code, ProtocolError)(text) from error

    def _raise_if_late(self, began: float, why: str) -> None:
        away = time.monotonic() - began
        if self._give_up is not None and away >= self._give_up:
            raise UnavailableError(
                f"no answer from {self._address} for {away:.0f} s ({why}); "
                "start the server, or check the address and the firewall"
            )


def _tell_incident(sending: _Sending, error: grpc.RpcError) -> None:
    """The server says no more than its number: what it was stands under that number in the server's log."""
    if error.code() is grpc.StatusCode.INTERNAL and (incident := incident_in(str(error.details()))):
        at = {key: sending.facts[key] for key in ("site", "run", "round") if key in sending.facts}
        log.error("the server failed in a call", call=sending.call, incident=incident, **at)


def _prepare(call: str, message: Message, timeout: float) -> _Sending:
    return _Sending(call, message.SerializeToString(deterministic=True), wire.facts(message), timeout)
