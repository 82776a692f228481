"""Solo: a site trains on from where it stopped, and nothing but its loss is offered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.half_rounds import parts
from tests.support.round_contexts import round_context

from protofed.client.methods.solo import SoloClient
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.common import codec
from protofed.common.payload import Part, Payload, Update, describe, same_tensors
from protofed.common.protocol.messages import Manifest
from protofed.server.methods.solo import SoloServer as Server
from protofed.server.rounds.intake import intake

COMMON: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.5], [-0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.5, 0.0], [0.0, 0.25]]), "bias": np.zeros(2)},
}


@pytest.fixture
def site(local_of: Callable[..., FitContext], linear: Callable[..., SplitModel]) -> Callable[..., FitContext]:
    """A site whose model is another one's until something is installed."""
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 2), [[3.0, 4.0], [1.0, -1.0]], [0, 1], 2, **plan)


def test_the_first_round_starts_from_the_common_model(site: Callable[..., FitContext]) -> None:
    local = site()
    SoloClient().load_global(local, COMMON)
    assert same_tensors(parts(local.model), COMMON)


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


def test_install_gives_the_sites_own_model(site: Callable[..., FitContext]) -> None:
    local = site(lr=0.1)
    SoloClient().fit(local, COMMON)
    again = site()
    again.client_state = local.client_state
    SoloClient().load_global(again, COMMON)
    assert same_tensors(parts(again.model), parts(local.model))


def test_no_tensor_is_sent(site: Callable[..., FitContext]) -> None:
    made = SoloClient().fit(site(lr=0.1), COMMON)
    assert made.payload == {}
    assert made.metrics.keys() == {"loss"}
    assert SoloClient.sends == frozenset()


def test_the_server_expects_nothing_and_keeps_its_state() -> None:
    state = Server().init(COMMON, round_context(2))
    expected = Server().expects(state)
    nothing, model = codec.encode({}), codec.encode(COMMON)
    assert intake.manifest_problem(Manifest((), len(nothing), codec.digest(nothing)), expected) is None
    fault = intake.manifest_problem(Manifest(describe(COMMON), len(model), codec.digest(model)), expected)
    assert fault is not None
    assert "not part of this method's update" in fault.text
    assert Server().aggregate(state, iter([Update("ann", {}), Update("bob", {})]), round_context()) is state
    assert Server().broadcast(state, "ann") is state
    assert not Server.global_model  # an evaluator has nothing to score
