"""Server and daemons as real processes, undisturbed and killed; the result is always the simulation's, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import undisturbed

from protofed.client.transport.audit import FILE as AUDIT_FILE
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ProtocolError
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import Role
from protofed.common.storage.journal import records
from protofed.deploy.cli import main
from protofed.deploy.operator.connection import Operator

pytestmark = pytest.mark.timeout(900)  # half a dozen processes that import PyTorch, on a machine with other work
SITES = ("evaluator", "site-1", "site-2", "site-3")
# Long enough to be caught in the middle of.
SLOW_PLAN = {"epochs": 4, "batch_size": 4, "lr": 0.01, "momentum": 0.9}


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    return recipe_of("fednh", plan=SLOW_PLAN, rounds=2)


def test_daemons_that_come_before_the_server_take_part_and_end_with_it(
    processes_of: Callable[..., Any], recipe_of: Callable[..., Recipe], unused_port: int
) -> None:
    recipe = recipe_of("fednh")
    here = processes_of(recipe)
    here.authority = None  # no certificate can be registered before there is a server
    here.address = f"127.0.0.1:{unused_port}"
    trainers = SITES[1:]  # whom the run waits for; an evaluator may come too late for so short a run
    for share, name in enumerate(trainers):
        here.site(name, f"--partition-index={share}")
    here.server()
    assert here.finish(["server", *trainers]) == [0] * 4, here.logs()
    assert here.final_digest() == undisturbed(recipe)


def test_a_daemon_and_the_server_killed_in_training_and_started_again_lose_nothing(
    processes_of: Callable[..., Any], recipe: Recipe
) -> None:
    """The daemon first, then the server: the round that both die in counts each site once."""
    here = processes_of(recipe)
    here.server()
    here.sites({"site-2": "batch-done=sleep3600"})
    number = here.wait_until_trains("site-2")
    here.kill("site-2")
    assert here.task_statuses(number)["site-2"] == "started"
    here.site("site-2", "--partition-index=1")
    here.kill("server")
    here.server()
    assert here.finish(["server", *SITES]) == [0] * 5, here.logs()
    assert set(here.task_statuses(number).values()) == {"reported"}
    assert here.final_digest() == undisturbed(recipe)


def test_a_secure_aggregation_is_that_of_a_simulation_though_a_site_and_the_server_are_killed_in_it(
    processes_of: Callable[..., Any], recipe_of: Callable[..., Recipe]
) -> None:
    """tests/faults kills at each step."""
    rules = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, "score_every": 0, "secure": True}
    here = processes_of(recipe_of("fednh", federation=rules, rounds=1))
    here.server(fails="sum-step-asked:3=kill")
    here.sites({"site-2": "sum-mask=kill"})
    for name, again in (("server", here.server), ("site-2", lambda: here.site("site-2", "--partition-index=1"))):
        process = here.running[name]
        here.wait_for(lambda process=process: process.poll() is not None)
        assert process.returncode == -signal.SIGKILL, here.logs()
        again()
    assert here.finish(["server", *SITES]) == [0] * 5, here.logs()
    assert here.final_digest() == undisturbed(here.recipe)


def test_a_hospital_leaves_in_the_middle_of_its_training_and_nothing_of_it_arrives_until_it_comes_back(
    processes_of: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    federation = {"min_sites": 3, "quorum": 2, "grace": 1.0, "heartbeat_s": 0.1}  # a round waits for all who train
    recipe = recipe_of("fednh", plan=SLOW_PLAN, rounds=2, federation=federation)
    here = processes_of(recipe)
    here.server()
    here.sites({"site-2": f"batch-done=until{tmp_path / 'go'}"})
    number = here.wait_until_trains("site-2")
    # It has started, by a heartbeat, before it has its base; and what it fetched is written with its next heartbeat.
    here.wait_for(lambda: any(call == "GetChunk" for call, _ in calls_of(here, "site-2")))
    left = len(calls_of(here, "site-2"))
    assert decide(here, "deny", "site-2") == 0, here.logs()
    (tmp_path / "go").touch()
    here.wait_for(lambda: any(call == "Enroll" for call, _ in calls_of(here, "site-2")[left:]))
    calls = calls_of(here, "site-2")
    assert {call for call, _ in calls[left:]} <= {"Heartbeat", "Enroll"}
    # All of them: a heartbeat of the fit may be on its way when the daemon enrolls.
    assert {fields["pause_reason"] for call, fields in calls[left:] if call == "Enroll"} == {"withdrawn"}
    assert {fields.get("failure") for call, fields in calls if call == "Heartbeat"} == {None, "withdrawn"}
    with here.ledger() as ledger:
        fits = [task for task in ledger.tasks(recipe.name, number) if task.kind == "fit"]
    assert [(task.task_status, task.reason) for task in fits if task.site == "site-2"] == [("failed", "withdrawn")]

    assert decide(here, "approve", "site-2") == 0, here.logs()  # round 2 needs three sites
    assert here.finish(["server", *SITES]) == [0] * 5, here.logs()
    decided = [line for line in records(here.folder / "site-2" / AUDIT_FILE) if line.event in ("withdrawn", "approved")]
    assert [line.event for line in decided] == ["withdrawn", "approved"]


def test_revoked_daemons_end_or_wait_as_they_are_set_and_come_back_with_new_certificates(
    processes_of: Callable[..., Any], recipe_of: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = recipe_of("fednh", plan=SLOW_PLAN, rounds=2)
    here = processes_of(recipe)
    here.server()
    here.site("evaluator", "--role=evaluator")
    here.site("site-1", "--partition-index=0")
    here.site("site-3", "--partition-index=2")
    monkeypatch.setenv("PROTOFED_CLIENT_WHEN_REVOKED", "wait")  # as the images do
    here.site("site-2", "--partition-index=1", fails=f"batch-done=until{tmp_path / 'go'}")
    here.wait_until_trains("site-2")
    with Operator(here.address, here.identity(Party.OPERATOR, "operator")) as operator:
        for name in ("site-1", "site-2"):
            operator.revoke(name, "a mistake")
        (tmp_path / "go").touch()
        assert here.running["site-1"].wait(60) == ProtocolError.exit_code, here.logs()
        here.wait_for(lambda: log_lines(here, "site-2", "certificate was revoked"))
        asked = len(calls_of(here, "site-2"))
        for name in ("site-1", "site-2"):
            folder = here.authority.issue(here.folder / "identities" / name, Party.SITE, name)
            operator.register((folder / "cert.pem").read_text(encoding="ascii"), [Role.TRAINER])
    here.site("site-1", "--partition-index=0")
    assert here.finish(["server", *SITES]) == [0] * 5, here.logs()
    assert next(call for call, _ in calls_of(here, "site-2")[asked:]) in ("NextTask", "Enroll")  # no heartbeat before
    for name in ("site-1", "site-2"):
        assert len(log_lines(here, name, "was revoked on")) == 1


def log_lines(here: Any, name: str, text: str) -> list[str]:
    """The lines of a process's log with a text."""
    return [line for line in (here.folder / f"{name}.log").read_text().splitlines() if text in line]


def decide(here: Any, command: str, site: str) -> int:
    """A hospital's command on its site's state folder; the exit code."""
    with pytest.raises(SystemExit) as ended:
        main.main(["client", command, here.recipe.name, f"--state={here.folder / site}", "--yes"])
    return int(ended.value.code or 0)


def calls_of(here: Any, site: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a site, and their fields, by the server's audit log; it may be writing its last line."""
    lines = (here.folder / "server" / AUDIT_FILE).read_bytes().rpartition(b"\n")[0].splitlines()
    calls = [record["facts"] for record in map(json.loads, lines) if record["event"] == "call"]
    return [(facts["call"], facts["facts"]) for facts in calls if facts["facts"].get("site") == site]
