"""The floor of a round: the same bytes over gRPC, protobuf and mTLS, averaged; no ledger, no file, no digest, no audit.

Clients fetch the model in unary chunks of 2 MiB, four in flight, and send as much back, each chunk with its CRC-32C, as
ours do; they are threads of one process, as those of `tests.bench.echo`. `python -m tests.bench.floor --megabytes 45
--sites 8 --rounds 5` prints one measurement as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google_crc32c import value as crc32c
from tests.bench.server_process import make_identities, memory, process, processor, written

from protofed.common.process import keep_memory
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.protos.v1 import federation_pb2 as pb

IN_FLIGHT = 4
SERVICE = "bench.Floor"
OPTIONS = [("grpc.max_receive_message_length", 6 << 20), ("grpc.max_send_message_length", 6 << 20)]


class _Server:
    """Gives out the model, takes updates, and answers every commit of a round once they are averaged."""

    def __init__(self, total: int, sites: int) -> None:
        self._model = np.random.default_rng(0).random(total // 4, np.float32).tobytes()
        self._sum, self._sites = np.zeros(total // 4, np.float32), sites
        self._updates = {str(site): bytearray(total) for site in range(sites)}
        self._all = asyncio.Barrier(sites)

    async def get(self, request: pb.GetChunkRequest, _: object) -> pb.Chunk:
        part = self._model[request.index * CHUNK_BYTES : (request.index + 1) * CHUNK_BYTES]
        return pb.Chunk(index=request.index, data=part, crc32c=crc32c(part))

    async def put(self, chunk: pb.Chunk, _: object) -> pb.ChunkAck:
        data, at = chunk.data, chunk.index * CHUNK_BYTES
        assert crc32c(data) == chunk.crc32c
        self._updates[chunk.upload][at : at + len(data)] = data
        return pb.ChunkAck()

    async def commit(self, request: pb.Chunk, _: object) -> pb.ChunkAck:
        self._sum += np.frombuffer(self._updates[request.upload], np.float32)
        if await self._all.wait() == 0:
            self._sum /= self._sites
            self._model = self._sum.tobytes()
            self._sum[:] = 0
        await self._all.wait()
        return pb.ChunkAck()


async def _serve(total: int, sites: int, identity: Path, told: Path) -> None:
    floor, server = _Server(total, sites), grpc.aio.server(options=OPTIONS)
    unary: Any = grpc.unary_unary_rpc_method_handler
    methods = {
        "Get": unary(floor.get, pb.GetChunkRequest.FromString, pb.Chunk.SerializeToString),
        "Put": unary(floor.put, pb.Chunk.FromString, pb.ChunkAck.SerializeToString),
        "Commit": unary(floor.commit, pb.Chunk.FromString, pb.ChunkAck.SerializeToString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    key, own, authority = ((identity / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, own)], authority, True))
    await server.start()
    told.write_text(f"127.0.0.1:{port}", encoding="utf-8")  # noqa: ASYNC240  (once, before the first call)
    await server.wait_for_termination()


@dataclass
class _Client:
    """Fetches the model and sends it back."""

    index: int
    total: int
    address: str
    identity: Path

    def __post_init__(self) -> None:
        key, own, authority = ((self.identity / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
        # Each client its own connection, which channels of one process with equal arguments would share.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(authority, key, own)
        self._channel = grpc.secure_channel(self.address, credentials, options)
        call: Callable[..., Any] = self._channel.unary_unary
        self._get = call(f"/{SERVICE}/Get", pb.GetChunkRequest.SerializeToString, pb.Chunk.FromString)
        self._put = call(f"/{SERVICE}/Put", pb.Chunk.SerializeToString, pb.ChunkAck.FromString)
        self._commit = call(f"/{SERVICE}/Commit", pb.Chunk.SerializeToString, pb.ChunkAck.FromString)
        self._pool = ThreadPoolExecutor(IN_FLIGHT)

    def round(self) -> None:
        chunks = range(-(-self.total // CHUNK_BYTES))
        model = b"".join(self._pool.map(self._fetched, chunks))
        list(self._pool.map(lambda index: self._send(model, index), chunks))
        self._commit(pb.Chunk(upload=str(self.index)))

    def close(self) -> None:
        self._pool.shutdown()
        self._channel.close()

    def _fetched(self, index: int) -> bytes:
        chunk = self._get(pb.GetChunkRequest(index=index))
        data: bytes = chunk.data
        assert crc32c(data) == chunk.crc32c
        return data

    def _send(self, model: bytes, index: int) -> None:
        part = model[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        self._put(pb.Chunk(upload=str(self.index), index=index, data=part, crc32c=crc32c(part)))


@dataclass
class _Times:
    """By the end of each round: clock, and processor seconds of server and clients."""

    server: int
    ends: list[tuple[float, float, float]] = field(default_factory=list)

    def note(self) -> None:
        self.ends.append((time.perf_counter(), processor(self.server), time.process_time()))


def measure(megabytes: float, sites: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One server process and its clients; of each round but the first."""
    total = int(megabytes * 1e6) // 4 * 4
    identities = make_identities(folder / "identities", [f"site-{index}" for index in range(sites)])
    told = [f"--serve={folder / 'address'}", f"--identity={identities / 'server'}", f"--sites={sites}"]
    command = [sys.executable, "-m", "tests.bench.floor", *told, f"--megabytes={megabytes}"]
    with process(command, folder, terminated=True) as server:
        address = written(folder / "address", server, folder)
        clients = [_Client(index, total, address, identities / f"site-{index}") for index in range(sites)]
        times = _Times(server.pid)
        together = threading.Barrier(sites, action=times.note)

        def run(client: _Client) -> None:
            for _ in range(rounds):
                client.round()
                together.wait()
            client.close()

        with ThreadPoolExecutor(sites) as pool:
            list(pool.map(run, clients))
        peak = memory(server.pid)[1]
    first, last = times.ends[0], times.ends[-1]
    return {
        "seconds": [after[0] - before[0] for before, after in pairwise(times.ends)],
        "server_cpu_s": (last[1] - first[1]) / (rounds - 1),
        "clients_cpu_s": (last[2] - first[2]) / (rounds - 1),
        "peak_mb": peak,
    }


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.floor", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help="be the server, and write its address to this file")
    parser.add_argument("--identity", type=Path, help="the server's")
    given = parser.parse_args()
    keep_memory()
    if given.serve:
        asyncio.run(_serve(int(given.megabytes * 1e6) // 4 * 4, given.sites, given.identity, given.serve))
        return
    with tempfile.TemporaryDirectory(prefix="protofed-floor-") as folder:
        print(json.dumps(measure(given.megabytes, given.sites, given.rounds, Path(folder))))  # noqa: T201


if __name__ == "__main__":
    main()
