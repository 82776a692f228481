"""cwFedAVG with mixing on the sites: a site's distribution stays with it, and one step of each half by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import Linear, LocalOf, parts, refusal
from tests.support.round_contexts import round_context

from protofed.client.methods.cwfedavg_private import CwFedAvgPrivateClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import dump
from protofed.client.training.context import FitContext
from protofed.common import codec
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer as Server

Site = Callable[..., FitContext]

MODEL: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.5], [-0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.3, 0.4], [-0.5, 1.2], [0.1, 0.7]]), "bias": np.array([0.1, 0.0, -0.2])},
}
HEADS = {  # class head j: all weights j + 1, all biases 10 (j + 1)
    "weight": np.ones((3, 3, 2)) * np.array([1.0, 2.0, 3.0])[:, None, None],
    "bias": np.ones((3, 3)) * np.array([10.0, 20.0, 30.0])[:, None],
}
STATE: Payload = {**MODEL, Part.CLASS_MODELS: HEADS}
MINIMUM = {"lr": 1e-30}  # of a server that wants what it sent back untrained


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Site:
    """Three of class 0, one of class 2."""
    features = [[3.0, 4.0], [1.0, -1.0], [2.0, 0.0], [-1.0, 1.0]]
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 3), features, [0, 0, 0, 2], 3, **plan)


def update(value: float, classes: list[int], weight: float | None = None) -> Update:
    """A model whose every number is `value`, of a site with these classes."""
    model = {part: {name: np.full_like(t, value) for name, t in MODEL[part].items()} for part in MODEL}
    present = np.array([float(c in classes) for c in range(3)])
    return Update("ann", {**model, Part.CLASS_PRESENCE: {"present": present}}, weight=weight)


def test_a_site_mixes_by_its_own_true_distribution(site: Site) -> None:
    """.75 of head 0, .25 of head 2: .75 + .75 = 1.5."""
    local = site()
    CwFedAvgPrivateClient().load_global(local, STATE)
    assert dump(local.model.head)["weight"].tolist() == [[1.5, 1.5]] * 3
    assert dump(local.model.head)["bias"].tolist() == [15.0] * 3
    assert same_tensors({Part.BODY: dump(local.model.body)}, {Part.BODY: MODEL[Part.BODY]})
    assert CwFedAvgPrivateClient.declares.personal == "loaded"


def test_one_step_from_the_mean_by_hand(local_of: LocalOf, linear: Linear) -> None:
    """One example (1, 0) of class 0, a body of ones, a head of zeros: every class gets 1/3, so with lr 0.3 the biases
    move by 0.3 (y - 1/3) = (0.2, -0.1, -0.1), each row of the weight by that times the features (1, 1), and the body,
    behind a head of zeros, not at all. The class heads appear nowhere.
    """
    local = local_of(linear(np.full((2, 2), 9.0), 3), [[1.0, 0.0]], [0], 3, lr=0.3)
    body, head = {"0.weight": np.ones((2, 2))}, {"weight": np.zeros((3, 2)), "bias": np.zeros(3)}
    received: Payload = {Part.BODY: body, Part.HEAD: head, Part.CLASS_MODELS: HEADS}
    sent = CwFedAvgPrivateClient().fit(local, received).payload
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [0.2, -0.1, -0.1], atol=1e-12)
    np.testing.assert_allclose(sent[Part.HEAD]["weight"], [[0.2, 0.2], [-0.1, -0.1], [-0.1, -0.1]], atol=1e-12)
    np.testing.assert_allclose(sent[Part.BODY]["0.weight"], np.ones((2, 2)), atol=1e-12)


def test_identical_heads_are_the_plain_model(site: Site) -> None:
    state = Server().init(MODEL, round_context(3))
    local = site()
    CwFedAvgPrivateClient().load_global(local, Server().broadcast(state, "ann"))
    assert same_tensors({Part.BODY: dump(local.model.body)}, {Part.BODY: MODEL[Part.BODY]})
    for name, tensor in dump(local.model.head).items():
        np.testing.assert_allclose(tensor, MODEL[Part.HEAD][name], atol=1e-15)
    for c in range(3):
        assert same_tensors(Server().class_model(state, c), MODEL)


def test_training_is_fedavgs_from_the_mean(site: Site) -> None:
    plan = {"lr": 0.01, "epochs": 2, "batch_size": 2, "momentum": 0.9}
    ours, plain = site(**plan), site(**plan)
    made = CwFedAvgPrivateClient().fit(ours, STATE)
    assert FedAvgClient().fit(plain, MODEL).metrics == made.metrics
    assert same_tensors(parts(ours.model), parts(plain.model))
    assert not same_tensors(parts(ours.model), MODEL)
    assert same_tensors({part: made.payload[part] for part in (Part.BODY, Part.HEAD)}, parts(ours.model))


def trap() -> Payload:
    """Class heads 1000 e_j: a mixture of them by p has the biases 1000 p.

    No bias of the mean is zero: beside zero, floating point shows a step of any size, as of every head that is trained.
    """
    heads = {"weight": np.zeros((3, 3, 2)), "bias": 1000.0 * np.eye(3)}
    mean = {**MODEL[Part.HEAD], "bias": np.array([0.1, 0.3, -0.2])}
    return {Part.BODY: MODEL[Part.BODY], Part.HEAD: mean, Part.CLASS_MODELS: heads}


@pytest.mark.parametrize("plan", [MINIMUM, {"lr": 0.05, "epochs": 2, "batch_size": 2}])
def test_what_is_sent_does_not_depend_on_the_class_heads(plan: dict[str, Any], site: Site) -> None:
    plain = {**trap(), Part.CLASS_MODELS: HEADS}
    sent = [CwFedAvgPrivateClient().fit(site(**plan), state).payload for state in (plain, trap())]
    assert codec.encode(sent[0]) == codec.encode(sent[1])


def test_a_server_that_sends_heads_to_read_shares_gets_its_own_mean_back(local_of: LocalOf, linear: Linear) -> None:
    """With a learning rate of 1e-30 nothing is trained: two sites with the same classes, 3 to 1 and 1 to 3, send the
    same bytes, and none of the biases is 1000 p.
    """
    sent = []
    for labels in ([0, 0, 0, 2], [0, 2, 2, 2]):
        local = local_of(linear(np.eye(2), 3), np.ones((4, 2)), labels, 3, **MINIMUM)
        payload = CwFedAvgPrivateClient().fit(local, trap()).payload
        assert payload.keys() == CwFedAvgPrivateClient.sends == {Part.BODY, Part.HEAD, Part.CLASS_PRESENCE}
        assert payload[Part.CLASS_PRESENCE].keys() == {"present"}
        assert payload[Part.CLASS_PRESENCE]["present"].tolist() == [1.0, 0.0, 1.0]
        assert payload[Part.HEAD]["bias"].tolist() == [0.1, 0.3, -0.2]
        sent.append(codec.encode(payload))
        CwFedAvgPrivateClient().load_global(local, trap())  # the site's own model, which stays, does have them
        assert dump(local.model.head)["bias"].tolist() == [250.0 * labels.count(c) for c in range(3)]
    assert sent[0] == sent[1]


def test_the_servers_step_by_hand() -> None:
    """Class 0 has two contributors, class 2 one, class 1 none: its head stays. Means are of all."""
    updates = [update(1.0, [0], 1000.0), update(5.0, [0, 2], 1.0), update(9.0, [], 1.0)]
    new = Server().aggregate(STATE, iter(updates), round_context())
    assert new[Part.BODY]["0.weight"].tolist() == [[5.0, 5.0]] * 2
    assert (new[Part.HEAD]["weight"].tolist(), new[Part.HEAD]["bias"].tolist()) == ([[5.0, 5.0]] * 3, [5.0] * 3)
    heads = [Server().class_model(new, c)[Part.HEAD] for c in range(3)]
    assert [sorted({*head["weight"].flat, *head["bias"].flat}) for head in heads] == [[3.0], [2.0, 20.0], [5.0]]
    assert {name: t.shape for name, t in new[Part.CLASS_MODELS].items()} == {"weight": (3, 3, 2), "bias": (3, 3)}


def test_a_class_that_nobody_has_keeps_its_head_over_rounds() -> None:
    state = STATE
    for value in (0.1, 0.3):
        state = codec.decode(codec.encode(Server().aggregate(state, [update(value, [1])], round_context())))
        assert same_tensors(
            {Part.HEAD: Server().class_model(state, 2)[Part.HEAD]}, {Part.HEAD: {n: t[2] for n, t in HEADS.items()}}
        )
        assert set(Server().class_model(state, 1)[Part.HEAD]["weight"].flat) == {value}


@pytest.mark.parametrize("present", [[-1.0, 0.0, 1e300], [0.0, 0.0, 1e-300]])
def test_how_much_a_site_claims_has_no_say(present: Any) -> None:
    plain, claimed = update(7.0, [2]), update(7.0, [])
    payload = {**claimed.payload, Part.CLASS_PRESENCE: {"present": np.array(present)}}
    states = [Server().aggregate(STATE, [one], round_context()) for one in (plain, Update("ann", payload))]
    assert same_tensors(*states)


def test_what_one_half_sends_the_other_expects_and_every_site_is_sent_the_same(site: Site) -> None:
    made = CwFedAvgPrivateClient().fit(site(lr=0.01), STATE)
    for state in (Server().init(MODEL, round_context(3)), Server().aggregate(STATE, [made], round_context())):
        assert not Server().expects(state).weight
        assert refusal(made.payload, Server().expects(state)) == ""
        assert Server().broadcast(state, "ann") is Server().broadcast(state, "bob") is state
    assert not Server.global_model
