"""`protofed tracking`: runs that have ended are told to a tracker afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.tracking.test_follower import RUN, RunLedger, by_the_ledger, expect_same, read

from protofed.deploy.cli import main
from protofed.server.verdicts import RoundOutcome


@pytest.fixture
def run_ledger(tmp_path: Path) -> Iterator[RunLedger]:
    here = RunLedger(tmp_path)
    yield here
    here.ledger.close()


def protofed(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_run_is_told_once_however_often_it_is_asked_for(
    run_ledger: RunLedger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ledger.publish(0)
    run_ledger.publish(1)
    run_ledger.ledger.end_run(RUN, "aborted by the operator", RoundOutcome.ABORTED)
    for new in (2, 0):
        assert protofed("tracking", "--state", tmp_path, "--tensorboard", tmp_path / "tb") == 0
        assert f"{RUN}: {new} new of 2 rounds sent to tensorboard" in capsys.readouterr().out
    scalars, texts = read(tmp_path / "tb" / RUN)
    expect_same(scalars, by_the_ledger(run_ledger))
    assert texts["outcome"] == [(1, "aborted: aborted by the operator")]


def test_all_runs_of_a_folder_are_told(
    run_ledger: RunLedger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ledger.ledger.begin_run("second", run_ledger.row().fingerprint, "{}")
    assert protofed("tracking", "--all", "--state", tmp_path, "--tensorboard", tmp_path / "tb") == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [RUN, "second"]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--tensorboard", "tb"], "say by --state where the runs are"),
        (["--state", "."], "expected a tracker: --tensorboard FOLDER, --mlflow URI, or both"),
        (["--state", ".", "--mlflow", "mlruns"], "sqlite:///PATH"),
    ],
)
def test_what_is_missing_is_named(
    arguments: list[str],
    phrase: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert protofed("tracking", *arguments) == 78
    assert phrase in capsys.readouterr().err
