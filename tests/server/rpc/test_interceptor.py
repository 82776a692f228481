"""The one way into the server: every call is bounded, recorded and only then answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.raw_client import FEDERATION, Code, RawClient, refused
from tests.support.tls_server import TlsServer, still_served, tls_server

from protofed.common.config.recipe import Recipe
from protofed.common.errors import DiskFailureError, OutOfSpaceError
from protofed.common.pki.identity import Party
from protofed.common.storage.journal import Journal, records
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import operator_pb2
from protofed.server.access.rate_limits import BURST, IN_FLIGHT

RecipeOf = Callable[..., Recipe]
RUN = "small-fedavg"
RULES = {"min_sites": 1, "quorum": 1, "score_every": 0}


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Any:
    """In plain text."""
    return live_server(recipe_of("fedavg", federation=RULES))


@pytest.fixture
def site(server: Any) -> Iterator[RawClient]:
    made = RawClient(server.address, RUN)
    yield made
    made.channel.close()


@pytest.fixture
def tls(live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path) -> Iterator[TlsServer]:
    """Over TLS; its run waits for sites."""
    with tls_server(tmp_path / "identities", live_server, recipe_of("fedavg")) as made:
        yield made


def kept(server: Any) -> list[Any]:
    """Call, code and who called, of all that the audit holds."""
    found = [record.facts for record in records(server.audit_file) if record.event == "call"]
    return [(facts["call"], facts["code"], facts["peer"]["party"]) for facts in found]  # type: ignore[call-overload, index]


# Recorded, then answered


def test_every_call_is_recorded_before_it_is_answered(server: Any, site: RawClient) -> None:
    assert refused(site.task)[0] is Code.UNAUTHENTICATED
    site.enroll()
    refused(site.channel.unary_unary(f"/{FEDERATION.full_name}/Reboot"), b"x", timeout=10)
    refused(site.channel.unary_unary(f"/{FEDERATION.full_name}/Heartbeat"), b"\xff" * 9, timeout=10)
    refused(site.channel.unary_unary(f"/{FEDERATION.full_name}/Heartbeat"), bytes(300 << 10), timeout=10)
    assert kept(server) == [
        ("NextTask", "UNAUTHENTICATED", "plaintext"),
        ("Enroll", "OK", "plaintext"),
        ("Reboot", "UNIMPLEMENTED", "plaintext"),
        ("Heartbeat", "INVALID_ARGUMENT", "plaintext"),
        ("Heartbeat", "RESOURCE_EXHAUSTED", "plaintext"),
    ]


def test_a_call_that_its_peer_gave_up_is_recorded_too(server: Any, site: RawClient) -> None:
    site.enroll()
    site.site = "site-2"
    site.enroll()  # it waits: round 0 is another's
    ask: Any = site.channel.unary_unary(f"/{FEDERATION.full_name}/NextTask")
    waiting = ask.future(pb.NextTaskRequest(caller=site.caller, run=RUN, wait_s=20.0).SerializeToString(), timeout=30)
    time.sleep(0.5)
    waiting.cancel()
    until = time.monotonic() + 10
    while ("NextTask", "CANCELLED", "plaintext") not in kept(server):
        assert time.monotonic() < until


def test_while_no_record_can_be_written_nothing_acts_and_nothing_is_answered(
    server: Any, site: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = operator_pb2.RunName(run=RUN)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append_all", full)
        for _ in range(3):
            code, text = refused(site.enroll)
            assert (code, "cannot store anything now" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert refused(site.say, "PauseRun", order)[0] is Code.RESOURCE_EXHAUSTED
    assert server.operation.run(RUN).status == "running"
    assert site.say("PauseRun", order).status == "paused"
    assert kept(server) == [("PauseRun", "OK", "plaintext")]


def full(*_: object) -> None:
    raise OutOfSpaceError("cannot write /state: No space left on device")


def test_an_audit_whose_disk_fails_ends_the_server(
    server: Any, site: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise DiskFailureError("cannot write /state: Input/output error")

    failed: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: failed.append(told.exc_value))
    monkeypatch.setattr(Journal, "append_all", broken)
    code, text = refused(site.enroll)
    assert (code, "Input/output" in text) == (Code.RESOURCE_EXHAUSTED, False)
    server.join()
    assert [str(error) for error in failed] == ["cannot write /state: Input/output error"]


# Bounded, by certificate


def test_calls_without_a_message_take_the_room_of_their_own_certificate_only(tls: TlsServer) -> None:
    """They are counted before anything is received."""
    greedy, other = tls.site("site-1"), tls.site("site-2")
    talk: Any = greedy.channel.stream_unary(f"/{FEDERATION.full_name}/PutChunk")
    never = threading.Event()

    def silence() -> Iterator[bytes]:
        never.wait(30)
        yield b""

    calls = [talk.future(silence(), timeout=30) for _ in range(IN_FLIGHT)]
    until = time.monotonic() + 10
    while not (late := talk.future(silence(), timeout=30)).done():
        assert time.monotonic() < until
        calls.append(late)
        time.sleep(0.2)
    assert (late.code(), "16 calls of this certificate" in late.details()) == (Code.RESOURCE_EXHAUSTED, True)
    assert still_served(other)
    for call in calls:
        call.cancel()
    never.set()
    assert [record.facts["call"] for record in tls.calls("RESOURCE_EXHAUSTED")] == ["PutChunk"]


def test_a_certificate_that_asks_too_often_is_put_off_and_others_are_not(tls: TlsServer) -> None:
    greedy, other = tls.site("site-1"), tls.site("site-2")
    codes = [_code(still_served, greedy) for _ in range(int(2 * BURST))]
    assert {Code.OK, Code.RESOURCE_EXHAUSTED} == set(codes)
    assert codes[: int(BURST) - 8] == [Code.OK] * (int(BURST) - 8)
    assert still_served(other)
    assert len(tls.calls("RESOURCE_EXHAUSTED")) == 1  # of all that were refused in this minute
    time.sleep(0.5)
    assert still_served(greedy)


def test_certificates_that_nobody_registered_are_bounded_as_well(tls: TlsServer) -> None:
    stranger = tls.client(tls.identity("site-3", Party.SITE), "site-3")
    codes = [_code(stranger.enroll) for _ in range(int(BURST))]
    assert {Code.PERMISSION_DENIED, Code.RESOURCE_EXHAUSTED} == set(codes)


def _code(call: Callable[..., object], *arguments: object) -> grpc.StatusCode:
    try:
        call(*arguments)
    except grpc.RpcError as error:
        told: Any = error
        return told.code()  # type: ignore[no-any-return]
    return Code.OK
