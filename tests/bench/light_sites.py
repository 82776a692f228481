"""Sites that are a coroutine each: they call as a daemon does, train nothing and keep nothing. Thousands fit a process.

Each has a connection of its own. While a daemon has nothing to do, its calls wait at the server, which tells by that
that it is there.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import resource
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google_crc32c import value as crc32c

from protofed.common import codec
from protofed.common.payload import Part, Payload, describe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import CHUNK_BYTES, PROTOCOL_VERSION, Manifest
from protofed.protos.v1 import federation_pb2 as pb

CLASSES = 10
MODEL: Payload = {
    Part.BODY: {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    Part.HEAD: {"weight": np.ones((CLASSES, 3), dtype=np.float32)},
}
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
WAIT_S = 20.0
_SERVICE = "/protofed.protos.v1.Federation/"
_REPLIES: dict[str, Any] = {
    "Enroll": pb.EnrollResponse,
    "NextTask": pb.NextTaskResponse,
    "Heartbeat": pb.HeartbeatResponse,
    "GetChunk": pb.Chunk,
    "BeginUpload": pb.UploadTicket,
    "PutChunk": pb.ChunkAck,
    "CommitUpload": pb.Receipt,
    "ReportScores": pb.Ack,
}


@dataclass(frozen=True)
class Crowd:
    """The sites of one process.

    Attributes:
        credentials: CA, key and each site's certificate in PEM, by name; empty: plain text.
        beat_s: between two heartbeats of a site that has no task; infinite: it sends none.
        connecting: sites that connect at a time.
    """

    address: str
    names: tuple[str, ...]
    credentials: tuple[bytes, bytes, dict[str, bytes]] | None
    beat_s: float
    connecting: int = 20


class Counts:
    """What a crowd did, in memory that its parent reads: sites there, calls answered, calls that failed, updates."""

    THERE, CALLS, FAILED, UPDATES, IN_RUN = range(5)

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def add(self, which: int, amount: int = 1) -> int:
        """Count up; to what."""
        self._shared[which] += amount
        return int(self._shared[which])


def run(crowd: Crowd, shared: Any) -> None:
    """Take part until the process is ended."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    gc.disable()  # nothing here makes cycles, and each look through so many objects takes a second
    asyncio.run(_run(crowd, Counts(shared)))


async def _run(crowd: Crowd, counts: Counts) -> None:
    gate = asyncio.Semaphore(crowd.connecting)
    await asyncio.gather(*(_Site(crowd, name, counts, gate).live() for name in crowd.names))


class _Site:
    def __init__(self, crowd: Crowd, name: str, counts: Counts, gate: asyncio.Semaphore) -> None:
        self._crowd, self._counts, self._gate = crowd, counts, gate
        self._caller, self._run, self._in_run = pb.Caller(site=name, instance="a"), "", False
        if crowd.credentials is None:
            self._channel = grpc.aio.insecure_channel(crowd.address, OPTIONS)
        else:
            authority, key, certificates = crowd.credentials
            secret = grpc.ssl_channel_credentials(authority, key, certificates[name])
            self._channel = grpc.aio.secure_channel(crowd.address, secret, OPTIONS)

    async def live(self) -> None:
        async with self._gate:
            await self._call("Enroll", self._enrolment(0.0))
        self._counts.add(Counts.THERE)
        beats = asyncio.create_task(self._beat())
        while True:
            answer = await self._call("Enroll", self._enrolment(WAIT_S))
            if answer.WhichOneof("answer") == "assignment":
                self._run = answer.assignment.run
                await self._work()
            assert not beats.done() or beats.exception() is None

    async def _work(self) -> None:
        self._counts.add(Counts.IN_RUN)
        while True:
            question = pb.NextTaskRequest(caller=self._caller, run=self._run, wait_s=WAIT_S)
            answer = await self._call("NextTask", question)
            match answer.WhichOneof("answer"):
                case "task":
                    await self._do(answer.task)
                case "finished":
                    self._counts.add(Counts.IN_RUN, -1)
                    return

    async def _beat(self) -> None:
        if self._crowd.beat_s == math.inf:
            return
        await asyncio.sleep(random.uniform(0, self._crowd.beat_s))  # noqa: S311
        while True:
            if self._run:
                beat = pb.HeartbeatRequest(caller=self._caller, run=self._run, activity=pb.ACTIVITY_IDLE)
                await self._call("Heartbeat", beat)
            await asyncio.sleep(self._crowd.beat_s)

    async def _do(self, task: pb.Task) -> None:
        if task.kind == pb.TASK_KIND_SCORE:
            which: dict[str, Any] = {"run": task.run, "round": task.round, "task_id": task.task_id}
            await self._call("ReportScores", pb.ScoresRequest(caller=self._caller, **which))
            return
        payload = MODEL if task.kind == pb.TASK_KIND_INITIALISE else codec.decode(await self._fetch(task))
        if task.kind == pb.TASK_KIND_FIT:
            place = hash(self._caller.site) % CLASSES
            head = np.array(payload[Part.HEAD]["weight"])
            head[place] += 1e-3
            payload = {**payload, Part.HEAD: {"weight": head}}
        await self._push(task, payload)
        self._counts.add(Counts.UPDATES, task.kind == pb.TASK_KIND_FIT)

    async def _fetch(self, task: pb.Task) -> bytes:
        chunks = range(-(-task.base_bytes // CHUNK_BYTES))
        asked = [
            pb.GetChunkRequest(caller=self._caller, run=self._run, digest=task.base_digest, index=i) for i in chunks
        ]
        return b"".join([(await self._call("GetChunk", one)).data for one in asked])

    async def _push(self, task: pb.Task, payload: Payload) -> None:
        data = codec.encode(payload)
        manifest = Manifest(describe(payload), len(data), codec.digest(data))
        what: dict[str, Any] = {"caller": self._caller, "run": task.run, "round": task.round, "task_id": task.task_id}
        announced = pb.UploadManifest(
            **what,
            base_digest=task.base_digest,
            tensors=wire.pack_tensors(manifest),
            total_bytes=manifest.total_bytes,
            digest=manifest.digest,
            digest_algorithm=wire.DIGEST_ALGORITHM,
        )
        ticket = await self._call("BeginUpload", announced)
        if ticket.WhichOneof("answer") == "receipt":
            return
        upload = ticket.upload.id
        for start in range(0, len(data), CHUNK_BYTES):
            part, index = data[start : start + CHUNK_BYTES], start // CHUNK_BYTES
            chunk = pb.Chunk(caller=self._caller, upload=upload, index=index, data=part, crc32c=crc32c(part))
            await self._call("PutChunk", chunk)
        await self._call("CommitUpload", pb.CommitRequest(**what, upload=upload, digest=manifest.digest))

    def _enrolment(self, wait_s: float) -> pb.EnrollRequest:
        return pb.EnrollRequest(
            caller=self._caller,
            protocol_version=PROTOCOL_VERSION,
            software_version="light",
            roles=[pb.ROLE_TRAINER],
            wait_s=wait_s,
        )

    async def _call(self, name: str, message: Any) -> Any:
        """Until it is answered."""
        method: Any = self._channel.unary_unary(_SERVICE + name)
        while True:
            try:
                answer: Awaitable[bytes] = method(message.SerializeToString(), timeout=60.0)
                reply = _REPLIES[name].FromString(await answer)
            except grpc.aio.AioRpcError as error:
                if self._counts.add(Counts.FAILED) <= 10:
                    print(name, error.code(), error.details(), file=sys.stderr, flush=True)  # noqa: T201
                await asyncio.sleep(random.uniform(0.5, 2.0))  # noqa: S311
            else:
                self._counts.add(Counts.CALLS)
                return reply
