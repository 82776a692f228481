"""The norm of an update is taken from what its site trained from, where a half knows that to be no broadcast."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import pytest

from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import Verdict
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.rounds.aggregation.publisher import outliers
from protofed.server.verdicts import RefusalCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

OWN = {"ann": 100.0, "bob": -3.0}  # the weights of their own models; cyd has none yet
UNIT = math.sqrt(10)  # a model has ten weights: its norm, if each of them is 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, make: MakeLab) -> list[SiteId]:
    """FedAvg's half, but ann and bob train from models of their own; the sites that it was asked about."""
    sites, model = list[SiteId](), make().model

    def start(_: FedAvgServer, state: Payload, site: SiteId, update: Payload) -> Payload:
        sites.append(site)
        return model(OWN[site]) if site in OWN else state

    monkeypatch.setattr(FedAvgServer, "start", start, raising=False)
    return sites


def norms(lab: Lab) -> dict[SiteId, float]:
    return {row.task.site: row.norm for row in lab.ledger.updates("test", 1) if row.norm is not None}


def examined(lab: Lab, site: SiteId, value: float) -> UpdateProblem | float:
    task = lab.task(site)
    manifest, data = lab.announce(lab.model(value))
    return lab.intake.examine(site, task.task_id, manifest, data, task.base_digest)


def test_the_norm_is_of_the_way_from_the_sites_own_model(lab: Lab, asked: list[SiteId]) -> None:
    lab.round(ann=101.0, bob=-1.0, cyd=3.0)
    assert norms(lab) == pytest.approx({"ann": UNIT, "bob": 2 * UNIT, "cyd": 3 * UNIT})
    assert outliers(norms(lab), factor=2.0) == {}  # from the broadcast, ann's 101 would have been one
    assert asked == ["ann", "bob", "cyd"]


def test_an_update_is_bounded_by_the_model_that_it_started_from(make: MakeLab, asked: list[SiteId]) -> None:
    lab = make(federation={"max_relative_norm": 2.0}).begin()
    assert examined(lab, "ann", 299.0) == pytest.approx(199 * UNIT)
    assert examined(lab, "bob", 2.5) == pytest.approx(5.5 * UNIT)
    for site, value in (("ann", 301.0), ("bob", 3.5)):
        problem = examined(lab, site, value)
        assert isinstance(problem, UpdateProblem)
        assert problem.code is RefusalCode.NORM


def test_a_restarted_server_takes_the_same_norm_on_any_thread(lab: Lab, asked: list[SiteId]) -> None:
    found = [examined(lab, "ann", 104.0)]
    lab.restart()
    thread = threading.Thread(target=lambda: found.append(examined(lab, "ann", 104.0)))
    thread.start()
    thread.join()
    assert found == [pytest.approx(4 * UNIT)] * 2


def test_of_a_task_that_is_closed_nobody_asks_what_it_started_from(lab: Lab, asked: list[SiteId]) -> None:
    """The newest state is another one by now; the verdict says that the update came too late."""
    task = lab.task("cyd")
    lab.push("ann", lab.model(100.0))
    lab.push("bob", lab.model(-3.0))
    lab.later(51.0, alive=("ann", "bob"))
    asked.clear()
    manifest, data = lab.announce(lab.model(2.0))
    intake = lab.intake
    assert intake.examine("cyd", task.task_id, manifest, data, task.base_digest) == pytest.approx(2 * UNIT)
    assert asked == []
    assert intake.commit("cyd", "daemon-cyd", task.task_id, manifest, {}, None, 2 * UNIT).verdict is Verdict.LATE


def test_an_option_of_that_name_is_no_start(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvgServer, "start", 0.5, raising=False)
    assert examined(lab, "ann", 2.0) == pytest.approx(2 * UNIT)
