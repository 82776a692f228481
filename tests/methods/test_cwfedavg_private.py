"""cwFedAVG with mixing on the sites: a site's distribution stays with it, and one step of each half by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protofed.client.methods.cwfedavg_private import CwFedAvgPrivateClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import SplitModel, dump
from protofed.client.training.context import FitContext
from protofed.common import codec
from protofed.common.payload import Part, Payload, Update, describe
from protofed.common.protocol.messages import Manifest
from protofed.common.tensors import same_tensors
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer as Server
from protofed.server.rounds import intake

LocalOf = Callable[..., FitContext]
Linear = Callable[..., SplitModel]
Site = Callable[..., FitContext]

MODEL: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.5], [-0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.3, 0.4], [-0.5, 1.2], [0.1, 0.7]]), "bias": np.array([0.1, 0.0, -0.2])},
}
HEADS = {  # class head j: all weights j + 1, all biases 10 (j + 1)
    "weight": np.ones((3, 3, 2)) * np.array([1.0, 2.0, 3.0])[:, None, None],
    "bias": np.ones((3, 3)) * np.array([10.0, 20.0, 30.0])[:, None],
}
STATE: Payload = {Part.BODY: MODEL[Part.BODY], Part.CLASS_MODELS: HEADS}


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Site:
    """Three of class 0, one of class 2."""
    features = [[3.0, 4.0], [1.0, -1.0], [2.0, 0.0], [-1.0, 1.0]]
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 3), features, [0, 0, 0, 2], 3, **plan)


def held(local: FitContext) -> Payload:
    return {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}


def update(value: float, classes: list[int], weight: float | None = None) -> Update:
    """A model whose every number is `value`, of a site with these classes."""
    model = {part: {name: np.full_like(t, value) for name, t in MODEL[part].items()} for part in MODEL}
    present = np.array([float(c in classes) for c in range(3)])
    return Update("ann", {**model, Part.CLASS_PRESENCE: {"present": present}}, weight=weight)


def test_a_site_mixes_by_its_own_true_distribution(site: Site) -> None:
    """.75 of head 0, .25 of head 2: .75 + .75 = 1.5."""
    local = site()
    CwFedAvgPrivateClient().install(local, STATE)
    assert dump(local.model.head)["weight"].tolist() == [[1.5, 1.5]] * 3
    assert dump(local.model.head)["bias"].tolist() == [15.0] * 3
    assert same_tensors({Part.BODY: dump(local.model.body)}, {Part.BODY: MODEL[Part.BODY]})
    assert CwFedAvgPrivateClient.personal == "installed"


def test_identical_heads_are_the_plain_model(site: Site) -> None:
    state = Server().init(MODEL, 3)
    local = site()
    CwFedAvgPrivateClient().install(local, Server().broadcast(state, "ann"))
    assert same_tensors({Part.BODY: dump(local.model.body)}, {Part.BODY: MODEL[Part.BODY]})
    for name, tensor in dump(local.model.head).items():
        np.testing.assert_allclose(tensor, MODEL[Part.HEAD][name], atol=1e-15)
    for c in range(3):
        assert same_tensors(Server().class_model(state, c), MODEL)


def test_training_is_fedavgs_from_the_mixture(site: Site) -> None:
    plan = {"lr": 0.01, "epochs": 2, "batch_size": 2, "momentum": 0.9}
    ours, plain = site(**plan), site(**plan)
    CwFedAvgPrivateClient().install(plain, STATE)
    mixture = held(plain)
    made = CwFedAvgPrivateClient().fit(ours, STATE)
    assert FedAvgClient().fit(plain, mixture).metrics == made.metrics
    assert same_tensors(held(ours), held(plain))
    assert not same_tensors(held(ours), mixture)
    assert same_tensors({part: made.payload[part] for part in (Part.BODY, Part.HEAD)}, held(ours))


def test_nothing_but_which_classes_there_are_leaves(local_of: LocalOf, linear: Linear) -> None:
    """Two sites with the same classes in other proportions tell the same."""
    told = []
    for labels in ([0, 0, 0, 2], [0, 2, 2, 2]):
        local = local_of(linear(np.eye(2), 3), np.ones((4, 2)), labels, 3, lr=1e-300)
        made = CwFedAvgPrivateClient().fit(local, STATE).payload
        assert made.keys() == CwFedAvgPrivateClient.sends == {Part.BODY, Part.HEAD, Part.CLASS_PRESENCE}
        assert made[Part.CLASS_PRESENCE].keys() == {"present"}
        told.append(made[Part.CLASS_PRESENCE]["present"].tolist())
    assert told == [[1.0, 0.0, 1.0]] * 2


def test_the_servers_step_by_hand() -> None:
    """Class 0 has two holders, class 2 one, class 1 none: its head stays. The body is of all, whatever their counts."""
    updates = [update(1.0, [0], 1000.0), update(5.0, [0, 2], 1.0), update(9.0, [], 1.0)]
    new = Server().aggregate(STATE, iter(updates))
    assert new[Part.BODY]["0.weight"].tolist() == [[5.0, 5.0]] * 2
    heads = [Server().class_model(new, c)[Part.HEAD] for c in range(3)]
    assert [sorted({*head["weight"].flat, *head["bias"].flat}) for head in heads] == [[3.0], [2.0, 20.0], [5.0]]
    assert {name: t.shape for name, t in new[Part.CLASS_MODELS].items()} == {"weight": (3, 3, 2), "bias": (3, 3)}


def test_a_class_that_nobody_has_keeps_its_head_over_rounds() -> None:
    state = STATE
    for value in (0.1, 0.3):
        state = codec.decode(codec.encode(Server().aggregate(state, [update(value, [1])])))
        assert same_tensors(
            {Part.HEAD: Server().class_model(state, 2)[Part.HEAD]}, {Part.HEAD: {n: t[2] for n, t in HEADS.items()}}
        )
        assert set(Server().class_model(state, 1)[Part.HEAD]["weight"].flat) == {value}


@pytest.mark.parametrize("present", [[-1.0, 0.0, 1e300], [0.0, 0.0, 1e-300]])
def test_how_much_a_site_claims_has_no_say(present: Any) -> None:
    plain, claimed = update(7.0, [2]), update(7.0, [])
    payload = {**claimed.payload, Part.CLASS_PRESENCE: {"present": np.array(present)}}
    states = [Server().aggregate(STATE, [one]) for one in (plain, Update("ann", payload))]
    assert same_tensors(*states)


def test_every_site_is_sent_the_same() -> None:
    assert Server().broadcast(STATE, "ann") is Server().broadcast(STATE, "bob") is STATE
    assert not Server.global_model


def test_what_one_half_sends_the_other_expects(site: Site) -> None:
    made = CwFedAvgPrivateClient().fit(site(lr=0.01), STATE).payload
    data = codec.encode(made)
    for state in (Server().init(MODEL, 3), Server().aggregate(STATE, [Update("ann", made)])):
        expected = Server().expects(state)
        assert not expected.weight
        assert intake.manifest_problem(Manifest(describe(made), len(data), codec.digest(data)), expected) is None
