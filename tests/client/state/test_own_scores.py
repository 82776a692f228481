"""A site's own scores: kept by round, bounded, and no line is erased by an old round."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from protofed.client.state import own_scores
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.client.state.store import MemoryStore
from protofed.common.errors import ConfigError, OutOfSpaceError, StateError
from protofed.common.storage import files

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def kept(tmp_path: Path) -> OwnScores:
    return OwnScores(tmp_path / FOLDER, now=lambda: NOON)


def test_the_scores_of_a_round_are_one_line_which_it_alone_replaces(kept: OwnScores, tmp_path: Path) -> None:
    kept.record("run", 1, {"loss": 0.5})
    kept.record("run", 1, {"personal.pm_l": 0.25, "personal.recall.3": 1.0, "global.accuracy": 0.9})
    (line,) = (tmp_path / FOLDER / "run.jsonl").read_text().splitlines()
    own = {"loss": 0.5, "personal.pm_l": 0.25, "personal.recall.3": 1.0}  # an evaluator's is not the site's own
    assert json.loads(line) == {"round": 1, "at": "2026-01-02T12:00:00Z", "scores": own}
    assert kept.rounds("run")[0].scores == kept.latest("run") == own
    for number in (1, 2, 3):
        kept.record("run", number, {"loss": float(number)})
    kept.record("run", 1, {"loss": 9.0})
    assert [(scored.round, scored.scores["loss"]) for scored in kept.rounds("run")] == [(1, 9.0), (2, 2.0), (3, 3.0)]
    assert kept.latest("run")["loss"] == 9.0  # taken last


def test_runs_do_not_mix_and_without_any_scores_the_error_says_so(kept: OwnScores, tmp_path: Path) -> None:
    assert kept.runs() == []
    with pytest.raises(ConfigError, match="no scores yet"):
        kept.rounds("run")
    with pytest.raises(ConfigError, match="is no id"):
        kept.record("../run", 1, {"loss": 1.0})
    assert not (tmp_path / FOLDER).exists()
    kept.record("b", 1, {"loss": 1.0})
    kept.record("a", 1, {"loss": 2.0})
    os.utime(tmp_path / FOLDER / "b.jsonl", (1, 1))
    assert kept.runs() == ["b", "a"]
    assert kept.latest("b") == {"loss": 1.0}
    assert kept.latest("none") == {}
    with pytest.raises(ConfigError, match="unknown run 'c'"):
        kept.rounds("c")


def test_a_file_is_bounded_and_the_newest_lines_stay(kept: OwnScores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_scores, "MAX_BYTES", 300)
    for number in range(1, 20):
        kept.record("run", number, {"loss": 0.5})
    numbers = [scored.round for scored in kept.rounds("run")]
    assert numbers == list(range(20 - len(numbers), 20))
    assert 2 <= len(numbers) < 19


def test_a_damaged_file_is_named_and_left_as_it_is(kept: OwnScores, tmp_path: Path) -> None:
    kept.record("run", 1, {"loss": 0.5})
    path = tmp_path / FOLDER / "run.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 2, "at"')
    damaged = path.read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: kept.rounds("run"),
        lambda: kept.latest("run"),
        lambda: kept.record("run", 2, {"loss": 0.5}),
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"run\.jsonl"):
            call()
    assert path.read_bytes() == damaged


def test_a_failed_write_leaves_what_was_there(kept: OwnScores, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.record("run", 1, {"loss": 0.5})

    def full(path: Path, _: bytes) -> None:
        raise OutOfSpaceError(f"cannot write {path}")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", full)
        with pytest.raises(OutOfSpaceError):
            kept.record("run", 2, {"loss": 0.4})
    assert kept.latest("run") == {"loss": 0.5}


def test_only_a_folder_keeps_scores(tmp_path: Path) -> None:
    assert MemoryStore().own_scores is None
    store = DiskStore(tmp_path)
    assert store.own_scores is not None
    store.own_scores.record("run", 1, {"loss": 0.5})
    assert store.unsettled("run") == []
    assert store.last_counted("run", 5).round == 0
    leftover = tmp_path / FOLDER / files.temporary_name("run.jsonl")
    leftover.write_bytes(b"half")
    store.close()
    DiskStore(tmp_path).close()
    assert not leftover.exists()
    assert OwnScores(tmp_path / FOLDER).latest("run") == {"loss": 0.5}
