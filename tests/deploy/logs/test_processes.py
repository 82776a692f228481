"""The logs of a server and two daemons that something goes wrong with: what is in them, and what never is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deploy.logs.test_log_calls import KEYS, UNITS
from tests.support.processes import to_toml

from protofed.common import failpoint
from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped

pytestmark = pytest.mark.timeout(600)
COUNTS = (61, 43, 37, 29, 23)  # of the classes at the site north: all primes, so that no other number is one of them
TOKEN, PASSWORD = "token-of-nobody-else", "hunter-two"
NAMES = ("Doe-Jane-p0817.npz", "Roe-Richard-p4711.npz")
RECIPE = {
    "name": "troubled",
    "rounds": 2,
    "classes": 5,
    "input": {"shape": [1, 8, 8]},
    "method": {"name": "fedavg"},
    "model": {"name": "digits-cnn"},
    "plan": {
        "epochs": 1,
        "batch_size": 64,
        "lr": 50.0,
        "max_grad_norm": 1.0,
    },  # steps of 50, which the server does not take
    "federation": {
        "min_sites": 3,  # north and east make the first model, for south cannot
        "required_sites": ["north"],
        "max_attempts": 3,
        "quorum": 1,
        "deadline_s": 4,
        "heartbeat_s": 0.2,
        "max_update_norm": 12,
    },
}


@dataclass
class LoggedProcesses:
    """A folder, and the processes in it: the standard error of each is its log."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str, fails: str = "", **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "protofed.deploy.cli",
            *arguments,
            "--identity=none",
            f"--state={self.folder / name}",
        ]
        told = {**os.environ, "OMP_NUM_THREADS": "1", failpoint.VARIABLE: fails, **environment}
        told.pop("PROTOFED_LOG_FORMAT", None)
        with (self.folder / f"{name}.log").open("ab") as log, (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(command, stdout=out, stderr=log, env=told)

    def address(self) -> str:
        until = time.monotonic() + 60
        while not (path := self.folder / "server" / "address").exists():
            assert time.monotonic() < until, self.text("server")
            time.sleep(0.05)
        return path.read_text(encoding="utf-8")

    def wait_for(self, event: str) -> None:
        until = time.monotonic() + 60
        while f'"event": "{event}"' not in self.text("server"):
            assert time.monotonic() < until, self.text("server")
            time.sleep(0.05)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name).splitlines()]


def settings(folder: Path, site: str, file: Path) -> str:
    """Of a site, with a token and a password that it does not use."""
    (folder / "token").write_text(TOKEN, encoding="utf-8")
    (folder / "token").chmod(0o600)
    text = f'[data]\nsource = "npz"\nroot = "{file}"\n[metrics]\nlisten = "127.0.0.1:0"\ntoken = "{folder / "token"}"\n'
    path = folder / f"{site}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> LoggedProcesses:
    """A run that fails: the first call meets an error, the server takes no update, and a site's data are damaged."""
    folder = tmp_path_factory.mktemp("logged")
    data = folder / "patients of north"
    data.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (sum(COUNTS), 8, 8), dtype=np.uint8)
    labels = np.repeat(np.arange(5), COUNTS)
    np.savez(data / NAMES[0], train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    (data / NAMES[1]).write_bytes(b"not an archive")
    (folder / "recipe.toml").write_text(to_toml(Recipe.model_validate(RECIPE)), encoding="utf-8")
    here = LoggedProcesses(folder)
    try:
        listen = (
            "--listen=127.0.0.1:0",
            f"--recipe={folder / 'recipe.toml'}",
            "--until-finished",
            f"--tensorboard={folder / 'tb'}",
        )
        here.start(
            "server", "server", "start", *listen, fails="enroll-answered=raise", MLFLOW_TRACKING_PASSWORD=PASSWORD
        )
        policy = (shipped.folder("policies") / "open.toml").read_text(encoding="utf-8")
        (folder / "policy.toml").write_text(policy.replace("\nlr = 1.0\n", "\nlr = 50.0\n"), encoding="utf-8")
        common = (f"--server={here.address()}", f"--policy={folder / 'policy.toml'}", "--until-finished")
        for site, name in (("north", NAMES[0]), ("east", NAMES[0]), ("south", NAMES[1])):
            here.start(
                site, "client", "start", f"--settings={settings(folder, site, data / name)}", f"--site={site}", *common
            )
        for process in here.running.values():
            process.wait(240)
    finally:
        for process in here.running.values():
            process.kill()
            process.wait()
    return here


def one(events: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next(found for found in events if found["event"] == event)


def test_every_line_is_json_with_event_level_and_time(logged: LoggedProcesses) -> None:
    for name in logged.running:
        events = logged.events(name)
        assert len(events) > 5
        for event in events:
            assert re.fullmatch(r"[a-z][^\d]*", event["event"]), event
            assert event["level"] in ("debug", "info", "warning", "error")
            assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", event["timestamp"])
            named = event.keys() - KEYS - {"level", "timestamp", "exception", "event"}
            assert all(key.endswith(UNITS) for key in named), named


def test_every_event_of_a_daemon_names_its_site_and_what_it_works_on(logged: LoggedProcesses) -> None:
    for site in ("north", "east", "south"):
        events = logged.events(site)
        assert {event["site"] for event in events} == {site}
        started = [number for number, event in enumerate(events) if event["event"] == "task started"]
        assert started
        for number in started:
            assert events[number]["run"] == events[number + 1]["run"] == "troubled"
            assert events[number]["round"] == events[number + 1]["round"]


def test_every_event_of_the_server_that_concerns_a_run_says_so(logged: LoggedProcesses) -> None:
    events = logged.events("server")
    for event in ("round opened", "update refused", "update accepted", "site declined", "round abandoned"):
        found = one(events, event)
        assert (found["run"], found["round"] in (0, 1)) == ("troubled", True)
    assert one(events, "update refused")["site"] in ("north", "east")
    assert "south" in {event["site"] for event in events if event["event"] == "site declined"}
    assert one(events, "run finished")["outcome"] == "failed"
    assert one(events, "the process ends")["exit_code"] == 1


def test_an_incident_damaged_data_and_the_end_are_told_where_they_belong(logged: LoggedProcesses) -> None:
    (here,) = [event for event in logged.events("server") if event["event"] == "incident"]
    assert "RuntimeError" in here["exception"]
    assert here["call"] == "Federation/Enroll"
    (there,) = [event for event in logged.events(here["site"]) if event.get("incident") == here["incident"]]
    assert (there["event"], there["call"], there["level"]) == ("the server failed in a call", "Enroll", "error")
    said = json.loads((logged.folder / "tb" / "troubled" / "protofed.json").read_bytes())
    assert (said["rounds"], said["outcome"].partition(":")[0]) == (1, "failed")
    said = one(logged.events("south"), "this site cannot take part in the run")
    assert "<data>" in said["why"]
    assert one(logged.events("south"), "task declined")["reason"] == "data"


def test_nothing_secret_stands_in_any_log(logged: LoggedProcesses) -> None:
    forbidden = [
        TOKEN,
        PASSWORD,
        str(logged.folder / "patients of north"),
        "patients of north",
        *NAMES,
        "p4711",
        "p0817",
    ]
    for name in logged.running:
        text = logged.text(name)
        for word in (*forbidden, "PRIVATE KEY"):
            assert word not in text, f"{name}: {word}"
        numbers = [int(number) for number in re.findall(r"(?<![\w.:-])\d+(?![\w.:-])", text)]
        assert not {*COUNTS, sum(COUNTS)} & set(numbers), name
