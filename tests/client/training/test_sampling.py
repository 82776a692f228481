"""Whatever the method, its epochs are drawn as the plan says; the data layer's own tests say how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.half_rounds import parts
from tests.support.method_facts import METHODS, brief
from tests.support.normed_model import seeded
from tests.support.round_contexts import round_context

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import Batch, SiteData
from protofed.client.method import client_methods
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import Plan, Sampling
from protofed.common.config.tables import Input
from protofed.server.method import server_methods

SMALL = Input(shape=(1, 2, 2))
HELD = torch.tensor([0] * 40 + [1] * 10)  # labels; of class 2 there are none


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The labels of each epoch that a method trains."""
    drawn: list[list[int]] = []
    batches = SiteData.batches

    def noted(data: SiteData, *given: Any, **named: Any) -> Iterator[Batch]:
        drawn.append(labels := [])
        for batch in batches(data, *given, **named):
            labels.extend(batch[1].tolist())
            yield batch

    monkeypatch.setattr(SiteData, "batches", noted)
    return drawn


def counts(method: str, sampling: Sampling, epochs: list[list[int]]) -> set[tuple[int, ...]]:
    """How many examples of each class the epochs of a fit have."""
    images = torch.rand(len(HELD), 1, 2, 2, generator=torch.Generator().manual_seed(0))
    examples, model = Examples(images, HELD), seeded(SMALL, 3)
    plan, rng = Plan(epochs=2, batch_size=10, sampling=sampling), torch.Generator().manual_seed(0)
    local = FitContext("ann", 1, 1, model, SiteData(examples, examples, SMALL, 3), 3, plan, rng, client_state={})
    server = server_methods.build(method, {})
    state = server.init(parts(model), round_context(3))
    client_methods.build(method, brief(method)).fit(local, server.broadcast(state, "ann"))
    assert len(epochs) >= 2
    return {tuple(torch.tensor(labels).bincount(minlength=3).tolist()) for labels in epochs}


@pytest.mark.parametrize("method", METHODS)
def test_every_epoch_has_each_class_as_often_where_the_plan_says_so(method: str, epochs: list[list[int]]) -> None:
    for zero, one, two in counts(method, "class-balanced", epochs):
        assert (zero, two) == (one, 0)


@pytest.mark.parametrize("method", METHODS)
def test_else_every_epoch_is_of_every_example(method: str, epochs: list[list[int]]) -> None:
    for zero, one, two in counts(method, "shuffled", epochs):
        assert (zero, two) == (4 * one, 0)
