"""One site by hand: exact features in double precision, batches in their own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import Batch, SiteData
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import AugmentationSetting, Plan, Sampling
from protofed.common.config.tables import Input


@dataclass(frozen=True, eq=False)
class Exact(SiteData):
    """Every epoch is `features` [N, D], float64, in consecutive slices, as in the golden files."""

    features: Tensor = field(default_factory=lambda: torch.empty(0))

    def batches(
        self,
        size: int,
        rng: torch.Generator,
        augmentation: AugmentationSetting = "none",
        drop_last: bool = False,
        sampling: Sampling = "shuffled",
    ) -> Iterator[Batch]:
        return self.ordered(self.train, size)

    def ordered(self, examples: Examples, size: int) -> Iterator[Batch]:
        assert examples is self.train
        return zip(torch.split(self.features, size), torch.split(examples.labels, size), strict=True)


@pytest.fixture
def local_of() -> Callable[..., FitContext]:
    """A site in one round: `model` on these features and labels, under a plan of these keys."""

    def make(
        model: SplitModel, features: Any, labels: Any, classes: int, *, round: int = 1, rounds: int = 1, **plan: Any
    ) -> FitContext:
        x, y = (torch.from_numpy(np.array(values)) for values in (features, labels))
        examples = Examples(torch.zeros(len(y), 1, 1, 1), y)
        data = Exact(examples, examples, Input(shape=(1, 1, 1)), classes, features=x.double())
        rng = torch.Generator().manual_seed(0)
        return FitContext("ann", round, rounds, model, data, classes, Plan(**plan), rng, client_state={})

    return make


@pytest.fixture
def linear() -> Callable[..., SplitModel]:
    """A body without bias, features = weight @ x, and a linear head of zeros; all in double precision."""

    def make(weight: Any, classes: int, *after: nn.Module) -> SplitModel:
        wide, narrow = np.shape(weight)[1], np.shape(weight)[0]
        body = nn.Sequential(nn.Linear(wide, narrow, bias=False), *after)
        head = nn.Linear(narrow, classes)
        model = SplitModel(body, head).double()
        with torch.no_grad():
            body.get_parameter("0.weight").copy_(torch.as_tensor(weight))
            for parameter in head.parameters():
                parameter.zero_()
        return model

    return make


@pytest.fixture
def tiny(local_of: Callable[..., FitContext], linear: Callable[..., SplitModel]) -> Callable[..., FitContext]:
    """A site of two classes whose body is one weight, another one's until something is loaded."""
    return lambda features, labels, **plan: local_of(linear([[9.0]], 2), features, labels, 2, **plan)
