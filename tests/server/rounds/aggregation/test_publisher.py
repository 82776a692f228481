"""States and broadcasts as blobs: in site order, stored once, and only the newest held."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.errors import StateError
from protofed.common.payload import Array, Part, Payload, SiteId, Update
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.server.method import ExpectedUpdate, RoundContext
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.rounds.aggregation import publisher
from protofed.server.rounds.aggregation.publisher import KEPT, Publisher, prototype_statistics
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.rows import TaskRow, UpdateRow

if TYPE_CHECKING:
    from tests.server.conftest import Lab


@dataclass(frozen=True)
class Listed:
    """Keeps who came, in order, and sends every site something of its own."""

    global_model: ClassVar[bool] = False

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """A number for each first letter."""
        return {Part.BODY: {"site": np.array(ord(site[0]))}}

    def expects(self, state: Payload) -> ExpectedUpdate:
        """Nothing."""
        return ExpectedUpdate(())

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """Their first letters and weights, as they come."""
        seen = [(ord(update.site[0]), update.weight or 0) for update in updates]
        return {Part.BODY: {"seen": np.array(seen, np.float64)}}


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


def row(blobs: MemoryBlobs, site: SiteId, payload: Payload, weight: float | None = None) -> UpdateRow:
    task = TaskRow(f"task_id-{site}", "run", 1, 1, site, TaskKind.FIT, None, 0)
    data = codec.encode(payload)
    return UpdateRow(task, Verdict.ACCEPTED, "", blobs.put(data), len(data), {}, weight)


def test_updates_are_folded_in_site_order_with_their_weights(blobs: MemoryBlobs, lab: Lab) -> None:
    rows = [row(blobs, site, {}, weight) for site, weight in (("ann", 1.0), ("bob", None), ("cyd", 3.0))]
    publisher = Publisher(Listed(), blobs, min_contributors=2)
    for order in permutations(rows):
        published = publisher.publish(publisher.aggregated(lab.model(0.0), order, round_context()))
        assert published.state[Part.BODY]["seen"].tolist() == [[97.0, 1.0], [98.0, 0.0], [99.0, 3.0]]


def test_a_published_state_can_be_restored(blobs: MemoryBlobs, lab: Lab) -> None:
    publisher = Publisher(FedAvgServer(), blobs, min_contributors=2)
    first = publisher.publish(publisher.aggregated(None, [row(blobs, "eva", lab.model(2.0))], round_context()))
    again = Publisher(FedAvgServer(), blobs, min_contributors=2).restore(first.address)
    assert again.address == first.address == codec.digest(codec.encode(again.state))


class Counting(MemoryBlobs):
    """Knows how often something was put."""

    puts = 0

    def put(self, *data: Buffer) -> Digest:
        """Count it."""
        self.puts += 1
        return super().put(*data)


def test_what_is_equal_for_all_is_encoded_once_however_often_it_is_sent(lab: Lab) -> None:
    blobs, state = Counting(), lab.model(0.0)
    publisher = Publisher(FedAvgServer(), blobs, min_contributors=2)
    for _ in range(2):
        publisher.broadcasts(state, ["ann", "bob", "cyd"])
    assert blobs.puts == 1


def test_what_is_equal_for_all_is_one_blob_and_what_is_not_is_one_each(blobs: MemoryBlobs, lab: Lab) -> None:
    state, sites = lab.model(0.0), ["ann", "bob", "cyd"]
    same = Publisher(FedAvgServer(), blobs, min_contributors=2).broadcasts(state, sites)
    assert set(same) == set(sites)
    assert set(same.values()) == {(codec.digest(codec.encode(state)), len(codec.encode(state)))}
    own = Publisher(Listed(), blobs, min_contributors=2).broadcasts(state, sites)
    assert len(set(own.values())) == 3
    for site, (address, nbytes) in own.items():
        data = blobs.get(address)
        assert len(data) == nbytes
        assert codec.decode(data)[Part.BODY]["site"] == ord(site[0])


@dataclass(frozen=True)
class Clustered(FedAvgServer):
    """Sends each of `clusters` its own model, of the state's arrays or of new ones; with it, its secret."""

    clusters: int = 2
    anew: bool = False

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """A dictionary of its own for every site."""
        array = state[Part.PRIVATE][str(int(site) % self.clusters)]
        return {Part.BODY: {"w": array.copy() if self.anew else array}, Part.PRIVATE: state[Part.PRIVATE]}


def clusters(number: int) -> Payload:
    return {Part.PRIVATE: {str(c): np.full(3, float(c)) for c in range(number)}}


def test_what_stays_on_the_server_is_in_its_state_and_in_no_broadcast(blobs: MemoryBlobs) -> None:
    publisher = Publisher(Clustered(), blobs, min_contributors=2)
    published = publisher.publish(clusters(2))
    sent = publisher.broadcasts(published.state, ["0", "1"])
    assert [codec.decode(blobs.get(address)).keys() for address, _ in sent.values()] == [{Part.BODY}] * 2
    assert publisher.restore(published.address).state.keys() == {Part.PRIVATE}


def test_the_same_arrays_in_new_dictionaries_are_encoded_once() -> None:
    blobs, state, sites = Counting(), clusters(2), [str(site) for site in range(20)]
    publisher = Publisher(Clustered(), blobs, min_contributors=2)
    for _ in range(2):
        sent = publisher.broadcasts(state, sites)
    assert len(set(sent.values())) == blobs.puts == 2
    for site, (address, nbytes) in sent.items():
        assert codec.decode(blobs.get(address))[Part.BODY]["w"].tolist() == [int(site) % 2] * 3
        assert nbytes == len(blobs.get(address))
        assert publisher.stored(address) is not None


def test_equal_tensors_that_are_new_for_each_site_are_one_blob_and_none_of_them_is_kept(blobs: MemoryBlobs) -> None:
    made = list[weakref.ref[Array]]()

    class Watched(Clustered):
        def broadcast(self, state: Payload, site: SiteId) -> Payload:
            payload = super().broadcast(state, site)
            made.append(weakref.ref(payload[Part.BODY]["w"]))
            return payload

    publisher = Publisher(Watched(anew=True), blobs, min_contributors=2)
    sent = publisher.broadcasts(clusters(2), [str(site) for site in range(20)])
    assert len(set(sent.values())) == len(blobs._data) == 2
    gc.collect()
    assert [ref() for ref in made] == [None] * 20
    assert publisher.stored(sent["0"][0]) is None


def test_the_same_arrays_under_other_names_are_another_payload(blobs: MemoryBlobs) -> None:
    publisher, array = Publisher(FedAvgServer(), blobs, min_contributors=2), np.ones(3)
    sent = [
        publisher.broadcasts(state, ["0"])["0"][0] for state in ({Part.BODY: {"a": array}}, {Part.BODY: {"b": array}})
    ]
    assert [list(codec.decode(blobs.get(address))[Part.BODY]) for address in sent] == [["a"], ["b"]]


def test_no_more_payloads_are_kept_than_are_needed_however_many_sites_there_are() -> None:
    blobs, many = Counting(), 3 * KEPT
    publisher = Publisher(Clustered(clusters=many), blobs, min_contributors=2)
    sent = publisher.broadcasts(clusters(many), [str(site) for site in range(many)])
    assert blobs.puts == len(set(sent.values())) == many
    assert sum(publisher.stored(address) is not None for address, _ in sent.values()) == KEPT


def test_only_the_newest_state_is_held_in_memory(blobs: MemoryBlobs, lab: Lab) -> None:
    publisher = Publisher(FedAvgServer(), blobs, min_contributors=2)
    state = publisher.publish(publisher.aggregated(None, [row(blobs, "eva", lab.model(0.0))], round_context())).state
    publisher.broadcasts(state, ["ann"])
    held = weakref.ref(state[Part.BODY]["conv.weight"])
    state = publisher.publish(publisher.aggregated(state, [row(blobs, "ann", lab.model(1.0))], round_context())).state
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_neither_published_nor_stored(blobs: MemoryBlobs, lab: Lab, value: float) -> None:
    rows = [row(blobs, "ann", {Part.BODY: {"x": np.array([1.0, value])}})]
    before = set(blobs._data)
    with pytest.raises(StateError, match="body/x has values that are not finite"):
        Publisher(FedAvgServer(), blobs, min_contributors=2).aggregated(lab.model(0.0), rows, round_context())
    assert set(blobs._data) == before


def test_an_update_that_is_gone_is_a_state_error(blobs: MemoryBlobs, lab: Lab) -> None:
    rows = [row(blobs, "ann", lab.model(1.0)), row(blobs, "bob", lab.model(2.0))]
    blobs.discard(rows[1].digest)
    with pytest.raises(StateError, match=rows[1].digest):
        Publisher(FedAvgServer(), blobs, min_contributors=2).aggregated(lab.model(0.0), rows, round_context())


EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
NORTH_EAST = [1.0, 1.0]


def matrix(*rows: list[float]) -> Payload:
    """As FedNH keeps them: a prototype for every class."""
    return {Part.PROTOTYPES: {"mean": np.array(rows, np.float32)}}


def rows(**by_class: list[float]) -> Payload:
    """As FedProc keeps them: c0, c2 … for the classes that have one."""
    named: dict[str, Array] = {name[1:]: np.array(row, np.float32) for name, row in by_class.items()}
    return {Part.PROTOTYPES: named}


def test_a_state_without_prototypes_says_nothing() -> None:
    body: Payload = {Part.BODY: {"w": np.ones((2, 2), np.float32)}}
    assert prototype_statistics(None, body) == {}
    assert prototype_statistics(body, {**body, Part.PROTOTYPES: {}}) == {}


def test_one_of_three_prototypes_turns() -> None:
    before, after = matrix(EAST, NORTH, WEST), matrix(NORTH_EAST, NORTH, WEST)
    turned = 1 - 1 / math.sqrt(2)  # east to north-east: cos 45 degrees
    found = prototype_statistics(before, after)
    assert found == pytest.approx(
        {"prototype_shift": turned / 3, "prototype_min_distance": turned, "classes_covered": 1.0}
    )


def test_nothing_moves_and_the_first_state_has_no_round_before_it() -> None:
    state = matrix(EAST, NORTH)
    assert prototype_statistics(state, state) == {
        "prototype_shift": 0.0,
        "prototype_min_distance": 1.0,
        "classes_covered": 0.0,
    }
    assert prototype_statistics(None, state) == {"prototype_min_distance": 1.0, "classes_covered": 0.0}


def test_length_is_no_distance_but_it_is_a_move() -> None:
    found = prototype_statistics(matrix(EAST, NORTH), matrix([3.0, 0.0], NORTH))
    assert found == {"prototype_shift": 0.0, "prototype_min_distance": 1.0, "classes_covered": 1.0}


def test_opposite_prototypes_are_two_apart() -> None:
    assert prototype_statistics(None, matrix(EAST, WEST))["prototype_min_distance"] == 2.0
    assert prototype_statistics(matrix(EAST), matrix(WEST)) == {"prototype_shift": 2.0, "classes_covered": 1.0}


def test_classes_that_come_new_are_covered_and_have_not_shifted() -> None:
    first = prototype_statistics({Part.BODY: {}}, rows(c0=EAST, c7=NORTH))
    assert first == {"prototype_min_distance": 1.0, "classes_covered": 2.0}
    then = prototype_statistics(rows(c0=EAST, c7=NORTH), rows(c0=EAST, c7=EAST, c3=WEST))
    assert then == {"prototype_shift": 0.5, "prototype_min_distance": 0.0, "classes_covered": 2.0}


def test_a_prototype_of_length_zero_has_no_distance() -> None:
    found = prototype_statistics(matrix([0.0, 0.0], EAST), matrix([0.0, 0.0], NORTH))
    assert found == {"prototype_shift": 1.0, "classes_covered": 1.0}


def test_what_a_method_of_ones_own_keeps_there_breaks_nothing() -> None:
    odd: Payload = {Part.PROTOTYPES: {"scale": np.full((), 2.0, np.float32), "1": np.ones((2, 2), np.float32)}}
    assert prototype_statistics(rows(c1=EAST), odd) == {"classes_covered": 1.0}
    ragged: Payload = {Part.PROTOTYPES: {"1": np.ones(2, np.float32), "2": np.ones(3, np.float32)}}
    assert prototype_statistics(ragged, ragged) == {}


def test_blocks_find_what_one_matrix_would(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    state: Payload = {Part.PROTOTYPES: {"mean": rng.standard_normal((11, 5)).astype(np.float32)}}
    whole = prototype_statistics(None, state)["prototype_min_distance"]
    monkeypatch.setattr(publisher, "BLOCK", 4)
    assert prototype_statistics(None, state)["prototype_min_distance"] == whole
    unit = state[Part.PROTOTYPES]["mean"].astype(float)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    pairs = [1 - unit[a] @ unit[b] for a in range(11) for b in range(a)]
    assert whole == pytest.approx(min(pairs))
