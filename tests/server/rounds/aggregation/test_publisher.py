"""States and broadcasts as blobs: in site order, stored once, and only the newest held.

No class is published from too few sites, and those from enough of them come out as if nothing had been withheld.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import Array, Part, Payload, SiteId, TensorSpec, Update
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.deploy.simulation.simulation import simulation
from protofed.server.method import ExpectedUpdate, RoundContext, server_methods
from protofed.server.methods.creff import RETRAINED
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.aggregation import publisher
from protofed.server.rounds.aggregation.publisher import (
    BY_CLASS,
    KEPT,
    Publisher,
    contributions,
    prototype_statistics,
    shows_classes,
    too_few,
    without,
)
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import TaskRow, UpdateRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.server.conftest import Lab

CLASSES, WIDTH = 4, 3
RecipeOf = Callable[..., Recipe]


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def first_model() -> Payload:
    return {Part.BODY: {"w": numbers(0, 2)}, Part.HEAD: {"weight": numbers(1, CLASSES, WIDTH)}}


def update(method: str, seed: int, classes: Sequence[int]) -> Payload:
    """What a site with these classes sends: all that the server half requires, and its classes' rows."""
    half, payload = server_methods.build(method, {}), dict[Part, dict[str, Array]]()
    expected = half.expects(half.init(first_model(), round_context(CLASSES)))
    rows = [spec for spec in expected.optional if int(spec.name) in classes]
    for number, spec in enumerate((*expected.required, *rows)):
        made = numbers(100 * seed + number, *spec.shape)
        if spec.part is Part.CLASS_PRESENCE:
            made = np.isin(np.arange(CLASSES), classes).astype(np.float32)
        payload.setdefault(spec.part, {})[spec.name] = made
    return payload


class Bench:
    """A method's aggregation over updates of sites that have these classes."""

    def __init__(self, method: str, min_contributors: int, blobs: MemoryBlobs | None = None) -> None:
        self.method, self.blobs = server_methods.build(method, {}), blobs or MemoryBlobs()
        self.publisher = Publisher(self.method, self.blobs, min_contributors)

    def row(self, site: str, payload: Payload) -> UpdateRow:
        data = codec.encode(payload)
        task = TaskRow(f"task_id-{site}", "run", 1, 1, site, TaskKind.FIT, None, 0)
        return UpdateRow(task, Verdict.ACCEPTED, "", self.blobs.put(data), len(data), {}, None)

    def after(self, *rounds: Mapping[str, Payload]) -> Payload:
        """The state after rounds of updates by site."""
        state = self.method.init(first_model(), round_context(CLASSES))
        for updates in rounds:
            state = self.publisher.aggregated(
                state, [self.row(site, update) for site, update in updates.items()], round_context()
            )
        return state


def three(method: str, held: Sequence[Sequence[int]], seed: int = 5) -> dict[str, Payload]:
    return {site: update(method, seed + k, held[k]) for k, site in enumerate(("ann", "bob", "cyd"))}


def class_rows(state: Payload) -> dict[str, list[float]]:
    """What is published of each class, or kept, whatever the state's layout."""
    if Part.CLASS_MODELS in state:
        return {str(c): head.ravel().tolist() for c, head in enumerate(state[Part.CLASS_MODELS]["weight"])}
    if Part.PRIVATE in state:
        return {str(c): features.ravel().tolist() for c, features in enumerate(state[Part.PRIVATE]["features"])}
    rows = state.get(Part.PROTOTYPES, {})
    return {name: row.tolist() for name, row in (rows if "mean" not in rows else _by_class(rows["mean"])).items()}


def _by_class(matrix: Array) -> dict[str, Array]:
    return {str(c): row for c, row in enumerate(matrix)}


def _by_classes(method: str) -> bool:
    half = server_methods.build(method, {})
    return shows_classes(half.expects(half.init(first_model(), round_context(CLASSES))))


METHODS = [method for method in server_methods if _by_classes(method)]
HELD = ((0, 1), (0, 1, 2), (1,))  # of classes 0, 1, 2, 3: by 2, 3, 1 and 0 sites


@pytest.mark.parametrize("method", METHODS)
def test_only_classes_of_enough_sites_change(method: str) -> None:
    start = class_rows(Bench(method, 1).after())
    for fewest, changing in ((1, "012"), (2, "01"), (3, "1"), (4, "")):
        found = class_rows(Bench(method, fewest).after(three(method, HELD)))
        everything = class_rows(Bench(method, 1).after(three(method, HELD)))
        for c in "0123":
            assert found.get(c) == (everything if c in changing else start).get(c)
        assert {c for c in found if found[c] != start.get(c)} == set(changing)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_published_of_a_class_stays_when_its_sites_become_too_few(method: str) -> None:
    both, one = three(method, ((2,), (2,), (2,))), three(method, ((2,), (), ()), seed=50)
    bench = Bench(method, 2)
    known = class_rows(bench.after(both))["2"]
    assert class_rows(bench.after(both, one))["2"] == known
    assert class_rows(Bench(method, 1).after(both, one))["2"] != known


@pytest.mark.parametrize("method", METHODS)
def test_bodies_and_heads_are_those_of_all_updates(method: str) -> None:
    strict, lax = Bench(method, 2).after(three(method, HELD)), Bench(method, 1).after(three(method, HELD))
    for part in {Part.BODY, Part.HEAD} & lax.keys():
        for name, array in lax[part].items():
            if name == RETRAINED:  # of CReFF, by classes
                continue
            np.testing.assert_array_equal(strict[part][name], array)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_arrival_does_not_matter(method: str) -> None:
    updates = three(method, HELD)
    there, back = Bench(method, 2).after(updates), Bench(method, 2).after(dict(reversed(updates.items())))
    assert codec.encode(there) == codec.encode(back)


@pytest.mark.parametrize(("method", "part"), [("fednh", Part.PROTOTYPES), ("creff", Part.CLASS_GRADIENTS)])
def test_rows_are_counted_without_making_their_tensors(
    method: str, part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = codec.encode(update(method, 5, (0, 2)))
    monkeypatch.setattr(codec, "decode", lambda _: pytest.fail("the header is enough"))
    assert contributions(data) == {(part, "0"), (part, "2")}


class Counting(MemoryBlobs):
    """Knows how often something was read and put."""

    reads = puts = 0

    def put(self, *data: Buffer) -> Digest:
        """Count it."""
        self.puts += 1
        return super().put(*data)

    def get(self, address: Digest) -> bytes:
        """Count it."""
        self.reads += 1
        return super().get(address)


@pytest.mark.parametrize(
    ("method", "fewest", "reads"), [("fedavg", 2, 3), ("fednh", 1, 3), ("fednh", 2, 6), ("cwfedavg", 2, 3)]
)
def test_no_blob_is_read_twice_where_nothing_can_be_withheld(method: str, fewest: int, reads: int) -> None:
    bench = Bench(method, fewest, Counting())
    bench.after(three(method, HELD))
    assert isinstance(bench.blobs, Counting)
    assert bench.blobs.reads == reads


def test_one_part_s_contributors_do_not_count_for_another() -> None:
    prototypes, presence = update("fedprp", 1, (0,)), update("cwfedavg-private", 2, (0,))
    withheld = too_few(map(codec.encode, (prototypes, presence)), 2)
    assert withheld == {(Part.PROTOTYPES, "0"), (Part.CLASS_PRESENCE, "0")}
    assert without(prototypes, withheld)[Part.PROTOTYPES] == {}
    assert without(presence, withheld)[Part.CLASS_PRESENCE]["present"].tolist() == [0.0] * CLASSES
    assert presence[Part.CLASS_PRESENCE]["present"][0] == 1.0  # the update itself stays as it was


def test_bodies_tell_nothing_by_class_and_all_parts_that_do_are_tested_here() -> None:
    body = TensorSpec(Part.BODY, "w", "float32", (2,))
    assert not shows_classes(ExpectedUpdate((body,)))
    for part in BY_CLASS:
        assert shows_classes(ExpectedUpdate((body,), (TensorSpec(part, "0", "float32", (3,)),)))
    assert {part for method in METHODS for part in update(method, 1, range(CLASSES))} >= BY_CLASS


def test_first_models_count_where_a_quorum_has_made_the_same() -> None:
    one, other = codec.digest(b"one"), codec.digest(b"other")
    assert publisher.disagreeing({"ann": one, "bob": one, "cyd": other}, 2).keys() == {"cyd"}
    assert publisher.disagreeing({"ann": one}, 2).keys() == {"ann"}


# A run's own rule


def of_three_sites(recipe_of: RecipeOf, **federation: int) -> Recipe:
    return recipe_of("fednh", federation={"min_sites": 3, "quorum": 1.0, "score_every": 0, **federation})


def test_a_server_refuses_one_contributor_and_a_simulation_takes_it(recipe_of: RecipeOf) -> None:
    recipe = of_three_sites(recipe_of, min_contributors=1)
    with simulation(recipe) as running:
        assert running.run.recipe.federation.min_contributors == 1
    ledger = Ledger("sqlite://")
    context = ServerContext(ledger, MemoryBlobs(), SitePresence(ledger, float), float)
    with pytest.raises(ConfigError, match=r"federation\.min_contributors"):
        RunQueue([recipe], context)
    assert not ledger.runs()  # nothing was started
    runs = RunQueue([], context)
    with pytest.raises(ConfigError, match=r"federation.min_contributors = 1"):
        runs.start(recipe)
    runs.start(of_three_sites(recipe_of))
    assert not ledger.runs()[0].outcome
    ledger.close()


@pytest.mark.parametrize("fewest", [1, 2, 3])
def test_every_round_can_be_computed_again_under_its_own_rule(recipe_of: RecipeOf, fewest: int) -> None:
    recipe = of_three_sites(recipe_of, min_contributors=fewest)
    with simulation(recipe) as running:
        running.go()
        rows = running.ledger.rounds(recipe.name)
        found = [verify_round(running.ledger, running.blobs, recipe.name, row.round, row.attempt) for row in rows[-2:]]
    assert [verified.finding for verified in found] == [VerificationResult.SAME] * 2


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


def test_a_published_state_can_be_restored_and_an_update_that_is_gone_is_a_state_error(
    blobs: MemoryBlobs, lab: Lab
) -> None:
    publisher = Publisher(FedAvgServer(), blobs, min_contributors=2)
    first = publisher.publish(publisher.aggregated(None, [row(blobs, "eva", lab.model(2.0))], round_context()))
    again = Publisher(FedAvgServer(), blobs, min_contributors=2).restore(first.address)
    assert again.address == first.address == codec.digest(codec.encode(again.state))
    rows = [row(blobs, "ann", lab.model(1.0)), row(blobs, "bob", lab.model(2.0))]
    blobs.discard(rows[1].digest)
    with pytest.raises(StateError, match=rows[1].digest):
        Publisher(FedAvgServer(), blobs, min_contributors=2).aggregated(lab.model(0.0), rows, round_context())


def test_what_is_equal_for_all_is_one_blob_and_what_is_not_is_one_each(lab: Lab) -> None:
    blobs, state, sites = Counting(), lab.model(0.0), ["ann", "bob", "cyd"]
    publisher = Publisher(FedAvgServer(), blobs, min_contributors=2)
    same = [publisher.broadcasts(state, sites) for _ in range(2)][1]
    assert blobs.puts == 1, "encoded once however often it is sent"
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


def test_a_state_that_is_not_finite_is_neither_published_nor_stored(blobs: MemoryBlobs, lab: Lab) -> None:
    rows = [row(blobs, "ann", {Part.BODY: {"x": np.array([1.0, np.nan])}})]
    before = set(blobs._data)
    with pytest.raises(StateError, match="body/x has values that are not finite"):
        Publisher(FedAvgServer(), blobs, min_contributors=2).aggregated(lab.model(0.0), rows, round_context())
    assert set(blobs._data) == before


EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
NORTH_EAST = [1.0, 1.0]


def matrix(*rows: list[float]) -> Payload:
    """As FedNH keeps them: a prototype for every class."""
    return {Part.PROTOTYPES: {"mean": np.array(rows, np.float32)}}


def rows(**by_class: list[float]) -> Payload:
    """As FedProc keeps them: c0, c2 … for the classes that have one."""
    named: dict[str, Array] = {name[1:]: np.array(row, np.float32) for name, row in by_class.items()}
    return {Part.PROTOTYPES: named}


TURNED = 1 - 1 / math.sqrt(2)  # east to north-east: cos 45 degrees
BODY_ONLY: Payload = {Part.BODY: {"w": np.ones((2, 2), np.float32)}}
MOVES: dict[str, tuple[Payload | None, Payload, dict[str, float]]] = {  # shift, smallest distance, covered
    "no prototypes": (None, BODY_ONLY, {}),
    "nor any of them": (BODY_ONLY, {**BODY_ONLY, Part.PROTOTYPES: {}}, {}),
    "one of three turns": (
        matrix(EAST, NORTH, WEST),
        matrix(NORTH_EAST, NORTH, WEST),
        {"prototype_shift": TURNED / 3, "prototype_min_distance": TURNED, "classes_covered": 1.0},
    ),
    "nothing moves": (
        matrix(EAST, NORTH),
        matrix(EAST, NORTH),
        {"prototype_shift": 0.0, "prototype_min_distance": 1.0, "classes_covered": 0.0},
    ),
    "the first state": (None, matrix(EAST, NORTH), {"prototype_min_distance": 1.0, "classes_covered": 0.0}),
    "length is no distance but it is a move": (
        matrix(EAST, NORTH),
        matrix([3.0, 0.0], NORTH),
        {"prototype_shift": 0.0, "prototype_min_distance": 1.0, "classes_covered": 1.0},
    ),
    "opposite ones are two apart": (matrix(EAST), matrix(WEST), {"prototype_shift": 2.0, "classes_covered": 1.0}),
    "one of length zero has no distance": (
        matrix([0.0, 0.0], EAST),
        matrix([0.0, 0.0], NORTH),
        {"prototype_shift": 1.0, "classes_covered": 1.0},
    ),
}


@pytest.mark.parametrize(("before", "after", "expected"), MOVES.values(), ids=MOVES)
def test_how_prototypes_moved(before: Payload | None, after: Payload, expected: dict[str, float]) -> None:
    assert prototype_statistics(before, after) == pytest.approx(expected)


def test_classes_that_come_new_are_covered_and_have_not_shifted() -> None:
    first = prototype_statistics({Part.BODY: {}}, rows(c0=EAST, c7=NORTH))
    assert first == {"prototype_min_distance": 1.0, "classes_covered": 2.0}
    then = prototype_statistics(rows(c0=EAST, c7=NORTH), rows(c0=EAST, c7=EAST, c3=WEST))
    assert then == {"prototype_shift": 0.5, "prototype_min_distance": 0.0, "classes_covered": 2.0}


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
