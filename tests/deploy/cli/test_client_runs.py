"""`client runs`: a site's own scores from its state folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import called
from tests.support.score_names import families

from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.client.transport.audit import FILE as AUDIT_FILE
from protofed.common.errors import ConfigError
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.protocol.messages import Role
from protofed.common.storage.journal import Journal
from protofed.deploy.cli import client
from protofed.deploy.site.own_scores import meaning
from protofed.protos.v1 import federation_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's exit code and what it printed, on a terminal of 100 columns."""
    monkeypatch.setattr(client.console, "width", 100)
    return partial(called, capfd, "client", "runs")


@pytest.fixture
def kept(tmp_path: Path) -> OwnScores:
    """Of a site that was scored twice in one run, and trained once more."""
    made = OwnScores(tmp_path / FOLDER)
    for number, pm_l in ((1, 0.5), (2, 0.75)):
        made.record("digits", number, {"loss": 1.0 / number})
        made.record("digits", number, {"personal.pm_l": pm_l, "personal.recall.3": 0.125})
    made.record("digits", 3, {"loss": 0.25})
    return made


def test_scores_are_a_table_by_round_or_json_and_all_have_stayed(run: Run, kept: OwnScores, tmp_path: Path) -> None:
    code, out, _ = run("digits", "--state", tmp_path)
    assert code == 0
    rows = [line.strip("│").replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]
    assert rows == [["1", "1.0000", "0.5000"], ["2", "0.5000", "0.7500"], ["3", "0.2500", "–"]]
    assert "digits" in out
    assert "recall" not in out
    assert kept.runs() == ["digits"]
    code, out, _ = run("digits", "--state", tmp_path, "--json")
    printed = json.loads(out)
    assert (code, printed["run"]) == (0, "digits")
    assert [scored["round"] for scored in printed["rounds"]] == [1, 2, 3]
    assert printed["rounds"][1]["scores"] == kept.rounds("digits")[1].scores
    assert printed["rounds"][1]["scores"]["personal.recall.3"] == 0.125
    assert "stayed at this site: all of them" in run("digits", "--state", tmp_path)[1]


def test_what_left_is_read_from_the_audit_log_and_the_rest_has_stayed(
    run: Run, kept: OwnScores, tmp_path: Path
) -> None:
    log = Journal(tmp_path / AUDIT_FILE)
    messages: list[tuple[int, str, dict[str, Any]]] = [
        (1, "ReportScores", {"scores": {"personal.pm_l": 0.5, "global.accuracy": 0.5}}),
        (1, "CommitUpload", {"metrics": ["loss"]}),  # as 0.2.0 wrote it
        (2, "CommitUpload", {}),
        (1, "Heartbeat", {"telemetry": {"loss": 1.0}}),
    ]
    for number, call, fields in messages:
        log.append("sent", call=call, digest=f"{call}{number}", facts={"run": "digits", "round": number, **fields})
    log.close()
    out = run("digits", "--state", tmp_path)[1]
    told = [line for line in out.splitlines() if line.startswith(("sent", "stayed"))]
    assert [line.rpartition(": ")[2] for line in told] == ["loss, rounds 1", "personal.pm_l, rounds 1"]
    rounds = json.loads(run("digits", "--state", tmp_path, "--json")[1])["rounds"]
    assert [scored["left"] for scored in rounds] == [["loss", "personal.pm_l"], [], []]


def test_what_left_in_a_secure_aggregation_has_not_stayed(run: Run, kept: OwnScores, tmp_path: Path) -> None:
    log = Journal(tmp_path / AUDIT_FILE)
    log.append("sent", call="ReportScores", digest="a", facts={"run": "digits", "round": 1, "scores": {"loss": 1.0}})
    at: dict[str, Any] = {"attempt": 1, "subject": "scores"}
    log.append("masked", run="digits", round=1, scores=["loss", "personal.recall.3"], **at)
    log.append("masked", run="digits", round=2, scores=["loss"], **at)
    log.append("masked", run="digits", round=3, scores=[], **at)
    log.append("aggregated", run="digits", round=3, sites=["ann", "bob", "eva"], **at)
    log.append("masked", run="another", round=3, scores=["personal.pm_l"], **at)
    log.close()
    out = run("digits", "--state", tmp_path)[1]
    told = [line for line in out.splitlines() if line.startswith(("sent", "stayed"))]
    assert [line.rpartition(": ")[2] for line in told] == ["loss, rounds 1", "loss, rounds 2", "personal.pm_l"]
    assert ["secure aggregation" in line for line in told] == [False, True, False]
    rounds = json.loads(run("digits", "--state", tmp_path, "--json")[1])["rounds"]
    assert [scored["left"] for scored in rounds] == [["loss"], [], []]
    assert [scored["left_in_sums"] for scored in rounds] == [["personal.recall.3"], ["loss"], []]


def test_none_is_said_to_have_stayed_of_more_scores_than_the_log_lists(
    run: Run, kept: OwnScores, tmp_path: Path
) -> None:
    log, many = Journal(tmp_path / AUDIT_FILE), {f"personal.recall.{number}": 0.5 for number in range(10_000)}
    request = pb.ScoresRequest(run="digits", round=1, scores=many)
    log.append("sent", call="ReportScores", digest="a", facts=audit_fields(request, values=True))
    log.close()
    out = run("digits", "--state", tmp_path)[1]
    assert "rounds 1: more scores were sent" in out
    assert "stayed" not in out
    rounds = json.loads(run("digits", "--state", tmp_path, "--json")[1])["rounds"]
    assert [scored["left"] for scored in rounds] == [None, [], []]


def test_every_score_has_a_meaning_and_what_is_wrong_is_named(kept: OwnScores, run: Run, tmp_path: Path) -> None:
    own = [name for name, family in families().items() if family.role is Role.TRAINER]
    assert len(own) > 20
    unknown = meaning("train.something")
    assert unknown not in {meaning(name) for name in [*own, "loss"]}
    assert len({meaning(name) for name in own}) == len(own)
    meanings = json.loads(run("digits", "--state", tmp_path, "--json")[1])["meanings"]
    assert meanings == {name: meaning(name) for name in ("loss", "personal.pm_l", "personal.recall")}
    code, _, err = run("digits", "--state", tmp_path / "none")
    assert (code, "--state" in err) == (ConfigError.exit_code, True)
    code, _, err = run("digit", "--state", tmp_path)
    assert (code, "did you mean 'digits'?" in err) == (ConfigError.exit_code, True)
    kept.record("other", 1, {"loss": 0.5})
    (tmp_path / FOLDER / "digits.jsonl").write_text("{}")
    code, _, err = run("digits", "--state", tmp_path)
    assert (code != 0, "digits.jsonl" in err) == (True, True)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_number_is_cut(
    width: int, run: Run, kept: OwnScores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.console, "width", width)
    names = [f"{where}.{what}" for where in ("personal", "personal.local") for what in ("accuracy", "auroc", "ece")]
    kept.record("wide", 1, dict.fromkeys(names, 0.1234))
    assert run("wide", "--state", tmp_path)[1].count("0.1234") == len(names)


def test_a_site_without_scores_says_so(run: Run, tmp_path: Path) -> None:
    assert run("digits", "--state", tmp_path)[0] == ConfigError.exit_code
