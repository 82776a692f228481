"""The operator's wire: documented codes, and what is in the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from tests.support.disturbed_run import RUN, SITES, close_channels, disturbed_run
from tests.support.raw_client import MODEL, RawClient

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import OutOfSpaceError
from protofed.protos.v1 import federation_pb2
from protofed.protos.v1 import operator_pb2 as pb
from protofed.protos.v1 import operator_pb2_grpc as rpc
from protofed.server.operator.service import OperatorApi
from protofed.server.operator.verification import VerificationResult, Verified
from protofed.server.rounds.scores.model_warnings import ModelWarning, WarningCode

Code = grpc.StatusCode
RecipeOf = Callable[..., Recipe]


class Desk:
    """Calls of the operator's, by name."""

    def __init__(self, server: Any) -> None:
        self.server, self.channel = server, grpc.insecure_channel(server.address)
        self._stub = rpc.OperatorStub(self.channel)

    def call(self, name: str, request: Message) -> Any:
        return getattr(self._stub, name)(request, timeout=20)

    def begin(self, name: str, request: Message) -> Any:
        """The call's future."""
        return getattr(self._stub, name).future(request, timeout=60)

    def refused(self, name: str, request: Message) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as raised:
            self.call(name, request)
        error: Any = raised.value
        return error.code(), error.details()

    def show(self, run: str = RUN) -> Any:
        return self.call("ShowRun", pb.ShowRunRequest(run=run))

    def statuses(self) -> dict[str, str]:
        return {info.run: info.status for info in self.call("ListRuns", pb.ListRunsRequest()).runs}


@pytest.fixture
def desk(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[Desk]:
    """A server whose only run waits for sites."""
    desk = Desk(live_server(recipe_of("fedavg")))
    yield desk
    desk.channel.close()


@pytest.fixture
def troubled(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[Desk]:
    """A server whose round 1 is published, though not without faults."""
    server, daemons = disturbed_run(live_server, recipe_of)
    desk = Desk(server)
    yield desk
    desk.channel.close()
    close_channels(daemons)


def test_an_operator_is_told_whether_a_run_has_noise(desk: Desk, recipe_of: RecipeOf) -> None:
    dp = {"noise_multiplier": 1.0, "max_unit_norm": 1.0, "sampling_rate": 0.1}
    for name, more in (("second", {}), ("third", {"dp": dp})):
        given = recipe_of("fedavg", name=name, plan={"batch_size": 16, "lr": 0.1, **more})
        assert desk.call("StartRun", pb.StartRunRequest(recipe=given.wire())).noisy is bool(more)
        assert desk.show(name).info.noisy is bool(more)


def test_a_run_is_queued_in_the_ledger_when_it_is_answered(desk: Desk, recipe_of: RecipeOf) -> None:
    given = recipe_of("fednh", name="second", method={"name": "fednh"})
    info = desk.call("StartRun", pb.StartRunRequest(recipe=given.wire()))
    assert (info.run, info.method, info.status, info.phase) == ("second", "fednh", "queued", "not started")
    assert (info.round, info.rounds, info.ended_at) == (0, 3, 0.0)
    assert info.began_at > 0.0
    assert desk.statuses() == {RUN: "running", "second": "queued"}
    row = desk.server.ledger.run("second")
    assert row is not None
    assert row.recipe == given.wire()


def test_orders_change_the_status(desk: Desk) -> None:
    assert desk.call("PauseRun", pb.RunName(run=RUN)).status == "paused"
    assert desk.call("ResumeRun", pb.RunName(run=RUN)).status == "running"
    info = desk.call("AbortRun", pb.AbortRunRequest(run=RUN, reason="wrong data"))
    assert (info.status, info.reason, info.phase) == ("aborted", "wrong data", "wrong data")
    assert info.ended_at >= info.began_at


def test_a_run_is_shown_with_every_fate_and_refusal_and_by_threads_of_its_own(
    troubled: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    detail = troubled.show()
    info, rounds = detail.info, {(row.round, row.attempt): row for row in detail.rounds}
    assert (info.status, info.round, info.rounds, info.invited, info.reported) == ("running", 2, 3, 6, 0)
    assert (info.degraded, info.abandoned, info.rolled_back) == (1, 0, 0)
    assert info.received_bytes > 0
    assert info.sent_bytes > 0
    assert {key: row.outcome for key, row in rounds.items()} == {
        (0, 1): "published",
        (1, 1): "degraded",
        (2, 1): "open",
    }
    tasks = {task.site: task for task in rounds[1, 1].sites}
    assert [tasks[site].task_status for site in SITES] == [
        "reported",
        "reported",
        "reported",
        "rejected",
        "failed",
        "late",
    ]
    assert list(tasks["site-1"].refusals) == ["not-finite: body/w has values that are not finite"]
    assert "more than 20 times the cohort's median" in tasks["site-4"].reason
    assert tasks["site-5"].reason == "out-of-memory"
    assert "training, epoch 1/3, last progress" in tasks["site-6"].reason
    assert {task.kind for task in rounds[1, 1].sites} == {"fit"}
    assert rounds[1, 1].closed_at >= rounds[1, 1].opened_at > 0.0
    assert rounds[2, 1].closed_at == 0.0
    assert list(troubled.show().model_warnings) == []
    found = [
        ModelWarning(WarningCode.CHANCE, 1, None, "no better."),
        ModelWarning(WarningCode.CHANCE, 1, "site-2", "nor."),
    ]
    monkeypatch.setattr(OperatorApi, "model_warnings", lambda _self, run: found if run == RUN else [])
    assert [(one.code, one.round, one.site, one.text) for one in troubled.show().model_warnings] == [
        ("chance", 1, "", "no better."),
        ("chance", 1, "site-2", "nor."),
    ]
    ledger, read, threads = troubled.server.ledger, troubled.server.ledger._read, set[str]()

    def noted(query: Any, **values: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return read(query, **values)

    monkeypatch.setattr(ledger, "_read", noted)
    assert troubled.call("GetRunRecord", pb.GetRunRecordRequest(run=RUN)).data
    assert troubled.call("GetState", pb.GetStateRequest(run=RUN)).data
    assert troubled.call("VerifyRound", pb.VerifyRoundRequest(run=RUN, round=1, attempt=1)).finding == "same"
    assert not threads & {"transfer", "operators"}


def test_sites_are_served_while_operators_verify(
    live_server: Callable[..., Any], recipe_of: RecipeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, verifying = threading.Event(), threading.Semaphore(0)

    def verify(*_: Any) -> Verified:
        verifying.release()
        assert let_go.wait(60)
        return Verified(VerificationResult.SAME, Digest("0" * 64), None, "")

    monkeypatch.setattr(OperatorApi, "verify", verify)
    desk = Desk(live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1})))
    site = RawClient(desk.server.address, RUN, "site-1").enroll()
    try:
        calls = [desk.begin("VerifyRound", pb.VerifyRoundRequest(run=RUN, round=1, attempt=1)) for _ in range(4)]
        assert all(verifying.acquire(timeout=20) for _ in calls)
        assert site.push(site.task(), MODEL).verdict == federation_pb2.VERDICT_ACCEPTED
    finally:
        let_go.set()
    assert [call.result().finding for call in calls] == ["same"] * 4
    desk.channel.close()
    close_channels([site])


def test_a_published_state_comes_out_again_and_a_run_goes_back(troubled: Desk) -> None:
    found = troubled.call("VerifyRound", pb.VerifyRoundRequest(run=RUN, round=1, attempt=1))
    assert (found.finding, found.recomputed) == ("same", found.published)
    assert found.published == troubled.show().rounds[1].state
    troubled.server.blobs.discard(found.published)
    found = troubled.call("VerifyRound", pb.VerifyRoundRequest(run=RUN, round=1, attempt=1))
    assert (found.finding, found.recomputed) == ("not-kept", "")
    code, text = troubled.refused("VerifyRound", pb.VerifyRoundRequest(run=RUN, round=2, attempt=1))
    assert (code, "published nothing in attempt 1 of round 2" in text) == (Code.INVALID_ARGUMENT, True)
    info = troubled.call("RollBackRun", pb.RollBackRunRequest(run=RUN, round=0))
    assert (info.status, info.rolled_back) == ("running", 2)
    code, text = troubled.refused("RollBackRun", pb.RollBackRunRequest(run=RUN, round=77))
    assert (code, text) == (Code.INVALID_ARGUMENT, "the state of round 77 does not exist; expected one of 0")


def test_sites_are_listed_excluded_and_admitted(troubled: Desk) -> None:
    sites = {info.site: info for info in troubled.call("ListSites", pb.ListSitesRequest()).sites}
    assert list(sites) == SITES
    assert list(sites["site-1"].roles) == ["trainer"]
    assert sites["site-6"].status == "working"
    assert sites["site-6"].activity_text == "training, epoch 1/3"
    assert sites["site-6"].progress_age_s >= 0.0
    info = troubled.call("ExcludeSite", pb.ExcludeSiteRequest(site="site-6", reason="wrong labels"))
    assert (info.status, info.excluded, info.progress_age_s) == ("excluded", "wrong labels", -1.0)
    info = troubled.call("AdmitSite", pb.AdmitSiteRequest(site="site-6"))
    assert (info.status, info.excluded, info.progress_age_s) == ("away", "", -1.0)
    assert troubled.call("ForgetSite", pb.ForgetSiteRequest(site="site-6")).site == "site-6"
    assert [info.site for info in troubled.call("ListSites", pb.ListSitesRequest()).sites] == SITES[:-1]


def test_a_group_is_shown_and_dissolved(troubled: Desk) -> None:
    troubled.server.ledger.keep_groups((("site-1", "site-2", "site-3"),))
    sites = {info.site: list(info.group) for info in troubled.call("ListSites", pb.ListSitesRequest()).sites}
    assert (sites["site-1"], sites["site-4"]) == (["site-1", "site-2", "site-3"], [])
    info = troubled.call("RegroupSite", pb.RegroupSiteRequest(site="site-2"))
    assert list(info.group) == ["site-1", "site-2", "site-3"]
    assert troubled.server.ledger.groups() == ()
    done = troubled.server.ledger.interventions()[-1]
    assert (done.action, done.site, done.reason) == ("regrouped", "site-2", "site-1, site-2, site-3")
    code, text = troubled.refused("RegroupSite", pb.RegroupSiteRequest(site="site-2"))
    assert (code, "is in no group" in text) == (Code.INVALID_ARGUMENT, True)


REFUSALS: list[tuple[str, Message, grpc.StatusCode, str]] = [
    ("StartRun", pb.StartRunRequest(recipe="{"), Code.INVALID_ARGUMENT, "the recipe: "),
    ("ShowRun", pb.ShowRunRequest(run="x"), Code.INVALID_ARGUMENT, f"expected one of: {RUN}"),
    ("PauseRun", pb.RunName(run="x"), Code.INVALID_ARGUMENT, "there is no run 'x'"),
    ("RollBackRun", pb.RollBackRunRequest(run=RUN), Code.INVALID_ARGUMENT, "expected one of none yet"),
    ("ExcludeSite", pb.ExcludeSiteRequest(site="../x"), Code.INVALID_ARGUMENT, "expected 1 to 64 of"),
    ("AdmitSite", pb.AdmitSiteRequest(site="x"), Code.INVALID_ARGUMENT, "unknown site 'x'"),
    ("ForgetSite", pb.ForgetSiteRequest(site="x"), Code.INVALID_ARGUMENT, "unknown site"),
    ("StartRun", pb.StartRunRequest(recipe="x" * (300 << 10)), Code.RESOURCE_EXHAUSTED, "takes at most"),
]


def test_refusals_have_documented_codes(desk: Desk) -> None:
    for call, request, code, phrase in REFUSALS:
        answered, text = desk.refused(call, request)
        assert (answered, phrase in text) == (code, True), text


def test_a_name_that_is_taken_and_a_run_that_has_ended_are_conflicts(desk: Desk, recipe_of: RecipeOf) -> None:
    code, text = desk.refused("StartRun", pb.StartRunRequest(recipe=recipe_of("fednh", name=RUN).wire()))
    assert (code, f"there is a run '{RUN}' already" in text) == (Code.ALREADY_EXISTS, True)
    desk.call("AbortRun", pb.AbortRunRequest(run=RUN))
    for order in ("PauseRun", "ResumeRun"):
        code, text = desk.refused(order, pb.RunName(run=RUN))
        assert (code, text) == (Code.ALREADY_EXISTS, f"run '{RUN}' has ended: aborted by the operator")


def test_row_89_an_order_that_cannot_be_written_down_is_not_acknowledged_until_it_can(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutOfSpaceError("no space left for journal.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(desk.server.ledger, "pause", full)
        code, text = desk.refused("PauseRun", pb.RunName(run=RUN))
    assert (code, text) == (Code.RESOURCE_EXHAUSTED, "the server cannot store anything now; try again later")
    assert desk.statuses() == {RUN: "running"}
    assert desk.call("PauseRun", pb.RunName(run=RUN)).status == "paused"
