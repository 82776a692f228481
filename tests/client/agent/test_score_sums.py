"""Daemons of four sites in a secure aggregation of their own scores, with the server's part by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.client.secure_aggregation.test_steps import BASE, SECURE, SITES, Daemon, Round, again_after_a_kill
from tests.support.sum_server import SumServer

from protofed.client.agent.scores import Answers, Scorer
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import SiteState
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason
from protofed.common.payload import Part
from protofed.common.protocol.messages import SUM_STEPS, SumOf, Task, TaskKind
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.keys import SumContext, Vector
from protofed.common.storage.journal import Fact

READ = Recipe.model_validate(SECURE)
VECTORS = (Vector.CONTRIBUTORS, Vector.VALUES)
OWN = {site: {"personal.accuracy": 0.25 * number, "personal.pm_v": 0.5} for number, site in enumerate(SITES)}


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sites: list[str] = []

    def answers(self: Scorer, *_: object) -> Answers:
        sites.append(self._site.name)
        own = OWN[self._site.name]
        return Answers(own, own, own)

    monkeypatch.setattr(Scorer, "answers", answers)
    return sites


class ScoreRound(Round):
    """The scores of round 1, which the sites have trained."""

    def __init__(self, folder: Path, policies: dict[str, Any]) -> None:
        trained = Round(folder).until(None)
        self.daemons, base = trained.daemons, codec.encode(BASE)
        for site, rules in policies.items():
            self.daemons[site].made.rules.update(rules)
            self.daemons[site].killed()
        at = ("run", 1, 1, SumOf.SCORES)
        self.server = SumServer(SumContext(*at, READ.fingerprint(), codec.digest(base), VECTORS), (SITES,))
        for site, daemon in self.daemons.items():
            self.server.take(TaskKind.SCORE_SUM, site, self.sent(daemon, TaskKind.SCORE_SUM, base))

    def task(self, kind: TaskKind, base: bytes, name: str = "") -> Task:
        at = (codec.digest(base), len(base), 60.0, 1, SumOf.SCORES)
        return Task(kind, "run", 1, name or f"{kind}-scores", *at)

    def opened(self) -> dict[str, Spread]:
        self.until(None)
        return score_sums.opened(READ.score_names(), self.server.total())


ALL = {"metrics": frozenset[str](), "aggregated_metrics": frozenset({"personal.accuracy", "personal.pm_v", "loss"})}
NONE = {"metrics": frozenset[str](), "aggregated_metrics": frozenset[str]()}
EVERYBODY = dict.fromkeys(SITES, ALL)


def test_the_server_gets_the_mean_and_no_score(tmp_path: Path) -> None:
    round_ = ScoreRound(tmp_path, EVERYBODY)
    found = round_.opened()
    assert found["personal.accuracy"] == Spread(0.375, None, None, 4)
    assert found["personal.pm_v"] == Spread(0.5, None, None, 4)
    assert found.keys() == {"personal.accuracy", "personal.pm_v", "loss"}
    for daemon in round_.daemons.values():
        assert all(set(codec.decode(released.data)) == {Part.SECURE_AGGREGATION} for _, released in daemon.uploads)
        assert daemon.made.link.scores == []
        assert daemon.refused == []


def test_a_site_whose_policy_names_none_takes_part_with_none_and_what_two_give_is_in_no_sum(tmp_path: Path) -> None:
    round_ = ScoreRound(tmp_path, {**EVERYBODY, "ann": NONE})
    assert round_.opened()["personal.accuracy"].sites == 3
    assert round_.daemons["ann"].refused == []
    assert round_.daemons["ann"].made.declined() == []
    round_ = ScoreRound(tmp_path / "1", {site: ALL if site in SITES[:2] else NONE for site in SITES})
    assert round_.opened() == {}


@pytest.mark.parametrize("method", ["mixes", "untrained"])
def test_no_sum_has_scores_of_a_servers_model(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture by the site's label shares, or before the site has trained: each would answer about its labels."""
    declared = replace(FedAvgClient.declares, personal="loaded", mixes_classes=method == "mixes")
    monkeypatch.setattr(FedAvgClient, "declares", declared)
    if method == "untrained":
        monkeypatch.setattr(DiskStore, "last_counted", lambda *_: SiteState())
    found = ScoreRound(tmp_path, EVERYBODY).opened()
    assert found.keys() == {"loss"}


def test_an_own_installed_model_is_scored_in_sums_once_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvgClient, "declares", replace(FedAvgClient.declares, personal="loaded"))
    assert ScoreRound(tmp_path, EVERYBODY).opened().keys() == {"personal.accuracy", "personal.pm_v", "loss"}


@pytest.mark.parametrize("step", [TaskKind.SCORE_SUM, *SUM_STEPS])
def test_a_killed_daemon_sends_the_same_bytes_and_scores_once(
    tmp_path: Path, step: TaskKind, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    round_ = ScoreRound(tmp_path, EVERYBODY)
    round_.until(TaskKind.SHARE if step is TaskKind.SCORE_SUM else step)
    base = codec.encode(BASE) if step is TaskKind.SCORE_SUM else round_.server.blob(step, "ann")
    round_.server.take(step, "ann", again_after_a_kill(round_, step, base, monkeypatch))
    assert round_.opened()["personal.accuracy"].sites == 4
    assert taken.count("ann") == 1


def test_scores_are_aggregated_once_and_of_the_round_that_the_site_scored(tmp_path: Path) -> None:
    round_ = ScoreRound(tmp_path, EVERYBODY)
    round_.until(None)
    ann, base = round_.daemons["ann"], codec.encode(BASE)
    at = (codec.digest(base), len(base), 60.0, 2, SumOf.SCORES)
    assert ann.work(Task(TaskKind.SCORE_SUM, "run", 1, "again", *at), base) is None
    assert ann.made.declined()[-1] == ("again", FailureReason.POLICY)
    assert "scored once" in ann.refused[-1]
    assert ann.made.link.scores == []


def test_a_score_that_one_site_withholds_is_none_of_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(self: Scorer, *_: object) -> Answers:
        own = OWN[self._site.name]
        return Answers(own, own, own, frozenset({"personal.accuracy"} if self._site.name == "ann" else ()))

    monkeypatch.setattr(Scorer, "answers", answers)
    round_ = ScoreRound(tmp_path, EVERYBODY)
    assert round_.opened().keys() == {"personal.pm_v", "loss"}
    counts = dict(zip(score_sums.list_scores(READ.score_names()), round_.server.counts().tolist(), strict=True))
    assert counts["personal.accuracy"] == len(SITES)
    told = {site: masked(daemon)[0] for site, daemon in round_.daemons.items()}
    assert told.pop("ann") == ["loss", "personal.pm_v"]
    assert all(names == ["loss", "personal.accuracy", "personal.pm_v"] for names in told.values())


def masked(daemon: Daemon) -> list[Fact]:
    return [facts["scores"] for event, facts in daemon.recorded if event == "masked"]


def test_a_site_records_which_scores_leave_as_they_leave_and_only_those(tmp_path: Path) -> None:
    """Whether the sum is opened takes no further word of it, as where it is killed then."""
    accuracy = {**ALL, "aggregated_metrics": frozenset({"personal.accuracy"})}
    round_ = ScoreRound(tmp_path, {site: ALL if site in SITES[:2] else accuracy for site in SITES})
    round_.until(TaskKind.MASK)
    daemons = round_.daemons.values()
    assert all(masked(daemon) == [] for daemon in daemons)
    round_.until(TaskKind.AGREE)
    assert all(masked(daemon) == [["personal.accuracy"]] for daemon in daemons)  # two alone would give the others
    assert round_.opened().keys() == {"personal.accuracy"}
    assert all(len(masked(daemon)) == 1 for daemon in daemons)
    assert {event for daemon in daemons for event, _ in daemon.recorded} == {"met", "masked", "aggregated"}
