"""FedAvg: two sites by hand, weighted or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import LocalOf, model, parts
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.common.payload import Part, Update, same_tensors
from protofed.server.methods.fedavg import FedAvgServer as Server
from protofed.server.rounds.intake import intake

FIRST = model()


@pytest.fixture
def fit(tiny: LocalOf) -> Callable[..., Update]:
    """A site with `count` examples x = 2 of one class, after one step of lr = .1 from `FIRST`.

    Logits are 0, so p = (.5, .5): the head's own class gains .1 * .5 * 2 = .1, its bias .05; the body's gradient is
    head^T (p - y) x = 0.
    """

    def make(label: int, count: int = 1) -> Update:
        local = tiny([[2.0]] * count, [label] * count, lr=0.1)
        return FedAvgClient().fit(local, FIRST)

    return make


def test_a_sites_step_by_hand(fit: Callable[..., Update]) -> None:
    made = fit(label=0, count=3)
    assert made.payload.keys() == FedAvgClient.sends == {Part.BODY, Part.HEAD}
    np.testing.assert_allclose(made.payload[Part.BODY]["0.weight"], [[1.0]], atol=1e-15)
    np.testing.assert_allclose(made.payload[Part.HEAD]["weight"], [[0.1], [-0.1]], atol=1e-15)
    np.testing.assert_allclose(made.payload[Part.HEAD]["bias"], [0.05, -0.05], atol=1e-15)
    assert made.metrics == {"loss": pytest.approx(math.log(2), abs=1e-6)}
    assert (made.site, made.weight) == ("ann", 3.0)


def test_two_sites_uniform_and_by_examples(fit: Callable[..., Update]) -> None:
    updates = [fit(label=0, count=1), fit(label=1, count=3)]
    new = Server().aggregate(FIRST, iter(updates), round_context())
    np.testing.assert_allclose(new[Part.HEAD]["weight"], [[0.0], [0.0]], atol=1e-15)
    np.testing.assert_allclose(new[Part.HEAD]["bias"], [0.0, 0.0], atol=1e-15)
    np.testing.assert_allclose(new[Part.BODY]["0.weight"], [[1.0]], atol=1e-15)
    new = Server(weighting="examples").aggregate(FIRST, iter(updates), round_context())
    np.testing.assert_allclose(new[Part.HEAD]["weight"], [[-0.05], [0.05]], atol=1e-15)  # 1/4 of .1, 3/4 of -.1
    np.testing.assert_allclose(new[Part.HEAD]["bias"], [-0.025, 0.025], atol=1e-15)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_one_site_is_the_whole_federation(weighting: Any, fit: Callable[..., Update]) -> None:
    made = fit(label=1, count=1)
    new = Server(weighting=weighting).aggregate(FIRST, [made], round_context())
    assert same_tensors(new, made.payload)


def test_a_withheld_count_is_refused_only_where_it_is_needed() -> None:
    by_examples, uniform = Server(weighting="examples").expects(FIRST), Server(weighting="uniform").expects(FIRST)
    fault = intake.scalars_problem({}, None, by_examples)
    assert fault is not None
    assert "example count is missing" in fault.text
    assert intake.scalars_problem({}, 3.0, by_examples) is None
    assert intake.scalars_problem({}, None, uniform) is None


def test_every_site_starts_from_the_global_model(tiny: LocalOf) -> None:
    state = Server().init(FIRST, round_context(2))
    local = tiny([[2.0]], [0])
    FedAvgClient().load_global(local, Server().broadcast(state, "ann"))
    assert same_tensors(parts(local.model), FIRST)
