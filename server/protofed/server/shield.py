"""The outermost layer of every call: bounded messages, documented codes, and nothing of an unforeseen error."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from protofed.common.errors import (
    CodecError,
    ConfigError,
    Conflict,
    DiskFailure,
    Excluded,
    Fenced,
    Incomplete,
    NotEnrolled,
    OverQuota,
    ProtocolError,
    StateError,
    VersionMismatch,
)

log = structlog.get_logger()
MESSAGE_BYTES = 6 << 20  # the most that gRPC takes in
MANIFEST_BYTES = 1 << 20  # thousands of tensors; as many empty ones take 36 times as much when they are parsed
SMALL_BYTES = 256 << 10  # any other message: 2048 scores, or a recipe
_ROOM = {"PutChunk": MESSAGE_BYTES, "BeginUpload": MANIFEST_BYTES}
CODES: list[tuple[type[Exception], grpc.StatusCode, str]] = [  # and a fixed text, where ours is not for a peer
    (NotEnrolled, grpc.StatusCode.UNAUTHENTICATED, ""),
    (Fenced, grpc.StatusCode.ABORTED, ""),
    (VersionMismatch, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (Incomplete, grpc.StatusCode.FAILED_PRECONDITION, ""),
    (Excluded, grpc.StatusCode.PERMISSION_DENIED, ""),
    (Conflict, grpc.StatusCode.ALREADY_EXISTS, ""),
    (OverQuota, grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT, "not a message of this protocol"),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT, ""),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT, ""),
    (CodecError, grpc.StatusCode.DATA_LOSS, ""),
    (StateError, grpc.StatusCode.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later"),
]


class Shield(grpc.aio.ServerInterceptor):
    """The outermost layer: errors become documented codes, and nothing of an unforeseen one reaches the peer.

    Args:
        stop: set when the disk has failed: nothing can be promised any more, so the server ends.

    Attributes:
        failure: with which it ends.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self.failure: DiskFailure | None = None

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner, parse = handler.unary_unary, handler.request_deserializer
        room = _ROOM.get(handler_call_details.method.rpartition("/")[2], SMALL_BYTES)

        async def guarded(data: bytes, context: Any) -> Any:
            try:
                if len(data) > room:
                    text = f"a message of {len(data)} bytes: this call takes at most {room}"
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                return await inner(parse(data), context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                code, text = self._answer(error, handler_call_details.method)
            # Behind the `except`: an abort within it would keep the error, its traceback and so the message alive.
            return await context.abort(code, text)

        return grpc.unary_unary_rpc_method_handler(guarded, None, handler.response_serializer)

    def _answer(self, error: Exception, call: str) -> tuple[grpc.StatusCode, str]:
        if isinstance(error, DiskFailure):
            log.error("the disk has failed; the server ends", why=str(error))
            self.failure = error
            self._stop.set()
        for kind, code, text in CODES:
            if isinstance(error, kind):
                log.info("call refused", call=call, why=str(error))
                return code, text or str(error)
        incident = secrets.token_hex(4)
        log.exception("incident", incident=incident, call=call)
        return grpc.StatusCode.INTERNAL, f"internal error, incident {incident}"
