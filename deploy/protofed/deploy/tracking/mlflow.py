"""Writes runs to MLflow: to a tracking server, or to a SQLite file.

MLflow deletes no values. A round that was rolled back and made again has two values of each metric; the later counts.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from protofed.common.errors import ConfigError, StateError
from protofed.common.process import quiet_mlflow
from protofed.deploy import logs
from protofed.deploy.tracking.follower import RoundMetrics, TrackedRun, outcome
from protofed.server.storage.rows import RunRow
from protofed.server.verdicts import RoundOutcome

EXPERIMENT = "protofed"
RUN, FINGERPRINT, BEGAN, TRACKED = (f"protofed.{name}" for name in ("run", "fingerprint", "began", "told"))
AT_A_TIME = 500  # metrics in one call; MLflow accepts 1000
_URI = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:///?.|https?://.")
_NOT_A_NAME = re.compile(r"[^\w\-. /:]")
_STATUS = {RoundOutcome.COMPLETED: "FINISHED", RoundOutcome.FAILED: "FAILED", RoundOutcome.ABORTED: "KILLED"}
_ENVIRONMENT = {  # defaults: variables that are set already stay
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the follower tries again, later
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Mlflow:
    """The `Tracker` of a tracking URI.

    Raises:
        ConfigError: MLflow does not support the URI.
    """

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        if not _URI.match(uri):
            raise ConfigError(
                "mlflow: expected the URI of a tracking server, http://… or https://…, or of a file, sqlite:///PATH; "
                "MLflow writes into no folders any more"
            )
        self._uri = uri
        self._client: Any = None

    @contextmanager
    def open(self, row: RunRow) -> Iterator[MlflowRunWriter]:
        """The writer of a run. The client is made at first use: that imports MLflow, and may fail."""
        if self._client is None:
            self._client = _client(self._uri)
        yield MlflowRunWriter(self._client, row)


class MlflowRunWriter:
    """Writes one run to MLflow; finds MLflow's run by its tags, and creates it if there is none."""

    def __init__(self, client: Any, row: RunRow) -> None:
        self._client, self._entities = client, import_module("mlflow.entities")
        identity_tags = {RUN: row.run, FINGERPRINT: row.fingerprint, BEGAN: repr(row.began_at)}
        experiment = _experiment(client)
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity_tags.items())
        runs = client.search_runs([experiment], query)
        self._run = runs[0] if runs else self._create(experiment, row, identity_tags)
        self._id: str = self._run.info.run_id
        self._tracked = _read(self._run.data.tags[TRACKED])
        if not self._tracked.attempts:
            self._params(row)

    @property
    def tracked(self) -> TrackedRun:
        """What MLflow has of the run, from a tag of MLflow's run."""
        return self._tracked

    def roll_back(self, rounds: int) -> None:
        """Record it in a tag; the values stay, and the new rounds add others at the same steps."""
        self._client.set_tag(self._id, "protofed.rolled_back_to", str(rounds - 1))
        self._save_tracked(replace(self._tracked, attempts=self._tracked.attempts[:rounds]))

    def write(self, metrics: RoundMetrics) -> None:
        """Add a round. To write it again after a failure is harmless: time, step and value are the ledger's."""
        metric = self._entities.Metric
        by_name = {_NOT_A_NAME.sub("_", tag): number for tag, number in metrics.numbers.items()}
        values = [metric(tag, number, int(metrics.at * 1000), metrics.round) for tag, number in by_name.items()]
        for start in range(0, len(values), AT_A_TIME):
            self._client.log_batch(self._id, metrics=values[start : start + AT_A_TIME])
        self._save_tracked(replace(self._tracked, attempts=(*self._tracked.attempts, metrics.attempt)))

    def end(self, row: RunRow) -> None:
        """Write the outcome as MLflow's status and as a tag."""
        if row.outcome is None:
            self._client.update_run(self._id, status="RUNNING")
        else:
            ended_ms = int((row.ended_at or row.began_at) * 1000)
            self._client.set_terminated(self._id, _STATUS[row.outcome], ended_ms)
        self._client.set_tag(self._id, "protofed.outcome", outcome(row) or "goes on")
        self._save_tracked(replace(self._tracked, outcome=outcome(row)))

    def _create(self, experiment: str, row: RunRow, identity_tags: Mapping[str, str]) -> Any:
        tags = {**identity_tags, TRACKED: json.dumps(TrackedRun().pack())}
        return self._client.create_run(experiment, int(row.began_at * 1000), tags, row.run)

    def _params(self, row: RunRow) -> None:
        """Write the recipe's keys; MLflow accepts a parameter again if its value is the same."""
        param = self._entities.Param
        params = [param(key, value[:6000]) for key, value in _flat(json.loads(row.recipe)).items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def _save_tracked(self, tracked: TrackedRun) -> None:
        self._client.set_tag(self._id, TRACKED, json.dumps(tracked.pack()))
        self._tracked = tracked


def _client(uri: str) -> Any:
    quiet_mlflow()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # MLflow's own tables use an option that the newest SQLAlchemy warns about.
    warnings.filterwarnings("ignore", "The ``noload`` loader strategy is deprecated", DeprecationWarning, r"mlflow\..*")
    client = import_module("mlflow.tracking").MlflowClient(uri)
    logs.redirect("mlflow")
    return client


def _experiment(client: Any) -> str:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return str(client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id)


def _read(text: str) -> TrackedRun:
    try:
        return TrackedRun.unpack(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"the tag {TRACKED} in MLflow is not what was written; remove MLflow's run") from error


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """A nested table with dotted keys, such as `plan.lr`."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": _text(value)}
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
