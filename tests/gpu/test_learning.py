"""Runs that have come to their end, or not; and CIFAR-10 that is there, or not."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu import cifar, learning
from tests.gpu.federation import Job, Progress, run
from tests.gpu.learning import RECIPES, findings, job_of
from tests.gpu.plan import Proof
from tests.gpu.report import Finding, Status, Table

GPU = torch.device("cuda")  # a name: nothing is put there
SCORED = {"global.accuracy": 0.25}
OWN = {"personal.pm_v": 0.5, "personal.pm_l": 0.75}


def test_a_run_that_was_stopped_is_not_passed_off_as_a_whole_one() -> None:
    whole = Progress(RECIPES[0], 0, 200, 200, 99.0, True, {100: SCORED, 200: SCORED | OWN})
    stopped = Progress(RECIPES[1], 0, 200, 110, 98.0, False, {100: SCORED, 110: SCORED})
    first, second, scores, curve = findings([whole, stopped])
    assert isinstance(first, Finding)
    assert isinstance(second, Finding)
    assert (first.status, first.numbers["personal.pm_v@200"]) == (Status.PASSED, 0.5)
    assert (second.status, second.found) == (Status.BEGUN, "110 of 200 rounds in 98 s")
    assert isinstance(scores, Table)
    assert isinstance(curve, Table)
    assert list(scores.rows[-2:]) == [
        (f"{RECIPES[0]}, seed 0 (200 rounds)", "25.0", "50.0", "75.0"),
        (f"{RECIPES[1]}, seed 0 (110 rounds)", "25.0", "–", "–"),
    ]
    assert ["published" in row[0] for row in scores.rows[:-2]] == [True, True]
    assert (curve.columns, curve.rows[1]) == (("", "100", "200"), (f"{RECIPES[1]}, seed 0", "25.0", "–"))


def test_the_published_table_stands_beside_its_own_recipes_only() -> None:
    *_, scores = findings([Progress("digits-fedavg", 0, 3)])
    assert isinstance(scores, Table)
    assert list(scores.rows) == [("digits-fedavg, seed 0 (0 rounds)", "–", "–", "–")]


def test_without_cifar_the_comparison_is_skipped_visibly(tmp_path: Path) -> None:
    (found,) = learning.work(Proof(GPU, tmp_path))
    assert isinstance(found, Finding)
    assert found.status is Status.SKIPPED
    assert "no CIFAR-10" in found.found


def test_cifar_is_torchvisions_folder_or_an_npz(tmp_path: Path) -> None:
    file, folder = tmp_path / "cifar10.npz", tmp_path / "sets"
    assert [cifar.found(place) for place in (None, file, folder, tmp_path)] == [None] * 4
    file.touch()
    (folder / cifar.FOLDER).mkdir(parents=True)
    assert (cifar.found(file), cifar.found(folder)) == (file, folder)
    assert cifar.data_of(file) == {"source": "npz", "root": str(file)}
    assert cifar.data_of(folder) == {"source": "cifar10", "root": str(folder)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_papers_recipe_is_kept_but_for_its_precision(recipe: str, tmp_path: Path) -> None:
    made = job_of(Proof(GPU, tmp_path, tmp_path), recipe, 2).prepared()
    assert (made.rounds, made.plan.amp, made.seed) == (200, False, 2)
    assert made.data is not None
    assert (made.data.source, made.data.root, made.data.seed) == ("cifar10", tmp_path, 2)
    assert made.federation.min_sites == 100


def test_a_run_writes_how_far_it_has_come(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    job = Job("digits-fedavg", 1, {"rounds": 2, "plan": {"epochs": 1}}, "cpu", math.inf, str(path))
    made = run(job)
    assert (made.rounds, made.of, made.ended) == (2, 2, True)
    assert 0 < made.scores[2]["global.accuracy"] <= 1
    assert Progress.read(path) == made
    assert Progress.read(tmp_path / "absent.json") is None


@pytest.mark.parametrize(
    ("ends", "expected"),
    [("", []), ("raise SystemExit(1)", [Status.FAILED]), ("os.kill(os.getpid(), 9)", [Status.FAILED])],
)
def test_a_run_that_is_killed_has_failed_and_is_not_one_without_time(ends: str, expected: list[Status]) -> None:
    job = Job("digits-fedavg", 0, {}, "cpu", 0.0, "")
    command = [sys.executable, "-c", f"import os; {ends}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        process.wait(60)
        assert [finding.status for finding in learning._failures([job], [process])] == expected


def test_a_run_without_time_ends_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    made = run(Job("digits-fednh", 0, {"rounds": 2}, "cpu", 0.0, str(path)))
    assert (made.rounds, made.ended) == (0, False)
    assert Progress.read(path) == made
