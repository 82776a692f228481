"""FedProx: the release's steps, and its limit, FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.golden_nets import assert_near, stored, two_layers
from tests.support.half_rounds import GOLDEN, LocalOf, model

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedprox import FedProxClient
from protofed.common.payload import Part, same_tensors

FIRST = model()


def test_the_releases_steps(local_of: LocalOf) -> None:
    with np.load(GOLDEN / "fedprox_train_step.npz") as golden:
        plan = {"lr": golden["lr"].item(), "batch_size": golden["batch_size"].item()}
        local = local_of(two_layers(), golden["X"], golden["y"], 3, **plan)
        sent = FedProxClient(mu=golden["mu"].item()).fit(local, stored(golden, "init")).payload
        assert_near(sent, stored(golden, "after"))


def test_two_steps_by_hand(tiny: LocalOf) -> None:
    """X = 2 of class 0, lr .1, mu .5. The first step is FedAvg's: the bias moves by .05, the head's weight by .1.

    Before the second one w - w^t is (.05, -.05) of the bias, so it moves by .1 * .5 * .05 = .0025 less.
    """
    fits = []
    for mu in (0.0, 0.5):
        local = tiny([[2.0]], [0], lr=0.1, epochs=2)
        fits.append(FedProxClient(mu=mu).fit(local, FIRST).payload[Part.HEAD]["bias"])
    np.testing.assert_allclose(fits[0] - fits[1], [0.0025, -0.0025], atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_mu_it_is_fedavg_to_the_bit(momentum: float, tiny: LocalOf) -> None:
    plan = {"lr": 0.1, "epochs": 3, "batch_size": 1, "momentum": momentum}
    prox, avg = (tiny([[2.0], [1.0]], [0, 1], **plan) for _ in range(2))
    assert same_tensors(FedProxClient(mu=0).fit(prox, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload)
