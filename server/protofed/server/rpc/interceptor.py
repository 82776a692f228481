"""The outermost layer of every call: who calls, how much and how often, what it may, what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from protofed.common.clock import utc_now
from protofed.common.errors import (
    CodecError,
    ConfigError,
    ConflictError,
    DeniedError,
    DiskFailureError,
    ExcludedError,
    FencedError,
    IncompleteUploadError,
    NotEnrolledError,
    OverQuotaError,
    ProtocolError,
    StateError,
    VersionMismatchError,
    short,
)
from protofed.common.incident import incident_text, new_incident
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.common.protocol.server_info import ServerInfo
from protofed.common.version import VERSION
from protofed.server.access.authorization import HEALTH, Access, Peer
from protofed.server.access.credentials import HandshakeCounter
from protofed.server.access.rate_limits import RateLimitError, RateLimits
from protofed.server.rpc.audit import AuditEntry, ServerAudit

log = structlog.get_logger()
MESSAGE_BYTES = 6 << 20  # the most that gRPC takes in
MANIFEST_BYTES = 1 << 20  # thousands of tensors; as many empty ones take 36 times as much when they are parsed
SMALL_BYTES = 256 << 10  # any other message: 2048 scores, or a recipe
_ROOM = {"PutChunk": MESSAGE_BYTES, "BeginUpload": MANIFEST_BYTES}


class UnimplementedError(ProtocolError):
    """Nothing of this name is offered."""


CODES: list[tuple[type[Exception], grpc.StatusCode, str]] = [  # and a fixed text, where ours is not for a peer
    (NotEnrolledError, grpc.StatusCode.UNAUTHENTICATED, ""),
    (FencedError, grpc.StatusCode.ABORTED, ""),
    (VersionMismatchError, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (IncompleteUploadError, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (ExcludedError, grpc.StatusCode.PERMISSION_DENIED, ""),
    (DeniedError, grpc.StatusCode.PERMISSION_DENIED, ""),
    (ConflictError, grpc.StatusCode.ALREADY_EXISTS, ""),
    (OverQuotaError, grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
    (UnimplementedError, grpc.StatusCode.UNIMPLEMENTED, ""),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT, "not a message of this protocol"),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT, ""),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT, ""),
    (CodecError, grpc.StatusCode.DATA_LOSS, ""),
    (StateError, grpc.StatusCode.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later"),
]


@dataclass
class _Call:
    """What is known of one call so far, and what becomes of it."""

    service: str
    name: str
    peer: Peer
    request: bytes = b""
    message: Any = None
    code: grpc.StatusCode = grpc.StatusCode.OK
    text: str = ""
    reply: bytes = b""
    noted: bool = False

    @property
    def is_audited(self) -> bool:
        """All calls are, but those of a service that carries nothing and is asked every few seconds."""
        return self.service != HEALTH

    def concerns(self) -> dict[str, str | int]:
        """For the log: the site that calls, and the run, round or site that its message names."""
        told: dict[str, str | int] = {**self.peer.site()}
        if self.message is not None:
            fields = self.message.DESCRIPTOR.fields_by_name
            told |= {key: getattr(self.message, key) for key in ("run", "round", "site") if key in fields}
            told |= {"site": self.message.caller.site} if "caller" in fields else {}
        return {key: short(value) if isinstance(value, str) else value for key, value in told.items() if value != ""}

    def entry(self) -> AuditEntry:
        """For the audit."""
        return AuditEntry(short(self.name), self.peer, self.request, self.message, self.code.name, self.reply)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The one way into the server; nothing of an unforeseen error leaves it.

    Args:
        stop: set when the disk has failed: nothing can be promised any more, so the server ends.

    Attributes:
        failure: with which it ends.
    """

    def __init__(
        self, stop: asyncio.Event, access: Access, limits: RateLimits, audit: ServerAudit, handshakes: HandshakeCounter
    ) -> None:
        self._stop, self._access, self._limits, self._audit, self._handshakes = stop, access, limits, audit, handshakes
        self._cut_short: set[asyncio.Task[None]] = set()
        self.failure: DiskFailureError | None = None

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Every call comes as a stream of messages: so it is known who calls before the first one is received."""
        handler = await continuation(handler_call_details)
        path, _, name = handler_call_details.method.rpartition("/")
        service = "" if handler is None else path.rpartition(".")[2]

        async def answered(_messages: Any, context: Any) -> Any:
            return await self._serve(service, name, handler, context)

        if handler is not None and handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(answered)
        return grpc.stream_stream_rpc_method_handler(answered, None, getattr(handler, "response_serializer", None))

    async def _serve(self, service: str, name: str, handler: Any, context: Any) -> bytes | None:
        """Peer, limits, what `_act` does, audit, answer."""
        self._handshakes.call_arrived(context.peer())
        call = _Call(service, name, self._access.peer(context.auth_context()))
        try:
            with self._limits.admit(call.peer, name):
                await self._judged(self._act(call, handler, context), call)
                await self._note(call)
        except asyncio.CancelledError:
            self._note_later(call)
            raise
        except RateLimitError as error:
            call.code, call.text = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
            if error.is_logged:  # all of a flood would fill the disk
                await self._note(call)
        # Behind the `except`: an abort within it would keep the error, its traceback and so the message alive.
        if call.code is not grpc.StatusCode.OK:
            await context.abort(call.code, call.text)
        return call.reply if handler.unary_unary is not None else None

    async def _act(self, call: _Call, handler: Any, context: Any) -> None:
        """Room in the audit, size, message, access, handler."""
        if handler is None:
            raise UnimplementedError("this server has no such method")
        if call.is_audited:
            await self._audit.ready(call.name)
        call.request = await _received(context)
        room = _ROOM.get(call.name, SMALL_BYTES)
        if len(call.request) > room:
            raise OverQuotaError(f"a message of {len(call.request)} bytes: this call takes at most {room}")
        call.message = handler.request_deserializer(call.request)
        self._access.check(call.peer, call.service, call.message)
        if call.service == HEALTH:
            await context.send_initial_metadata(self._greeting(call.peer).metadata())
        if handler.unary_unary is None:
            await handler.unary_stream(call.message, context)  # it writes its answers itself
        else:
            call.reply = handler.response_serializer(await handler.unary_unary(call.message, context))

    def _greeting(self, peer: Peer) -> ServerInfo:
        """For whoever asks whether all is well, and wants to know with whom: `protofed client doctor`."""
        return ServerInfo(utc_now(), VERSION, PROTOCOL_VERSION, self._access.status(peer))

    async def _judged(self, doing: Awaitable[None], call: _Call) -> None:
        """Do it; an error becomes the call's code and text."""
        try:
            await doing
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            call.code, call.text = self._refusal(error, call)
            call.reply = b""
            self._limits.charge(call.peer)

    async def _note(self, call: _Call) -> None:
        if call.is_audited:
            call.noted = True
            await self._judged(self._audit.note(call.entry()), call)

    def _note_later(self, call: _Call) -> None:
        """Of a call that was cut short, and may have acted: nobody waits for its record."""
        if not call.noted:
            call.code, call.reply = grpc.StatusCode.CANCELLED, b""
            task = asyncio.get_running_loop().create_task(self._note(call))
            self._cut_short.add(task)
            task.add_done_callback(self._cut_short.discard)

    def _refusal(self, error: Exception, call: _Call) -> tuple[grpc.StatusCode, str]:
        if isinstance(error, DiskFailureError):
            log.error("the disk has failed; the server ends", why=str(error))
            self.failure = error
            self._stop.set()
        told = {"call": f"{call.service}/{short(call.name)}", "peer": str(call.peer), **call.concerns()}
        for kind, code, text in CODES:
            if isinstance(error, kind):
                log.info("call refused", **told, why=str(error))
                return code, text or str(error)
        incident = new_incident()
        log.exception("incident", incident=incident, **told)
        return grpc.StatusCode.INTERNAL, incident_text(incident)


async def _received(context: Any) -> bytes:
    """The call's one message.

    Raises:
        DecodeError: there is none, or it is larger than gRPC takes in, which answers that itself.
    """
    data = await context.read()
    if not isinstance(data, bytes):
        raise DecodeError("no message")
    return data
