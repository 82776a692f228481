"""Calls that no client of ours makes, and what the operator is shown: rows 17 to 19, 37 and 45 of the fault table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.disturbed_run import RUN, close_channels, disturbed_run, update_of
from tests.support.raw_client import FEDERATION, Code, RawClient, refused
from tests.support.tls_server import tls_server

from protofed.common import codec
from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import PROTOCOL_VERSION, Verdict
from protofed.common.version import VERSION
from protofed.deploy.operator import tables
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb

RecipeOf = Callable[..., Recipe]


@pytest.fixture
def site(
    request: pytest.FixtureRequest, live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path
) -> Iterator[RawClient]:
    """The only site of a run whose first model is there; in plain text unless "tls" is asked for."""
    recipe = recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1, "score_every": 0})
    with ExitStack() as held:
        if getattr(request, "param", "") == "tls":
            one = held.enter_context(tls_server(tmp_path / "identities", live_server, recipe)).site()
        else:
            one = RawClient(live_server(recipe).address, RUN).enroll()
            held.callback(one.channel.close)
        assert one.push(one.task()).verdict == pb.VERDICT_ACCEPTED
        yield one
        assert serves(one)


def serves(site: RawClient) -> bool:
    """Whether an honest update still counts (N5)."""
    return bool(site.push(site.task(), update_of(1.0)).verdict == pb.VERDICT_ACCEPTED)


UNKNOWN = {
    "method": f"/{FEDERATION.full_name}/Reboot",
    "method of another case": f"/{FEDERATION.full_name}/enroll",
    "service": "/protofed.protos.v1.Nobody/Enroll",
    "version": "/protofed.protos.v2.Federation/Enroll",
    "reflection": "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "older reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "channelz": "/grpc.channelz.v1.Channelz/GetServers",
    "no path": "/",
}


BOTH = pytest.mark.parametrize("site", ["plaintext", "tls"], indirect=True)


@BOTH
@pytest.mark.parametrize("path", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("streams", [False, True])
def test_row_17_what_is_not_offered_is_unimplemented(site: RawClient, path: str, streams: bool) -> None:
    if streams:
        talk: Any = site.channel.stream_stream(path)
        code, _ = refused(lambda: list(talk(iter([b"\x3a\x00"]), timeout=20)))
    else:
        call: Any = site.channel.unary_unary(path)
        code, _ = refused(lambda: call(b"", timeout=20))
    assert code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("step", [-1, 1])
def test_row_18_another_version_of_the_protocol_is_refused_by_naming_both(site: RawClient, step: int) -> None:
    theirs = PROTOCOL_VERSION + step
    newcomer = RawClient(site.address, RUN, "site-9")
    hello = pb.EnrollRequest(
        caller=newcomer.caller, protocol_version=theirs, software_version="9.9.9", roles=[pb.ROLE_TRAINER]
    )
    code, text = refused(newcomer.say, "Enroll", hello)
    assert code is Code.FAILED_PRECONDITION
    for phrase in (
        f"(protofed 9.9.9) speaks protocol {theirs}",
        f"(protofed {VERSION}) protocol {PROTOCOL_VERSION};",
        "install the same protofed on both",
    ):
        assert phrase in text
    asked = pb.NextTaskRequest(caller=newcomer.caller, run=RUN)
    assert refused(newcomer.say, "NextTask", asked)[0] is Code.UNAUTHENTICATED  # it is not enrolled
    newcomer.channel.close()


METADATA: dict[str, list[tuple[str, str | bytes]]] = {
    "20 KB": [("x-long", "a" * 20_000)],
    "20 KB of small ones": [(f"x-{number}", "a" * 180) for number in range(100)],
    "junk in a binary header": [("x-junk-bin", bytes(range(256)) * 70)],
}


@BOTH
@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA)
def test_row_19_too_much_metadata_is_refused_and_the_server_works_on(
    site: RawClient, metadata: list[tuple[str, str | bytes]]
) -> None:
    call: Any = site.channel.unary_unary(f"/{FEDERATION.full_name}/Enroll")
    code, text = refused(lambda: call(b"", timeout=20, metadata=metadata))
    assert code in (Code.RESOURCE_EXHAUSTED, Code.INTERNAL)
    assert "Traceback" not in text


@BOTH
def test_row_19_junk_in_a_small_binary_header_is_not_looked_at(site: RawClient) -> None:
    hello = pb.EnrollRequest(caller=site.caller, protocol_version=PROTOCOL_VERSION, roles=[pb.ROLE_TRAINER])
    call: Any = site.channel.unary_unary(f"/{FEDERATION.full_name}/Enroll", type(hello).SerializeToString)
    call(hello, timeout=20, metadata=[("x-junk-bin", bytes(range(256)))])


# What came too late, and what the operator sees of it


@pytest.fixture
def troubled(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[tuple[Any, dict[str, RawClient]]]:
    """A run whose round 1 was closed without site-6; the server, and the daemons."""
    server, daemons = disturbed_run(live_server, recipe_of)
    yield server, {daemon.site: daemon for daemon in daemons}
    close_channels(list(daemons))


def test_row_37_and_45_a_late_update_is_refused_as_late_and_leaves_no_blob(
    troubled: tuple[Any, dict[str, RawClient]], tmp_path: Path
) -> None:
    server, daemons = troubled
    late = daemons["site-6"]
    (invitation,) = [row for row in server.ledger.tasks(RUN, 1) if row.site == late.site]
    task = pb.Task(run=RUN, round=1, task_id=invitation.task_id, base_digest=invitation.base_digest)
    before = sorted(path.name for path in (tmp_path / "server" / "blobs").rglob("*"))
    receipt = late.push(task, update_of(7.0))
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_LATE, "round 1 is closed")
    assert sorted(path.name for path in (tmp_path / "server" / "blobs").rglob("*")) == before
    (row,) = [row for row in server.ledger.updates(RUN, 1) if row.task.site == late.site]
    assert (row.verdict, row.digest) == ("late", codec.digest(codec.encode(update_of(7.0))))
    assert "refused as late: round 1 is closed" in shown(server)
    assert late.task().round == 2


@pytest.mark.parametrize("rounds", [1, 6])
def test_row_45_an_update_that_was_under_way_when_its_round_was_closed_is_late_and_nothing_of_it_is_kept(
    rounds: int, live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path
) -> None:
    """Even long after, when the model that it starts from is gone."""
    blobs, rules = tmp_path / "server" / "blobs", {"min_sites": 2, "quorum": 1, "score_every": 0, "grace": 0.0}
    server = live_server(recipe_of("fedavg", rounds=9, federation=rules | {"required_sites": ["site-2"]}))
    slow, quick = daemons = [RawClient(server.address, RUN, name).enroll() for name in ("site-1", "site-2")]
    for maker in daemons:
        assert maker.push(maker.task()).verdict == pb.VERDICT_ACCEPTED  # the first model
    task, data = slow.task(), codec.encode(update_of(7.0))
    ticket = slow.say("BeginUpload", slow.announcement(task, data, update_of(7.0)))
    slow.put(ticket.upload.id, 0, data)
    for number in range(rounds):
        assert quick.push(quick.task(), update_of(1.0 + number)).verdict == pb.VERDICT_ACCEPTED
    assert quick.task().round == rounds + 1  # so the one before is published
    assert (blobs / task.base_digest).exists() is (rounds == 1)
    receipt = slow.commit(task, ticket.upload.id, codec.digest(data))
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_LATE, "round 1 is closed")
    again = slow.push(task, update_of(7.0))
    assert again.record_hash == receipt.record_hash
    verdicts = [(row.task.site, row.verdict) for row in server.ledger.updates(RUN, 1)]
    assert verdicts == [("site-1", Verdict.LATE), ("site-2", Verdict.ACCEPTED)]
    assert not (blobs / codec.digest(data)).exists()
    assert list((blobs / "uploads").iterdir()) == []
    close_channels(daemons)


def shown(server: Any) -> str:
    """What `runs show` prints, with single spaces."""
    console = Console(width=200)
    with Operator(server.address, NO_TLS) as operator, console.capture() as captured:
        for part in tables.run_parts(operator.show(RUN), everything=False):
            console.print(part)
    return " ".join(captured.get().split())


def test_row_73_degraded_rounds_and_the_site_without_which_none_counts_are_named(
    troubled: tuple[Any, dict[str, RawClient]],
) -> None:
    server, daemons = troubled
    text = shown(server)
    assert "DEGRADED: 1 round used fewer sites than wanted" in text
    assert "1 1 degraded" in text
    wanted = daemons["site-3"]
    beat = pb.HeartbeatRequest(caller=wanted.caller, run=RUN, task_id=wanted.task().task_id)
    beat.activity, beat.failure = pb.ACTIVITY_FAILED, pb.FAILURE_REASON_DATA
    wanted.say("Heartbeat", beat)
    text = shown(server)
    assert "2 1 abandoned" in text
    assert "1 of 6 sites cannot do the task: site-3 (last reason: data); without site-3 no round counts" in text
    assert "1 attempt abandoned" in text
