"""Runs in MLflow: on a tracking server, or in a SQLite file.

MLflow takes nothing back: a round that was rolled back has two values then, the later one of which is true.
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
from protofed.deploy.logs import capture
from protofed.deploy.tracking.pages import Page, TrackedRun, outcome
from protofed.server.storage.rows import RunRow
from protofed.server.verdicts import RoundOutcome

EXPERIMENT = "protofed"
RUN, FINGERPRINT, BEGAN, TOLD = (f"protofed.{name}" for name in ("run", "fingerprint", "began", "told"))
AT_A_TIME = 500  # metrics; MLflow takes 1000
_KNOWN = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:///?.|https?://.")
_NOT_A_NAME = re.compile(r"[^\w\-. /:]")
_STATUS = {RoundOutcome.COMPLETED: "FINISHED", RoundOutcome.FAILED: "FAILED", RoundOutcome.ABORTED: "KILLED"}
_ENVIRONMENT = {  # what is set already stays
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers that it was used
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the follower tries again, later
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Mlflow:
    """`Tracker` of a tracking URI.

    Raises:
        ConfigError: MLflow has no such URI.
    """

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        if not _KNOWN.match(uri):
            raise ConfigError(
                "mlflow: expected the URI of a tracking server, http://… or https://…, or of a file, sqlite:///PATH; "
                "MLflow writes into no folders any more"
            )
        self._uri = uri
        self._client: Any = None

    @contextmanager
    def open(self, row: RunRow) -> Iterator[MlflowBook]:
        """MLflow's run of a run."""
        if self._client is None:
            self._client = _client(self._uri)
        yield MlflowBook(self._client, row)


class MlflowBook:
    """One run in MLflow, made when it is missing."""

    def __init__(self, client: Any, row: RunRow) -> None:
        self._client, self._entities = client, import_module("mlflow.entities")
        whose = {RUN: row.run, FINGERPRINT: row.fingerprint, BEGAN: repr(row.began_at)}
        experiment = _experiment(client)
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in whose.items())
        found = client.search_runs([experiment], wanted)
        self._run = found[0] if found else self._make(experiment, row, whose)
        self._id: str = self._run.info.run_id
        self._told = _read(self._run.data.tags[TOLD])
        if not self._told.attempts:
            self._params(row)

    @property
    def told(self) -> TrackedRun:
        """What MLflow has."""
        return self._told

    def take_back(self, rounds: int) -> None:
        """Note it; the values stay, and get others beside them."""
        self._client.set_tag(self._id, "protofed.rolled_back_to", str(rounds - 1))
        self._keep(replace(self._told, attempts=self._told.attempts[:rounds]))

    def write(self, page: Page) -> None:
        """Twice the same is once for MLflow, because time, step and value are the ledger's."""
        metric = self._entities.Metric
        named = {_NOT_A_NAME.sub("_", tag): number for tag, number in page.numbers.items()}
        values = [metric(tag, number, int(page.at * 1000), page.round) for tag, number in named.items()]
        for start in range(0, len(values), AT_A_TIME):
            self._client.log_batch(self._id, metrics=values[start : start + AT_A_TIME])
        self._keep(replace(self._told, attempts=(*self._told.attempts, page.attempt)))

    def end(self, row: RunRow) -> None:
        """As status and tag."""
        if row.outcome is None:
            self._client.update_run(self._id, status="RUNNING")
        else:
            ended_ms = int((row.ended_at or row.began_at) * 1000)
            self._client.set_terminated(self._id, _STATUS[row.outcome], ended_ms)
        self._client.set_tag(self._id, "protofed.outcome", outcome(row) or "goes on")
        self._keep(replace(self._told, outcome=outcome(row)))

    def _make(self, experiment: str, row: RunRow, whose: Mapping[str, str]) -> Any:
        tags = {**whose, TOLD: json.dumps(TrackedRun().pack())}
        return self._client.create_run(experiment, int(row.began_at * 1000), tags, row.run)

    def _params(self, row: RunRow) -> None:
        """The recipe; the same once more is no harm."""
        param = self._entities.Param
        said = [param(key, value[:6000]) for key, value in _flat(json.loads(row.recipe)).items()]
        for start in range(0, len(said), 100):
            self._client.log_batch(self._id, params=said[start : start + 100])

    def _keep(self, told: TrackedRun) -> None:
        self._client.set_tag(self._id, TOLD, json.dumps(told.pack()))
        self._told = told


def _client(uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # MLflow's tables, with the newest SQLAlchemy
    warnings.filterwarnings("ignore", "The ``noload`` loader strategy is deprecated", DeprecationWarning, r"mlflow\..*")
    client = import_module("mlflow.tracking").MlflowClient(uri)
    capture.take_over("mlflow")
    return client


def _experiment(client: Any) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    return str(client.create_experiment(EXPERIMENT) if found is None else found.experiment_id)


def _read(text: str) -> TrackedRun:
    try:
        return TrackedRun.unpack(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"the tag {TOLD} in MLflow is not what was written; remove MLflow's run") from error


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """`plan.lr` and so on."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": _word(value)}
    return flat


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
