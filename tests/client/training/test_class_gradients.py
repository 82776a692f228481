"""Gradients by class are those of autograd, over all batches; models whose head is not linear are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from protofed.client.data.site_data import Examples, SiteData
from protofed.client.models.heads import CosineHead
from protofed.client.models.split import SplitModel
from protofed.client.training.class_gradients import BATCH, class_gradients
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import Input, Plan
from protofed.common.errors import ConfigError

CLASSES, WIDE = 4, 3


def site(labels: list[int], head: nn.Module) -> FitContext:
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(len(labels), 1, 2, 2, generator=draw)
    data = SiteData(
        (examples := Examples(images, torch.tensor(labels))), examples, Input(shape=(1, 2, 2)), classes=CLASSES
    )
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.5))
    model = SplitModel(body, head).train()
    return FitContext("ann", 1, 1, model, data, CLASSES, Plan(), torch.Generator().manual_seed(0), memory={})


@pytest.mark.parametrize("bias", [False, True])
def test_they_are_those_of_autograd_in_evaluation_mode(bias: bool) -> None:
    local = site([0, 2, 0, 2, 2, 3] * BATCH, nn.Linear(WIDE, CLASSES, bias=bias))
    buffers = {name: buffer.clone() for name, buffer in local.model.named_buffers()}
    random = local.rng.get_state(), torch.get_rng_state()
    made = class_gradients(local)
    assert made.keys() == {0, 2, 3}  # class 1 is not there
    for c, gradient in made.items():
        ((images, labels),) = local.data.ordered(
            local.data.train.take((local.data.train.labels == c).nonzero()[:, 0]), 9**9
        )
        expected = torch.autograd.grad(cross_entropy(local.model(images), labels), list(local.model.head.parameters()))
        torch.testing.assert_close(gradient, torch.column_stack(list(expected)), atol=1e-6, rtol=1e-5)
    for name, buffer in local.model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert all(
        torch.equal(*states) for states in zip(random, (local.rng.get_state(), torch.get_rng_state()), strict=True)
    )


def test_a_task_that_nobody_waits_for_ends_between_batches() -> None:
    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    local = site([0], nn.Linear(WIDE, CLASSES))
    local.check = stop
    with pytest.raises(StopError):
        class_gradients(local)


def test_a_site_without_examples_has_none() -> None:
    local = site([0], nn.Linear(WIDE, CLASSES))
    local.data = SiteData.for_scoring(local.data.test, local.data.input, CLASSES)
    assert class_gradients(local) == {}


def test_bfloat16_is_summed_in_float32() -> None:
    local = site([0] * 3, nn.Linear(WIDE, CLASSES))
    local.model.to(torch.bfloat16)
    local.data = SiteData(local.data.train, local.data.test, Input(shape=(1, 2, 2)), classes=CLASSES)
    body = local.model.body
    local.model.body = nn.Sequential(_Cast(), body)
    assert class_gradients(local)[0].dtype == torch.float32


class _Cast(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [B, ...]."""
        return images.to(torch.bfloat16)


def test_a_head_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ConfigError, match="CosineHead"):
        class_gradients(site([0], CosineHead(torch.eye(CLASSES, WIDE), 1.0, fixed=True)))
