"""What a hospital decides on the command line: files that the daemon obeys, lines in its audit log, and a list."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import Answers, called

from protofed.client.policy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.client.policy.pause import FILE as PAUSE_FILE
from protofed.client.policy.pause import SitePause
from protofed.client.state.decisions import FOLDER as DECISIONS
from protofed.client.state.decisions import Act, Decision, Decisions
from protofed.client.transport.audit import FILE as AUDIT_FILE
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import Assignment
from protofed.common.storage import files
from protofed.common.storage.journal import records, verify
from protofed.deploy.cli import client
from protofed.deploy.daemons import readyz
from protofed.deploy.site import orders
from protofed.deploy.site.orders import pause_end

Run = Callable[..., tuple[int, str, str]]
GOLDEN = Path(__file__).parents[2] / "golden" / "v0_3_0" / "site-1"
NOON = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
DATE = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's exit code and what it printed, by a user named `ann`."""
    monkeypatch.setenv("SUDO_USER", "ann")
    return partial(called, capfd, "client")


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    return recipe_of("fednh")


@pytest.fixture
def approvals(tmp_path: Path, recipe: Recipe) -> Approvals:
    """Of a site whose server offered it one run."""
    made = Approvals(tmp_path / FOLDER, lambda: NOON)
    made.record_offer(Assignment(recipe.name, recipe.wire(), min_cohort=3))
    return made


def lines(state: Path) -> list[tuple[str, dict[str, Any]]]:
    """Events and facts of the site's audit log, whose chain is checked."""
    return [(record.event, dict(record.facts)) for record in records(state / AUDIT_FILE)]


@pytest.mark.parametrize(
    ("took_part", "status", "act"),
    [(True, ApprovalStatus.WITHDRAWN, Act.WITHDRAW), (False, ApprovalStatus.DENIED, Act.DENY)],
)
def test_a_site_is_out_and_the_record_says_whether_it_had_taken_part(
    took_part: bool,
    status: ApprovalStatus,
    act: Act,
    run: Run,
    approvals: Approvals,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    if took_part:
        approvals.record_task(Assignment(recipe.name, recipe.wire()))
    assert run("deny", recipe.name, "--state", tmp_path, "--yes")[0] == 0
    assert approvals.status(recipe.name, recipe.wire()) is status
    ((event, facts),) = lines(tmp_path)
    assert (event, facts["by"], facts["run"]) == (act.value, "ann", recipe.name)
    assert facts["recipe"] == approvals.offer(recipe.name).digest
    assert DATE.fullmatch(facts["decided_at"])
    assert list((tmp_path / DECISIONS).iterdir()) == []
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert (row["approval"], row["decided_by"], row["who"]) == (status.value, "person", "ann")


def test_a_site_that_takes_part_is_asked_first(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Answers("n\n"))
    approvals.record_task(Assignment(recipe.name, recipe.wire()))
    assert run("deny", recipe.name, "--state", tmp_path)[0] == 1
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.WAITING
    assert not (tmp_path / AUDIT_FILE).exists()


def test_the_command_returns_once_the_daemon_has_carried_it_out(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    lock, carried_out = files.Lock(tmp_path), list[Decision]()
    decisions, seen = Decisions(tmp_path / DECISIONS), threading.Event()

    def carry_out(decision: Decision) -> None:
        carried_out.append(decision)
        seen.set()

    def daemon() -> None:
        while not seen.wait(0.01):
            decisions.move(decisions.waiting(), carry_out)

    thread = threading.Thread(target=daemon)
    thread.start()
    try:
        code, out, _ = run("deny", recipe.name, "--state", tmp_path, "--yes")
    finally:
        seen.set()
        thread.join()
        lock.release()
    assert (code, [decision.run for decision in carried_out]) == (0, [recipe.name])
    assert "the daemon has noticed" in out
    assert not (tmp_path / AUDIT_FILE).exists()  # the daemon's to write


def test_a_daemon_that_does_not_look_is_told_of(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "WAIT_S", 0.0)
    lock = files.Lock(tmp_path)
    code, out, _ = run("deny", recipe.name, "--state", tmp_path, "--yes")
    lock.release()
    assert (code, "has not confirmed it" in out) == (0, True)
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.DENIED


def test_what_was_handed_in_before_is_listed_or_that_nothing_was(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    assert "sent nothing for the run" in run("deny", recipe.name, "--state", tmp_path, "--yes")[1]
    state = shutil.copytree(GOLDEN, tmp_path / "site-1")
    before = verify(state / AUDIT_FILE)
    code, out, _ = run("deny", "kept", "--state", state, "--yes")
    assert code == 0
    assert {"updates, rounds 1 to 2", "scores, rounds 1 to 2"} <= {line.strip() for line in out.splitlines()}
    assert [event for event, _ in lines(state)][before:] == ["withdrawn"]  # it has the run's folder: it took part


def test_a_run_without_scores_says_so_beside_the_decision(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    run("deny", recipe.name, "--state", tmp_path, "--yes")
    code, out, _ = run("runs", recipe.name, "--state", tmp_path)
    assert (code, "denied" in out, "none yet" in out) == (0, True, True)
    assert json.loads(run("runs", recipe.name, "--state", tmp_path, "--json")[1])["rounds"] == []


def test_an_approval_takes_it_back(run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path) -> None:
    run("deny", recipe.name, "--state", tmp_path, "--yes")
    assert run("approve", recipe.name, "--state", tmp_path, "--yes")[0] == 0
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.APPROVED
    assert [event for event, _ in lines(tmp_path)] == ["denied", "approved"]
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert (row["approval"], row["decided_by"], row["who"]) == ("approved", "person", "ann")


def test_an_unknown_run_is_named(run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path) -> None:
    code, _, err = run("deny", recipe.name + "x", "--state", tmp_path, "--yes")
    assert (code, f"did you mean '{recipe.name}'?" in err) == (ConfigError.exit_code, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
def test_root_writes_as_the_owner_of_the_state_folder(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    try:
        orders.act_as_owner(tmp_path)
        assert (os.geteuid(), os.getegid()) == (65534, 65534)
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_an_approval_by_policy_names_the_policy_and_the_first_task(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    offered = Assignment(recipe.name, recipe.wire())
    approvals.approve_by_policy(offered, "standard.toml", "a" * 64)
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert (row["approval"], row["decided_by"], row["who"]) == ("approved by policy", "policy", "")
    assert (row["policy"], row["policy_digest"]) == ("standard.toml", "a" * 64)
    assert (row["decided_at"], row["first_task"]) == ("2026-06-01T12:00:00Z", "")
    approvals.record_task(offered)
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert row["first_task"] == "2026-06-01T12:00:00Z"
    approvals.end_approval_by_policy(recipe.name)
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert (row["approval"], row["decided_by"]) == ("waiting", None)


@pytest.mark.parametrize("width", [30, 80, 120])
@pytest.mark.parametrize("status", ["waiting", "approved", "policy", "denied", "changed"])
def test_no_date_is_cut_on_any_terminal(
    width: int,
    status: str,
    run: Run,
    approvals: Approvals,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client.console, "width", width)
    offered, offer = Assignment(recipe.name, recipe.wire()), approvals.offer(recipe.name)
    match status:
        case "policy":
            approvals.approve_by_policy(offered, "standard.toml", "a" * 64)
        case "approved" | "changed":
            approvals.approve(offer, "ann")
        case "denied":
            approvals.deny(offer, "ann", took_part=True)
    if status == "changed":
        approvals.record_offer(Assignment(recipe.name, recipe.wire() + " "))
    out = run("runs", "--state", tmp_path)[1]
    assert set(DATE.findall(out)) == {"2026-06-01T12:00:00Z"}
    assert len(re.findall("2026", out)) == len(DATE.findall(out)) == 1 + (status != "waiting")
    assert max(map(len, out.splitlines())) <= max(width, 60)  # a word may be longer


def test_a_pause_and_its_end_are_files_and_lines_of_the_audit_log(run: Run, tmp_path: Path) -> None:
    assert run("pause", "--state", tmp_path, "--until", "90m", "--reason", "a new scanner")[0] == 0
    pause = SitePause(tmp_path / PAUSE_FILE).current()
    assert pause is not None
    assert pause.until is not None
    assert pause.by == "ann"
    assert timedelta(minutes=89) < pause.until - datetime.now(UTC) <= timedelta(minutes=90)
    assert run("resume", "--state", tmp_path)[0] == 0
    assert SitePause(tmp_path / PAUSE_FILE).current() is None
    (first, paused), (second, resumed) = lines(tmp_path)
    assert (first, second) == (Act.PAUSE, Act.RESUME)
    assert (paused["by"], resumed["by"]) == ("ann", "ann")
    assert (paused["reason"], "reason" in resumed) == ("a new scanner", False)
    assert paused["until"] == f"{pause.until:%Y-%m-%dT%H:%M:%SZ}"
    assert run("resume", "--state", tmp_path)[0] == 0
    assert len(lines(tmp_path)) == 2


def test_runs_health_and_doctor_say_that_a_site_is_paused(run: Run, tmp_path: Path) -> None:
    assert readyz.pause_text(tmp_path) == ""
    SitePause(tmp_path / PAUSE_FILE).begin("ann")
    assert "paused" in run("runs", "--state", tmp_path)[1]
    assert readyz.pause_text(tmp_path).startswith("paused since 20")
    SitePause(tmp_path / PAUSE_FILE).begin("ann", datetime.now(UTC) - timedelta(seconds=1))
    assert readyz.pause_text(tmp_path) == ""
    (tmp_path / PAUSE_FILE).write_text("{")
    assert readyz.pause_text(tmp_path).startswith("paused")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("18:00", NOON.replace(hour=18)),
        ("9:30", (NOON + timedelta(days=1)).replace(hour=9, minute=30)),
        ("12:00", NOON + timedelta(days=1)),
        ("2026-06-02T06:00", (NOON + timedelta(days=1)).replace(hour=6)),
        ("2026-06-02T06:00+02:00", (NOON + timedelta(days=1)).replace(hour=4)),
        ("2026-06-02T06:00:00Z", (NOON + timedelta(days=1)).replace(hour=6)),
        ("90m", NOON + timedelta(minutes=90)),
        ("2h30m", NOON + timedelta(hours=2, minutes=30)),
        ("3d", NOON + timedelta(days=3)),
        ("15min", NOON + timedelta(minutes=15)),
    ],
)
def test_the_end_of_a_pause_as_a_person_types_it(text: str, end: datetime) -> None:
    assert pause_end(text, NOON) == end


@pytest.mark.parametrize(
    "text", ["", "soon", "25:00", "12", "0m", "2026-06-01", "400d", "-2h", "2025-01-01T00:00", "0001-01-01T00:00+14:00"]
)
def test_an_end_that_is_none_is_refused(text: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        pause_end(text, NOON)
    assert run("pause", "--state", tmp_path, f"--until={text}")[0] == (ConfigError.exit_code)
    assert not (tmp_path / PAUSE_FILE).exists()


@pytest.mark.parametrize(
    "arguments", [("pause",), ("resume",), ("runs",), *((word, "lesions") for word in ("deny", "approve"))]
)
def test_a_folder_that_is_not_there_is_not_made(arguments: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    code, _, err = run(*arguments, "--state", tmp_path / "elsewhere")
    assert (code, "expected the --state" in err) == (ConfigError.exit_code, True)
    assert not (tmp_path / "elsewhere").exists()
