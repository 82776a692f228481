"""An operator's calls: their answers whole, their errors ours, whatever became of the server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.support.disturbed_run import RUN

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, ProtocolError, StateError, UnavailableError
from protofed.common.protocol.messages import TaskKind
from protofed.deploy.operator.connection import Operator, plain
from protofed.protos.v1 import operator_pb2 as pb
from protofed.server.storage.rows import RoundRow, TaskRow


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]) -> Any:
    return live_server(recipe_of("fedavg"))


def test_answers_become_errors_of_ours(server: Any, unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Operator(server.address, NO_TLS) as operator:
        with pytest.raises(ConfigError, match="there is no run 'x'"):
            operator.show("x")
        with monkeypatch.context() as patched:
            patched.setattr(server.ledger, "runs", lambda: 1 / 0)
            with pytest.raises(ProtocolError, match=r"internal error, incident [0-9a-f]{8}$"):
                operator.runs()
        with pytest.raises(StateError, match="takes at most"):
            operator.abort(RUN, "x" * (300 << 10))
    with (
        Operator(f"127.0.0.1:{unused_port}", NO_TLS) as operator,
        pytest.raises(UnavailableError, match="start it"),
    ):
        operator.runs()


def test_a_name_that_does_not_resolve_is_not_taken_for_a_server_that_is_down(
    unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unresolved)
    address = f"localhost:{unused_port}"
    with (
        Operator(address, NO_TLS) as operator,
        pytest.raises(UnavailableError, match=r"'localhost' .* does not resolve"),
    ):
        operator.runs()


def test_a_run_of_many_rounds_and_sites_can_be_shown(server: Any) -> None:
    sites = 2_000
    for attempt in range(1, 13):
        tasks = [
            TaskRow(f"{attempt}-{number}", RUN, 1, attempt, f"site-{number}", TaskKind.FIT, None, 0, "late", "x" * 300)
            for number in range(sites)
        ]
        server.ledger.open_round(RoundRow(RUN, 1, attempt, 1, 1), tasks)
    with Operator(server.address, NO_TLS) as operator:
        detail, newest = operator.show(RUN), operator.show(RUN, newest=8)
    assert detail.ByteSize() > 6 << 20  # more than one message may have
    assert [(row.attempt, len(row.sites)) for row in detail.rounds] == [(attempt, sites) for attempt in range(1, 13)]
    assert [row.attempt for row in newest.rounds] == [8, 9, 10, 11, 12]


def test_a_message_is_told_with_all_its_fields() -> None:
    tasks = [pb.SiteTask(site="ann", kind="fit", task_status="late", refusals=["a", "b"])]
    assert plain(pb.RoundInfo(round=3, opened_at=1.5, sites=tasks)) == {
        "round": 3,
        "attempt": 0,
        "outcome": "",
        "reason": "",
        "opened_at": 1.5,
        "closed_at": 0.0,
        "state": "",
        "sites": [{"site": "ann", "kind": "fit", "task_status": "late", "reason": "", "refusals": ["a", "b"]}],
    }


def test_a_call_that_a_stopping_server_ends_is_as_no_answer() -> None:
    class Stopping(grpc.GenericRpcHandler):
        def service(self, _: Any) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(
                lambda _, call: call.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
            )

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Stopping(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Operator(f"127.0.0.1:{port}", NO_TLS) as operator, pytest.raises(UnavailableError):
            operator.sites()
    finally:
        server.stop(None).wait()
