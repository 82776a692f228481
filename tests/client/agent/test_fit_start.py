"""Units that few images activate leave as the fit began with them, whatever was received."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.client.policy.test_rare_units import data_of, made, parts, trained, trap
from tests.support.scripted_server import RUN

from protofed.client.agent.computation import Computation, fit
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import load
from protofed.client.site import DaemonStatus, PreparedRun
from protofed.client.state.store import SiteState
from protofed.client.training.context import FitContext, FitStart, NoCheckpoints
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Task, TaskKind

TASK = Task(TaskKind.FIT, "run", 1, "t", None, 0, 9.0)
FEW = 4  # of the ten units the first three answer to fewer images


def left_of(received: Payload, first: Payload, start: FitStart | None) -> tuple[Payload, Payload]:
    """What leaves of a fit that begins with `first` and says `start`, and what it had trained."""
    data, model = data_of(), made("mlp", hidden=[10])
    recipe = Recipe.model_validate({**RUN, "input": {"shape": [1, 16, 16]}})
    found: list[Payload] = []

    def train(run: PreparedRun, task: Task, local: FitContext, base: Payload) -> Update:
        load(local.model.body, first[Part.BODY])
        load(local.model.head, first[Part.HEAD])
        local.start = start
        found.append(trained(local.model, data, lr=1e-4, steps=1))
        return local.update(found[0])

    run = PreparedRun(recipe, FedAvgClient(), model, data, 0)
    work = Computation("ann", run, TASK, SiteState(), FEW)
    return fit(work, received, DaemonStatus(), NoCheckpoints(), train).update.payload, found[0]


def models() -> tuple[Payload, Payload]:
    """A model as it is made, and one whose first units measure brightness, with thresholds between the images."""
    model, data = made("mlp", hidden=[10]), data_of()
    return parts(model), trap(made("mlp", hidden=[10]), data)


def withheld(left: Payload, learnt: Payload, as_in: Payload) -> list[bool]:
    """Of each unit, whether its row is another one's and no longer what was learnt."""
    rows = (payload[Part.BODY]["linear1.weight"] for payload in (left, learnt, as_in))
    sent, own, expected = rows
    return [bool((s == e).all() and (s != o).any()) for s, o, e in zip(sent, own, expected, strict=True)]


def test_of_a_fit_that_says_nothing_they_leave_as_received() -> None:
    _, first = models()
    left, learnt = left_of(first, first, None)
    assert withheld(left, learnt, first) == [True] * 3 + [False] * 7


def test_of_a_fit_that_begins_with_another_model_they_leave_as_in_that_one() -> None:
    received, first = models()
    left, learnt = left_of(received, first, FitStart(first))
    assert withheld(left, learnt, first) == [True] * 3 + [False] * 7


def test_where_another_model_computes_its_units_count_and_what_was_sent_takes_the_place() -> None:
    received, first = models()
    other = {part: {n: np.full_like(a, 0.5) for n, a in tensors.items()} for part, tensors in first.items()}
    left, learnt = left_of(received, first, FitStart(first, sent=other))
    assert withheld(left, learnt, other) == [True] * 3 + [False] * 7
    assert torch.equal(*(torch.tensor(p[Part.BODY]["linear1.weight"][3:]) for p in (left, learnt)))


@pytest.mark.parametrize("said", [True, False])
def test_where_a_fit_leaves_another_model_the_units_of_the_one_that_it_sends_count(said: bool) -> None:
    received, learnt = models()
    data, model = data_of(), made("mlp", hidden=[10])
    recipe = Recipe.model_validate({**RUN, "input": {"shape": [1, 16, 16]}})

    def train(run: PreparedRun, task: Task, local: FitContext, base: Payload) -> Update:
        load(local.model.body, received[Part.BODY])  # the site's own, in which every unit sees many images
        local.sent_model = learnt if said else None
        return local.update(learnt)

    work = Computation("ann", PreparedRun(recipe, FedAvgClient(), model, data, 0), TASK, SiteState(), FEW)
    left = fit(work, received, DaemonStatus(), NoCheckpoints(), train).update.payload
    assert withheld(left, learnt, received)[:3] == [True] * 3
    assert withheld(left, learnt, received)[3:] == [False] * 7
