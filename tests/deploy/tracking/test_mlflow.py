"""MLflow has what the ledger says, in a SQLite file of its own; one that does not answer is caught up with later."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.deploy.tracking.test_follower import RECIPE, RUN, RunLedger, by_the_ledger, expect_same, follow

from protofed.common.errors import ConfigError
from protofed.deploy.logs import Hidden
from protofed.deploy.tracking import follower as tracking
from protofed.deploy.tracking.follower import Follower
from protofed.deploy.tracking.mlflow import EXPERIMENT, Mlflow
from protofed.server.verdicts import RoundOutcome

pytestmark = pytest.mark.timeout(300)  # an import of seconds, and a database that is made


@pytest.fixture
def run_ledger(tmp_path: Path) -> Iterator[RunLedger]:
    here = RunLedger(tmp_path)
    yield here
    here.ledger.close()


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Mlflow]]:
    """Trackers of one file, each as of a process that begins now; in an environment that is put back."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_CONFIGURE_LOGGING", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")  # so that it is unset again afterwards, whatever the tracker makes of it
        monkeypatch.delenv(name)
    before = logging.getLogger().handlers[:]
    yield lambda: Mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert logging.getLogger().handlers == before, "MLflow has changed how this process logs"
    others = logging.getLogger("alembic").handlers
    assert all(isinstance(handler, logging.NullHandler) for handler in others), "MLflow has changed how others log"


def seen(tracker: Mlflow) -> Any:
    """MLflow's one run, and the points of each metric."""
    client = tracker._client
    (run,) = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    points = {
        tag: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, tag))
        for tag in run.data.metrics
    }
    return run, points


def test_a_run_is_there_with_its_numbers_recipe_and_outcome_however_often_processes_restart(
    run_ledger: RunLedger, mlflow: Callable[[], Mlflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        run_ledger.publish(number, number / 10)
        assert follow(run_ledger, mlflow()) == 1
    run_ledger.publish(2, 0.7)
    killed = mlflow()
    with killed.open(run_ledger.row()) as book, monkeypatch.context() as patch:
        patch.setattr(book, "_save_tracked", lambda _tracked: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tracking.sync_run(run_ledger.ledger, run_ledger.row(), book)
    run_ledger.ledger.end_run(RUN, "all rounds are done", RoundOutcome.COMPLETED)
    last = mlflow()
    assert follow(run_ledger, last) == 1
    run, points = seen(last)
    expect_same(points, by_the_ledger(run_ledger))
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    assert run.info.end_time == int((run_ledger.row().ended_at or 0) * 1000)
    assert run.data.tags["protofed.outcome"] == "completed: all rounds are done"
    assert run.data.params["method.options.prototype_momentum"] == "0.9"
    assert run.data.params["plan.lr"] == json.dumps(RECIPE["plan"]["lr"])  # type: ignore[index]

    run_ledger.ledger.roll_back(RUN, 1)
    assert follow(run_ledger, mlflow()) == 0
    run_ledger.publish(2, 0.9)
    again = mlflow()
    assert follow(run_ledger, again) == 1
    run, points = seen(again)
    assert (run.info.status, run.data.tags["protofed.outcome"]) == ("RUNNING", "goes on")
    assert run.data.tags["protofed.rolled_back_to"] == "1"
    assert [step for step, _ in points["round/seconds"]] == [0, 1, 2, 2]  # MLflow takes nothing back
    assert run.data.metrics["scores/personal.accuracy/worst"] == pytest.approx(0.9)


def test_a_server_that_does_not_answer_is_told_later_and_holds_nobody_up(
    run_ledger: RunLedger, mlflow: Callable[[], Mlflow], unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "RETRY_S", 0.01)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    here, absent = mlflow(), Mlflow(f"http://ann:hunter@127.0.0.1:{unused_port}")
    run_ledger.publish(0)
    with capture_logs() as logs:
        follower = Follower(run_ledger.url, absent, 0.01)
        follower.start()
        until = time.monotonic() + 60
        while not logs:
            assert time.monotonic() < until
            time.sleep(0.02)
        began = time.monotonic()
        run_ledger.publish(1)
        assert time.monotonic() - began < 5.0
        follower._tracker = here  # it is back
        while not any(entry["event"] == "a tracker has caught up" for entry in logs):
            assert time.monotonic() < until
            time.sleep(0.02)
        follower.stop()
    assert logs[0]["event"] == "a tracker failed; trying again"
    assert "hunter" not in Hidden().clean(logs[0]["why"])
    _, points = seen(here)
    expect_same(points, by_the_ledger(run_ledger))


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "http://", "sqlite:x"])
def test_a_folder_is_no_tracking_uri(uri: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///PATH"):
        Mlflow(uri)
