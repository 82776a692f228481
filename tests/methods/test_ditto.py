"""Ditto: a round by hand, the release's step, and the limits of lambda."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.half_rounds import GOLDEN, LocalOf, model

from protofed.client.method import proximal
from protofed.client.methods.ditto import DittoClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import dump
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, same_tensors

FIRST = model()
OWN: Payload = {**FIRST, Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.ones(2)}}  # v_k: logits are equal, too


@pytest.fixture
def local(tiny: LocalOf) -> FitContext:
    """One example x = 2 of class 0, one step of lr = .1.

    Of equal logits p = (.5, .5): the head's weights move by -.1 (p - y) 2 = (.1, -.1), its biases by (.05, -.05), the
    body's by 0.
    """
    return tiny([[2.0]], [0], lr=0.1)


def test_a_round_by_hand(local: FitContext) -> None:
    local.client_state.update(OWN)
    sent = DittoClient(lam=0.5).fit(local, FIRST).payload
    assert sent.keys() == DittoClient.sends
    assert local.sent_model == sent  # in which the policy looks for what few images teach, not in v_k
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [0.05, -0.05], atol=1e-15)
    own = local.client_state[Part.HEAD]
    np.testing.assert_allclose(own["weight"], [[0.1], [-0.1]], atol=1e-15)
    np.testing.assert_allclose(own["bias"], [1.0, 0.9], atol=1e-15)  # 1 - .1 (-.5 + .5), 1 - .1 (.5 + .5)
    np.testing.assert_allclose(local.client_state[Part.BODY]["0.weight"], [[1.0]], atol=1e-15)


def test_drawn_to_the_trained_model_as_in_fednhs_code(local: FitContext) -> None:
    local.client_state.update(OWN)
    DittoClient(lam=0.5, reference="trained").fit(local, FIRST)
    made = local.client_state[Part.HEAD]
    np.testing.assert_allclose(made["bias"], [1.0025, 0.8975], atol=1e-15)  # .1 * .5 * (.05, -.05)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["weight"], [[0.105], [-0.105]], atol=1e-15)


def test_the_releases_step() -> None:
    with np.load(GOLDEN / "ditto_step.npz") as golden:
        v = torch.tensor(golden["v"], requires_grad=True)
        loss = torch.tensor(golden["grad"]) @ v + float(golden["lam"]) * proximal([v], [torch.tensor(golden["w_ref"])])
        loss.backward()  # type: ignore[no-untyped-call]
        assert v.grad is not None
        np.testing.assert_allclose((v - golden["lr"].item() * v.grad).detach(), golden["v_new"], atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.75])
def test_what_is_sent_is_fedavgs_whatever_lambda(lam: float, tiny: LocalOf) -> None:
    sites = [tiny([[2.0], [1.0]], [0, 1], lr=0.1, epochs=3, batch_size=1) for _ in range(2)]
    sites[0].client_state.update(OWN)
    assert same_tensors(DittoClient(lam=lam).fit(sites[0], FIRST).payload, FedAvgClient().fit(sites[1], FIRST).payload)


def test_without_lambda_the_own_model_trains_alone(tiny: LocalOf) -> None:
    ditto, alone = (tiny([[2.0]], [0], lr=0.1) for _ in range(2))
    ditto.client_state.update(OWN)
    DittoClient(lam=0).fit(ditto, FIRST)
    assert same_tensors(ditto.client_state, FedAvgClient().fit(alone, OWN).payload)


def test_a_site_predicts_with_its_own_model_once_it_has_one(local: FitContext) -> None:
    DittoClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: FIRST[Part.HEAD]})
    local.client_state.update(OWN)
    DittoClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: OWN[Part.HEAD]})
