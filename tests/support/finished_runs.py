"""Small simulations that have ended, on disk, and what their exported models answer."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.examples import Examples
from protofed.common.config.recipe import Recipe
from protofed.common.payload import SiteId
from protofed.deploy.export import model_folder
from protofed.deploy.export.predict import predictor
from protofed.deploy.simulation.simulation import EVALUATOR, load_data, simulation

ROUNDS = 2


@dataclass(frozen=True)
class FinishedRun:
    """One simulation's folder, and the scores of its last round by site and name."""

    recipe: Recipe
    state: Path
    test: Examples
    scores: dict[SiteId, dict[str, float]]

    @property
    def run(self) -> str:
        return self.recipe.name

    def site(self, name: SiteId) -> Path:
        return self.state / "sites" / name


@functools.cache
def finished_run(recipe: str) -> FinishedRun:
    """Of a recipe as JSON; run once in a process."""
    read = Recipe.model_validate_json(recipe)
    folder = Path(tempfile.mkdtemp(prefix="protofed-finished-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with simulation(read, folder) as running:
        running.go()
        scores = running.ledger.scores(read.name).get(read.rounds, {})  # under secure aggregation the server has none
    return FinishedRun(read, folder, load_data(read)[EVALUATOR].test, scores)


def probabilities(
    folder: Path,
    images: NDArray[np.float32],
    allowed: frozenset[str] = frozenset(),
    runtime: Literal["torch", "onnx"] = "torch",
) -> NDArray[np.float32]:
    """What a runtime makes of a model's file and of pixels."""
    return predictor(folder, model_folder.read(folder), runtime, "cpu", allowed)(images)


def right_answers(folder: Path, test: Examples, runtime: Literal["torch", "onnx"] = "torch") -> NDArray[np.bool_]:
    """Which images a model classifies rightly, [N]."""
    found = probabilities(folder, test.pixels().numpy(), runtime=runtime).argmax(1)
    return np.asarray(found == test.labels.numpy())


def accuracy(folder: Path, test: Examples) -> float:
    return float(right_answers(folder, test).mean())
