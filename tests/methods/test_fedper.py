"""FedPer: body and head step together, and the head stays."""

from __future__ import annotations

import numpy as np
from tests.support.half_rounds import LocalOf
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedper import FedPerClient
from protofed.client.models.split import dump
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.shared_body import SharedBodyServer

FIRST: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0]])},
    Part.HEAD: {"weight": np.array([[0.5], [-0.5]]), "bias": np.zeros(2)},
}


def test_the_first_round_is_fedavgs_without_the_head(tiny: LocalOf) -> None:
    per, avg = (tiny([[2.0], [1.0]], [0, 1], lr=0.1, epochs=3) for _ in range(2))
    sent, whole = FedPerClient().fit(per, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload
    assert same_tensors(sent, {Part.BODY: whole[Part.BODY]})
    assert same_tensors(per.client_state, {Part.HEAD: whole[Part.HEAD]})


def test_a_step_by_hand_from_the_sites_own_head(tiny: LocalOf) -> None:
    """X = 2 of class 0 with equal logits, lr .1: the gradient of z is sum_c (p_c - y_c) h_c = -.5 * 3 + .5 * 1 = -1."""
    local = tiny([[2.0]], [0], lr=0.1)
    local.client_state[Part.HEAD] = {"weight": np.array([[3.0], [1.0]]), "bias": np.array([-4.0, 0.0])}  # logits 2, 2
    sent = FedPerClient().fit(local, FIRST).payload[Part.BODY]
    np.testing.assert_allclose(sent["0.weight"], [[1 + 0.1 * 2]], atol=1e-15)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["weight"], [[3.1], [0.9]], atol=1e-15)


def test_the_server_averages_bodies_and_keeps_the_first_head() -> None:
    half = SharedBodyServer()
    bodies = ({"0.weight": np.array([[value]])} for value in (2.0, 6.0))
    state = half.aggregate(
        FIRST, [Update(site, {Part.BODY: body}) for site, body in zip("ab", bodies, strict=True)], round_context()
    )
    assert same_tensors(state, {Part.BODY: {"0.weight": np.array([[4.0]])}, Part.HEAD: FIRST[Part.HEAD]})
    assert {spec.part for spec in half.expects(state).required} == {Part.BODY}
    assert not half.global_model


def test_a_site_that_comes_new_predicts_with_the_first_head(tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0])
    FedPerClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: FIRST[Part.HEAD]})
