"""What the author of a task gets from `protofed`, without PyTorch; see the guide to tasks."""

from protofed.client.task import (
    CONSTANT,
    ClientTask,
    LeftOut,
    OwnLabel,
    OwnNames,
    Predictions,
    Target,
)
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import LearningTask
from protofed.common.errors import ConfigError, DataError
from protofed.common.protocol.scores import TaskScore

__all__ = [
    "CONSTANT",
    "ClientTask",
    "ConfigError",
    "DataError",
    "LearningTask",
    "LeftOut",
    "OwnLabel",
    "OwnNames",
    "Predictions",
    "Recipe",
    "Target",
    "TaskScore",
]
