"""What speaks against a run's models, from a real coordinator's ledger: read at each round, logged once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from structlog.testing import capture_logs

from protofed.server.rounds.scores.history import ScoreMemory, WarningLog, warnings_of

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")
ONE_CLASS = {"global.recall.0": 1.0, "global.recall.1": 0.0, "global.recall.2": 0.0}
SOUND = {"global.recall.0": 0.9, "global.recall.1": 0.8, "global.recall.2": 0.7}


def scored_round(lab: Lab, value: float, scores: Mapping[str, float]) -> None:
    """All sites train; the evaluator reports these scores."""
    for site in SITES:
        lab.push(site, lab.model(value))
    lab.intake.report_scores("eva", "daemon-eva", lab.task("eva").task_id, scores)
    for site in SITES:
        lab.score(site)


def logged(events: list[Any]) -> list[tuple[int, str, str | None]]:
    return [(one["round"], one["code"], one.get("site")) for one in events if one["event"] == "model warning"]


def test_each_thing_is_logged_once_in_the_round_in_which_it_was_seen(make: MakeLab) -> None:
    lab = make(rounds=8).begin()
    with capture_logs() as events:
        for number in range(1, 8):
            scored_round(lab, float(number), ONE_CLASS)
    assert logged(events) == [(5, "one-class", None), (5, "unchanged", None)]


def test_a_restarted_server_does_not_log_again_what_was_known(make: MakeLab) -> None:
    lab = make(rounds=8).begin()
    for number in range(1, 6):
        scored_round(lab, float(number), ONE_CLASS)
    with capture_logs() as events:
        lab.restart()
        scored_round(lab, 6.0, ONE_CLASS)
    assert logged(events) == []


def test_a_last_model_is_judged_when_its_run_ends_however_young(make: MakeLab) -> None:
    lab = make(rounds=2).begin()
    with capture_logs() as events:
        scored_round(lab, 1.0, SOUND)
        scored_round(lab, 2.0, ONE_CLASS)
    assert logged(events) == [(2, "one-class", None)]


def test_what_is_no_longer_so_is_no_longer_told(make: MakeLab) -> None:
    lab = make(rounds=9).begin()
    for number in range(1, 6):
        scored_round(lab, float(number), ONE_CLASS)
    assert [warning.code for warning in warnings_of(lab.ledger, "test")] == ["one-class", "unchanged"]
    scored_round(lab, 6.0, SOUND)
    assert warnings_of(lab.ledger, "test") == []


def test_a_run_that_is_not_known_has_no_warning(lab: Lab) -> None:
    assert warnings_of(lab.ledger, "other") == []
    WarningLog(lab.ledger, "other", ScoreMemory(lab.ledger, "other")).look()
