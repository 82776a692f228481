"""FedNova: two sites of 1 and 3 steps by hand, the lengths of the paper, and its limit, FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import LocalOf, parts
from tests.support.half_rounds import model as first_model
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fednova import FedNovaClient
from protofed.client.methods.fedprox import FedProxClient
from protofed.client.training.progress import sgd_length
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.fednova import FedNovaServer

FIRST = first_model()


def model(weight: float, buffer: float = 0.0) -> Payload:
    statistics = {"bn.running_var": np.array([buffer]), "bn.num_batches_tracked": np.array(3)}
    return {Part.BODY: {"bn.weight": np.array([float(weight)]), **statistics}, Part.HEAD: {}}


def steps(number: float) -> Payload:
    return {Part.STEPS: {"steps": np.array(number, np.float32)}}


def test_two_sites_of_1_and_3_steps_by_hand() -> None:
    """From x = 10: one step of 1, and three that come to 6. d = 1 and 2, tau_eff = 2: 10 - 2 * 1.5; FedAvg has 6.5."""
    updates = [
        Update("ann", {**model(10 - 1, 0.5), **steps(1)}, weight=30.0),
        Update("bob", {**model(10 - 2, 1.5), **steps(3)}, weight=10.0),
    ]
    new = FedNovaServer().aggregate(model(10.0), updates, round_context())
    assert new.keys() == {Part.BODY, Part.HEAD}
    assert new[Part.BODY]["bn.weight"] == 7.0
    assert new[Part.BODY]["bn.running_var"] == 1.0  # the mean: no steps are in it
    assert new[Part.BODY]["bn.num_batches_tracked"] == 3
    by_examples = FedNovaServer(weighting="examples").aggregate(model(10.0), updates, round_context())
    assert by_examples[Part.BODY]["bn.weight"] == 10 - (3 * 1 + 3) / 4 * (3 * 1 + 2) / 4


@pytest.mark.parametrize(
    ("plan", "length"), [({}, 3.0), ({"momentum": 0.5}, 1 + 1.5 + 1.75), ({"momentum": 0.5, "optimizer": "adam"}, 3.0)]
)
def test_a_site_sends_its_model_after_one_mean_step(plan: dict[str, Any], length: float, tiny: LocalOf) -> None:
    three = [[2.0], [1.0], [0.5]]
    nova, avg = (tiny(three, [0, 1, 0], lr=0.1, batch_size=1, **plan) for _ in range(2))
    sent, y = FedNovaClient().fit(nova, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload
    assert sent.keys() == FedNovaClient.sends
    assert sent[Part.STEPS]["steps"] == np.float32(length)
    assert same_tensors(parts(nova.model), y), "the site's own is the one that it trained"
    for part, tensors in FIRST.items():
        for name, x in tensors.items():
            np.testing.assert_allclose(sent[part][name], x - (x - y[part][name]) / length, rtol=0, atol=1e-15)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_lengths_are_the_papers(count: int) -> None:
    rho, alpha = 0.9, 0.05
    assert sgd_length(count, 0.0, 0.0) == count
    momentum = (count - rho * (1 - rho**count) / (1 - rho)) / (1 - rho)
    assert sgd_length(count, rho, 0.0) == pytest.approx(momentum, rel=1e-12)
    assert sgd_length(count, 0.0, alpha) == pytest.approx((1 - (1 - alpha) ** count) / alpha, rel=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_of_equal_steps_it_is_fedavg(mu: float, tiny: LocalOf) -> None:
    plan = {"lr": 0.1, "epochs": 2, "batch_size": 1, "momentum": 0.9}
    nova, avg = [], []
    for x, label in ((2.0, 0), (1.0, 1)):
        sites = [tiny([[x], [0.5]], [label, 1], **plan) for _ in range(2)]
        nova.append(FedNovaClient(mu=mu).fit(sites[0], FIRST))
        avg.append(FedProxClient(mu=mu).fit(sites[1], FIRST))
    new = FedNovaServer().aggregate(FIRST, nova, round_context())
    mean = FedAvgServer().aggregate(FIRST, avg, round_context())
    for part, tensors in mean.items():
        for name, array in tensors.items():
            np.testing.assert_allclose(new[part][name], array, rtol=0, atol=1e-7)  # steps are sent in float32
