"""`[data]`: where images come from, and how one source is cut into sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from protofed.common.partition import Partition, Whole
from protofed.common.table import Share, Table


class Data(Table):
    """Where images come from, and how one source is cut into sites; a simulation's, or one daemon's own."""

    source: Literal["digits", "spiral", "npz", "cifar10", "cifar100", "mnist", "fashion-mnist"]
    root: Path | None = None  # the folder of a torchvision set, or the .npz file
    download: bool = False  # torchvision sets only
    long_tail: Share | None = None  # imbalance factor: the rarest class's share of the most frequent one
    test_share: Share | None = None  # held out with equal class counts, for a source without a test set
    merge: bool = False  # the source's test set joins its training set: only sites have test sets then
    local_test_share: Annotated[float, Field(gt=0, lt=1)] | None = None  # held out of every site's own examples
    local_test: Literal["by-class"] | None = None  # the test set, each class divided among the sites that hold it
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    partition: Partition = Whole()

    @model_validator(mode="after")
    def _one_way_to_test(self) -> Data:
        if self.local_test is not None and self.local_test_share is not None:
            raise ValueError("expected local_test or local_test_share, not both")
        if self.merge and self.local_test_share is None:
            raise ValueError("merge leaves no test set; expected local_test_share beside it")
        if self.merge and self.test_share is not None:
            raise ValueError("merge takes in the test set; remove test_share")
        return self
