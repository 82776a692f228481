"""Bootstrap intervals and subgroups of an evaluator's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from sklearn.metrics import roc_auc_score
from structlog.testing import capture_logs

from protofed.client.data.examples import Examples
from protofed.client.task import Predictions, build_client_task
from protofed.client.training.intervals import MIN_SUBGROUP, qualified_scores
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Role
from protofed.deploy.report.report import document
from protofed.deploy.simulation.simulation import simulation
from protofed.server.operator.run_record import run_record
from protofed.testing.small_recipe import small_recipe

MULTI_LABEL = {"task": {"name": "multi-label"}, "classes": 2, "class_names": ("a", "b")}


def recipe(**evaluation: Any) -> Recipe:
    return small_recipe("fedavg", **MULTI_LABEL, evaluation=evaluation)


def found(run: Recipe, outputs: torch.Tensor, targets: torch.Tensor, **more: Any) -> dict[str, float]:
    examples = Examples(torch.zeros(len(targets), *run.input.shape, dtype=torch.uint8), targets, **more)
    task = build_client_task(run.task)
    return qualified_scores("global", Predictions(outputs, targets), examples, task, targets[:0], run)


def drawn(count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(count, 2, generator=generator) < 0.4).float()
    return targets + 1.5 * torch.randn(count, 2, generator=generator), targets


def test_intervals_are_percentiles_of_the_bootstrap() -> None:
    outputs, targets = drawn()
    scores = found(recipe(intervals=400), outputs, targets)
    rng = np.random.default_rng(7)
    rows = [rng.integers(len(targets), size=len(targets)) for _ in range(2000)]
    by_hand = [roc_auc_score(targets[row, 0].numpy(), outputs[row, 0].numpy()) for row in rows]
    low, high = np.percentile(by_hand, (2.5, 97.5))
    assert scores["global.class_auroc.0@low"] == pytest.approx(low, abs=0.02)
    assert scores["global.class_auroc.0@high"] == pytest.approx(high, abs=0.02)
    assert not any("reliability" in name for name in scores)
    assert recipe(intervals=400).score_names().problem(scores, {Role.EVALUATOR}) is None


def test_all_images_of_a_patient_are_drawn_together() -> None:
    """Ten copies of each image tell no more than one: the interval must not become narrower."""
    outputs, targets = drawn(60)
    copies, patients = torch.arange(60).repeat(10), torch.arange(60).repeat(10)
    run = recipe(intervals=400)

    def width(scores: dict[str, float]) -> float:
        return scores["global.auroc@high"] - scores["global.auroc@low"]

    one = width(found(run, outputs, targets))
    grouped = width(found(run, outputs[copies], targets[copies], units=patients))
    alone = width(found(run, outputs[copies], targets[copies]))
    assert grouped == pytest.approx(one, rel=0.25)
    assert alone < grouped / 2


def test_a_subgroup_is_scored_by_itself_if_it_is_large_enough() -> None:
    outputs, targets = drawn()
    few = torch.arange(len(targets)) < MIN_SUBGROUP - 1
    run = recipe(subgroups={"sex": ["F", "M", "X"]})
    with capture_logs() as logs:
        scores = found(run, outputs, targets, subgroups={"sex=F": ~few, "sex=M": few})
    (told,) = logs
    assert told["subgroups"] == ["sex=M", "sex=X"], "one is too small, and no image has the other"
    (row,) = [name for name in scores if name.startswith("global.class_auroc.1")]
    assert row == "global.class_auroc.1@sex=F"
    assert scores[row] == pytest.approx(roc_auc_score(targets[~few, 1].numpy(), outputs[~few, 1].numpy()))
    assert not any("@sex=M" in name or "@sex=X" in name for name in scores)
    as_patients = torch.arange(len(targets)) // 3
    assert not found(run, outputs, targets, subgroups={"sex=F": ~few}, units=as_patients), "24 patients are few"


def test_only_what_the_recipe_asks_for_is_a_score_of_the_run() -> None:
    names = recipe(intervals=200, subgroups={"sex": ["F"]}).score_names()
    for known in ("global.auroc@low", "global.class_auroc.1@sex=F", "global.auroc@sex=F@high"):
        assert names.problem({known: 0.5}, {Role.EVALUATOR}) is None
    for unknown in (
        "global.auroc@sex=M",
        "global.auroc@mean",
        "global.auroc@",
        "global.class_auroc.2@low",
        "global.reliability.share.0@low",
        "personal.auroc@low",
        "global.local.auroc@low",
        "global.auroc@low@sex=F",
    ):
        assert "no score of this run" in str(names.problem({unknown: 0.5}, {*Role}))
    assert "no score of this run" in str(recipe().score_names().problem({"global.auroc@low": 0.5}, {Role.EVALUATOR}))
    with pytest.raises(ValidationError, match="intervals"):
        small_recipe("fedavg", evaluation={"intervals": 10})
    with pytest.raises(ValidationError, match="subgroups"):
        small_recipe("fedavg", evaluation={"subgroups": {"sex": ["F@low"]}})


def manifest(folder: Path) -> Path:
    """400 images, brighter ones of class 1, of 200 patients, and who each is."""
    rng, rows = np.random.default_rng(0), ["path,label,group,sex,age"]
    for number in range(400):
        label, patient = number % 2, number // 2
        pixels = rng.integers(0, 120, (8, 8)) + 8 * label
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{label},p{patient},{'F' if patient % 3 else 'M'},{'<40' if patient < 9 else '40+'}")
    (folder / "images.csv").write_text("\n".join(rows), encoding="utf-8")
    return folder / "images.csv"


def test_a_run_on_a_manifest_has_intervals_and_subgroups(tmp_path: Path) -> None:
    data = {"source": "manifest", "root": manifest(tmp_path), "test_fraction": 0.5, "local_test_fraction": None}
    evaluation = {"intervals": 200, "subgroups": {"sex": ["F", "M"], "age": ["<40", "40+"]}}
    own = {"subgroup_columns": ["sex", "age"], "partition": {"kind": "whole"}}
    federation = {"min_sites": 1, "quorum": 1}
    run = small_recipe(
        "fedavg",
        classes=2,
        class_names=("0", "1"),
        rounds=2,
        data={**{key: value for key, value in data.items() if value is not None}, **own},
        evaluation=evaluation,
        federation=federation,
    )
    with simulation(run) as running:
        running.go()
        assert running.runs.failed == []
        scores = running.ledger.scores(run.name, 2)[2]["evaluator"]
        told = document(run_record(running.ledger, running.blobs, run.name))
    (section,) = [section for section in told.sections if section.key == "details"]
    of_all, by_subgroup = section.tables
    (accuracy,) = [value for name, value in of_all.rows if name == "accuracy, %"]
    ends = (scores[f"global.accuracy{end}"] for end in ("", "@low", "@high"))
    assert accuracy == "{:.1f} ({:.1f} to {:.1f})".format(*(100 * end for end in ends))
    assert [row[0] for row in by_subgroup.rows] == ["sex=F", "age=40+"]
    assert scores["global.accuracy@low"] <= scores["global.accuracy"] <= scores["global.accuracy@high"]
    groups = {name.partition("@")[2] for name in scores if "@" in name}
    assert groups == {"low", "high"} | {
        f"{group}{end}" for group in ("sex=F", "age=40+") for end in ("", "@low", "@high")
    }, "33 patients are M, and few are below 40"
