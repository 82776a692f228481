"""What a server says of its health, as it changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthWatch:
    """Listens from now on.

    Attributes:
        heard: each change, the state at first among them.
    """

    def __init__(self, address: str) -> None:
        self.heard: list[int] = []
        self._channel = grpc.insecure_channel(address)
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the server has ended the call, and hang up."""
        self._thread.join(timeout=10)
        self._channel.close()

    def _listen(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        answers: Iterator[health_pb2.HealthCheckResponse] = stub.Watch(health_pb2.HealthCheckRequest())
        try:
            for answer in answers:
                self.heard.append(answer.status)
        except grpc.RpcError:
            return
