"""No class is published from too few sites, and those from enough of them come out as if nothing had been withheld."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, Payload, TensorSpec
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.deploy.simulation.simulation import simulation
from protofed.server.method import ExpectedUpdate, server_methods
from protofed.server.methods.creff import RETRAINED
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.aggregation.counting import BY_CLASS, contributions, shows_classes, too_few, without
from protofed.server.rounds.aggregation.publisher import Publisher
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import TaskRow, UpdateRow

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Knows how often something was read."""

    reads = 0

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


def test_methods_of_every_part_that_shows_classes_are_tested_here() -> None:
    parts = {part for method in METHODS for part in update(method, 1, range(CLASSES))}
    assert parts >= BY_CLASS


def test_bodies_tell_nothing_by_class() -> None:
    body = TensorSpec(Part.BODY, "w", "float32", (2,))
    assert not shows_classes(ExpectedUpdate((body,)))
    for part in BY_CLASS:
        assert shows_classes(ExpectedUpdate((body,), (TensorSpec(part, "0", "float32", (3,)),)))


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
    assert not ledger.runs()  # nothing was begun
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
