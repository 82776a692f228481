"""A recipe's table `[evaluation]`: which scores are taken beside those of every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field

from protofed.common.config.tables import StrictModel
from protofed.common.protocol.scores import name_ends

MAX_CLASSES = 100_000
Order = Annotated[tuple[int, ...], Field(max_length=MAX_CLASSES)]
SPECIFICITY = 0.9
# Keys of [evaluation] that say nothing of other tasks than classification.
SubgroupName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_<>+-][A-Za-z0-9_ .<>+-]{0,39}$")]
Subgroups: TypeAlias = Annotated[tuple[SubgroupName, ...], Field(min_length=1, max_length=20)]


class Evaluation(StrictModel):
    """Scores in addition to those that every run has."""

    frequency_groups: bool = (
        False  # accuracy on many (the first 20 % of classes), medium (the next 30 %) and few (the rest)
    )
    probabilities: bool = False  # area under the ROC curve, and calibration error: seconds more at a daemon's start
    personal_test_images: Annotated[int, Field(ge=2)] | None = (
        None  # images of the shared test set for scores of sites' own models: a stratified sample; None: all
    )
    clinical: Annotated[bool, Field(exclude_if=lambda on: not on)] = (
        False  # of classes: area under the ROC curve, average precision and sensitivity of each, and the Brier score
    )
    specificity: Annotated[float, Field(gt=0, lt=1, exclude_if=lambda share: share == SPECIFICITY)] = (
        SPECIFICITY  # least specificity at which sensitivity is taken
    )
    intervals: Annotated[int | None, Field(ge=200, le=10_000, exclude_if=lambda number: number is None)] = (
        None  # resamples of an evaluator's test set for 95 % bootstrap intervals of its scores; None: no intervals
    )
    subgroups: Annotated[
        Mapping[SubgroupName, Subgroups], Field(max_length=8, exclude_if=lambda named: not named)
    ] = {}  # an evaluator's scores by the values of a column of its manifest, as { sex = ["F", "M"] }
    class_order: Order = ()  # the classes from the most frequent to the rarest; empty: 0, 1, 2, … as a long tail

    @property
    def switched_on(self) -> frozenset[str]:
        """The keys that are true: each of them gives scores that other runs have not."""
        return frozenset(key for key, value in self if value is True)

    @property
    def subgroup_names(self) -> list[str]:
        """Each as `sex=F`, in the recipe's order."""
        return [f"{column}={value}" for column, values in self.subgroups.items() for value in values]

    @property
    def qualifiers(self) -> frozenset[str]:
        """What an evaluator's scores may have behind QUALIFIED: ends of intervals, and subgroups as `sex=F`."""
        of_all = ["", *self.subgroup_names]
        ends = [end for subgroup in of_all for end in name_ends(subgroup)] if self.intervals else []
        return frozenset([*of_all[1:], *ends])
