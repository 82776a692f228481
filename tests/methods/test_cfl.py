"""CFL: a split by hand, what keeps a cluster together, bipartitions beside scikit-learn's, and FedAvg as the limit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.cluster import AgglomerativeClustering
from tests.support.half_rounds import LocalOf, model, play
from tests.support.round_contexts import round_context

from protofed.client.methods.cfl import CFLClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.training.context import FitContext
from protofed.common.payload import Array, Part, Payload, SiteId, Update, same_tensors
from protofed.server.methods.cfl import CFLServer, Linkage, bipartition, inner_products
from protofed.server.methods.fedavg import FedAvgServer

SPLITS = CFLServer(eps1=0.4, eps2=0.9, first_rounds=0)
APART = {"ann": (1.0, 0.0), "bob": (0.9, 0.1), "cyd": (-1.0, 0.0), "dan": (-0.9, -0.1)}  # dW, of the head's biases


def after(server: CFLServer, state: Payload, round: int, **moves: tuple[float, float]) -> Payload:
    """The state after a round in which each site moved the biases that it was sent by so much."""
    updates = []
    for site, move in moves.items():
        bias = server.broadcast(state, site)[Part.HEAD]["bias"]
        updates.append(Update(site, model((bias[0] + move[0], bias[1] + move[1]))))
    return server.aggregate(state, updates, round_context(round=round))


def bias(server: CFLServer, state: Payload, site: SiteId) -> list[float]:
    return [round(float(value), 12) for value in server.broadcast(state, site)[Part.HEAD]["bias"]]


def started(server: CFLServer = SPLITS) -> Payload:
    return server.init(model(), round_context(round=0))


def test_a_split_by_hand() -> None:
    """||mean dW|| = 0 < .4 and max ||dW|| = 1 > .9: the two that went right, and the two that went left."""
    state = after(SPLITS, started(), 1, **APART)
    assert bias(SPLITS, state, "ann") == bias(SPLITS, state, "bob") == [0.95, 0.05]
    assert bias(SPLITS, state, "cyd") == bias(SPLITS, state, "dan") == [-0.95, -0.05]
    state = after(SPLITS, state, 2, ann=(0.05, 0.0), cyd=(0.0, 0.05))  # each from its cluster's model
    assert bias(SPLITS, state, "bob") == [1.0, 0.05]
    assert bias(SPLITS, state, "dan") == [-0.95, 0.0]


@pytest.mark.parametrize(
    ("server", "round", "moves"),
    [
        (CFLServer(eps1=0.4, eps2=0.9, first_rounds=1), 1, APART),
        (CFLServer(eps1=0.4, eps2=1.1, first_rounds=0), 1, APART),
        (SPLITS, 1, {**APART, "cyd": (1.0, 0.0)}),  # the mean moves by .5
        (SPLITS, 1, {"ann": (1.0, 0.0), "cyd": (-1.0, 0.0)}),
    ],
    ids=["too early", "nobody is far", "the model still moves", "two sites"],
)
def test_what_keeps_a_cluster_together(server: CFLServer, round: int, moves: dict[str, tuple[float, float]]) -> None:
    state = after(server, started(server), round, **moves)
    assert bias(server, state, "ann") == bias(server, state, "cyd")


def test_who_is_not_in_the_round_stays_with_the_larger_part_and_who_comes_new_begins_in_the_largest() -> None:
    state = after(SPLITS, started(), 1, ann=(0.1, 0.0), eve=(0.1, 0.0))  # eve is known, and not there below
    state = after(SPLITS, state, 2, ann=(1.0, 0.0), cyd=(-1.0, 0.0), dan=(-0.9, -0.1))
    assert bias(SPLITS, state, "cyd") == bias(SPLITS, state, "eve") == bias(SPLITS, state, "new") == [-0.85, -0.05]
    assert bias(SPLITS, state, "ann") == [1.1, 0.0]
    state = after(SPLITS, state, 3, ann=(0.5, 0.0))
    assert bias(SPLITS, state, "cyd") == [-0.85, -0.05]  # a cluster without an update keeps its model
    assert bias(SPLITS, state, "ann") == [1.6, 0.0]


def similarities(count: int, seed: int) -> Array:
    draw = np.random.default_rng(seed).normal(size=(count, 5))
    unit = draw / np.linalg.norm(draw, axis=1, keepdims=True)
    return np.asarray(unit @ unit.T)


@pytest.mark.parametrize("linkage", ["single", "complete"])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 20])
def test_the_bipartition_is_scikit_learns(linkage: Linkage, count: int) -> None:
    for seed in range(10):
        similarity = similarities(count, seed)
        labels = AgglomerativeClustering(2, metric="precomputed", linkage=linkage).fit(1 - similarity).labels_
        expected = [np.flatnonzero(labels == label).tolist() for label in (0, 1)]
        assert sorted(bipartition(similarity, linkage)) == sorted(expected)


def test_single_linkage_makes_the_greatest_similarity_between_the_parts_as_small_as_it_can_be() -> None:
    for seed in range(10):
        similarity, everybody = similarities(6, seed), set(range(6))
        cross = {
            some: max(similarity[one, other] for one in some for other in everybody - set(some))
            for size in range(1, 6)
            for some in itertools.combinations(range(6), size)
        }
        assert cross[tuple(bipartition(similarity, "single")[0])] == min(cross.values())


def test_the_linkages_differ() -> None:
    """A chain: each is near the next one alone. Its end goes, or it is cut in two."""
    near = np.eye(4)
    for k, closeness in enumerate((0.9, 0.8, 0.7)):
        near[k, k + 1] = near[k + 1, k] = closeness
    assert sorted(bipartition(near, "single")) == [[0, 1, 2], [3]]
    assert sorted(bipartition(near, "complete")) == [[0, 1], [2, 3]]


def test_buffers_count_for_nothing_in_a_split() -> None:
    def with_buffer(seen: float) -> Payload:
        return {**model(), Part.BODY: {"0.weight": np.array([[1.0]]), "1.running_var": np.array([seen])}}

    assert not inner_products(with_buffer(0.0), [with_buffer(5.0), with_buffer(-5.0)]).any()


def test_without_a_split_it_is_fedavg_bit_for_bit(tiny: LocalOf) -> None:
    def sites() -> dict[SiteId, FitContext]:
        data = {"ann": ([[2.0], [1.0]], [0, 1]), "bob": ([[3.0]], [1]), "cyd": ([[-1.0]], [0])}
        return {site: tiny(*some, lr=0.1, epochs=2) for site, some in data.items()}

    clustered = play(CFLServer(eps1=0.0), CFLClient(), sites(), model(), 3)
    averaged = play(FedAvgServer(), FedAvgClient(), sites(), model(), 3)
    for one, other in zip(clustered, averaged, strict=True):
        assert all(same_tensors(CFLServer().broadcast(one, site), other) for site in ("ann", "bob", "cyd"))
