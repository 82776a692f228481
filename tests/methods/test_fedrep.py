"""FedRep: the release's round, and what stays at the site."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.golden_nets import assert_near, stored, two_layers
from tests.support.half_rounds import GOLDEN, LocalOf, model

from protofed.client.methods.fedrep import FedRepClient
from protofed.client.models.split import dump
from protofed.common.payload import Part

FIRST = model()


def test_the_releases_round(local_of: LocalOf) -> None:
    with np.load(GOLDEN / "fedrep_train_step.npz") as golden:
        epochs, tau_h = golden["body_epochs"].item(), golden["head_epochs"].item()
        plan = {"lr": golden["lr"].item(), "batch_size": golden["batch_size"].item(), "epochs": epochs}
        local = local_of(two_layers(), golden["X"], golden["y"], 3, **plan)
        sent = FedRepClient(head_epochs=tau_h).fit(local, stored(golden, "init")).payload
        assert_near({**sent, Part.HEAD: local.client_state[Part.HEAD]}, stored(golden, "after"))


def test_a_round_by_hand(tiny: LocalOf) -> None:
    """One example x = 2 of class 0, lr .1: from equal logits the head's step gives weights +-.1, biases +-.05.

    Then the logits are +-.25, the gradient of the feature is -(1 - p) (.1 + .1), that of the body's weight twice it.
    """
    local = tiny([[2.0]], [0], lr=0.1)
    sent = FedRepClient(head_epochs=1).fit(local, FIRST).payload
    assert sent.keys() == FedRepClient.sends
    np.testing.assert_allclose(local.client_state[Part.HEAD]["weight"], [[0.1], [-0.1]], atol=1e-15)
    miss = 1 - 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(sent[Part.BODY]["0.weight"], [[1 + 0.1 * miss * 0.2 * 2]], atol=1e-15)


def test_a_site_predicts_with_the_newest_body_and_its_own_head(tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0], lr=0.1)
    FedRepClient().load_global(local, FIRST)
    np.testing.assert_array_equal(dump(local.model.head)["weight"], FIRST[Part.HEAD]["weight"])
    FedRepClient(head_epochs=1).fit(local, FIRST)
    FedRepClient().load_global(local, {**FIRST, Part.BODY: {"0.weight": np.array([[7.0]])}})
    np.testing.assert_array_equal(dump(local.model.body)["0.weight"], [[7.0]])
    np.testing.assert_allclose(dump(local.model.head)["weight"], [[0.1], [-0.1]], atol=1e-15)


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_of_the_two_trains_its_own_epochs(epochs: int, tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0], lr=0.1, epochs=epochs)
    FedRepClient(head_epochs=2).fit(local, FIRST)
    assert (local.train_calls, local.fit_progress.epochs) == (2, epochs)
