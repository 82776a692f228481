"""cwFedAVG: both directions by hand, against a plain O(C P) computation, and whatever shares sites send."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.half_rounds import GOLDEN, Linear, LocalOf, parts, refusal
from tests.support.round_contexts import round_context
from torch import nn

from protofed.client.data.site_data import SiteData
from protofed.client.methods.cwfedavg import CwFedAvgClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import SplitModel, dump
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.training.context import FitContext
from protofed.client.training.losses import class_shares
from protofed.common import codec
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.payload import Array, Part, Payload, Update, same_tensors
from protofed.server.methods.cwfedavg import CwFedAvgServer as Server
from protofed.server.methods.fedavg import FedAvgServer as FedAvgServer
from protofed.server.methods.mixtures import FACTORS

MODEL_PARTS = (Part.BODY, Part.HEAD)


def like(fill: Callable[[tuple[int, ...]], Any], classes: int, dtype: str = "float64") -> dict[Part, dict[str, Array]]:
    """A model with numbers that `fill` gives for a shape."""
    shapes = {Part.BODY: {"w": (3, 2), "scale": ()}, Part.HEAD: {"weight": (classes, 2), "bias": (classes,)}}
    return {p: {n: np.asarray(fill(shape), dtype) for n, shape in named.items()} for p, named in shapes.items()}


def model(value: float, classes: int = 2, dtype: str = "float64") -> Payload:
    """Every number is `value`; with BatchNorm's counter."""
    made = like(lambda shape: np.full(shape, value), classes, dtype)
    made[Part.BODY]["seen"] = np.array(int(value))
    return made


def drawn(seed: int, classes: int) -> Payload:
    return like(np.random.default_rng(seed).standard_normal, classes)


def update(site: str, made: Payload, shares: Any, weight: float | None = None) -> Update:
    dtype = made[Part.HEAD]["weight"].dtype
    return Update(site, {**made, Part.CLASS_SHARES: {"shares": np.asarray(shares, dtype)}}, weight=weight)


def close(left: Payload, right: Payload, atol: float = 1e-12) -> None:
    for part in MODEL_PARTS:
        assert left[part].keys() == right[part].keys()
        for name, tensor in left[part].items():
            np.testing.assert_allclose(tensor, right[part][name], rtol=0, atol=atol, err_msg=f"{part}/{name}")


def value(payload: Payload) -> float:
    """Of a model whose every number is the same."""
    numbers = {float(n) for part in MODEL_PARTS for t in payload[part].values() if t.dtype.kind == "f" for n in t.flat}
    assert max(numbers) - min(numbers) < 1e-12
    return min(numbers)


UPDATES = [update("ann", model(1.0), [0.75, 0.25], 1.0), update("bob", model(5.0), [0.25, 0.75], 3.0)]
FIRST = Server().init(model(0.5), round_context(2))


def test_both_directions_by_hand() -> None:
    """Here q = p, every column of shares adds up to 1: w_0 = .75 + 1.25, w_1 = .25 + 3.75; .75 2 + .25 4."""
    state = Server().aggregate(FIRST, iter(UPDATES), round_context())
    assert [value(Server().class_model(state, c)) for c in (0, 1)] == [2.0, 4.0]
    assert [value(Server().broadcast(state, site)) for site in ("ann", "bob", "new")] == [2.5, 3.5, 3.0]
    assert Server().broadcast(state, "ann")[Part.BODY]["seen"] == 5


def test_both_directions_by_hand_with_example_counts() -> None:
    """Masses (.75, .75) of class 0 and (.25, 2.25) of class 1: q_0 = (.5, .5), q_1 = (.1, .9)."""
    server = Server(weighting="examples")
    state = server.aggregate(FIRST, iter(UPDATES), round_context())
    np.testing.assert_allclose(state[Part.CLASS_MODELS][FACTORS], [[0.5, 0.5], [0.1, 0.9]], atol=1e-15)
    models = [value(server.class_model(state, c)) for c in (0, 1)]
    assert models == pytest.approx([3.0, 4.6], abs=1e-12)
    sent = [value(server.broadcast(state, site)) for site in ("ann", "bob")]
    assert sent == pytest.approx([0.75 * 3 + 0.25 * 4.6, 0.25 * 3 + 0.75 * 4.6], abs=1e-12)


def test_every_site_begins_with_the_first_model() -> None:
    state = Server().init(drawn(1, 3), round_context(3))
    for made in (Server().broadcast(state, "ann"), *(Server().class_model(state, c) for c in range(3))):
        assert same_tensors(made, drawn(1, 3))
    assert not Server.global_model


@pytest.mark.parametrize("layers", ["all", "head"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_with_uniform_shares_everything_is_fedavg(layers: Any, weighting: Any) -> None:
    server, classes = Server(layers=layers, weighting=weighting), 4
    updates = [update(site, drawn(k, classes), [0.25] * 4, 1.0 + k) for k, site in enumerate(("ann", "bob", "cyd"))]
    state = server.aggregate(server.init(drawn(9, classes), round_context(classes)), iter(updates), round_context())
    mean = FedAvgServer(weighting=weighting).aggregate(drawn(9, classes), iter(updates), round_context())
    for c in range(classes):
        close(server.class_model(state, c), mean)
    for site in ("ann", "bob", "cyd", "new"):
        close(server.broadcast(state, site), mean)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_by_head_alone_the_body_is_fedavgs_and_the_head_is_class_wise(weighting: Any) -> None:
    server, whole = (Server(layers=layers, weighting=weighting) for layers in ("head", "all"))
    states = [
        half.aggregate(half.init(model(0.5), round_context()), UPDATES, round_context()) for half in (server, whole)
    ]
    mean = FedAvgServer(weighting=weighting).aggregate(model(0.5), iter(UPDATES), round_context())
    for site in ("ann", "bob"):
        ours, theirs = server.broadcast(states[0], site), whole.broadcast(states[1], site)
        assert same_tensors({Part.BODY: ours[Part.BODY]}, {Part.BODY: mean[Part.BODY]})
        assert same_tensors({Part.HEAD: ours[Part.HEAD]}, {Part.HEAD: theirs[Part.HEAD]})
    assert states[0][Part.CLASS_MODELS].keys() == {"head.weight", "head.bias", FACTORS}
    assert refusal(UPDATES[0].payload, server.expects(states[0])) == ""


class Plain:
    """All C class models, one by one, in the words of the paper."""

    def __init__(self, first: Payload, classes: int) -> None:
        self.models, self.shares = [first] * classes, dict[str, Array]()

    def aggregate(self, updates: list[Update]) -> None:
        self.shares |= {u.site: np.asarray(u.payload[Part.CLASS_SHARES]["shares"]) for u in updates}
        for j in range(len(self.models)):
            mass = [(u.weight or 1.0) * self.shares[u.site][j] for u in updates]
            if sum(mass) > 0:
                self.models[j] = self.mixture([m / sum(mass) for m in mass], [u.payload for u in updates])

    def broadcast(self, site: str) -> Payload:
        classes = len(self.models)
        return self.mixture(self.shares.get(site, np.full(classes, 1 / classes)), self.models)

    def mixture(self, weights: Any, models: list[Payload]) -> Payload:
        return {
            part: {
                name: np.sum([w * m[part][name] for w, m in zip(weights, models, strict=True)], axis=0)
                for name in models[0][part]
            }
            for part in MODEL_PARTS
        }


def cohorts(classes: int, rounds: int) -> list[list[Update]]:
    """Rounds of one to three of five sites, each of which has about a third of the classes."""
    rng, made = np.random.default_rng(5), []
    for number in range(rounds):
        some = sorted(rng.choice(5, size=rng.integers(1, 4), replace=False).tolist())
        masses = [rng.random(classes) * (rng.random(classes) < 0.35) for _ in some]
        shares = [(mass + (mass.sum() == 0)) / (mass + (mass.sum() == 0)).sum() for mass in masses]
        models = [drawn(100 * number + k, classes) for k in some]
        made.append([update(f"site-{k}", m, p, 1.0 + k) for k, m, p in zip(some, models, shares, strict=True)])
    return made


def test_partial_participation_is_the_plain_computation() -> None:
    classes, server = 6, Server(weighting="examples")
    state, plain = server.init(drawn(0, classes), round_context(classes)), Plain(drawn(0, classes), classes)
    for updates in cohorts(classes, rounds=12):
        state = codec.decode(codec.encode(server.aggregate(state, iter(updates), round_context())))
        plain.aggregate(updates)
        for c in range(classes):
            close(server.class_model(state, c), plain.models[c])
        for site in range(6):  # the last never takes part
            close(server.broadcast(state, f"site-{site}"), plain.broadcast(f"site-{site}"))
        rows = state[Part.CLASS_MODELS][FACTORS].shape[1]  # which stay bounded
        absent = classes - np.count_nonzero(np.sum([u.payload[Part.CLASS_SHARES]["shares"] for u in updates], axis=0))
        assert rows == len(updates) + absent


@pytest.mark.parametrize("layers", ["all", "head"])
def test_a_class_without_mass_keeps_its_model_bit_for_bit(layers: Any) -> None:
    server = Server(layers=layers)
    state = server.init(drawn(0, 3), round_context(3))
    mixed = [update("ann", drawn(1, 3), [0.3, 0.6, 0.1]), update("bob", drawn(2, 3), [0.2, 0.1, 0.7])]
    state = server.aggregate(state, iter(mixed), round_context())
    kept = {c: codec.encode({Part.HEAD: server.class_model(state, c)[Part.HEAD]}) for c in (0, 2)}
    for seed in range(3, 8):
        state = server.aggregate(state, [update("cyd", drawn(seed, 3), [0.0, 1.0, 0.0])], round_context())
        for c, before in kept.items():
            assert codec.encode({Part.HEAD: server.class_model(state, c)[Part.HEAD]}) == before
        assert same_tensors(server.class_model(state, 1), drawn(seed, 3))
        assert state[Part.CLASS_MODELS][FACTORS].shape == (3, 1 + 2)  # the round's site, and the classes kept


def test_a_site_that_is_not_in_the_round_keeps_its_shares() -> None:
    state = Server().aggregate(FIRST, iter(UPDATES), round_context())
    state = Server().aggregate(state, [update("bob", model(7.0), [0.5, 0.5])], round_context())
    assert state[Part.CLASS_SHARES]["ann"].tolist() == [0.75, 0.25]
    assert state[Part.CLASS_SHARES]["bob"].tolist() == [0.5, 0.5]
    # Class 0 stays at 7, class 1 is 3 now.
    state = Server().aggregate(state, [update("bob", model(3.0), [0.0, 1.0])], round_context())
    assert value(Server().broadcast(state, "ann")) == 0.75 * 7 + 0.25 * 3


def test_the_state_holds_models_of_sites_and_not_of_classes() -> None:
    classes = 50
    updates = [update(site, drawn(k, classes), np.full(classes, 1 / classes)) for k, site in enumerate(("ann", "bob"))]
    state = Server().aggregate(Server().init(drawn(9, classes), round_context(classes)), iter(updates), round_context())
    rows = {name: t for name, t in state[Part.CLASS_MODELS].items() if name != FACTORS}
    assert {len(stack) for stack in rows.values()} == {2}
    one = sum(t.nbytes for part in MODEL_PARTS for t in drawn(0, classes)[part].values())
    assert sum(t.nbytes for t in rows.values()) == 2 * one
    assert state.keys() == {Part.CLASS_MODELS, Part.CLASS_SHARES}


SENSELESS = [[0.0] * 3, [-1.0, 2.0, 0.0], ["max", -1.0, "tiny"], ["tiny"] * 3, [1e-30, 0.0, 1e-30]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shares", SENSELESS)
@pytest.mark.parametrize("beside", [True, False], ids=["beside-another", "alone"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_shares_that_make_no_sense_never_become_nan(shares: Any, dtype: Any, beside: bool, weighting: Any) -> None:
    info = np.finfo(dtype)
    said = [{"max": info.max, "tiny": info.smallest_subnormal}.get(share, share) for share in shares]
    updates = [update("mal", model(3.0, 3, dtype), said, 2.0**52)]
    updates += [update("ann", model(1.0, 3, dtype), [0.5, 0.5, 0.0], 1.0)] * beside
    server = Server(weighting=weighting)
    state = server.init(model(0.5, 3, dtype), round_context(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            state = codec.decode(codec.encode(server.aggregate(state, iter(updates), round_context())))
            assert codec.first_not_finite(state) is None
            made = [server.broadcast(state, site) for site in ("mal", "ann", "new")]
            made += [server.class_model(state, c) for c in range(3)]
            assert all(0.5 - 1e-6 <= float(t) <= 3 + 1e-6 for m in made for t in m[Part.BODY]["w"].flat)


def test_a_site_that_says_nothing_moves_no_class_and_is_sent_all_alike() -> None:
    said = [update("ann", model(1.0), [0.5, 0.5]), update("bob", model(9.0), [0.0, 0.0])]
    state = Server().aggregate(FIRST, iter(said), round_context())
    assert [value(Server().class_model(state, c)) for c in (0, 1)] == [1.0, 1.0]
    state = Server().aggregate(state, [update("ann", model(3.0), [1.0, 0.0])], round_context())
    assert value(Server().broadcast(state, "bob")) == 2.0  # of class models 3 and 1
    assert value(Server().broadcast(state, "ann")) == 3.0


@pytest.mark.parametrize("lam", [0, 1, 10])
def test_training_is_the_released_codes(lam: int, local_of: LocalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add .5 lambda Omega; their p is of the whole site, before its test examples were taken out."""
    golden = np.load(GOLDEN / "cwfedavg_wdr_train_step.npz")
    p = torch.from_numpy(golden["p_true"])
    monkeypatch.setattr(SiteData, "label_frequencies", lambda _: p)
    net = SplitModel(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    local = local_of(net, golden["X"], golden["y"], 3, batch_size=10, lr=float(golden["lr"]))
    received = {
        Part.BODY: {"weight": golden["base_weight"], "bias": golden["base_bias"]},
        Part.HEAD: {"weight": golden["head_weight"], "bias": golden["head_bias"]},
    }
    made = CwFedAvgClient(wdr=lam / 2).fit(local, received).payload
    for theirs, part, name in (("head", "head", "weight"), ("head", "head", "bias"), ("base", "body", "weight")):
        expected = golden[f"lam{lam}_{theirs}_{name}_after"]
        np.testing.assert_allclose(made[Part(part)][name], expected, rtol=0, atol=1e-9, err_msg=f"{theirs} {name}")


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Callable[..., FitContext]:
    """Three of class 0 and one of class 1."""
    features = [[3.0, 4.0], [1.0, -1.0], [2.0, 0.0], [-1.0, 1.0]]
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 2), features, [0, 0, 0, 1], 2, **plan)


RECEIVED: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.5], [-0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.3, 0.4], [-0.5, 1.2]]), "bias": np.array([0.1, 0.0])},
}


def test_without_the_regularizer_training_is_fedavgs(site: Callable[..., FitContext]) -> None:
    plain, ours, regular = (site(lr=0.05, epochs=3, batch_size=2, momentum=0.9) for _ in range(3))
    losses = [FedAvgClient().fit(plain, RECEIVED).metrics, CwFedAvgClient(wdr=0).fit(ours, RECEIVED).metrics]
    assert same_tensors(parts(ours.model), parts(plain.model))
    assert losses[0] == losses[1]
    CwFedAvgClient(wdr=1).fit(regular, RECEIVED)
    assert not same_tensors(parts(regular.model), parts(plain.model))


def test_the_regularizer_makes_the_norms_tell_the_distribution(site: Callable[..., FitContext]) -> None:
    far, near = site(lr=0.05, epochs=40), site(lr=0.05, epochs=40)
    told = [
        CwFedAvgClient(wdr=wdr).fit(local, RECEIVED).payload[Part.CLASS_SHARES]["shares"]
        for wdr, local in ((0.0, far), (10.0, near))
    ]
    assert np.abs(told[1] - [0.75, 0.25]).max() < 0.1 < np.abs(told[0] - [0.75, 0.25]).max()


def test_shares_are_of_the_head_after_training(site: Callable[..., FitContext]) -> None:
    made = CwFedAvgClient().fit(site(lr=0.05), RECEIVED).payload
    assert made.keys() == CwFedAvgClient().sends == {Part.BODY, Part.HEAD, Part.CLASS_SHARES}
    shares = made[Part.CLASS_SHARES]["shares"]
    np.testing.assert_array_equal(shares, class_shares(torch.from_numpy(made[Part.HEAD]["weight"])).numpy())
    assert not np.allclose(shares, [0.5 / 1.8, 1.3 / 1.8])  # as they were received


def test_install_gives_the_mixture_that_was_received(site: Callable[..., FitContext]) -> None:
    local = site()
    CwFedAvgClient().load_global(local, RECEIVED)
    assert same_tensors(parts(local.model), RECEIVED)
    assert CwFedAvgClient.declares.personal == "loaded"  # what a site predicts with, before it trains on


@pytest.mark.parametrize("layers", ["all", "head"])
@pytest.mark.parametrize("shares", ["norms", "true"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_what_one_half_sends_the_other_expects(
    layers: Any, shares: Any, weighting: Any, site: Callable[..., FitContext]
) -> None:
    server = Server(layers=layers, shares=shares, weighting=weighting)
    made = CwFedAvgClient(shares=shares).fit(site(lr=0.1), RECEIVED)
    state = server.init(RECEIVED, round_context(2))
    for _ in range(2):  # of the first state, and of a later one
        expected = server.expects(state)
        assert refusal(made.payload, expected) == ""
        assert expected.weight == (weighting == "examples")
        state = server.aggregate(state, [made], round_context())
    other = CwFedAvgClient(shares="true" if shares == "norms" else "norms").fit(site(lr=0.1), RECEIVED)
    assert refusal(other.payload, server.expects(state))


def test_true_shares_are_a_part_of_their_own(site: Callable[..., FitContext]) -> None:
    made = CwFedAvgClient(shares="true").fit(site(lr=0.1), RECEIVED).payload
    assert made.keys() == CwFedAvgClient(shares="true").sends == {Part.BODY, Part.HEAD, Part.LABEL_DISTRIBUTION}
    assert made[Part.LABEL_DISTRIBUTION]["shares"].tolist() == [0.75, 0.25]
    server = Server(shares="true")
    updates = [Update(name, made) for name in ("ann", "bob")]
    state = server.aggregate(server.init(RECEIVED, round_context(2)), updates, round_context())
    assert state[Part.CLASS_SHARES]["ann"].tolist() == [0.75, 0.25]
    np.testing.assert_allclose(state[Part.CLASS_MODELS][FACTORS], [[0.5, 0.5], [0.5, 0.5]])


def test_no_policy_file_can_allow_true_shares(site: Callable[..., FitContext], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["cwfedavg"]\nparts = ["body", "head", "class-shares", "label-distribution"]\n')
    with pytest.raises(ConfigError, match="no message can carry part 'label-distribution'"):
        Policy.read(policy)


def test_a_policy_without_them_refuses_true_shares_before_and_after_training(site: Callable[..., FitContext]) -> None:
    parts = frozenset({Part.BODY, Part.HEAD, Part.CLASS_SHARES})
    rules = PolicyRules(methods=frozenset({"cwfedavg"}), parts=parts, class_distribution_estimate=True)
    policy, method = Policy(rules), CwFedAvgClient(shares="true")
    with pytest.raises(PolicyViolationError, match="sends 'label-distribution'"):
        policy.admit("cwfedavg", method.sends, exchanges=frozenset())
    with pytest.raises(PolicyViolationError, match="'label-distribution' is not in this site's policy"):
        policy.release(method.fit(site(lr=0.1), RECEIVED))
    policy.admit("cwfedavg", CwFedAvgClient().sends, exchanges=frozenset())


def test_class_models_are_mixed_only_where_the_true_shares_are_aggregated(local_of: LocalOf, linear: Linear) -> None:
    """A server that learns what a site sends must not have it begin where the site's true distribution puts it."""
    site = linear(np.eye(2), 2)
    local = local_of(site, np.zeros((4, 2)), [0, 0, 0, 1], 2)
    first = parts(site)
    heads = np.zeros((2, *first[Part.HEAD]["weight"].shape))
    heads[0], heads[1] = 1.0, 5.0
    received = {**first, Part.CLASS_MODELS: {"head.weight": heads, "head.bias": np.zeros((2, 2)), FACTORS: np.eye(2)}}
    CwFedAvgClient().load_global(local, received)
    assert not dump(site.head)["weight"].any()
    CwFedAvgClient(shares="true").load_global(local, received)
    np.testing.assert_allclose(dump(site.head)["weight"], 0.75 * 1 + 0.25 * 5)
