"""The recipe chooses the loss of class logits, whatever the method; by default it is the cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.half_rounds import Linear, LocalOf, parts
from tests.support.round_contexts import round_context
from torch.nn.functional import cross_entropy

from protofed.client.method import client_methods, supervised
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedrod import FedRODClient
from protofed.client.training.context import FitContext
from protofed.client.training.losses import balanced_softmax, logit_adjusted
from protofed.common import codec
from protofed.common.payload import Part, same_tensors
from protofed.server.method import server_methods

LABELS = [0, 0, 0, 1, 0]  # of three classes


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Callable[..., FitContext]:
    """One with four examples of class 0, one of class 1 and none of class 2."""

    def make(**plan: Any) -> FitContext:
        features = [[1.0, 0.5], [2.0, -1.0], [0.5, 0.25], [-1.0, 1.0], [0.0, 2.0]]
        model = linear([[1.0, 0.0], [0.5, 1.0]], 3)
        return local_of(model, features, LABELS, 3, lr=0.1, batch_size=2, rounds=3, **plan)

    return make


def test_the_verb_is_the_loss_that_the_plan_names(site: Callable[..., FitContext]) -> None:
    logits, labels = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]]), torch.tensor([0, 1])
    pi = torch.tensor([0.8, 0.2, 0.0])
    expected = {
        "cross-entropy": cross_entropy(logits, labels),
        "balanced-softmax": balanced_softmax(logits, labels, pi),
        "logit-adjustment": logit_adjusted(logits, labels, pi, 1.0),
    }
    for loss, value in expected.items():
        assert torch.equal(supervised(site(loss=loss), logits, labels), value)
    half = supervised(site(loss="logit-adjustment", tau=0.5), logits, labels)
    assert half == logit_adjusted(logits, labels, pi, 0.5) != expected["logit-adjustment"]


def test_a_site_counts_its_labels_once(site: Callable[..., FitContext], monkeypatch: pytest.MonkeyPatch) -> None:
    counted, bincount = [], torch.Tensor.bincount

    def counting(labels: torch.Tensor, **given: Any) -> torch.Tensor:
        counted.append(len(labels))
        return bincount(labels, **given)

    monkeypatch.setattr(torch.Tensor, "bincount", counting)
    local = site(loss="balanced-softmax", epochs=3)
    FedAvgClient().fit(local, parts(local.model))
    assert counted == [len(LABELS)]


@pytest.mark.parametrize("method", sorted(client_methods))
def test_no_method_trains_past_it(method: str, site: Callable[..., FitContext]) -> None:
    """A key of a recipe that a method did not look at would be a lie in every table."""
    server, client = server_methods.build(method, {}), client_methods.build(method, {})
    found = []
    for plan in ({}, {"loss": "balanced-softmax"}, {"loss": "logit-adjustment", "tau": 2.0}):
        local = site(**plan)
        update = client.fit(local, server.broadcast(server.init(parts(local.model), round_context(3)), "ann"))
        found.append([codec.encode(some) for some in (update.payload, local.client_state, parts(local.model))])
    assert found[0] != found[1] != found[2] != found[0]


def test_fedavg_by_the_balanced_softmax_is_fedrods_generic_model(site: Callable[..., FitContext]) -> None:
    avg, rod = site(loss="balanced-softmax", epochs=2), site(epochs=2)
    received = parts(avg.model)
    sent, generic = FedAvgClient().fit(avg, received).payload, FedRODClient().fit(rod, received).payload
    assert same_tensors(sent, generic)


def test_fedrods_generic_head_has_its_own_loss_whatever_the_plan_says(site: Callable[..., FitContext]) -> None:
    locals_ = [site(), site(loss="logit-adjustment", tau=3.0)]
    received = parts(locals_[0].model)
    plain, adjusted = (FedRODClient().fit(local, received).payload for local in locals_)
    assert same_tensors(plain, adjusted)
    own, other = (local.client_state[Part.HEAD]["bias"] for local in locals_)
    assert not np.array_equal(own, other)
