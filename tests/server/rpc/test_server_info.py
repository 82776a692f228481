"""How the server greets those who ask for its health, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.raw_client import FEDERATION, RawClient
from tests.support.tls_server import tls_server

from protofed.client.transport.channels import fetch_server_info
from protofed.common.config.recipe import Recipe
from protofed.common.errors import UnavailableError
from protofed.common.forms import utc_now
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.common.version import VERSION
from protofed.protos.v1 import federation_pb2 as pb

RecipeOf = Callable[..., Recipe]


def test_in_plain_text(live_server: Callable[..., Any], recipe_of: RecipeOf) -> None:
    said = fetch_server_info(live_server(recipe_of("fedavg")).address, None, None)
    assert said is not None
    assert (said.software, said.protocol, said.status) == (VERSION, PROTOCOL_VERSION, "")
    assert abs(utc_now() - said.time) < timedelta(seconds=30)


def test_whoever_has_a_certificate_is_told_how_it_stands(
    live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path
) -> None:
    with tls_server(tmp_path, live_server, recipe_of("fedavg")) as tls:
        folder = tls.identity("site-1", Party.SITE)
        identity = LiveIdentity(folder, Party.SITE)

        def status() -> str | None:
            said = fetch_server_info(tls.server.address, identity, None)
            return None if said is None else said.status

        def roles() -> tuple[str, ...]:
            said = fetch_server_info(tls.server.address, identity, None)
            return () if said is None else said.roles

        assert roles() == ()
        assert status() == "unknown"
        fingerprint = tls.register(folder)
        assert status() == "registered"
        assert roles() == ("trainer",)
        with tls.operator() as operator:
            operator.revoke(fingerprint, "lost")
        assert status() == "revoked"


def test_only_a_health_check_is_greeted_and_it_is_the_standard_one(
    live_server: Callable[..., Any], recipe_of: RecipeOf
) -> None:
    site = RawClient(live_server(recipe_of("fedavg", federation={"min_sites": 1})).address, "small-fedavg")
    check: Any = health_pb2_grpc.HealthStub(site.channel).Check
    answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert {"protofed-time", "protofed-version", "protofed-protocol"} <= dict(call.initial_metadata()).keys()
    watched = health_pb2_grpc.HealthStub(site.channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(iter(watched)).status == health_pb2.HealthCheckResponse.SERVING
    assert "protofed-version" in dict(watched.initial_metadata())
    watched.cancel()
    enroll: Any = site.channel.unary_unary(f"/{FEDERATION.full_name}/Enroll")
    caller = pb.EnrollRequest(caller=site.caller, protocol_version=PROTOCOL_VERSION, roles=[pb.ROLE_TRAINER])
    _reply, other = enroll.with_call(caller.SerializeToString(), timeout=10)
    assert not [name for name, _ in other.initial_metadata() if name.startswith("protofed")]
    site.channel.close()


def test_nobody_there(unused_port: int) -> None:
    with pytest.raises(UnavailableError, match="health check"):
        fetch_server_info(f"127.0.0.1:{unused_port}", None, None, timeout=2.0)
