"""FedFomo: the release's weights, a fit and the server's affinities by hand, and local training as its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.golden_nets import assert_near, two_layers
from tests.support.half_rounds import GOLDEN, Linear, LocalOf, model, parts, play
from tests.support.round_contexts import round_context
from torch import nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import compute_losses, distance, mixed
from protofed.client.methods.fedfomo import FedFomoClient, first_order, normalised_gains
from protofed.client.methods.solo import SoloClient
from protofed.client.models.split import site_models
from protofed.client.training.context import FitContext
from protofed.common.config.tables import Input
from protofed.common.payload import Array, Part, Payload, SiteId, Update, same_tensors
from protofed.server.methods.fedfomo import FedFomoServer

ONE_PIXEL = Input(shape=(1, 1, 1))


@pytest.fixture
def site_of(local_of: LocalOf, linear: Linear) -> Callable[..., FitContext]:
    """A site with so many examples of each of two classes, all of them the image 0; batches of all."""

    def make(*counts: int, **plan: float) -> FitContext:
        labels = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        local = local_of(linear([[9.0]], 2, nn.Flatten()).float(), [[0.0]], [0], 2, **{"lr": 0.1, **plan})
        examples = Examples(torch.zeros(len(labels), 1, 1, 1), labels)
        local.data = SiteData(examples, examples, ONE_PIXEL, 2)
        return local

    return make


def test_the_releases_weights_and_mixture(local_of: LocalOf) -> None:
    with np.load(GOLDEN / "fedfomo_weights.npz") as golden:
        shapes = [tuple(int(n) for n in shape.strip("()").split(",") if n) for shape in golden["param_shapes"]]

        def unflattened(flat: Array) -> Payload:
            rows = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
            weight, bias, *head = (row.reshape(shape) for row, shape in zip(rows, shapes, strict=True))
            return {Part.BODY: {"0.weight": weight, "0.bias": bias}, Part.HEAD: {"weight": head[0], "bias": head[1]}}

        own, *others = (unflattened(flat) for flat in (golden["old_model_flat"], *golden["received_flat"]))
        local = local_of(two_layers(), golden["X"], golden["y"], 3)
        before, *losses = compute_losses(local, [own, *others], local.data.train)
        np.testing.assert_allclose([before, *losses], [golden["old_val_loss"], *golden["received_val_losses"]])
        gains = first_order(before, losses, [distance(local, own, other) for other in others])
        np.testing.assert_allclose(gains, golden["raw_weights"], atol=1e-9)
        weights = normalised_gains(gains)
        np.testing.assert_allclose(weights, [0.0, *golden["positive_normalised_weights"]], atol=1e-9)
        assert_near(mixed([own, *others], weights), unflattened(golden["aggregated_flat"]))


def with_others(own: Payload, *biases: tuple[float, float]) -> Payload:
    stack = {"body.0.weight": np.ones((len(biases), 1, 1)), "head.weight": np.zeros((len(biases), 2, 1))}
    return {**own, Part.SITE_MODELS: {**stack, "head.bias": np.array(biases)}}


def test_a_fit_by_hand(site_of: Callable[..., FitContext]) -> None:
    """Ten examples of class 0, of which two are held out. Their loss is ln 2 with w_k, ln(1 + e^-2) with the first
    other model, ln(1 + e^2) with the second; both are at a distance of sqrt 2.

    So the mixture is the first, and the fit a step from there: of its biases by .1 (1 - p_0) = .1 / (1 + e^2).
    """
    local = site_of(10, 0)
    update = FedFomoClient(models=3).fit(local, with_others(model(), (1.0, -1.0), (-1.0, 1.0))).payload
    gains = np.array([math.log(2) - math.log1p(math.exp(-2)), math.log(2) - math.log1p(math.exp(2))])
    gains /= math.sqrt(2) + 1e-5, math.sqrt(2) + 1e-5
    np.testing.assert_allclose(update[Part.CHOICE]["weights"], [*gains, 0.0], rtol=1e-6)
    step = 0.1 / (1 + math.exp(2))
    np.testing.assert_allclose(update[Part.HEAD]["bias"], [1 + step, -1 - step], rtol=1e-6)
    assert local.start is not None
    assert local.start.model[Part.HEAD]["bias"].tolist() == [1.0, -1.0]
    assert len(local.data.train) == 8
    assert same_tensors(parts(local.model), {part: update[part] for part in (Part.BODY, Part.HEAD)})


def test_a_mixture_is_of_what_gains() -> None:
    assert normalised_gains(np.array([1.0, -5.0, 3.0])).tolist() == [0.0, 0.25, 0.0, 0.75]
    assert normalised_gains(np.array([-1.0, 0.0])).tolist() == [1.0, 0.0, 0.0]
    assert first_order(2.0, [2.0], [0.0]).tolist() == [0.0]  # an equal model


def test_where_no_other_model_gains_anything_the_site_trains_alone(site_of: Callable[..., FitContext]) -> None:
    received = with_others(model(), (-1.0, 1.0))
    fomo, alone = site_of(10, 0, epochs=3), site_of(10, 0, epochs=3)
    alone.data, _ = alone.data.held_out(0.2)
    update = FedFomoClient().fit(fomo, received).payload
    SoloClient().fit(alone, model())
    assert (update[Part.CHOICE]["weights"] <= 0).all()
    assert same_tensors({part: update[part] for part in (Part.BODY, Part.HEAD)}, alone.client_state)
    update = FedFomoClient().fit(site_of(4, 0), with_others(model(), (1.0, -1.0))).payload
    assert not update[Part.CHOICE]["weights"].any(), "without a validation part"
    np.testing.assert_allclose(update[Part.HEAD]["bias"], [0.05, -0.05], rtol=1e-6)


def test_one_site_alone_is_solo(site_of: Callable[..., FitContext]) -> None:
    fomo, alone = site_of(5, 5, epochs=2), site_of(5, 5, epochs=2)
    alone.data, _ = alone.data.held_out(0.2)
    play(FedFomoServer(), FedFomoClient(), {"ann": fomo}, model(), 3)
    for _ in range(3):
        SoloClient().fit(alone, model())
    assert same_tensors(parts(fomo.model), alone.client_state)


def sent(bias: float, *weights: float) -> Payload:
    return {**model((bias, 0.0)), Part.CHOICE: {"weights": np.array(weights)}}


THREE = [Update(site, sent(bias, 0.0, 0.0)) for site, bias in (("ann", 1.0), ("bob", 2.0), ("cyd", 3.0))]


def others_of(server: FedFomoServer, state: Payload, site: SiteId) -> list[float]:
    """The first bias of each model that a site is sent."""
    return [float(other[Part.HEAD]["bias"][0]) for other in site_models(server.broadcast(state, site))]


def rounds(server: FedFomoServer, *updates: Sequence[Update], seed: int = 0) -> Payload:
    state = server.init(model((9.0, 9.0)), round_context(round=0, seed=seed))
    for number, of_round in enumerate(updates, 1):
        state = server.aggregate(state, of_round, round_context(round=number, seed=seed))
    return state


def test_a_site_is_sent_what_has_gained_it_most_without_names() -> None:
    server = FedFomoServer(models=1, exploration=0.0)
    state = rounds(server, THREE)
    (shown,) = others_of(server, state, "ann")
    assert shown in (2.0, 3.0)
    worse = server.aggregate(state, [Update("ann", sent(1.0, -0.5))], round_context(round=2))
    assert others_of(server, worse, "ann") == [5.0 - shown]  # what harmed is sent last
    better = server.aggregate(state, [Update("ann", sent(1.0, 0.5))], round_context(round=2))
    assert others_of(server, better, "ann") == [shown]
    own = server.broadcast(better, "ann")
    assert own[Part.HEAD]["bias"].tolist() == [1.0, 0.0]
    assert not any("ann" in name for part in (Part.SITE_MODELS, Part.BODY, Part.HEAD) for name in own[part])


def test_affinities_add_up() -> None:
    server = FedFomoServer(models=2, exploration=0.0)
    state = rounds(server, THREE)
    for number in (2, 3):
        gains = [{2.0: 0.1, 3.0: 0.3}[shown] * number for shown in others_of(server, state, "ann")]
        state = server.aggregate(state, [Update("ann", sent(1.0, *gains))], round_context(round=number))
    assert others_of(server, state, "ann") == [3.0, 2.0]
    kept = state[Part.PRIVATE]["affinity.ann"]
    np.testing.assert_allclose(kept, [[1.0, 0.5], [2.0, 1.5]])  # rows 1 and 2 are bob's and cyd's


def test_exploration_falls_from_round_to_round_and_comes_from_the_runs_seed() -> None:
    first = [Update(site, sent(float(number), 0.0)) for number, site in enumerate("abcdefgh")]
    likes = FedFomoServer(models=1, exploration=1.0, exploration_decay=0.25)

    def shown(number: int, seed: int) -> float:
        """To site a, which is sure of what it has got, in the round of this number."""
        state = rounds(likes, first, seed=seed)
        row = int(others_of(likes, state, "a")[0])
        state = likes.aggregate(state, [Update("a", sent(0.0, 1.0))], round_context(round=number, seed=seed))
        return float(others_of(likes, state, "a") == [float(row)])

    assert all(shown(4, seed) for seed in range(20))  # 1 - .25 * 4: no chance is left
    assert 0 < sum(shown(2, seed) for seed in range(20)) < 20
    assert [shown(2, seed) for seed in range(5)] == [shown(2, seed) for seed in range(5)]


def test_a_new_site_is_sent_the_first_model_and_the_oldest_others() -> None:
    server = FedFomoServer(models=2)
    state = rounds(server, THREE)
    assert server.broadcast(state, "eve")[Part.HEAD]["bias"].tolist() == [9.0, 9.0]
    assert others_of(server, state, "eve") == [1.0, 2.0]


def test_what_a_site_started_from_is_the_mixture_by_its_weights() -> None:
    server = FedFomoServer(models=2)
    state = rounds(server, THREE)
    one, other = others_of(server, state, "ann")
    start = server.start(state, "ann", sent(0.0, 3e30, 1e30))
    assert start[Part.HEAD]["bias"][0] == pytest.approx(0.75 * one + 0.25 * other)
    for nothing in ((0.0, -1.0), (np.nan, 1.0), (np.inf, 1.0)):
        assert server.start(state, "ann", sent(0.0, *nothing))[Part.HEAD]["bias"].tolist() == [1.0, 0.0]


def test_a_weight_of_a_model_that_was_not_sent_counts_for_nothing() -> None:
    server = FedFomoServer(models=4)
    state = rounds(server, [replace(update, payload=sent(9.0, *[0.0] * 4)) for update in THREE])
    lie = sent(1.0, 0.0, 0.0, 5.0, 5.0)
    assert server.start(state, "ann", lie)[Part.HEAD]["bias"].tolist() == [9.0, 0.0]
    after = server.aggregate(state, [Update("ann", lie)], round_context(round=2))[Part.PRIVATE]["affinity.ann"]
    assert after.tolist() == [[1.0, 0.0], [2.0, 0.0]]
