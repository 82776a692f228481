"""FedPHP: a round by hand, its losses and schedule by hand, and its limit, FedAvg."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.half_rounds import LocalOf, model, parts
from tests.support.scripted_server import RUN, AgentHarness, work
from torch import nn

from protofed.client.method import mean_discrepancy, soft_labels
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedphp import FedPHPClient
from protofed.client.models.split import SplitModel, dump
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, Update, same_tensors

FIRST = model()
# Its logits, divided by T = 4, are (log 3, 0): soft labels (.75, .25).
OWN: Payload = {**FIRST, Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.array([4 * log(3), 0.0])}}


@pytest.fixture
def local(tiny: LocalOf) -> FitContext:
    """One example x = 2 of class 0, one step of lr = .1; the second of four rounds, half of the sites in each."""
    made = tiny([[2.0]], [0], round=2, rounds=4, lr=0.1)
    made.participation = 0.5
    return made


def test_a_round_by_hand(local: FitContext) -> None:
    """Of equal logits CE's gradient by the biases is (-.5, .5), R's (.5 - .75, .5 - .25); half of each."""
    local.client_state.update({**OWN, Part.PRIVATE: {"fits": np.array(1)}})
    sent = FedPHPClient(lam=0.5).fit(local, FIRST).payload
    assert sent.keys() == FedPHPClient.sends
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [0.0375, -0.0375], atol=1e-15)
    np.testing.assert_allclose(sent[Part.HEAD]["weight"], [[0.075], [-0.075]], atol=1e-15)
    # Two fits are expected of it, one is done: mu = .45.
    expected = 0.45 * OWN[Part.HEAD]["bias"] + 0.55 * sent[Part.HEAD]["bias"]
    np.testing.assert_allclose(local.client_state[Part.HEAD]["bias"], expected, atol=1e-15)
    assert local.client_state[Part.PRIVATE]["fits"] == 2


def test_soft_labels_by_hand() -> None:
    taught = torch.tensor([[4 * log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[0.0, 0.0], [log(3), 0.0]], dtype=torch.float64)
    # -(.75 + .25) log .5, and -(.5 log .75 + .5 log .25)
    expected = (log(2) - (log(0.75) + log(0.25)) / 2) / 2
    assert soft_labels(logits, taught, 4.0).item() == pytest.approx(expected, abs=1e-15)


def test_the_mean_discrepancy_of_two_features_by_hand() -> None:
    """Their squared distance is 4, the mean over both pairs 4: kernels exp(-4 / (4 * 1/4)) ... exp(-4 / (4 * 4))."""
    features, others = (torch.tensor([[value]], dtype=torch.float64) for value in (0.0, 2.0))
    kernels = exp(-4) + exp(-2) + exp(-1) + exp(-1 / 2) + exp(-1 / 4)
    assert mean_discrepancy(features, others).item() == pytest.approx(2 * 5 - 2 * kernels, abs=1e-7)


def test_the_mean_discrepancy_is_zero_of_the_same_features_and_its_gradient_finite() -> None:
    for batch in (torch.zeros(1, 3), torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.5, 0.0]])):
        features = batch.clone().requires_grad_()
        loss = mean_discrepancy(features, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == pytest.approx(0, abs=1e-6)
        assert features.grad is not None
        assert features.grad.isfinite().all()


GROWS = [(0, 0.5, 8, 0.0), (1, 0.5, 8, 0.225), (3, 0.5, 8, 0.675), (4, 0.5, 8, 0.9), (9, 0.5, 8, 0.9)]
ONCE = (1, 0.1, 5, 0.9)  # less than that in the mean


@pytest.mark.parametrize(("fits", "participation", "rounds", "mu"), [*GROWS, ONCE])
def test_what_is_inherited_grows(fits: int, participation: float, rounds: int, mu: float, local: FitContext) -> None:
    local.rounds, local.participation = rounds, participation
    local.client_state.update({**OWN, Part.PRIVATE: {"fits": np.array(fits)}})
    w = FedPHPClient().fit(local, FIRST).payload[Part.HEAD]["bias"]
    expected = mu * OWN[Part.HEAD]["bias"] + (1 - mu) * w
    np.testing.assert_allclose(local.client_state[Part.HEAD]["bias"], expected, atol=1e-12)


def test_how_often_a_site_may_expect_to_train_is_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    site = AgentHarness(recipe={**RUN, "federation": {**RUN["federation"], "participation": 0.25}})
    told, fit = [], FedAvgClient.fit

    def recorded(half: FedAvgClient, local: FitContext, received: Payload) -> Update:
        told.append(local.participation)
        return fit(half, local, received)

    monkeypatch.setattr(FedAvgClient, "fit", recorded)
    site.fit(1)
    work(site.agent(), 1)
    assert told == [0.25]


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_without_lambda_it_is_fedavg_to_the_bit(transfer: Any, tiny: LocalOf) -> None:
    plan = {"lr": 0.1, "epochs": 3, "batch_size": 2, "momentum": 0.9}
    php, avg = (tiny([[2.0], [1.0], [0.5]], [0, 1, 1], **plan) for _ in range(2))
    php.client_state.update({**OWN, Part.BODY: {"0.weight": np.array([[-2.0]])}})
    sent = FedPHPClient(transfer=transfer, lam=0.0).fit(php, FIRST).payload
    assert same_tensors(sent, FedAvgClient().fit(avg, FIRST).payload)


def test_features_are_drawn_to_the_inherited_ones(tiny: LocalOf) -> None:
    found = []
    for lam in (0.0, 0.5):
        local = tiny([[2.0], [1.0]], [0, 1], lr=0.1)
        local.client_state.update({**FIRST, Part.BODY: {"0.weight": np.array([[3.0]])}})
        sent = FedPHPClient(transfer="mmd", lam=lam).fit(local, FIRST).payload
        found.append(sent[Part.BODY]["0.weight"].item())
    assert found[0] == 1.0  # a head of zeros gives the body no gradient
    assert 1.0 < found[1] < 3.0


def test_a_site_predicts_with_what_it_inherited_once_it_has_it(local: FitContext) -> None:
    FedPHPClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: FIRST[Part.HEAD]})
    local.client_state.update(OWN)
    FedPHPClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: OWN[Part.HEAD]})


def test_statistics_are_inherited(local_of: LocalOf) -> None:
    torch.manual_seed(5)
    normed = SplitModel(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)).double()
    local = local_of(normed, [[2.0, 1.0], [0.5, -1.0]], [0, 1], 2, lr=0.1, epochs=3, rounds=2)
    first = parts(normed)
    local.client_state.update({**first, Part.PRIVATE: {"fits": np.array(1)}})
    sent = FedPHPClient().fit(local, first).payload[Part.BODY]
    kept = local.client_state[Part.BODY]
    assert sent["1.num_batches_tracked"] == 3
    assert kept["1.num_batches_tracked"].dtype == np.int64
    np.testing.assert_allclose(kept["1.running_mean"], 0.55 * sent["1.running_mean"], atol=1e-15)
