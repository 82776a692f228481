"""The log says why a run does not go on: once for each reason that lasts."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog
from tests.support.operator_lab import OperatorLab, operator_lab

from protofed.common.payload import SiteId
from protofed.server.monitoring.waiting_log import STEADY_S, WaitingLog


class Log:
    """A lab whose ticks are noted, and what was logged."""

    def __init__(self, lab: OperatorLab) -> None:
        self.lab = lab
        self._log = WaitingLog(lab.runs, lab.operation.certificates, lab.clock)

    def later(self, seconds: float, alive: tuple[SiteId, ...] = ()) -> list[MutableMapping[str, Any]]:
        """Time passes in steps of a second, while these sites live; the lines that were logged."""
        with structlog.testing.capture_logs() as lines:
            for _ in range(int(seconds)):
                self.lab.later(1.0, alive)
                self._log.note()
        return [line for line in lines if line["event"] == "the run does not go on"]


@pytest.fixture
def log() -> Log:
    lab = operator_lab()
    lab.start("one")
    return Log(lab)


def test_a_reason_that_lasts_is_logged_once(log: Log) -> None:
    assert log.later(STEADY_S) == []
    (line,) = log.later(10)
    assert (line["run"], line["round"], line["reason"], line["missing"]) == ("one", 0, "trainers", [])
    assert line["why"] == "needs 2 trainers, has 0"
    assert log.later(100) == []


def test_another_reason_is_another_line_and_a_run_that_goes_on_has_none(log: Log) -> None:
    log.later(10)
    log.lab.enroll("ann")
    (line,) = log.later(10, alive=("ann",))
    assert line["why"] == "needs 2 trainers, has 1"
    log.lab.enroll("bob")
    assert log.later(20, alive=("ann", "bob")) == []


def test_sites_that_come_one_after_the_other_are_no_lines(log: Log) -> None:
    for site in ("ann", "bob", "cyd"):
        log.lab.enroll(site)
        assert log.later(2) == []
