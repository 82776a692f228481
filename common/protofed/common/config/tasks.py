"""The learning tasks: what a model learns from its images. This is all of a task that needs no PyTorch.

A task has two halves, both frozen dataclasses with pure functions. A `LearningTask` has the options of a recipe's
`[task]` as its fields, and says which scores the task takes and how large they can be. Server, policies and reports ask
it. It names the other half, a `protofed.client.task.ClientTask` in PyTorch: targets, loss, predictions and the values
of the scores. Methods, rounds and messages know nothing of a task: a method only declares the tasks it is defined for.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias

from pydantic import Field

from protofed.common.config.tables import NamedOptions
from protofed.common.errors import ConfigError
from protofed.common.plugins import PluginKind, Registry, TaskNames
from protofed.common.protocol.scores import RELIABILITY, TaskScore

CLASSIFICATION, MULTI_LABEL, REGRESSION = "classification", "multi-label", "regression"


OUTPUT_NOUNS = {CLASSIFICATION: "class", MULTI_LABEL: "finding", REGRESSION: "number"}


def output_noun(task: str) -> str:
    """What a model has one output for, in a word."""
    return OUTPUT_NOUNS.get(task, "output")


class LearningTask(Protocol):
    """The half of a task without PyTorch; its fields are the options of `[task]`."""

    client: ClassVar[str]  # package.module:Class of the `ClientTask`, which is made of this half and C

    def check(self, classes: int) -> None:
        """Check the options, and that the task can be learnt with so many outputs.

        Raises:
            ConfigError: it cannot, with what is expected.
        """

    def scores(self) -> tuple[TaskScore, ...]:
        """The scores that the task takes."""

    def predictions(self) -> str:
        """What `ClientTask.predict` gives, in words, for an exported model's card."""


tasks: Registry[LearningTask] = Registry("task", protocols=(LearningTask,), plugin=PluginKind.TASK)

_SHARED, _OWN_MODEL = ("global",), ("personal",)
_FINDINGS = ("auroc", "average_precision", "sensitivity")  # of one class or finding against all others


@tasks.register(CLASSIFICATION)
@dataclass(frozen=True)
class Classification:
    """Each image has one of C classes."""

    client: ClassVar[str] = "protofed.client.tasks.classification:ClassificationTask"

    def check(self, classes: int) -> None:
        """Two classes at least."""
        if classes < 2:
            raise ConfigError(f"classes = {classes}: expected 2 or more for the task classification")

    def scores(self) -> tuple[TaskScore, ...]:
        """Shares of right answers, and by `[evaluation]` what the probabilities say."""
        return (
            TaskScore("accuracy"),
            TaskScore("balanced_accuracy"),
            TaskScore("recall", "class"),
            *(TaskScore(name, needs="probabilities") for name in ("auroc", "ece")),
            *(TaskScore(name, needs="frequency_groups") for name in ("many", "medium", "few", "groups")),
            *(TaskScore(name, tests=_OWN_MODEL) for name in ("pm_v", "pm_l")),
            TaskScore("majority", tests=_SHARED),
            *(TaskScore(name, "bin", "probabilities", tests=_SHARED) for name in RELIABILITY),
            *(TaskScore(f"class_{name}", "class", "clinical") for name in _FINDINGS),
            TaskScore("brier", needs="clinical", high=2.0),
        )

    def predictions(self) -> str:
        """As of `LearningTask`."""
        return "the probabilities of the classes, which sum to 1"


# The narrowest range of a regression: a share of its largest number, and a width. Float32 has 7 digits: one step is a
# thousandth of that share.
MIN_RANGE_SHARE, MIN_RANGE_WIDTH = 1e-4, 1e-30


UnknownRule: TypeAlias = Literal["ignore", "ones", "zeros"]


@tasks.register(MULTI_LABEL)
@dataclass(frozen=True)
class MultiLabel:
    """Each image has any of C findings, or none; of some it may be unknown whether an image has them."""

    uncertain: UnknownRule | None = None  # what -1 in a column of findings counts as; None: refuse it
    blank: UnknownRule | None = None  # what an empty cell in a column of findings counts as; None: refuse it

    client: ClassVar[str] = "protofed.client.tasks.multi_label:MultiLabelTask"

    def check(self, classes: int) -> None:
        """One finding is enough."""

    def scores(self) -> tuple[TaskScore, ...]:
        """Of each finding, of its probabilities, and their means over the findings."""
        return (
            *(TaskScore(name) for name in _FINDINGS),
            *(TaskScore(f"class_{name}", "class") for name in _FINDINGS),
            TaskScore("brier"),
            TaskScore("ece"),
            *(TaskScore(name, "bin", tests=_SHARED) for name in RELIABILITY),
        )

    def predictions(self) -> str:
        """As of `LearningTask`."""
        return "the probability of each finding; an image may have several findings, or none"


@tasks.register(REGRESSION)
@dataclass(frozen=True)
class Regression:
    """Each image has one number."""

    range: tuple[float, float]  # the least and the largest number; a prediction outside counts as the nearer one
    unit: Annotated[str, Field(max_length=20)] = ""  # of the numbers, as "years": for screens and reports

    client: ClassVar[str] = "protofed.client.tasks.regression:RegressionTask"

    def check(self, classes: int) -> None:
        """One number an image, and a range that is one."""
        if classes != 1:
            raise ConfigError(f"classes = {classes}: expected 1 for the task regression, whose model has one output")
        if not self.range[0] < self.range[1]:
            raise ConfigError(f"task.range = {list(self.range)}: expected the least number, then a larger one")
        if self.range[1] - self.range[0] < max(MIN_RANGE_WIDTH, MIN_RANGE_SHARE * max(map(abs, self.range))):
            raise ConfigError(
                f"task.range = {list(self.range)} is too narrow: float32, in which models compute, cannot tell its "
                "numbers apart. Subtract a constant from the labels, or take another unit"
            )

    def scores(self) -> tuple[TaskScore, ...]:
        """Mean absolute error, and the bias and limits of agreement of Bland and Altman, in the numbers' own unit."""
        width = self.range[1] - self.range[0]
        return (
            TaskScore("mae", high=width),
            TaskScore("bias", low=-width, high=width),
            # Bias and 1.96 standard deviations, which are at most the width.
            *(TaskScore(f"agreement_{end}", low=-3 * width, high=3 * width) for end in ("low", "high")),
        )

    def predictions(self) -> str:
        """As of `LearningTask`."""
        unit = f", in {self.unit}" if self.unit else ""
        return f"one number an image{unit}, from {self.range[0]:g} to {self.range[1]:g}"


def check_defined(method: str, declared: TaskNames, task: str) -> None:
    """Check that a method is defined for a run's task.

    Args:
        method: its name.
        declared: the tasks that it is defined for.
        task: the run's.

    Raises:
        ConfigError: it is not.
    """
    if declared != "any" and task not in declared:
        raise ConfigError(
            f"method '{method}' is defined for the task {', '.join(sorted(declared))}, and the run's task is '{task}'. "
            "Choose another method"
        )


def build_task(settings: NamedOptions, allowed: Container[str] | None = None) -> LearningTask:
    """The task of a recipe's `[task]`.

    Args:
        allowed: plug-ins that may be imported; None: those that `plugins.allow` has allowed in this process.

    Raises:
        ConfigError: as of `Registry.build`.
    """
    if settings.name in set(tasks):
        return _shipped(settings.model_dump_json())
    return tasks.build(settings.name, settings.options, allowed)


@lru_cache(maxsize=64)
def _shipped(settings: str) -> LearningTask:
    """A server asks for each report of scores."""
    chosen = NamedOptions.model_validate_json(settings)
    return tasks.build(chosen.name, chosen.options)
