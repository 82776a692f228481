"""FedAMP: both steps by hand, the paper's formula, and the limits of sigma and lambda."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.support.half_rounds import GOLDEN, LocalOf, model, parts, play
from tests.support.round_contexts import round_context

from protofed.client.method import proximal
from protofed.client.methods.fedamp import FedAMPClient
from protofed.client.methods.solo import SoloClient
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, SiteId, Update, same_tensors
from protofed.server.methods.fedamp import FedAMPServer
from protofed.server.methods.solo import SoloServer


def state_of(server: FedAMPServer, **bodies: float) -> Payload:
    """After a round in which each site has sent a model that differs in its one weight of the body."""
    updates = [Update(site, model(body=body)) for site, body in bodies.items()]
    return server.aggregate(server.init(model(), round_context(round=0)), updates, round_context(round=1))


def body(sent: Payload) -> float:
    return float(sent[Part.BODY]["0.weight"].item())


def test_a_message_by_hand() -> None:
    """||0 - 2||^2 = 4 = sigma: xi = alpha / sigma e^-1 = .25 e^-1, and u_ann = (1 - xi) 0 + xi 2."""
    server = FedAMPServer(sigma=4.0, alpha=1.0)
    state = state_of(server, ann=0.0, bob=2.0)
    xi = 0.25 * math.exp(-1)
    assert body(server.broadcast(state, "ann")) == pytest.approx(xi * 2, abs=1e-15)
    assert body(server.broadcast(state, "bob")) == pytest.approx((1 - xi) * 2, abs=1e-15)


def test_near_models_count_more_and_messages_are_never_more_than_a_mean() -> None:
    server = FedAMPServer(sigma=1.0, alpha=10.0)
    state = state_of(server, ann=0.0, bob=1.0, cyd=2.0)
    xi = [10 * math.exp(-1), 10 * math.exp(-4)]  # together more than 1: shares, and nothing is left of ann's own
    assert body(server.broadcast(state, "ann")) == pytest.approx((xi[0] * 1 + xi[1] * 2) / sum(xi))


def test_a_site_that_is_not_in_a_round_keeps_its_model_and_a_new_one_begins_with_the_first() -> None:
    server = FedAMPServer(sigma=4.0, alpha=1.0)
    state = server.aggregate(
        state_of(server, ann=0.0, bob=2.0), [Update("ann", model(body=4.0))], round_context(round=2)
    )
    xi = 0.25 * math.exp(-1)
    assert body(server.broadcast(state, "bob")) == pytest.approx(2 + xi * 2)  # 4 now, as far as 0 was
    near = 0.25 * np.exp(-np.array([9.0, 1.0]) / 4)  # the first model is 1
    assert body(server.broadcast(state, "eve")) == pytest.approx(1 + near @ [3.0, 1.0])


def test_buffers_are_no_distance_and_are_averaged() -> None:
    def normalised(mean: float) -> Payload:
        plain = model()
        return {**plain, Part.BODY: {**plain[Part.BODY], "1.running_mean": np.array([mean])}}

    server = FedAMPServer(sigma=1.0, alpha=0.5)
    updates = [Update("ann", normalised(0.0)), Update("bob", normalised(8.0))]
    state = server.aggregate(server.init(normalised(0.0), round_context(round=0)), updates, round_context(round=1))
    assert server.broadcast(state, "ann")[Part.BODY]["1.running_mean"] == pytest.approx([4.0])  # xi = .5: no distance


def test_the_papers_step() -> None:
    with np.load(GOLDEN / "fedamp_paper_step_numpy.npz") as golden:
        w = torch.tensor(golden["w"], requires_grad=True)
        pull = float(golden["lam"] / golden["alpha_k"])
        loss = torch.tensor(golden["grad"]) @ w + pull * proximal([w], [torch.tensor(golden["u"])])
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        np.testing.assert_allclose((w - golden["eta"].item() * w.grad).detach(), golden["w_new"], atol=1e-12)


def test_two_steps_by_hand(tiny: LocalOf) -> None:
    """X = 0 of class 0, so that the biases alone move: by -.1 (p - y) = (.05, -.05), and then from logits (.05, -.05).

    There 1 - p_0 = 1 / (1 + e^.1), and lambda / alpha = .5 draws the bias of .05 back to u = 0.
    """
    local = tiny([[0.0]], [0], lr=0.1, epochs=2)
    sent = FedAMPClient(alpha=4.0, lam=2.0).fit(local, model()).payload
    assert sent.keys() == FedAMPClient.sends
    second = 0.05 + 0.1 * (1 / (1 + math.exp(0.1)) - 0.5 * 0.05)
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [second, -second], atol=1e-15)
    assert same_tensors(parts(local.model), sent)  # its own model


def test_without_near_models_and_lambda_each_site_trains_alone(tiny: LocalOf) -> None:
    def sites() -> dict[SiteId, FitContext]:
        data = {"ann": ([[2.0], [1.0]], [0, 1]), "bob": ([[3.0]], [1])}
        return {site: tiny(*some, lr=0.1, epochs=2) for site, some in data.items()}

    amp, alone = sites(), sites()
    play(FedAMPServer(sigma=1e-9, alpha=1.0), FedAMPClient(alpha=1.0, lam=0), amp, model(), 3)
    play(SoloServer(), SoloClient(), alone, model(), 3)
    for site, local in amp.items():
        assert same_tensors(parts(local.model), alone[site].client_state)
