"""The scores of a task, by name."""

from __future__ import annotations

from protofed.common.config.tables import NamedOptions
from protofed.common.config.tasks import CLASSIFICATION, build_task
from protofed.common.protocol.scores import ScoreFamily, ScoreNames, list_families


def families(task: str = CLASSIFICATION, **options: object) -> dict[str, ScoreFamily]:
    return list_families(build_task(NamedOptions.model_validate({"name": task, **options})).scores())


def score_names(classes: int, *switched_on: str, task: str = CLASSIFICATION, **options: object) -> ScoreNames:
    return ScoreNames(classes, families(task, **options), switched_on)
