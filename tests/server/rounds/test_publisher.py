"""States and broadcasts as blobs: in site order, stored once, and only the newest held."""

from __future__ import annotations

import gc
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
from protofed.server.rounds.publisher import KEPT, Publisher
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
