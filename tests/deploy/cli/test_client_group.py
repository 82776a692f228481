"""`client group`: the sites that a site is summed with, and that a person has it forget them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.client.sums.sessions import FOLDER, GROUP, Sessions

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command's exit code and what it printed."""
    return partial(called, capfd, "client", "group")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a site that was summed with two others."""
    (tmp_path / FOLDER).mkdir()
    pinned = {"group": ["ann", "bob", "cleo"], "at": "2026-11-24T04:00:00Z", "run": "lesions"}
    (tmp_path / FOLDER / GROUP).write_text(json.dumps(pinned))
    return tmp_path


def test_the_group_is_shown_with_the_day_and_the_run(state: Path, run: Run) -> None:
    assert run("show", "--state", state)[1] == "ann, bob, cleo  since 2026-11-24T04:00:00Z, run lesions\n"
    assert json.loads(run("show", "--state", state, "--json")[1])["group"] == ["ann", "bob", "cleo"]


def test_a_person_who_forgets_it_is_told_what_that_gives_away(
    state: Path, run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, why = run("forget", "--state", state)
    assert code == 78
    assert "by subtracting sums" in why
    assert "--yes" in why
    assert (state / FOLDER / GROUP).exists()
    monkeypatch.setenv("SUDO_USER", "eva")
    assert run("forget", "--state", state, "--yes")[0] == 0
    assert Sessions(state / FOLDER).group() is None
    code, out, _ = called(capfd, "audit", "show", state, "--json")
    assert code == 0
    [note] = json.loads(out)["notes"]
    assert note["what"].startswith(f"group ann, bob, cleo forgotten by eva, {datetime.now(UTC):%Y-}")
    assert called(capfd, "audit", "verify", state)[0] == 0


def test_without_a_group_there_is_none_to_forget(tmp_path: Path, run: Run) -> None:
    assert run("show", "--state", tmp_path)[1].startswith("no group yet")
    assert run("show", "--state", tmp_path, "--json")[1] == "null\n"
    assert run("forget", "--state", tmp_path, "--yes")[0] == 78
    assert run("show", "--state", tmp_path / "mistyped")[0] == 78
