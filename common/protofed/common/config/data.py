"""`[data]`: where images come from, and how one source is cut into sites."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field, model_validator

from protofed.common.config.partition import Partition, Whole
from protofed.common.config.table import Share, StrictModel
from protofed.common.errors import short, unknown
from protofed.common.plugins import PluginKind, is_plugin

Source: TypeAlias = Literal[
    "digits", "spiral", "npz", "folder", "manifest", "medmnist", "cifar10", "cifar100", "mnist", "fashion-mnist"
]
SOURCES: tuple[str, ...] = get_args(Source)
_GROUPS = {"manifest": "add a column `group`", "npz": "add arrays train_group and test_group"}


def common_folder() -> Path | None:
    """What `PROTOFED_DATA` names, if it names one."""
    named = os.environ.get("PROTOFED_DATA")
    return Path(named) if named else None


def _known(source: str) -> str:
    if source not in SOURCES and not is_plugin(PluginKind.DATASET, source):
        raise ValueError(str(unknown("source", source, SOURCES)))
    return source


class Data(StrictModel):
    """Where images come from, and how one source is cut into sites; a simulation's, or one daemon's own."""

    source: Annotated[str, AfterValidator(_known)]  # one of `Source`, or a plug-in
    options: Mapping[str, Any] = {}  # of a source that is a plug-in, for it to read
    root: Path | None = None  # the folder of images or of a library's set; the file of an npz or a manifest (.csv)
    dataset: str | None = None  # medmnist only: which of its sets, as dermamnist or dermamnist_64
    download: bool = False  # torchvision's sets and medmnist's
    label_map: Mapping[str, str] = {}  # the site's own names, or numbers as text -> the run's; equal ones need no entry
    ignore_labels: frozenset[str] = frozenset()  # own names whose images are left out
    max_unreadable_fraction: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # share of image files that may be left out as unreadable
    )
    group_pattern: str | None = (
        None  # folder only: regex over the path below root; what its (group) matches stays together
    )
    preprocessing_digest: Annotated[str, Field(min_length=1)] | None = (
        None  # digest that a run's must equal, or it is refused
    )
    long_tail: Share | None = None  # imbalance factor: the rarest class's share of the most frequent one
    test_fraction: Share | None = None  # held out with equal class counts, for a source without a test set
    merge_test_into_train: bool = False  # the source's test set joins its training set: only sites have test sets then
    local_test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None  # held out of every site's own examples
    local_test: Literal["by-class"] | None = None  # the test set, each class divided among the sites that hold it
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the partition and of what is held out
    partition: Partition = Whole()  # how a simulation, or a daemon's `partition_index`, cuts the source into sites

    @property
    def place(self) -> Path | None:
        """The root where it is: a relative one in the folder that `PROTOFED_DATA` names, if it names one."""
        common = common_folder()
        return common / self.root if common is not None and self.root is not None else self.root

    @model_validator(mode="after")
    def _of_its_source(self) -> Data:
        if self.options and self.source in SOURCES:
            raise ValueError(f"source {self.source} has no options; remove them")
        if (self.dataset is not None) != (self.source == "medmnist"):
            raise ValueError("expected dataset with source medmnist, and with no other")
        if self.group_pattern is not None and self.source != "folder":
            raise ValueError(
                f"group_pattern is of source folder; for source {self.source} {_GROUPS.get(self.source, 'remove it')}"
            )
        if self.group_pattern is not None and _groups_of(self.group_pattern) != 1:
            raise ValueError("group_pattern: expected a regular expression with one (group) in it, as '/(P[0-9]+)_'")
        if both := sorted(self.ignore_labels & set(self.label_map)):
            raise ValueError(f"'{short(both[0])}' is in label_map and in ignore_labels; expected it in one of them")
        return self

    @model_validator(mode="after")
    def _one_way_to_test(self) -> Data:
        if self.local_test is not None and self.local_test_fraction is not None:
            raise ValueError("expected local_test or local_test_fraction, not both")
        if self.merge_test_into_train and self.local_test_fraction is None:
            raise ValueError("merge_test_into_train leaves no test set; expected local_test_fraction beside it")
        if self.merge_test_into_train and self.test_fraction is not None:
            raise ValueError("merge_test_into_train takes in the test set; remove test_fraction")
        return self


def _groups_of(pattern: str) -> int | None:
    """How many; None: it is no regular expression."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return None
