"""APPLE: a fit by hand, the authors' schedules, how a site finds its core, and local training as its limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import GOLDEN, LocalOf, model, parts, play
from tests.support.round_contexts import round_context

from protofed.client.methods.apple import APPLEClient, decay
from protofed.client.methods.solo import SoloClient
from protofed.client.training.context import FitContext
from protofed.common.payload import Array, Part, Payload, SiteId, Update, same_tensors
from protofed.server.methods.apple import APPLEServer
from protofed.server.methods.solo import SoloServer

CORES: Payload = {
    **model((9.0, 9.0)),
    Part.SITE_MODELS: {
        "body.0.weight": np.ones((2, 1, 1)),
        "head.weight": np.zeros((2, 2, 1)),
        "head.bias": np.array([[1.0, -1.0], [0.0, 0.0]]),
    },
}


def memory(row: int, own: float, others: Any) -> dict[str, Array]:
    return {"row": np.array(row), "own": np.array(own), "others": np.array(others)}


@pytest.fixture
def local(tiny: LocalOf) -> FitContext:
    """One example x = 0 of class 0, so that the biases alone move; the second of two cores is the site's own."""
    local = tiny([[0.0]], [0], round=2, rounds=20, lr=0.1)
    local.client_state[Part.PRIVATE] = memory(1, 0.0, [0.0, 0.0])
    return local


def test_a_fit_by_hand(local: FitContext) -> None:
    """P = (.5, .5): logits (.5, -.5), 1 - p_0 = 1 / (1 + e) = g, and the loss's gradient by them (-g, g).

    The own core's biases move by .1 * .5 g, p of the other core by .01 * 2 g, and p of the own one, of zeros, by 0.
    """
    update = APPLEClient(p_lr=0.01).fit(local, CORES).payload
    g = 1 / (1 + math.e)
    assert update.keys() == APPLEClient.sends
    np.testing.assert_allclose(update[Part.HEAD]["bias"], [0.05 * g, -0.05 * g], atol=1e-15)
    assert update[Part.BODY]["0.weight"] == 1.0
    kept = local.client_state[Part.PRIVATE]
    np.testing.assert_allclose(kept["others"], [0.02 * g, 0.0], atol=1e-15)
    assert (float(kept["own"]), int(kept["row"])) == (0.0, 1)
    personal = (0.5 + 0.02 * g) * 1.0 + 0.5 * 0.05 * g
    np.testing.assert_allclose(parts(local.model)[Part.HEAD]["bias"], [personal, -personal], atol=1e-15)
    assert local.start is not None
    assert local.start.sent is not None
    assert local.start.model[Part.HEAD]["bias"].tolist() == [0.5, -0.5]  # with which the first step computed
    assert local.start.sent[Part.HEAD]["bias"].tolist() == [0.0, 0.0]  # and what it moved


def test_p_is_drawn_to_p0_until_l_is_over(local: FitContext) -> None:
    """From p - p_0 = (.2, -.2) another .01 (2 mu lambda .2) back: lambda = (1 + cos(pi 2 / 4)) / 2 = .5 in round 3."""
    start = memory(1, -0.2, [0.2, 0.0])
    found = {}
    for number in (3, 5):
        local.round, local.client_state[Part.PRIVATE] = number, start
        APPLEClient(p_lr=0.01, mu=5.0).fit(local, CORES)
        found[number] = float(local.client_state[Part.PRIVATE]["others"][0])
    assert found[5] - found[3] == pytest.approx(0.01 * 2 * 5.0 * 0.5 * 0.2)


def test_the_authors_schedules() -> None:
    with np.load(GOLDEN / "apple_authors_reg.npz") as golden:
        end, mu = float(golden["last_fraction"] * golden["num_rounds"]), float(golden["mu"])
        for schedule in ("cosine", "exponential"):
            made = [mu * decay(int(done), end, schedule) for done in golden["rounds"]]
            np.testing.assert_allclose(made, golden[f"coef_{schedule}"], atol=1e-9)


def test_the_authors_penalty(local: FitContext) -> None:
    """In round 1 lambda is 1, so that mu is their coefficient: what it adds to the loss is mu ||p - p_0||^2."""
    with np.load(GOLDEN / "apple_authors_reg.npz") as golden:
        gap, expected = golden["p"] - golden["p0"], float(golden["reg_loss_coef05"])
    cores = {name: np.concatenate([stack[:1]] * len(gap)) for name, stack in CORES[Part.SITE_MODELS].items()}
    local.round, losses = 1, []
    for mu in (0.5, 0.0):
        local.client_state[Part.PRIVATE] = memory(1, gap[1], np.where(np.arange(5) == 1, 0, gap))
        losses.append(APPLEClient(mu=mu).fit(local, {**CORES, Part.SITE_MODELS: cores}).metrics["loss"])
    assert losses[0] - losses[1] == pytest.approx(expected, abs=1e-6)  # a loss is a sum in float32


def test_before_the_server_has_its_core_a_site_counts_the_first_model_as_its_own(local: FitContext) -> None:
    """N = 3: p_0 = 1/3 of each."""
    local.client_state.clear()
    APPLEClient().load_global(local, CORES)
    np.testing.assert_allclose(parts(local.model)[Part.HEAD]["bias"], [(9 + 1 + 0) / 3, (9 - 1 + 0) / 3])


def test_sites_find_their_cores_by_what_they_sent(tiny: LocalOf) -> None:
    sites = {
        site: tiny([[float(number)]], [number % 2], lr=0.1) for number, site in enumerate(("ann", "bob", "cyd"), 1)
    }
    states = play(APPLEServer(), APPLEClient(), sites, model(), 3)
    assert [int(local.client_state[Part.PRIVATE]["row"]) for local in sites.values()] == [0, 1, 2]
    assert len(states[3][Part.SITE_MODELS]["head.bias"]) == 3


def test_a_core_is_found_though_some_of_its_head_left_as_it_came(tiny: LocalOf) -> None:
    first, received = tiny([[2.0]], [0], lr=0.1), model()
    sent = APPLEClient().fit(first, received).payload
    withheld = {**sent, Part.HEAD: {**sent[Part.HEAD], "weight": received[Part.HEAD]["weight"]}}
    other = {**sent, Part.HEAD: {**sent[Part.HEAD], "bias": sent[Part.HEAD]["bias"] * 2}}
    untrained = model()
    updates = [Update("ann", untrained), Update("bob", other), Update("cyd", withheld)]
    server = APPLEServer()
    state = server.aggregate(server.init(received, round_context(round=0)), updates, round_context(round=1))
    APPLEClient().fit(first, state)
    assert int(first.client_state[Part.PRIVATE]["row"]) == 2


def test_a_new_site_changes_p0_and_nothing_that_was_learnt(local: FitContext) -> None:
    local.client_state[Part.PRIVATE] = memory(1, 0.25, [0.125, 0.0])
    grown = {name: np.concatenate([stack, stack[:1]]) for name, stack in CORES[Part.SITE_MODELS].items()}
    APPLEClient().load_global(local, {**CORES, Part.SITE_MODELS: grown})
    bias = (1 / 3 + 0.125) * 1.0 + (1 / 3 + 0.25) * 0.0 + (1 / 3) * 1.0
    np.testing.assert_allclose(parts(local.model)[Part.HEAD]["bias"], [bias, -bias])


def test_whose_a_core_is_stays_on_the_server_and_where_it_starts_from_is_its_own() -> None:
    server = APPLEServer()
    first = server.init(model((9.0, 9.0)), round_context(round=0))
    updates = [Update("ann", model((1.0, 0.0))), Update("bob", model((2.0, 0.0)))]
    state = server.aggregate(first, updates, round_context(round=1))
    state = server.aggregate(state, [Update("bob", model((3.0, 0.0)))], round_context(round=2))
    assert server.broadcast(state, "ann") is server.broadcast(state, "bob")
    assert state[Part.SITE_MODELS]["head.bias"][:, 0].tolist() == [1.0, 3.0]
    assert not any("ann" in name for part in state if part is not Part.PRIVATE for name in state[part])
    starts = [server.start(state, site, model())[Part.HEAD]["bias"][0] for site in ("ann", "bob", "eve")]
    assert starts == [1.0, 3.0, 9.0]


@pytest.mark.parametrize("sites", [("ann",), ("ann", "bob")])
def test_with_all_of_p_on_the_own_core_and_frozen_it_trains_alone(sites: tuple[SiteId, ...], tiny: LocalOf) -> None:
    def made() -> dict[SiteId, FitContext]:
        return {site: tiny([[2.0 + number], [1.0]], [0, 1], lr=0.1, epochs=2) for number, site in enumerate(sites)}

    apple, alone = made(), made()
    play(SoloServer(), SoloClient(), alone, model(), 3)
    server, state = APPLEServer(), APPLEServer().init(model(), round_context(round=0))
    for number in (1, 2, 3):
        updates = []
        for row, (site, local) in enumerate(apple.items()):
            if number > 1 and len(sites) > 1:
                local.client_state[Part.PRIVATE] = memory(row, 0.5, [-0.5, -0.5])
            updates.append(Update(site, APPLEClient(p_lr=0.0).fit(local, server.broadcast(state, site)).payload))
        state = server.aggregate(state, updates, round_context(round=number))
    for site, local in apple.items():
        assert same_tensors(parts(local.model), alone[site].client_state)
