"""FedBABU: a round by hand, and the site's own model."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.half_rounds import LocalOf, parts
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedbabu import FedBABUClient
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, same_tensors
from protofed.server.methods.shared_body import FedBABUServer

FIRST: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0]])},
    Part.HEAD: {"weight": np.array([[0.5], [0.5]]), "bias": np.array([0.0, 0.0])},
}
TILTED: Payload = {**FIRST, Part.HEAD: {"weight": np.array([[3.0], [1.0]]), "bias": np.array([-4.0, 0.0])}}


@pytest.fixture
def local(tiny: LocalOf) -> FitContext:
    """One example x = 2 of class 0, one step of lr = .1."""
    return tiny([[2.0]], [0], lr=0.1)


def test_the_body_is_trained_for_the_first_head(local: FitContext) -> None:
    """Equal logits of the head (3, 1): the gradient of z is -.5 * 3 + .5 * 1 = -1, of the body's weight twice that."""
    sent = FedBABUClient(finetune_epochs=0).fit(local, TILTED).payload
    assert sent.keys() == FedBABUClient.sends
    assert local.sent_model == sent  # in which the policy looks for what few images teach, not in the fine-tuned one
    np.testing.assert_allclose(sent[Part.BODY]["0.weight"], [[1.2]], atol=1e-15)
    assert same_tensors(parts(local.model), TILTED), "without fine-tuning it is the global model"


def test_the_own_model_is_the_received_one_wholly_trained(tiny: LocalOf) -> None:
    ours, whole = (tiny([[2.0]], [0], lr=0.1, epochs=2) for _ in range(2))
    FedBABUClient(finetune_epochs=2).fit(ours, TILTED)
    expected = FedAvgClient().fit(whole, TILTED).payload
    assert same_tensors(parts(ours.model), expected)


def test_the_global_model_has_the_first_head(local: FitContext) -> None:
    assert FedBABUServer.global_model
    state = FedBABUServer().aggregate(FIRST, [FedBABUClient().fit(local, FIRST)], round_context())
    assert same_tensors({Part.HEAD: state[Part.HEAD]}, {Part.HEAD: FIRST[Part.HEAD]})
