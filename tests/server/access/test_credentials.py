"""Handshakes that lead to no call, and how many connections there may be."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from protofed.common.process import check_in_time, require_tls_1_3
from protofed.server.access.credentials import HandshakeCounter
from protofed.server.rpc import server


def test_a_handshake_without_a_call_counts_once() -> None:
    handshakes = HandshakeCounter()
    for _ in range(5):
        handshakes.handshake_started()
    for _ in range(3):
        handshakes.call_arrived("ipv4:127.0.0.1:1")
    with structlog.testing.capture_logs() as logs:
        assert handshakes.log_failed() == 4
        handshakes.call_arrived("ipv4:127.0.0.1:1")  # the same connection goes on
        assert handshakes.log_failed() == 0
        handshakes.handshake_started()
        handshakes.call_arrived("ipv4:127.0.0.1:2")
        assert handshakes.log_failed() == 0
        handshakes.handshake_started()
        handshakes.call_arrived("ipv4:127.0.0.1:2")
        assert handshakes.log_failed() == 1
    assert [(line["count"], line["of"]) for line in logs] == [(4, 5), (1, 1)]


def test_nothing_is_kept_of_connections_that_have_ended() -> None:
    handshakes = HandshakeCounter()
    for minute in range(100):
        for port in range(10):
            handshakes.call_arrived(f"ipv4:127.0.0.1:{minute * 10 + port}")
        handshakes.log_failed()
    assert len(handshakes._calling | handshakes._calling_before) == 10


@pytest.fixture
def descriptors() -> Iterator[int]:
    """The most that this process may have; it may have 600 now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_is_a_descriptor_for_every_connection(descriptors: int) -> None:
    assert server.room(100) == 100
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
    assert server.room(1000) == 1000
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1256, descriptors)
    with structlog.testing.capture_logs() as logs:
        assert server.room(10 * descriptors) == descriptors - 256
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (descriptors, descriptors)
    assert [(line["connections"], line["descriptors"]) for line in logs] == [(descriptors - 256, descriptors)]


def test_who_imports_grpc_too_early_is_told_so() -> None:
    require_tls_1_3()
    check_in_time()
    script = (
        "import grpc\n"
        "from protofed.common.errors import ConfigError\n"
        "from protofed.common.process import check_in_time, require_tls_1_3\n"
        "require_tls_1_3()\n"
        "try:\n"
        "    check_in_time()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", script], env=bare, capture_output=True, text=True, check=True)
    assert "would offer TLS 1.2" in done.stdout
