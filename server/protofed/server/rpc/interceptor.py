"""The outermost layer of every call: rate and size limits, access, audit, and errors as gRPC codes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
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
    RevokedError,
    StateError,
    VersionMismatchError,
    incident_text,
    new_incident,
    short,
)
from protofed.common.protocol.call_metadata import (
    REGISTERED,
    DeniedBecause,
    ServerInfo,
    denied_metadata,
    retry_metadata,
)
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.common.version import VERSION
from protofed.server.access.authorization import HEALTH, AccessRules, Peer
from protofed.server.access.rate_limits import RateLimitError, RateLimits
from protofed.server.rpc.audit import AuditEntry, ServerAudit
from protofed.server.rpc.connections import ConnectionGuard, HandshakeCounter

log = structlog.get_logger()
MESSAGE_BYTES = 6 << 20  # gRPC's limit for any message; a chunk has 2 MiB
# A manifest of thousands of tensors. Not more: one full of empty tensors takes 36 times its size once it is parsed.
MANIFEST_BYTES = 1 << 20
SMALL_BYTES = 256 << 10  # any other message, such as 2048 scores or a recipe
CHUNKS = 8  # that are parsed and written at a time; protobuf copies them twice. Others wait as they came
_MAX_BYTES = {"PutChunk": MESSAGE_BYTES, "BeginUpload": MANIFEST_BYTES}


class UnimplementedError(ProtocolError):
    """The server has no method of this name."""


# The first class that matches decides. A text replaces the error's own where that would tell a peer about our disks.
CODES: list[tuple[type[Exception], grpc.StatusCode, str]] = [
    (NotEnrolledError, grpc.StatusCode.UNAUTHENTICATED, ""),
    (FencedError, grpc.StatusCode.ABORTED, ""),
    (VersionMismatchError, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (IncompleteUploadError, grpc.StatusCode.FAILED_PRECONDITION, ""),
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
class _ServedCall:
    """One call: its request as far as it was read, and its answer."""

    service: str
    name: str
    peer: Peer
    request: bytes = b""
    message: Any = None
    code: grpc.StatusCode = grpc.StatusCode.OK
    text: str = ""
    retry_after_s: float | None = None  # of a call over a limit
    denied: DeniedBecause | None = None
    reply: bytes = b""
    is_noted: bool = False  # its record was handed to the audit
    is_flood: bool = False  # refused as one of too many: of those one a minute is recorded, or they would fill the disk

    @property
    def is_audited(self) -> bool:
        """All calls but health checks, and all but one a minute of a flood, are audited."""
        return self.service != HEALTH and not self.is_flood

    def log_fields(self) -> dict[str, str | int]:
        """The calling site, and the run, round or site that its message names."""
        fields: dict[str, str | int] = {**self.peer.site()}
        if self.message is not None:
            names = self.message.DESCRIPTOR.fields_by_name
            fields |= {key: getattr(self.message, key) for key in ("run", "round", "site") if key in names}
            fields |= {"site": self.message.caller.site} if "caller" in names else {}
        return {key: short(value) if isinstance(value, str) else value for key, value in fields.items() if value != ""}

    def entry(self) -> AuditEntry:
        """Its entry of the audit log."""
        return AuditEntry(short(self.name), self.peer, self.request, self.message, self.code.name, self.reply)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Every call passes here. After an unexpected error the peer gets an incident's number, never the text.

    Without it gRPC sends the text of any exception of a handler to the peer.

    Args:
        stop: set by a failure of the disk, after which nothing can be promised: the server ends.
        guard: closes connections; None: in plain text, in which callers cannot be distinguished.

    Attributes:
        failure: the failure of the disk with which the server ends; None: there was none.
        on_denied: called with each call of a revoked certificate or an excluded site, for the metrics.
    """

    def __init__(
        self,
        stop: asyncio.Event,
        access: AccessRules,
        limits: RateLimits,
        audit: ServerAudit,
        handshakes: HandshakeCounter,
        guard: ConnectionGuard | None = None,
    ) -> None:
        self._stop, self._access, self._limits, self._audit, self._handshakes = stop, access, limits, audit, handshakes
        self._guard = guard
        self._chunks = asyncio.Semaphore(CHUNKS)
        self._cut_short: set[asyncio.Task[None]] = set()
        self.failure: DiskFailureError | None = None
        self.on_denied: Callable[[DeniedBecause], None] = lambda _: None
        self._denied: set[tuple[str, DeniedBecause]] = set()  # contributors of whom it is logged

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Serve every unary call as a stream of requests.

        gRPC reads and parses a unary request before the handler runs. It reads a stream's request when we ask for it,
        after the check of the caller's limits.
        """
        handler = await continuation(handler_call_details)
        path, _, name = handler_call_details.method.rpartition("/")
        service = "" if handler is None else path.rpartition(".")[2]

        async def serve(_messages: Any, context: Any) -> Any:
            return await self._serve(service, name, handler, context)

        if handler is not None and handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(serve)
        return grpc.stream_stream_rpc_method_handler(serve, None, getattr(handler, "response_serializer", None))

    async def _serve(self, service: str, name: str, handler: Any, context: Any) -> bytes | None:
        """Identify the peer, count the call, act, record it, answer."""
        self._handshakes.call_arrived(context.peer())
        call = _ServedCall(service, name, self._access.peer(context.auth_context()))
        try:
            with self._connection(call, context.peer()), self._limits.admit(call.peer, name):
                await self._with_code(self._act(call, handler, context), call)
                if self._denied and call.code is grpc.StatusCode.OK and call.service != HEALTH:
                    self._denied -= {(_holder(call), because) for because in DeniedBecause}  # it may call again
                await self._note(call)
        except asyncio.CancelledError:
            self._note_later(call)
            raise
        except RateLimitError as error:
            call.code, call.text = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
            call.retry_after_s, call.is_flood = error.retry_after_s, not error.is_logged
            await self._note(call)
        # Outside of the `except`: an abort raised in it would keep the error, its traceback and so the message alive.
        if call.code is not grpc.StatusCode.OK:
            metadata = (*retry_metadata(call.retry_after_s), *denied_metadata(call.denied))
            await context.abort(call.code, call.text, metadata)
        return call.reply if handler.unary_unary is not None else None

    @contextmanager
    def _connection(self, call: _ServedCall, connection: str) -> Iterator[None]:
        """Tell the guard whose connection it is; that of a caller who may not call is closed after its answer."""
        if self._guard is None:
            yield
            return
        registered = self._access.status(call.peer) == REGISTERED
        if not registered and call.service != HEALTH:
            self._guard.refused(connection)
        with self._guard.call(connection, call.peer.fingerprint if registered else ""):
            yield

    async def _act(self, call: _ServedCall, handler: Any, context: Any) -> None:
        """Check that the call can be audited, its size, its message and its access, cheapest first; then handle it."""
        if handler is None:
            raise UnimplementedError("this server has no such method")
        if call.is_audited:
            await self._audit.ready(call.name)
        call.request = await _received(context)
        max_bytes = _MAX_BYTES.get(call.name, SMALL_BYTES)
        if len(call.request) > max_bytes:
            raise OverQuotaError(f"a message of {len(call.request)} bytes: this call takes at most {max_bytes}")
        if call.name == "PutChunk":
            async with self._chunks:
                await self._handle(call, handler, context)
        else:
            await self._handle(call, handler, context)

    async def _handle(self, call: _ServedCall, handler: Any, context: Any) -> None:
        call.message = handler.request_deserializer(call.request)
        self._access.check(call.peer, call.service, call.message)
        if call.service == HEALTH:
            await context.send_initial_metadata(self._server_info(call.peer).metadata())
        if handler.unary_unary is None:
            await handler.unary_stream(call.message, context)  # it writes its answers itself
        else:
            reply = await handler.unary_unary(call.message, context)
            call.reply = reply if isinstance(reply, bytes) else handler.response_serializer(reply)

    def _server_info(self, peer: Peer) -> ServerInfo:
        """Clock, versions and the peer's certificate status, which `protofed client doctor` compares with its own."""
        return ServerInfo(utc_now(), VERSION, PROTOCOL_VERSION, self._access.status(peer), self._access.roles(peer))

    async def _with_code(self, action: Awaitable[None], call: _ServedCall) -> None:
        """Await the action; an error becomes the call's code and text."""
        try:
            await action
        except grpc.aio.AbortError:  # gRPC's own, of a call that is answered already
            raise
        except Exception as error:
            call.code, call.text = self._refusal(error, call)
            call.retry_after_s = error.retry_after_s if isinstance(error, OverQuotaError) else None
            call.is_flood = isinstance(error, RateLimitError) and not error.is_logged
            call.reply = b""
            self._limits.charge(call.peer)

    async def _note(self, call: _ServedCall) -> None:
        if call.is_audited:
            call.is_noted = True
            await self._with_code(self._audit.note(call.entry()), call)

    def _note_later(self, call: _ServedCall) -> None:
        """Record a call that was cut short, as it may have acted; nobody waits for its record."""
        if not call.is_noted:
            call.code, call.reply = grpc.StatusCode.CANCELLED, b""
            task = asyncio.get_running_loop().create_task(self._note(call))
            self._cut_short.add(task)  # the loop holds tasks weakly: without this one might vanish unfinished
            task.add_done_callback(self._cut_short.discard)

    def _refusal(self, error: Exception, call: _ServedCall) -> tuple[grpc.StatusCode, str]:
        if isinstance(error, DiskFailureError):
            log.error("the disk has failed; the server ends", why=str(error))
            self.failure = error
            self._stop.set()
        fields = {"call": f"{call.service}/{short(call.name)}", "peer": str(call.peer), **call.log_fields()}
        if (because := _because(error)) is not None:
            self._deny(call, because, error, fields)
            return grpc.StatusCode.PERMISSION_DENIED, str(error)
        for kind, code, text in CODES:
            if isinstance(error, kind):
                if (unlogged := self._limits.unlogged(call.peer)) is not None:
                    more = {"unlogged": unlogged} if unlogged else {}
                    log.info("call refused", **fields, **more, why=str(error))
                return code, text or str(error)
        incident = new_incident()
        log.exception("incident", incident=incident, **fields)
        return grpc.StatusCode.INTERNAL, incident_text(incident)

    def _deny(self, call: _ServedCall, because: DeniedBecause, error: Exception, fields: Mapping[str, Any]) -> None:
        """Count the call, and log the first one of its holder: its daemon may ask again and again."""
        call.denied = because
        self.on_denied(because)
        if (holder := (_holder(call), because)) not in self._denied:
            self._denied.add(holder)
            log.warning("calls denied until somebody acts", because=because.value, **fields, why=str(error))


def _because(error: Exception) -> DeniedBecause | None:
    match error:
        case RevokedError():
            return DeniedBecause.REVOKED
        case ExcludedError():
            return DeniedBecause.EXCLUDED
    return None


def _holder(call: _ServedCall) -> str:
    """The caller's certificate; in plain text, the site that it says it is."""
    return call.peer.fingerprint or str(call.log_fields().get("site", ""))


async def _received(context: Any) -> bytes:
    """The call's one message.

    Raises:
        DecodeError: there is none, or it is larger than gRPC accepts; gRPC has then answered the call itself.
    """
    data = await context.read()
    if not isinstance(data, bytes):
        raise DecodeError("no message")
    return data
