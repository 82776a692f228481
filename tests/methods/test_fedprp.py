"""FedPRP: one step of each half by hand, what is private, and in which order a site works."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.half_rounds import Linear, LocalOf, refusal
from torch import Tensor, nn

from protofed.client.method import client_methods
from protofed.client.methods import fedprp
from protofed.client.methods.fedprp import FedPRPClient
from protofed.client.models.split import PrototypeHead, dump
from protofed.client.training import losses
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train
from protofed.client.training.progress import ParameterGroup
from protofed.common import codec
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, Payload, Tensors, describe, same_tensors
from protofed.server.method import server_methods
from protofed.server.methods.fedprp import FedPRPServer as Server

Site = Callable[..., FitContext]

NO_STEP = 1e-300  # a learning rate that moves nothing
MODEL: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.0], [0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.5, 0.0], [0.0, 0.25], [-0.1, 0.1]]), "bias": np.array([0.0, 0.1, 0.2])},
}
X = [[3.0, 4.0], [1.0, -1.0], [2.0, 0.0], [-1.0, 1.0]]
Y = [0, 2, 0, 2]  # class 1 is nowhere at this site
GLOBAL: Payload = {**MODEL, Part.PROTOTYPES: {"0": np.array([2.0, 5.0]), "1": np.array([-3.0, 0.5])}}


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Site:
    """A site whose model is another one's until something is installed."""

    def make(*after: nn.Module, client_state: Any = None, **plan: Any) -> FitContext:
        local = local_of(linear(np.full((2, 2), 9.0), 3, *after), X, Y, 3, **{"lr": NO_STEP, **plan})
        local.client_state.update(client_state or {})
        return local

    return make


class Watched:
    """What the inter-class loss was given, and the model at that time, batch by batch."""

    def __init__(self, local: FitContext) -> None:
        self.local = local
        self.centroids, self.margins, self.given = list[Array](), list[Array](), list[Any]()
        self.bodies, self.heads = list[Tensors](), list[Tensors]()

    def __call__(self, features: Tensor, labels: Tensor, centroids: Tensor, margins: Tensor, *others: Any) -> Tensor:
        self.centroids.append(centroids.numpy().copy())
        self.margins.append(margins.detach().numpy().copy())
        self.given.append(others)
        self.bodies.append(dump(self.local.model.body))
        self.heads.append(dump(PrototypeHead.of(self.local.model).own))
        return losses.inter_class(features, labels, centroids, margins, *others)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[FitContext], Watched]:
    def watch(local: FitContext) -> Watched:
        seen = Watched(local)
        monkeypatch.setattr(fedprp, "inter_class", seen)
        return seen

    return watch


def s(x: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-x))


def same(left: Tensors, right: Tensors) -> bool:
    return same_tensors({Part.BODY: left}, {Part.BODY: right})


def features(body: Tensors) -> Array:
    return np.asarray(np.array(X) @ body["0.weight"].T)


def test_one_step_by_hand(tiny: LocalOf) -> None:
    """D = 1, body w = 1, head zero; x = 1 of class 0, x = 3 of class 1; lr .1, tau 1, P_0 = 2, no P_1; margins 1.

    Head: gradient of its rows -+1/2 (1 - 3) / 2 = +-.5, so rows -.05, .05; biases stay.
    Body, cross-entropy: logits -+.05 z; with a = s(.1), b = s(-.3): (.1 a - .1 b 3) / 2.
    Intra: ((1 - 2)^2 + 0) / 2, gradient -1. Inter: centroids 1 and 3 are the features; of either class the own
    distance is 0 + 1, the other 2: log(1 + 1/e); z_1 leaves centroid 0 and z_0 centroid 1, with s(-1) / 2 each:
    gradient s(-1) / 2 - 3 s(-1) / 2; of each margin s(-1) / 2.
    """
    received: Payload = {
        Part.BODY: {"0.weight": np.array([[1.0]])},
        Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.zeros(2)},
        Part.PROTOTYPES: {"0": np.array([2.0])},
    }
    local = tiny([[1.0], [3.0]], [0, 1], lr=0.1)
    made = FedPRPClient(head_epochs=1, temperature=1.0, margins="learned").fit(local, received)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["weight"], [[-0.05], [0.05]], atol=1e-12)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["bias"], [0.0, 0.0], atol=1e-12)
    w = 1 - 0.1 * ((0.1 * s(0.1) - 0.3 * s(-0.3)) / 2 - 0.5 - 0.5 * s(-1))
    np.testing.assert_allclose(made.payload[Part.BODY]["0.weight"], [[w]], atol=1e-12)
    np.testing.assert_allclose(local.client_state[Part.PROTOTYPES]["margins"], [1 - 0.025 * s(-1)] * 2, atol=1e-12)
    assert {name: row.tolist() for name, row in made.payload[Part.PROTOTYPES].items()} == {
        "0": [pytest.approx(w, abs=1e-12)],  # raw: their length counts, too
        "1": [pytest.approx(3 * w, abs=1e-12)],
    }
    entropy = (math.log(1 + math.exp(0.1)) + math.log(1 + math.exp(-0.3))) / 2
    assert made.metrics == {"loss": pytest.approx(entropy + 0.25 + 0.5 * math.log(1 + math.exp(-1)), abs=1e-6)}


@pytest.mark.parametrize(("intra", "inter"), [(0.0, 0.0), (2.0, 0.0), (0.0, 3.0), (0.5, 0.5)])
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_the_objective_is_the_sum_of_three(intra: float, inter: float, distance: Any, site: Site) -> None:
    made = FedPRPClient(head_epochs=0, intra=intra, inter=inter, distance=distance, temperature=0.5).fit(site(), GLOBAL)
    z, y = torch.tensor(features(MODEL[Part.BODY])), torch.tensor(Y)
    logits = z @ torch.tensor(MODEL[Part.HEAD]["weight"]).T + torch.tensor(MODEL[Part.HEAD]["bias"])
    near = ((z[[0, 2]] - torch.tensor([2.0, 5.0])) ** 2).sum() / 8  # class 2 has no global prototype
    means = torch.stack([z[[0, 2]].mean(0), torch.zeros(2).double(), z[[1, 3]].mean(0)])
    apart = losses.inter_class(z, y, means, torch.ones(3), 0.5, distance)
    expected = nn.functional.cross_entropy(logits, y) + intra * near + inter * apart
    assert made.metrics == {"loss": pytest.approx(expected.item(), abs=1e-5)}


def test_head_first_then_body(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    """The head's epochs leave the body alone, the body's leave the head alone, momentum and decay included."""
    plan = {"lr": 0.05, "epochs": 3, "batch_size": 2, "momentum": 0.9, "weight_decay": 0.1}
    local, alone = site(**plan), site(**plan)
    seen = watched(local)
    made = FedPRPClient(head_epochs=4, temperature=1.0).fit(local, GLOBAL)
    assert same(seen.bodies[0], MODEL[Part.BODY])
    assert not same(seen.bodies[1], seen.bodies[0])
    assert all(same(head, seen.heads[0]) for head in [*seen.heads, local.client_state[Part.HEAD]])
    assert len(seen.heads) == 3 * 2
    FedPRPClient().load_global(alone, GLOBAL)  # the head's epochs, on cross-entropy alone
    own = PrototypeHead.of(alone.model).own
    group, cross_entropy = ParameterGroup(own.parameters(), weight_decay=0.0), nn.functional.cross_entropy
    train(alone, lambda x, y: cross_entropy(own(alone.model.body(x)), y), [group], 4)
    assert same(seen.heads[0], dump(own))
    assert not same(seen.heads[0], MODEL[Part.HEAD])
    assert same(made.payload[Part.BODY], dump(local.model.body))


def test_weight_decay_is_the_bodys_alone(site: Site) -> None:
    """One full batch at lr .1, once with the plan's decay of .5 and once without; the head is not in its gradient."""
    made = {}
    for decay in (0.0, 0.5):
        local = site(lr=0.1, batch_size=4, weight_decay=decay)
        update = FedPRPClient(head_epochs=1).fit(local, GLOBAL)
        made[decay] = local.client_state[Part.HEAD], update.payload[Part.BODY]["0.weight"]
    assert same(made[0.5][0], made[0.0][0])
    start = MODEL[Part.BODY]["0.weight"]
    np.testing.assert_allclose(made[0.5][1], made[0.0][1] - 0.1 * 0.5 * start, atol=1e-12)


def test_centroids_are_of_the_body_as_it_was_received(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    """One mean a class, in evaluation mode, for the whole round; BatchNorm's statistics move with the head's epochs."""
    body = {f"1.{name}": t for name, t in dump(nn.BatchNorm1d(2).double()).items()}
    body = {**MODEL[Part.BODY], **body, "1.running_mean": np.array([4.0, -2.0]), "1.running_var": np.array([4.0, 0.25])}
    local = site(nn.BatchNorm1d(2).double(), lr=0.05, epochs=2, batch_size=2)
    seen = watched(local)
    FedPRPClient(head_epochs=3).fit(local, {**GLOBAL, Part.BODY: body})
    z = (features(body) - [4.0, -2.0]) / np.sqrt(np.array([4.0, 0.25]) + 1e-5)
    expected = np.stack([z[[0, 2]].mean(axis=0), np.zeros(2), z[[1, 3]].mean(axis=0)])
    assert len(seen.centroids) == 4
    for centroids in seen.centroids:
        np.testing.assert_allclose(centroids, expected, atol=1e-9)


def test_prototypes_are_of_the_new_body(site: Site) -> None:
    local = site(lr=0.05)
    made = FedPRPClient(head_epochs=1).fit(local, GLOBAL).payload
    assert all(parameter.requires_grad for parameter in local.model.parameters()), "after the head's epochs"
    z = features(made[Part.BODY])
    assert not np.allclose(z, features(MODEL[Part.BODY]))
    assert made[Part.PROTOTYPES].keys() == {"0", "2"}
    np.testing.assert_allclose(made[Part.PROTOTYPES]["0"], z[[0, 2]].mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(made[Part.PROTOTYPES]["2"], z[[1, 3]].mean(axis=0), atol=1e-12)


@pytest.mark.parametrize(("at_least", "classes"), [(2, {"0", "2"}), (3, set())])
def test_a_class_with_too_few_examples_is_the_sites_own_alone(at_least: int, classes: set[str], site: Site) -> None:
    local = site()
    made = FedPRPClient(min_samples_per_class=at_least).fit(local, GLOBAL).payload
    assert made[Part.PROTOTYPES].keys() == classes
    assert PrototypeHead.of(local.model).known.tolist() == [1, 0, 1]  # its own model still predicts by both


def test_the_head_stays_and_is_gone_on_with(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    first = site(lr=0.1)
    made = FedPRPClient(head_epochs=2).fit(first, GLOBAL)
    assert made.payload.keys() == FedPRPClient.sends == {Part.BODY, Part.PROTOTYPES}
    assert not any("own" in spec.name or "margins" in spec.name for spec in describe(made.payload))
    later = site(client_state=codec.decode(codec.encode(first.client_state)))
    seen = watched(later)
    FedPRPClient(head_epochs=0).fit(later, GLOBAL)
    assert same(seen.heads[0], first.client_state[Part.HEAD])  # not the first head, which is sent in every round
    assert not same(first.client_state[Part.HEAD], MODEL[Part.HEAD])


def test_margins_are_one_and_are_not_kept(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    """The gradient by a margin is never negative: learned, they all come to 0, where `clamp_min` stops it."""
    local = site(lr=0.05, epochs=3, batch_size=2)
    seen = watched(local)
    FedPRPClient().fit(local, GLOBAL)
    FedPRPClient().fit(local, GLOBAL)
    assert {tuple(margins) for margins in seen.margins} == {(1.0, 1.0, 1.0)}
    assert len(seen.margins) == 2 * 3 * 2
    assert local.client_state.keys() == {Part.HEAD}


def test_margins_begin_at_one_are_learned_and_persist(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    first = site(lr=0.01)
    seen = watched(first)
    FedPRPClient(head_epochs=0, margins="learned").fit(first, GLOBAL)
    assert seen.margins[0].tolist() == [1.0, 1.0, 1.0]
    assert same(seen.heads[0], MODEL[Part.HEAD])  # with which a new site begins
    learned = first.client_state[Part.PROTOTYPES]["margins"]
    assert (learned[[0, 2]] < 1).all()
    assert learned[1] == 1.0  # of a class that the site does not have
    later = site(client_state=first.client_state)
    seen = watched(later)
    FedPRPClient(head_epochs=0, margins="learned").fit(later, GLOBAL)
    np.testing.assert_array_equal(seen.margins[0], learned)


def test_margins_are_never_negative_in_effect(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    client_state: Any = {Part.PROTOTYPES: {"margins": np.array([1e-4, 1.0, 2e-4])}}
    effective = []
    for _ in range(3):
        local = site(lr=0.01, epochs=2, client_state=client_state)
        seen = watched(local)
        FedPRPClient(head_epochs=0, intra=0.0, temperature=1.0, margins="learned").fit(local, GLOBAL)
        client_state = local.client_state
        effective += seen.margins
    assert effective[0].tolist() == [1e-4, 1.0, 2e-4]
    assert [margins.tolist() for margins in effective[-2:]] == [[0.0, 1.0, 0.0]] * 2
    assert np.min(effective) == 0.0


def test_the_sites_own_model_goes_by_its_own_prototypes(site: Site) -> None:
    local = site(lr=0.05)
    made = FedPRPClient(head_epochs=1).fit(local, GLOBAL).payload
    local.model.eval()
    logits = local.model(torch.tensor(X).double()).detach().numpy()
    for c in (0, 2):
        far = np.linalg.norm(features(made[Part.BODY]) - made[Part.PROTOTYPES][str(c)], axis=1)
        np.testing.assert_allclose(logits[:, c], -far, atol=1e-9)
    assert (logits[:, 1] == -np.inf).all()  # the global prototype of class 1 is not the site's own


@pytest.mark.parametrize("prediction", ["prototypes", "head"])
def test_the_global_model_goes_by_the_global_prototypes(prediction: Any, site: Site) -> None:
    evaluator = site()
    FedPRPClient(prediction=prediction).load_global(evaluator, GLOBAL)
    logits = evaluator.model(torch.tensor(X).double()).detach().numpy()
    for c in (0, 1):
        far = np.linalg.norm(features(MODEL[Part.BODY]) - GLOBAL[Part.PROTOTYPES][str(c)], axis=1)
        np.testing.assert_allclose(logits[:, c], -far, atol=1e-9)
    assert (logits[:, 2] == -np.inf).all()
    FedPRPClient(prediction=prediction).load_global(evaluator, {**MODEL, Part.PROTOTYPES: {"1": np.zeros(2)}})
    assert PrototypeHead.of(evaluator.model).known.tolist() == [0.0, 1.0, 0.0]


def test_before_there_are_prototypes_the_first_head_predicts(site: Site) -> None:
    evaluator = site()
    FedPRPClient().load_global(evaluator, MODEL)
    expected = features(MODEL[Part.BODY]) @ MODEL[Part.HEAD]["weight"].T + MODEL[Part.HEAD]["bias"]
    np.testing.assert_allclose(evaluator.model(torch.tensor(X).double()).detach(), expected, atol=1e-12)


def test_the_private_head_can_predict(site: Site) -> None:
    local = site(lr=0.05)
    made = FedPRPClient(head_epochs=2, prediction="head").fit(local, GLOBAL).payload
    own = local.client_state[Part.HEAD]
    expected = features(made[Part.BODY]) @ own["weight"].T + own["bias"]
    np.testing.assert_allclose(local.model(torch.tensor(X).double()).detach(), expected, atol=1e-9)
    scored = site(client_state=local.client_state)
    FedPRPClient(prediction="head").load_global(scored, {**GLOBAL, **made})
    np.testing.assert_allclose(scored.model(torch.tensor(X).double()).detach(), expected, atol=1e-9)


OUT: dict[str, Any] = {"head_epochs": -1, "intra": -0.5, "inter": -0.5, "temperature": 0, "distance": "l1"}
OUT |= {"margins": "none", "prototype_momentum": 1}


@pytest.mark.parametrize("name", OUT)
def test_options_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"fedprp: {name} = "):
        (server_methods if name == "prototype_momentum" else client_methods).build("fedprp", {name: OUT[name]})


def test_as_released_the_sign_is_turned_and_margins_stay(site: Site, watched: Callable[[FitContext], Watched]) -> None:
    local = site(lr=0.05, epochs=3)
    seen = watched(local)
    FedPRPClient(compat="authors", margins="learned", temperature=0.5).fit(local, GLOBAL)
    assert seen.given == [(0.5, "negated-cosine")] * 3
    assert {tuple(margins) for margins in seen.margins} == {(1.0, 1.0, 1.0)}
    assert local.client_state.keys() == {Part.HEAD}


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_the_distance_is_the_recipes(distance: Any, site: Site, watched: Callable[[FitContext], Watched]) -> None:
    local = site()
    seen = watched(local)
    FedPRPClient(distance=distance).fit(local, GLOBAL)
    assert seen.given == [(0.07, distance)]


@pytest.mark.parametrize("state", [MODEL, GLOBAL], ids=["first", "later"])
def test_what_one_half_sends_the_other_expects(state: Payload, site: Site) -> None:
    made = FedPRPClient().fit(site(lr=0.01), state).payload
    assert refusal(made, Server().expects(state)) == ""
    assert refusal({**made, Part.HEAD: MODEL[Part.HEAD]}, Server().expects(state)).startswith("head/")
