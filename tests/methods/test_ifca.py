"""IFCA: a round by hand, where the k models come from, and FedAvg as its limit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.half_rounds import LocalOf, model, parts, play
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.ifca import IFCAClient
from protofed.client.models.split import site_models
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, SiteId, Update, same_tensors
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.ifca import IFCAServer

ZERO, ONE = model((1.0, -1.0)), model((-1.0, 1.0))  # what predicts class 0, and class 1
BOTH: Payload = {
    **ZERO,
    Part.SITE_MODELS: {
        f"{part}.{name}": array[None] for part, tensors in ONE.items() for name, array in tensors.items()
    },
}
STEP = 0.1 / (1 + math.exp(2))  # of biases of 1 and -1 towards their class: .1 (1 - p)


def sent(choice: tuple[float, ...], bias: tuple[float, float]) -> Payload:
    return {**model(bias), Part.CHOICE: {"one-hot": np.array(choice)}}


@pytest.mark.parametrize(("label", "choice"), [(0, [1.0, 0.0]), (1, [0.0, 1.0])])
def test_a_fit_by_hand(label: int, choice: list[float], tiny: LocalOf) -> None:
    """X = 0: the loss is ln(1 + e^-2) of the model that says the class, and ln(1 + e^2) of the other."""
    local = tiny([[0.0]], [label], lr=0.1)
    update = IFCAClient().fit(local, BOTH).payload
    assert update.keys() == IFCAClient.sends
    assert update[Part.CHOICE]["one-hot"].tolist() == choice
    up, down = 1 + STEP, -1 - STEP
    np.testing.assert_allclose(update[Part.HEAD]["bias"], [up, down] if label == 0 else [down, up], atol=1e-15)
    assert local.start is not None
    assert same_tensors({Part.HEAD: local.start.model[Part.HEAD]}, {Part.HEAD: (ZERO, ONE)[label][Part.HEAD]})


def test_a_site_predicts_with_the_model_that_suits_it(tiny: LocalOf) -> None:
    local = tiny([[0.0]], [1])
    IFCAClient().load_global(local, BOTH)
    assert same_tensors(parts(local.model), ONE)


def test_a_round_by_hand() -> None:
    """Two chose the first model, one the second, nobody the third."""
    server = IFCAServer(clusters=3)
    state = server.init(model((1.0, 3.0)), round_context(round=0))
    updates = [
        Update("ann", sent((1.0, 0.0, 0.0), (2.0, 0.0))),
        Update("bob", sent((0.0, 1.0, 0.0), (7.0, 7.0))),
        Update("cyd", sent((1.0, 0.0, 0.0), (4.0, 0.0))),
    ]
    new = server.aggregate(state, updates, round_context(round=1))
    assert new[Part.HEAD]["bias"].tolist() == [3.0, 0.0]
    second, third = site_models(new)
    assert second[Part.HEAD]["bias"].tolist() == [7.0, 7.0]
    assert same_tensors(third, site_models(state)[1])
    starts = [server.start(new, "ann", sent(tuple(choice), (0.0, 0.0)))[Part.HEAD]["bias"] for choice in np.eye(3)]
    np.testing.assert_array_equal(starts, [[3.0, 0.0], [7.0, 7.0], third[Part.HEAD]["bias"]])


def test_the_other_models_have_the_first_ones_numbers_in_an_order_of_their_own() -> None:
    first: Payload = {
        Part.BODY: {"0.weight": np.arange(12.0, dtype=np.float32).reshape(3, 4)},
        Part.HEAD: {"weight": np.arange(6.0).reshape(2, 3), "bias": np.array([5.0, 6.0]), "scale": np.array(2.0)},
    }
    models = site_models(IFCAServer(clusters=4).init(first, round_context(round=0)))
    assert len(models) == 3
    for other in models:
        for part, name in ((Part.BODY, "0.weight"), (Part.HEAD, "weight"), (Part.HEAD, "bias"), (Part.HEAD, "scale")):
            assert other[part][name].dtype == first[part][name].dtype
            assert other[part][name].shape == first[part][name].shape
            assert sorted(other[part][name].ravel()) == sorted(first[part][name].ravel())
    bodies = {other[Part.BODY]["0.weight"].tobytes() for other in (first, *models)}
    assert len(bodies) == 4
    again, other_seed = (
        site_models(IFCAServer(clusters=4).init(first, round_context(round=0, seed=seed))) for seed in (0, 1)
    )
    assert all(same_tensors(one, other) for one, other in zip(models, again, strict=True))
    assert not any(same_tensors(one, other) for one, other in zip(models, other_seed, strict=True))


def test_one_cluster_is_fedavg_bit_for_bit(tiny: LocalOf) -> None:
    def sites() -> dict[SiteId, FitContext]:
        data = {"ann": ([[2.0], [1.0]], [0, 1]), "bob": ([[3.0]], [1])}
        return {site: tiny(*some, lr=0.1, epochs=2) for site, some in data.items()}

    clustered = play(IFCAServer(clusters=1), IFCAClient(), sites(), model(), 3)
    averaged = play(FedAvgServer(), FedAvgClient(), sites(), model(), 3)
    for one, other in zip(clustered, averaged, strict=True):
        assert same_tensors(one, other)
