"""The doctor finds a problem with a site's data exactly where its daemon declines rounds for them, by the same code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.doctor_rows import rows
from tests.support.policies import standard_with_plain_updates
from tests.support.scripted_server import ScriptedServer

from protofed.client.agent.agent import Agent
from protofed.client.models.catalogue import first_model
from protofed.client.policy.policy import PolicyFile
from protofed.client.state.store import MemoryStore
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import FailureReason, ProtofedError
from protofed.common.protocol.messages import Activity, Task, TaskKind
from protofed.deploy import shipped
from protofed.deploy.daemons import client
from protofed.deploy.doctor.checks import Check, CheckRow
from protofed.deploy.doctor.site import SiteUnderCheck
from protofed.server.rounds.machine.rules import min_cohort

RecipeOf = Callable[..., Recipe]
CLASSES = ("mel", "nv", "bcc")
SKEWED = {"nv": 60, "mel": 12, "bcc": 1}


@dataclass(frozen=True)
class Case:
    """A data set of folders, what the settings and the recipe say beside it, and the doctor's finding; None: none."""

    finding: str | None
    images: Mapping[str, int]  # by folder
    data: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    damage: Callable[[Path], object] = lambda _root: None


def empty_files(root: Path) -> None:
    for file in sorted(root.glob("nv/*.png"))[:4]:
        file.write_bytes(b"")


def one_shade(root: Path) -> None:
    for file in root.glob("*/*.png"):
        Image.fromarray(np.full((8, 8), 90, np.uint8)).save(file)


CASES = {
    "skewed": Case(None, SKEWED),
    "one image in a class": Case(None, {"nv": 40, "mel": 40, "bcc": 1}),
    "one class alone": Case(None, {"nv": 60}),
    "an empty class": Case(None, {**SKEWED, "bcc": 0}),
    "patients": Case(None, SKEWED, {"group_pattern": r"(\d)\.png"}),
    "a test set of its own": Case(None, {"train/nv": 40, "test/nv": 2, "train/mel": 3}),
    "an own test set": Case(None, SKEWED, {"local_test_fraction": 0.2}),
    "an own test set, and the evaluator, too": Case(
        None, SKEWED, {"local_test_fraction": 0.2}, settings={"roles": ["trainer", "evaluator"]}
    ),
    "an own test set that nothing can be spared for": Case(
        None, {"nv": 30}, {"test_fraction": 0.7, "local_test_fraction": 0.2}
    ),
    "an own test set alone that nothing can be spared for": Case(
        "data-unusable", {"nv": 9}, {"local_test_fraction": 0.2}
    ),
    "some unreadable files are allowed": Case(None, SKEWED, {"max_unreadable_fraction": 0.1}, damage=empty_files),
    "an evaluator": Case(None, {"test/nv": 3}, settings={"roles": ["evaluator"]}),
    "no class with enough images for a test set": Case("data-unusable", {"nv": 9, "mel": 9, "bcc": 9}),
    "no images": Case("data-unusable", {"nv": 0}),
    "training images alone missing": Case("data-unusable", {"test/nv": 30}),
    "one patient alone": Case("data-unusable", SKEWED, {"group_pattern": r"(\.png)"}),
    "patients in both train and test": Case(
        "data-unusable", {"train/nv": 20, "test/nv": 20}, {"group_pattern": r"(\d+)\.png"}
    ),
    "no patient in a path": Case("data-unusable", SKEWED, {"group_pattern": "/(P[0-9]+)_"}),
    "a fraction beside a test set": Case("data-unusable", {"train/nv": 40, "test/nv": 9}, {"test_fraction": 0.2}),
    "a partition that is not": Case("data-unusable", SKEWED, {"partition": {"kind": "column"}}),
    "no such folder": Case("data-unusable", SKEWED, {"root": "/nowhere/at/all"}),
    "an unknown label": Case("labels-unmapped", {**SKEWED, "naevus": 30}),
    "a map to an unknown class": Case("labels-unmapped", SKEWED, {"label_map": {"nv": "naevus"}}),
    "empty files": Case("images-unreadable", SKEWED, damage=empty_files),
    "another size": Case("images-unreadable", SKEWED, recipe={"input": {"shape": [1, 12, 12]}}),
    "other colours": Case("images-unreadable", SKEWED, recipe={"input": {"shape": [3, 8, 8]}}),
    "another preprocessing": Case("preprocessing-differs", SKEWED, {"preprocessing_digest": "0" * 64}),
    "too few images for the least movement": Case("run-refused", {"nv": 12}),
    "images all alike": Case("run-refused", SKEWED, damage=one_shade),
    "a batch above the policy's": Case("run-refused", SKEWED, recipe={"plan": {"batch_size": 1024}}),
    "a model that is not": Case("recipe-invalid", SKEWED, recipe={"model": {"name": "digits-cnn", "wide": 3}}),
}


def settings_of(case: Case, folder: Path) -> ClientSettings:
    draw, root = np.random.default_rng(0), folder / "images"
    for name, count in case.images.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(root / name / f"{number:02}.png")
    case.damage(root)
    data = {"source": "folder", "root": root, **case.data}
    policy = standard_with_plain_updates(folder / "policies")
    given = {"site": "a", "policy": policy, "state": folder / "state", "data": data, **case.settings}
    return ClientSettings.model_validate(given)


def recipe_for(case: Case, recipe_of: RecipeOf) -> Recipe:
    plan = {"epochs": 10, "batch_size": 8, "lr": 0.05}
    own = {"classes": 3, "class_names": list(CLASSES), "data": None, "plan": plan, **case.recipe}
    return recipe_of("fedavg", **own)


def declines(settings: ClientSettings, recipe: Recipe) -> FailureReason | None:
    """By which code the daemon declines a round, with everything that it does in one; None: it declines nothing."""
    client.check_root(settings)
    policy, cpu = PolicyFile(shipped.policy(settings.policy)), torch.device("cpu")
    site = client._site(settings, policy, MemoryStore(), cpu, partial(client._load, settings, cpu))
    link = ScriptedServer(recipe.wire(), recipe.name, min_cohort=min_cohort(recipe.federation))
    try:
        base = codec.encode(first_model(recipe, frozenset()))
    except ProtofedError:  # a recipe of no model: the run is declined before any base is fetched
        base = b""
    digest = codec.digest(base)
    link.blobs[str(digest)] = base
    kinds = (TaskKind.FIT, TaskKind.SCORE) if "trainer" in settings.roles else (TaskKind.SCORE,)
    link.tasks = deque(Task(kind, recipe.name, 1, f"n-{kind}", digest, len(base), 60.0) for kind in kinds)
    agent = Agent(site, link, pause=lambda _: None)
    while link.tasks:
        agent.step(0.0)
    return next((beat.failure for beat in link.beats if beat.activity is Activity.FAILED), None)


def doctors_row(settings: ClientSettings, recipe: Recipe) -> CheckRow:
    site = SiteUnderCheck(recipe=lambda: recipe)
    return rows([Check("data", lambda: site.data(settings), "data-unusable")])["data"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_doctor_finds_what_the_daemon_declines_by(case: Case, tmp_path: Path, recipe_of: RecipeOf) -> None:
    settings, recipe = settings_of(case, tmp_path), recipe_for(case, recipe_of)
    row = doctors_row(settings, recipe)
    assert (row.diagnosis and row.diagnosis.name) == case.finding, row.message
    try:
        declined = declines(settings, recipe)
    except ProtofedError:  # it does not even start
        assert case.finding is not None
        return
    assert (declined is None) == (case.finding is None), row.message
    assert declined is None or f"({declined.value})" in row.message


def test_rare_classes_are_not_named_for_others(tmp_path: Path, recipe_of: RecipeOf) -> None:
    case = CASES["skewed"]
    message = doctors_row(settings_of(case, tmp_path), recipe_for(case, recipe_of)).message
    assert "not scored" in message
    assert not [name for name in CLASSES if name in message]


def test_images_without_a_group_are_not_counted_for_others(tmp_path: Path, recipe_of: RecipeOf) -> None:
    case = CASES["no patient in a path"]
    message = doctors_row(settings_of(case, tmp_path), recipe_for(case, recipe_of)).message
    assert "data.group_pattern" in message
    assert not set("0123456789") & set(message.partition("declines")[2])


def test_a_limit_that_the_number_of_images_breaks_is_named_without_it(tmp_path: Path, recipe_of: RecipeOf) -> None:
    case = CASES["too few images for the least movement"]
    message = doctors_row(settings_of(case, tmp_path), recipe_for(case, recipe_of)).message
    assert "limits." in message
    assert not set("0123456789") & set(message.partition("declines")[2])
