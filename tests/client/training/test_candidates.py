"""What other models lose on a site's examples, and how far they are; by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from protofed.client.data.site_data import Examples, SiteData
from protofed.client.models.split import SplitModel, dump
from protofed.client.status import TaskAbortedError
from protofed.client.training.candidates import WORST, distance, losses_of
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import Input, Plan
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload

TWO = Input(shape=(1, 1, 1))
SOME = Examples(torch.zeros(3, 1, 1, 1), torch.tensor([0, 0, 1]))


def model(*bias: float, mean: float = 0.0) -> Payload:
    """Of the image 0 its logits are the head's biases, in evaluation mode, whatever the running mean is."""
    body = {"1.running_mean": np.array([mean]), "1.running_var": np.ones(1), "1.num_batches_tracked": np.array(3)}
    return {Part.BODY: body, Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.array(bias)}}


@pytest.fixture
def local() -> FitContext:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1, affine=False))
    data = SiteData(SOME, SOME, TWO, 2)
    split = SplitModel(body, nn.Linear(1, 2)).float()
    return FitContext("ann", 1, 1, split, data, 2, Plan(), torch.Generator(), memory={})


def test_losses_are_means_over_the_examples_in_evaluation_mode(local: FitContext) -> None:
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    found = losses_of(local, [model(1.0, -1.0), model(0.0, 0.0, mean=5.0), model(-1.0, 1.0)], SOME)
    assert found == pytest.approx([(2 * right + wrong) / 3, math.log(2), (2 * wrong + right) / 3])
    assert dump(local.model.body)["1.num_batches_tracked"] == 3  # no training mode: nothing was counted


def test_batches_change_nothing(local: FitContext, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = losses_of(local, [model(1.0, -1.0)], SOME)
    monkeypatch.setattr("protofed.client.training.candidates.BATCH", 2)
    assert losses_of(local, [model(1.0, -1.0)], SOME) == pytest.approx(at_once)


def test_a_model_that_gives_no_numbers_is_the_worst(local: FitContext) -> None:
    found = losses_of(local, [model(np.nan, 0.0), model(3e38, -3e38), model(0.0, 0.0)], SOME)
    assert found == [WORST, WORST, pytest.approx(math.log(2))]


def test_a_model_of_another_shape_is_refused_and_an_aborted_task_ends(local: FitContext) -> None:
    with pytest.raises(CodecError):
        losses_of(local, [model(1.0, -1.0, 0.0)], SOME)

    def aborted() -> None:
        raise TaskAbortedError

    local.check = aborted
    with pytest.raises(TaskAbortedError):
        losses_of(local, [model(1.0, -1.0)], SOME)


def test_a_distance_is_over_parameters(local: FitContext) -> None:
    assert distance(local, model(3.0, 0.0), model(0.0, 4.0, mean=100.0)) == pytest.approx(5.0)
