"""Solo: a site trains on from where it stopped, and nothing but its loss is offered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.half_rounds import parts, refusal
from tests.support.round_contexts import round_context

from protofed.client.methods.solo import SoloClient
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.solo import SoloServer as Server

COMMON: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.5], [-0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.5, 0.0], [0.0, 0.25]]), "bias": np.zeros(2)},
}


@pytest.fixture
def site(local_of: Callable[..., FitContext], linear: Callable[..., SplitModel]) -> Callable[..., FitContext]:
    """A site whose model is another one's until something is installed."""
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 2), [[3.0, 4.0], [1.0, -1.0]], [0, 1], 2, **plan)


def test_later_rounds_go_on_from_the_sites_own_memory(site: Callable[..., FitContext]) -> None:
    whole, half = site(lr=0.1, epochs=2), site(lr=0.1, epochs=1)
    SoloClient().fit(whole, COMMON)
    SoloClient().fit(half, COMMON)
    later = site(lr=0.1, epochs=1)  # the model is gone, the memory is there
    later.client_state = half.client_state
    SoloClient().fit(later, COMMON)
    assert same_tensors(parts(later.model), parts(whole.model))
    assert same_tensors(later.client_state, parts(whole.model))
    assert not same_tensors(parts(half.model), parts(whole.model))
    SoloClient().load_global(later, COMMON)
    assert same_tensors(parts(later.model), parts(whole.model))
    new = site()
    SoloClient().load_global(new, COMMON)
    assert same_tensors(parts(new.model), COMMON), "the first round starts from the common model"


def test_no_tensor_is_sent_and_the_server_expects_none_and_keeps_its_state(site: Callable[..., FitContext]) -> None:
    made = SoloClient().fit(site(lr=0.1), COMMON)
    assert not made.payload
    assert not SoloClient.sends
    assert made.metrics.keys() == {"loss"}
    state = Server().init(COMMON, round_context(2))
    assert refusal(made.payload, Server().expects(state)) == ""
    assert "not part of this method's update" in refusal(COMMON, Server().expects(state))
    assert Server().aggregate(state, iter([Update("ann", {}), Update("bob", {})]), round_context()) is state
    assert Server().broadcast(state, "ann") is state
    assert not Server.global_model  # an evaluator has nothing to score
