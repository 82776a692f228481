"""FedProx: the release's steps, and its limit, FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.golden_nets import assert_near, stored, two_layers

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedprox import FedProxClient
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, same_tensors

LocalOf = Callable[..., FitContext]
Linear = Callable[..., SplitModel]

GOLDEN = Path(__file__).parents[1] / "golden" / "fedprox_train_step.npz"
FIRST: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0]])},
    Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.zeros(2)},
}


def test_the_releases_steps(local_of: LocalOf) -> None:
    with np.load(GOLDEN) as golden:
        plan = {"lr": golden["lr"].item(), "batch_size": golden["batch_size"].item()}
        local = local_of(two_layers(), golden["X"], golden["y"], 3, **plan)
        sent = FedProxClient(mu=golden["mu"].item()).fit(local, stored(golden, "init")).payload
        assert_near(sent, stored(golden, "after"))


def test_two_steps_by_hand(local_of: LocalOf, linear: Linear) -> None:
    """X = 2 of class 0, lr .1, mu .5. The first step is FedAvg's: the bias moves by .05, the head's weight by .1.

    Before the second one w - w^t is (.05, -.05) of the bias, so it moves by .1 * .5 * .05 = .0025 less.
    """
    fits = []
    for mu in (0.0, 0.5):
        local = local_of(linear([[9.0]], 2), [[2.0]], [0], 2, lr=0.1, epochs=2)
        fits.append(FedProxClient(mu=mu).fit(local, FIRST).payload[Part.HEAD]["bias"])
    np.testing.assert_allclose(fits[0] - fits[1], [0.0025, -0.0025], atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_mu_it_is_fedavg_to_the_bit(momentum: float, local_of: LocalOf, linear: Linear) -> None:
    plan = {"lr": 0.1, "epochs": 3, "batch_size": 1, "momentum": momentum}
    prox, avg = (local_of(linear([[9.0]], 2), [[2.0], [1.0]], [0, 1], 2, **plan) for _ in range(2))
    assert same_tensors(FedProxClient(mu=0).fit(prox, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload)
