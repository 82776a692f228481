"""`client consortium`: the partners that a site is summed with, confirmed by a person, and its group."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import called
from tests.support.partners import listed

from protofed.client.secure_aggregation.partners import OFFERED
from protofed.client.secure_aggregation.sessions import FOLDER, GROUP, Sessions
from protofed.deploy.cli import consortium
from protofed.protos.v1 import operator_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command's exit code and what it printed."""
    return partial(called, capfd, "client", "consortium")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a site that was summed with two others."""
    (tmp_path / FOLDER).mkdir()
    pinned = {"group": ["ann", "bob", "cleo"], "at": "2026-11-24T04:00:00Z", "run": "lesions"}
    (tmp_path / FOLDER / GROUP).write_text(json.dumps(pinned))
    return tmp_path


def test_the_group_is_shown_with_the_day_and_the_run(state: Path, run: Run) -> None:
    shown = run("--state", state)[1]
    assert "group: ann, bob, cleo, since 2026-11-24T04:00:00Z, run lesions\n" in shown
    assert "can invent the other sites of the group" in shown  # no list is confirmed
    assert json.loads(run("--state", state, "--json")[1])["group"]["group"] == ["ann", "bob", "cleo"]


def test_a_person_who_forgets_it_is_told_what_that_gives_away(
    state: Path, run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, why = run("--forget-group", "--state", state)
    assert code == 78
    assert "subtract the two groups' sums" in why
    assert "--yes" in why
    assert (state / FOLDER / GROUP).exists()
    monkeypatch.setenv("SUDO_USER", "eva")
    assert run("--forget-group", "--state", state, "--yes")[0] == 0
    assert Sessions(state / FOLDER).group() is None
    code, out, _ = called(capfd, "audit", "show", state, "--json")
    assert code == 0
    [note] = json.loads(out)["notes"]
    assert note["what"].startswith(f"group ann, bob, cleo forgotten by eva, {datetime.now(UTC):%Y-}")
    assert called(capfd, "audit", "verify", state)[0] == 0


@pytest.fixture
def sites(state: Path) -> dict[str, Path]:
    """The state folders of ann, which was summed with two others, and of its partners."""
    return {"ann": state, **{site: state / ".others" / site for site in ("bob", "cleo", "dan")}}


def test_a_person_confirms_a_list_and_sees_what_changed_and_who_reads_the_site_alone(
    state: Path, run: Run, sites: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    first = listed({site: sites[site] for site in ("ann", "bob", "cleo")}, coordinator="Hospital bob")
    (state / OFFERED).write_text(first.document)
    assert "offered, not confirmed here:" in run("--state", state)[1]
    code, _, why = run("--confirm", first.code, "--state", state)
    assert (code, "Do you know every hospital" in why) == (78, True)
    assert run("--confirm", first.code, "--state", state, "--yes")[0] == 0
    shown = run("--state", state)[1]
    assert "Hospital bob runs the server and is in this site's group as bob." in shown
    assert "The server can read this site's own update only together with Hospital cleo (cleo)." in shown
    second = listed({site: sites[site] for site in ("ann", "bob", "dan")}, number=2, coordinator="Hospital bob")
    (state / OFFERED).write_text(second.document)
    _, told, _ = run("--confirm", second.code, "--state", state, "--yes")
    assert "Hospital dan (dan) is new." in told
    assert "Hospital cleo (cleo) is no longer a partner." in told
    assert "This site's group ends, because cleo is no longer a partner." in told
    assert Sessions(state / FOLDER).group() is None
    known = json.loads(run("--state", state, "--json")[1])
    assert (known["site"], known["confirmed"]["code"]) == ("ann", second.code)
    notes = json.loads(called(capfd, "audit", "show", state, "--json")[1])["notes"]
    assert [note["what"].split(" confirmed")[0] for note in notes] == [
        "partners ann, bob, cleo",
        "partners ann, bob, dan",
    ]
    assert called(capfd, "audit", "verify", state)[0] == 0


def test_without_a_group_there_is_none_to_forget(tmp_path: Path, run: Run) -> None:
    assert run("--state", tmp_path)[1].startswith("No list of partners is confirmed here")
    assert json.loads(run("--state", tmp_path, "--json")[1])["group"] is None
    assert run("--forget-group", "--state", tmp_path, "--yes")[0] == 78
    assert run("--state", tmp_path / "mistyped")[0] == 78


def test_the_operator_is_told_of_a_site_that_has_another_key_than_the_list(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = {site: tmp_path / site for site in ("ann", "bob", "cleo")}
    offered = listed(folders)
    info = pb.ConsortiumInfo(offered=offered.document, confirmed=["ann"], waiting=["bob", "cleo"])
    info.proposed = listed(folders, number=2).document
    consortium._show(info, as_json=False)
    assert f"--confirm {offered.code}" in capfd.readouterr().out
    info.proposed = listed({**folders, "cleo": tmp_path / "new"}, number=2).document
    consortium._show(info, as_json=False)
    out = " ".join(capfd.readouterr().out.split())
    assert "with another key than the list says: cleo." in out
    assert "--confirm" not in out
