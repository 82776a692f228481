"""The server starts without torch, and without grpc where nothing is sent."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "torchvision", "sklearn", "scipy")


def loaded(*modules: str) -> set[str]:
    """The packages that these modules bring along."""
    code = "\n".join([*(f"import {module}" for module in modules), "import sys", "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_whole_server_imports_no_torch() -> None:
    modules = loaded("protofed.server.rpc.federation", "protofed.server.rounds.queue", "protofed.server.methods")
    assert "protofed.server.methods.fednh" in modules
    assert modules.isdisjoint(HEAVY)


def test_only_the_service_knows_of_grpc() -> None:
    """And of the messages of its calls: those of secure aggregation is in blobs, which rounds read."""
    modules = loaded("protofed.server.rounds.queue", "protofed.server.operator.run_record")
    assert "protofed.server.operator.run_record" in modules
    assert modules.isdisjoint({"grpc", "protofed.protos.v1.federation_pb2", *HEAVY})
