"""What people are told of five runs that go wrong, each really run over TLS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.report.test_summary import WENT_WELL, words
from tests.support.provoked_runs import RUNS, staged

from protofed.deploy.report.document import Document
from protofed.deploy.report.report import document
from protofed.server.rounds.scores.model_warnings import WarningCode


def played(name: str, folder: Path) -> tuple[list[WarningCode], Document, str]:
    """The codes of the run's warnings, its report, and all words of it."""
    with staged(name, folder) as stage:
        stage.play(RUNS[name].before)
        record = stage.operator.run_record(stage.recipe.name)
    found, warnings = document(record), record["warnings"]
    return [WarningCode(one["code"]) for one in warnings if one["site"] is None], found, "\n".join(words(found))


def of_one_class(codes: list[WarningCode], found: Document, text: str) -> None:
    """A figure that looks good is told for what it is."""
    assert codes == [WarningCode.ONE_CLASS]
    assert "calls every image 'zero'" in found.alerts[0]
    assert "9 of 10 classes are never found by the global model" in text
    assert "balanced accuracy 10.0 % (10.0 % by chance)" in text


def diverged(codes: list[WarningCode], found: Document, text: str) -> None:
    assert WarningCode.DIVERGING in codes
    assert found.alerts[0].startswith("The run failed on")
    assert "none of the 6 planned rounds is finished" in text


def aborted(codes: list[WarningCode], found: Document, text: str) -> None:
    assert "aborted by operator 'olga'" in found.alerts[0]
    assert "in the middle of round 4" in found.alerts[0]
    assert "labels of two classes were swapped at site-2" in found.alerts[0]
    assert "3 of 12 planned rounds are finished" in text


def without_evaluator(codes: list[WarningCode], found: Document, text: str) -> None:
    assert "No evaluator scored the global model." in text
    assert "on the sites' own test sets (mean): balanced accuracy" in text
    assert "test set of evaluator" not in text


def expelled(codes: list[WarningCode], found: Document, text: str) -> None:
    assert "site-4 was excluded by operator 'olga'" in text
    assert "in round 2: its ethics vote has expired." in text
    assert "site-5's certificate was revoked by operator 'olga'" in text
    assert "in round 4: a laptop with its key was stolen." in text
    assert "could not train" not in text


CHECKS: dict[str, Callable[[list[WarningCode], Document, str], None]] = {
    "one-class": of_one_class,
    "diverged": diverged,
    "aborted": aborted,
    "no-evaluator": without_evaluator,
    "expelled": expelled,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_went_wrong_is_told_so(name: str, tmp_path: Path) -> None:
    codes, found, text = played(name, tmp_path)
    CHECKS[name](codes, found, text)
    if name != "no-evaluator":  # nothing did go wrong there, and the lack of an evaluator is told
        assert WENT_WELL not in text
