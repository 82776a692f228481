"""With `plan.buffers = "local"` a site goes on with its own statistics, whatever the method and whatever is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.normed_model import seeded
from tests.support.round_contexts import round_context
from tests.support.training_doubles import LocalOf

from protofed.client.agent.computation import Computation, ScoredModel, fit, score
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.split import dump
from protofed.client.site import DaemonStatus, PreparedRun, train_alone
from protofed.client.state.store import FitOutcome, SiteState
from protofed.client.training.context import (
    OWN_BUFFERS,
    FitContext,
    NoCheckpoints,
    client_state_with_buffers,
    with_own_buffers,
)
from protofed.common import codec
from protofed.common.payload import Array, Part, Payload, is_buffer, same_tensors
from protofed.common.protocol.messages import Task, TaskKind
from protofed.server.method import server_methods
from protofed.testing.small_recipe import small_recipe

SENDERS = [name for name in sorted(client_methods) if Part.BODY in client_methods.build(name, {}).sends]
BUFFERS = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}


class Lab:
    """One site in two rounds of a method; the server's statistics in the second one are what a test makes of them."""

    def __init__(self, method: str, buffers: str) -> None:
        self.recipe = small_recipe(method, plan={"epochs": 2, "batch_size": 8, "lr": 0.05, "buffers": buffers})
        draw = torch.Generator().manual_seed(7)
        images = torch.rand(30, 1, 8, 8, generator=draw)
        data = SiteData(
            Examples(images, torch.arange(30) % 3),
            Examples(images.flip(0), torch.arange(30) % 3),
            self.recipe.input,
            10,
        )
        model = seeded(self.recipe.input, 10)
        first = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        half = client_methods.build(method, {})
        self.run = PreparedRun(self.recipe, half, model, data, seed=0)
        server, context = server_methods.build(method, {}), round_context(10)
        state = server.init(first, context)
        outcome = self.fit(1, SiteState(), server.broadcast(state, "ann"))
        self.state = SiteState(1, outcome.client_state, outcome.personal)
        self.sent = server.broadcast(server.aggregate(state, [outcome.update], context), "ann")

    def fit(self, number: int, state: SiteState, base: Payload) -> FitOutcome:
        work = Computation("ann", self.run, task(TaskKind.FIT, number), state)
        return fit(work, base, DaemonStatus(), NoCheckpoints(), train_alone)

    def second(self, base: Payload) -> bytes:
        made = self.fit(2, self.state, base)
        return b"".join(codec.encode(some) for some in (made.update.payload, made.client_state, made.personal))

    def scores(self, scored: ScoredModel, base: Payload) -> dict[str, float]:
        work = Computation("ann", self.run, task(TaskKind.SCORE, 2), self.state, scored=scored)
        return dict(score(work, base, DaemonStatus()))


def task(kind: TaskKind, number: int) -> Task:
    return Task(kind, "run", number, "n", None, 0, 60.0)


def with_buffers(payload: Payload, change: Callable[[Array], Any]) -> Payload:
    return {
        part: {n: np.asarray(change(a), a.dtype) if is_buffer(n) else a for n, a in tensors.items()}
        for part, tensors in payload.items()
    }


def far(array: Array) -> Any:
    return array + 5


@pytest.mark.parametrize("method", SENDERS)
def test_what_the_server_sends_of_them_changes_nothing(method: str) -> None:
    lab = Lab(method, "local")
    assert {name for name in lab.sent[Part.BODY] if is_buffer(name)} == BUFFERS
    other = with_buffers(lab.sent, far)
    assert lab.second(lab.sent) == lab.second(other)
    assert lab.scores(ScoredModel.OWN, lab.sent) == lab.scores(ScoredModel.OWN, other)


@pytest.mark.parametrize("method", SENDERS)
def test_else_it_does_and_nothing_is_remembered(method: str) -> None:
    lab = Lab(method, "averaged")
    assert not any(name.startswith(OWN_BUFFERS) for name in lab.state.client_state.get(Part.PRIVATE, {}))
    assert lab.second(lab.sent) != lab.second(with_buffers(lab.sent, far))


def test_the_global_model_is_scored_with_the_servers() -> None:
    lab = Lab("fedper", "local")
    bases = lab.sent, with_buffers(lab.sent, lambda array: 0 * array + 1e6)
    assert lab.scores(ScoredModel.GLOBAL, bases[0]) != lab.scores(ScoredModel.GLOBAL, bases[1])
    assert lab.scores(ScoredModel.OWN, bases[0]) == lab.scores(ScoredModel.OWN, bases[1])


def test_a_site_sends_its_statistics_all_the_same_and_remembers_them_beside_the_methods_memory() -> None:
    lab = Lab("moon", "local")
    sent = lab.fit(2, lab.state, lab.sent)
    kept = sent.client_state[Part.PRIVATE]
    assert kept.keys() == {f"buffers.body.{name}" for name in BUFFERS}
    for name in BUFFERS:
        assert np.array_equal(kept[f"buffers.body.{name}"], sent.update.payload[Part.BODY][name])
    assert kept["buffers.body.2.num_batches_tracked"] == 2 * 2 * 4  # of both rounds
    assert same_tensors({Part.BODY: sent.client_state[Part.BODY]}, {Part.BODY: sent.update.payload[Part.BODY]})


@pytest.fixture
def local(local_of: LocalOf) -> FitContext:
    made = local_of([1.0], buffers="local")
    made.client_state = dict(OWN)
    return made


def test_what_was_sent_is_not_read_before_the_method_asks_and_is_whole_before_the_first_fit(local: FitContext) -> None:
    made = with_own_buffers(Distant({Part.BODY: {}}), local)
    assert list(made) == [Part.BODY]
    with pytest.raises(AssertionError, match="nobody asked"):
        made[Part.BODY]
    local.client_state = {}
    received: Payload = {Part.BODY: {"bn.running_mean": np.ones(2)}}
    assert with_own_buffers(received, local) is received


class Distant(dict[Part, Any]):
    """A payload that is fetched when a part is looked at, as an export's is."""

    def __getitem__(self, part: Part) -> Any:
        raise AssertionError("nobody asked for it")


OWN: Payload = {Part.PRIVATE: {"buffers.body.bn.running_mean": np.array([1.0, 2.0]), "seen": np.array(7)}}


@pytest.mark.parametrize("part", [Part.BODY, Part.CLASS_MODELS, Part.SITE_MODELS])
def test_own_ones_are_put_in_place_in_each_row_of_several_models(part: Part, local: FitContext) -> None:
    theirs = {"bn.running_mean": np.zeros(2), "bn.running_var": np.ones(2), "bn.weight": np.ones(2)}
    stacked = part is not Part.BODY
    rows = {f"body.{name}": np.stack([array] * 3) for name, array in theirs.items()}
    received: Payload = {part: rows if stacked else theirs, Part.HEAD: {"weight": np.ones(1)}}
    made = with_own_buffers(received, local)
    name = "body.bn.running_mean" if stacked else "bn.running_mean"
    assert made[part][name].tolist() == ([[1.0, 2.0]] * 3 if stacked else [1.0, 2.0])
    assert all(made[part][other] is array for other, array in received[part].items() if other != name)
    assert made[Part.HEAD] == received[Part.HEAD]
    assert (received[part][name] == 0).all()  # what was received stays


def test_statistics_are_kept_by_part_shape_and_beyond_a_round_without_them(local: FitContext) -> None:
    wrong: Payload = {Part.BODY: {"bn.running_mean": np.zeros(3)}}
    assert with_own_buffers(wrong, local)[Part.BODY]["bn.running_mean"].tolist() == [0, 0, 0]
    update: Payload = {part: {"bn.running_mean": np.full(2, n)} for n, part in enumerate((Part.BODY, Part.HEAD), 1)}
    local.client_state = dict(client_state_with_buffers(local, update, {}))
    received: Payload = {part: {"bn.running_mean": np.zeros(2)} for part in (Part.BODY, Part.HEAD)}
    made = with_own_buffers(received, local)
    assert [made[part]["bn.running_mean"].tolist() for part in (Part.BODY, Part.HEAD)] == [[1.0, 1.0], [2.0, 2.0]]
    local.client_state = {Part.PRIVATE: {"seen": np.array(8)}}  # a method that wrote its part anew
    kept = client_state_with_buffers(local, {Part.HEAD: {"weight": np.ones(1)}}, OWN)
    assert kept[Part.PRIVATE]["seen"] == 8
    assert kept[Part.PRIVATE]["buffers.body.bn.running_mean"].tolist() == [1.0, 2.0]
    newer = client_state_with_buffers(local, {Part.BODY: {"bn.running_mean": np.zeros(2)}}, OWN)
    assert newer[Part.PRIVATE]["buffers.body.bn.running_mean"].tolist() == [0.0, 0.0]
