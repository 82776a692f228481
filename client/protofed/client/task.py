"""The client half of a task, in PyTorch: its protocol. `protofed.tasks` is what its author imports.

A `ClientTask` is a frozen dataclass of pure functions, made of the task's half without PyTorch, a `LearningTask` of
`protofed.common.config.tasks`. It says what targets are, what a model's outputs are trained to, and how far they agree
with the targets.

Targets are one tensor [N, ...] on the CPU, of any dtype. Outputs are the model's, [N, C].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import NamedOptions
from protofed.common.config.tasks import LearningTask, build_task
from protofed.common.errors import DataError
from protofed.common.plugins import import_object

if TYPE_CHECKING:  # images are read without PyTorch, too
    from torch import Tensor

CONSTANT = 0.05  # share of all examples that a nearly constant model may say something else of, and one more
NO_RULE = "the recipe has no task."  # of a label that an option of the recipe's [task] decides; the option follows
NO_NUMBER, NO_CELL, NO_COLUMN = "no number from", "expected 1, 0, -1 or nothing", "several label columns"
ADVICE = {  # by what stands in a label that has no target
    NO_RULE: "The recipe's task.uncertain and task.blank must say what -1 and blanks count as: ask the coordinator",
    NO_NUMBER: "Correct the numbers, or name them in data.ignore_labels",
    NO_CELL: "Correct the cells",
    NO_COLUMN: "Name one column in data.label_column",
}
Target: TypeAlias = int | float | tuple[float, ...]  # of one example: a row of the targets


class OwnLabel(NamedTuple):
    """What a site's own source says of one example.

    Attributes:
        text: the label, normalised; of several columns the one that has a 1.
        cells: of a table, what stands in its label columns; else the text alone.
        columns: the headings of these columns, if `data.label_column` names several; else none.
    """

    text: str
    cells: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class OwnNames(Protocol):
    """A site's own names of the run's classes or findings, from its settings."""

    @property
    def classes(self) -> Mapping[str, tuple[int, ...]]:
        """Own name -> the outputs that it stands for, 0..C-1."""

    @property
    def ignored(self) -> frozenset[str]:
        """Own names that `data.ignore_labels` lists."""

    @property
    def count(self) -> int:
        """C."""


class LeftOut(NamedTuple):
    """Why an example has no target.

    Attributes:
        label: what is wrong, or ignored, in words for the site's people.
        ignored: the settings say so; else the run refuses the site's data.
    """

    label: str
    ignored: bool = False


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's outputs on a test set, and what is true; on the CPU.

    Attributes:
        outputs: [N, C] float32, N > 0.
        targets: [N, ...].
    """

    outputs: Tensor
    targets: Tensor

    def of_some(self, rows: Tensor) -> Predictions:
        """Those of a mask [N] bool, which has one."""
        return Predictions(self.outputs[rows], self.targets[rows])


class ClientTask(Protocol):
    """The half of a task with PyTorch."""

    @property
    def options(self) -> LearningTask:
        """The half without PyTorch, of which this one was made."""

    def read(self, own: OwnLabel, names: OwnNames) -> Target | LeftOut:
        """The target of one example of a source with texts for labels, such as a table or folders."""

    def from_array(self, labels: NDArray[Any], classes: int) -> Tensor:
        """The targets [N, ...] of labels [N, ...] of a source of arrays. Values may be wrong still: see `valid`.

        Raises:
            DataError: they have a dtype or shape that no targets have.
        """

    def valid(self, targets: Tensor, classes: int) -> Tensor:
        """Which targets [N, ...] a model with C outputs can learn: [N] bool."""

    def expected(self, classes: int) -> str:
        """What targets must be, for the error about those that are not `valid`."""

    def strata(self, targets: Tensor) -> Tensor:
        """Targets that are much alike, by a number: [N] int64 from 0. Each gives its share of a test set or a site."""

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """How many examples each output learns to say something from: [C] int64."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss [] of outputs [B, C]: a mean over examples, each of whose terms depends on its example alone.

        So gradients of single examples can be clipped, and a batch can be computed in parts.
        """

    def predict(self, outputs: Tensor) -> Tensor:
        """What people read in place of outputs [N, C], such as probabilities: [N, C]."""

    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        """The values of `LearningTask.scores` on one test set; one that is not defined is left out, never 0 or NaN.

        Args:
            test: of `common.protocol.scores.TESTS`.
            trained_on: the targets of the site's own training examples, [N, ...]; empty at an evaluator.
        """

    def is_nearly_constant(self, outputs: Tensor) -> bool:
        """Whether a model of these outputs [N, C] says much the same of nearly all examples.

        The scores of such a model tell what a server that chose it wants to know of the targets.
        """

    def can_be_asked(self, targets: Tensor) -> bool:
        """Whether scores on these targets [N, ...], N > 0, may leave: else honest models would often be constant."""


def build_client_task(settings: NamedOptions, allowed: frozenset[str] | None = None) -> ClientTask:
    """The client half of a recipe's `[task]`.

    Args:
        allowed: as of `build_task`.

    Raises:
        ConfigError: as of `build_task`; or the task's client half cannot be imported.
    """
    options = build_task(settings, allowed)
    made = import_object(options.client, f"task '{settings.name}'")
    return cast("ClientTask", made(options))


def as_target(value: object) -> Target:
    """A label of a dataset's item as a target.

    Raises:
        DataError: it is neither a number nor a row of numbers.
    """
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.ndim > 1 or not array.size or array.dtype.kind not in "iuf":
        raise DataError("expected a number, or a row of numbers")
    if array.size > 1:
        return tuple(float(number) for number in array)
    return float(array.item()) if array.dtype.kind == "f" else int(array.item())
