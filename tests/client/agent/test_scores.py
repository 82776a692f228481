"""A site sees its own scores whatever its policy lets leave: on its disk, in its log and in its metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.support.scripted_server import RULES, AgentHarness, site_data, work

from protofed.client.state.disk_store import DiskStore
from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.client.status import DaemonStatus
from protofed.common.errors import OutOfSpaceError
from protofed.common.protocol.messages import Role, Scores

PERSONAL = {"personal.accuracy", "personal.balanced_accuracy", "personal.pm_v", "personal.pm_l"}
NOTHING: dict[str, Any] = {**RULES, "metrics": []}


def test_what_stays_on_the_site_is_kept_logged_and_measured_there(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), rules=NOTHING)
    harness.fit(1)
    harness.score(1)
    with capture_logs() as lines:
        work(harness.agent(), 2)
    assert harness.link.scores == [{}]  # an answer without scores: the server need not wait for its deadline
    assert all(released.metrics == {} for _, released in harness.link.pushed)
    (scored,) = OwnScores(tmp_path / FOLDER).rounds("run")
    families = {name for name in scored.scores if "recall" not in name}
    assert (scored.round, families) == (1, PERSONAL | {"loss"})
    assert "personal.recall.0" in scored.scores
    assert harness.now.own_scores == {name: scored.scores[name] for name in families}
    logged = [line["scores"].keys() for line in lines if line["event"] == "own scores"]
    assert logged == [{"loss"}, PERSONAL]


def test_a_restarted_daemon_shows_what_was_kept(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), rules=NOTHING)
    harness.fit(1)
    harness.score(1)
    work(harness.agent(), 2)
    before, harness.now = harness.now.own_scores, DaemonStatus()
    harness.restart(tmp_path)
    work(harness.agent(), 1)
    assert harness.now.own_scores == before


def test_an_evaluators_scores_are_not_its_own(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), roles=frozenset({Role.EVALUATOR}))
    harness.score(1)
    work(harness.agent(), 1)
    assert set(harness.link.scores[0]) == {"global.accuracy", "global.balanced_accuracy"}
    assert OwnScores(tmp_path / FOLDER).runs() == []
    assert harness.now.own_scores == {}


@pytest.mark.parametrize("own_test", [False, True])
def test_scores_of_a_trainers_own_held_out_images_are_not_taken_for_others(own_test: bool) -> None:
    harness = AgentHarness(roles=frozenset(Role), load_data=lambda _: replace(site_data(), own_test=own_test))
    harness.fit(1)
    harness.score(1)
    work(harness.agent(), 2)
    assert any(name.startswith("global.") for name in harness.link.scores[0]) != own_test


def test_a_disk_that_takes_no_scores_stops_neither_training_nor_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: OwnScores, run: str, round: int, scores: Scores) -> None:
        raise OutOfSpaceError(f"no space for {run}, {round}, {scores}")

    monkeypatch.setattr(OwnScores, "record", full)
    harness = AgentHarness(store=DiskStore(tmp_path))
    harness.fit(1)
    harness.score(1)
    with capture_logs() as lines:
        work(harness.agent(), 2)
    assert (len(harness.link.pushed), len(harness.link.scores), harness.declined()) == (1, 1, [])
    assert [line["log_level"] for line in lines if "could not be written" in line["event"]] == ["warning"] * 2


def test_damaged_scores_stop_no_run(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "run.jsonl").write_text("no line")
    harness = AgentHarness(store=DiskStore(tmp_path))
    harness.fit(1)
    harness.score(1)
    with capture_logs() as lines:
        work(harness.agent(), 2)
    assert (len(harness.link.pushed), len(harness.link.scores)) == (1, 1)
    assert (tmp_path / FOLDER / "run.jsonl").read_text() == "no line"
    assert [line["event"] for line in lines if line["log_level"] == "warning"]
    assert harness.now.own_scores.keys() == PERSONAL | {"loss"}  # they are in the metrics all the same
