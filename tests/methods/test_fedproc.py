"""FedProc: the weight of the contrast over the rounds, one step of each half by hand, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import Linear, LocalOf, parts, refusal
from tests.support.round_contexts import round_context

from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedproc import FedProcClient
from protofed.client.training.context import FitContext
from protofed.common import codec
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.fedproc import FedProcServer as Server

Site = Callable[..., FitContext]

NO_STEP = 1e-300  # a learning rate that moves nothing
MODEL: Payload = {Part.BODY: {"0.weight": np.eye(2)}, Part.HEAD: {"weight": np.zeros((2, 2)), "bias": np.zeros(2)}}
AXES = {"0": np.array([2.0, 0.0]), "1": np.array([0.0, 0.5])}
KNOWN: Payload = {**MODEL, Part.PROTOTYPES: AXES}
CE, GPC = math.log(2), math.log(1 + math.exp(0.2))  # of the example below under KNOWN: cosines .6 and .8


@pytest.fixture
def site(local_of: LocalOf, linear: Linear) -> Site:
    """A site with one example (3, 4) of class 0, whose model is another one's until something is installed."""
    return lambda **plan: local_of(linear(np.full((2, 2), 9.0), 2), [[3.0, 4.0]], [0], 2, **{"lr": NO_STEP, **plan})


def update(
    value: float, rows: dict[int, Any], weight: float | None = None, site: str = "ann", dtype: str = "float64"
) -> Update:
    """A model whose every number is `value`, and these class means."""
    model = {part: {name: np.full_like(t, value, dtype) for name, t in MODEL[part].items()} for part in MODEL}
    prototypes = {str(c): np.asarray(row, dtype) for c, row in rows.items()}
    return Update(site, {**model, Part.PROTOTYPES: prototypes}, weight=weight)


PLAIN = [(2, 10, 0.9), (6, 10, 0.5), (10, 10, 0.1), (2, 4, 0.75), (150, 200, 0.255), (200, 200, 0.005), (1, 10, 1.0)]
AT_ONCE = [(2, 10, 1.0), (5, 10, 6 / 9), (10, 10, 1 / 9), (2, 2, 1.0), (3, 3, 0.5), (1, 1, 1.0)]


@pytest.mark.parametrize("given", [*((False, *row) for row in PLAIN), *((True, *row) for row in AT_ONCE)])
def test_alpha_is_of_the_runs_own_rounds(given: tuple[bool, int, int, float], site: Site) -> None:
    """T counts from 0, so the last round's alpha is 1/T; the released code takes T = 100 for every run.

    With the contrast from the start it counts from the second round.
    """
    at_once, number, rounds, alpha = given
    made = FedProcClient(gpc_from_start=at_once).fit(site(round=number, rounds=rounds), KNOWN)
    assert made.metrics == {"loss": pytest.approx(alpha * GPC + (1 - alpha) * CE, abs=1e-6)}


def test_the_first_round_is_fedavgs(site: Site) -> None:
    local, plain = (site(lr=0.1, momentum=0.9, epochs=3, rounds=5) for _ in range(2))
    made = FedProcClient().fit(local, MODEL)
    assert same_tensors(parts(local.model), parts(plain.model)) is False
    FedAvgClient().fit(plain, MODEL)
    assert same_tensors(parts(local.model), parts(plain.model))
    assert same_tensors({part: made.payload[part] for part in (Part.BODY, Part.HEAD)}, parts(plain.model))


def test_with_the_contrast_from_the_start_the_first_round_only_makes_prototypes(site: Site) -> None:
    local = site(lr=0.5, rounds=3)
    made = FedProcClient(gpc_from_start=True).fit(local, MODEL)
    assert same_tensors(parts(local.model), MODEL)
    assert same_tensors(made.payload, {**MODEL, Part.PROTOTYPES: made.payload[Part.PROTOTYPES]})
    np.testing.assert_allclose(made.payload[Part.PROTOTYPES]["0"], [0.6, 0.8], atol=1e-15)
    assert made.metrics == {"loss": 0.0}


def test_a_run_of_one_round_trains_all_the_same(site: Site) -> None:
    local = site(lr=0.5, rounds=1)
    made = FedProcClient(gpc_from_start=True).fit(local, MODEL)
    assert made.metrics == {"loss": pytest.approx(CE, abs=1e-6)}
    assert not same_tensors(parts(local.model), MODEL)


def test_one_step_by_hand(site: Site) -> None:
    """Round 3 of 4, alpha 1/2, lr 1: u = (.6, .8) are also the cosines to the axes, whatever the prototypes' length.

    p = softmax(.6, .8)_1; dgpc/dz = p (-.224, .168), as with FedNH's head of scale 1; the head is zero, so the
    cross-entropy moves only the head: by (y - 1/2) z and (y - 1/2).
    """
    p = 1 / (1 + math.exp(-0.2))
    made = FedProcClient().fit(site(lr=1.0, round=3, rounds=4), KNOWN).payload
    body = np.eye(2) - 0.5 * p * np.outer([-0.224, 0.168], [3.0, 4.0])
    np.testing.assert_allclose(made[Part.BODY]["0.weight"], body, atol=1e-12)
    np.testing.assert_allclose(made[Part.HEAD]["weight"], 0.5 * np.outer([0.5, -0.5], [3.0, 4.0]), atol=1e-12)
    np.testing.assert_allclose(made[Part.HEAD]["bias"], [0.25, -0.25], atol=1e-12)
    z = body @ [3.0, 4.0]
    np.testing.assert_allclose(made[Part.PROTOTYPES]["0"], z / np.linalg.norm(z), atol=1e-12)  # of the new body


@pytest.mark.parametrize(
    ("prototypes", "expected"), [("mean", [0.8, 0.4]), ("unit", [2 / math.sqrt(5), 1 / math.sqrt(5)])]
)
def test_prototypes_are_unit_means(prototypes: Any, expected: list[float], local_of: LocalOf, linear: Linear) -> None:
    features = [[3.0, 4.0], [10.0, 0.0], [0.0, 2.0]]  # unit: (.6, .8), (1, 0); (0, 1)
    local = local_of(linear(np.eye(2), 4), features, [0, 0, 2], 4, lr=NO_STEP)
    wide: Payload = {**MODEL, Part.HEAD: {"weight": np.zeros((4, 2)), "bias": np.zeros(4)}}
    made = FedProcClient(prototypes=prototypes).fit(local, wide).payload[Part.PROTOTYPES]
    assert made.keys() == {"0", "2"}  # classes 1 and 3 are nowhere at this site
    np.testing.assert_allclose(made["0"], expected, atol=1e-12)
    np.testing.assert_allclose(made["2"], [0, 1], atol=1e-12)


def test_a_class_with_fewer_examples_than_asked_for_has_no_prototype(local_of: LocalOf, linear: Linear) -> None:
    local = local_of(linear(np.eye(2), 2), [[3.0, 4.0], [10.0, 0.0], [0.0, 2.0]], [0, 0, 1], 2, lr=NO_STEP)
    made = FedProcClient(min_samples_per_class=2).fit(local, MODEL).payload[Part.PROTOTYPES]
    assert made.keys() == {"0"}
    np.testing.assert_allclose(made["0"], [0.8, 0.4], atol=1e-12)


def test_the_head_takes_features_as_they_are(site: Site) -> None:
    """Only the contrast sees unit vectors; logits (3, 0) and (0, 4) of class 0."""
    received: Payload = {**KNOWN, Part.HEAD: {"weight": np.eye(2), "bias": np.zeros(2)}}
    made = FedProcClient().fit(site(round=2, rounds=2), received)
    expected = 0.5 * GPC + 0.5 * math.log(1 + math.exp(1))
    assert made.metrics == {"loss": pytest.approx(expected, abs=1e-6)}


def test_an_example_of_a_class_without_prototype_is_trained_on_by_cross_entropy_alone(site: Site) -> None:
    made = FedProcClient().fit(site(round=2, rounds=4, lr=1.0), {**MODEL, Part.PROTOTYPES: {"1": AXES["1"]}})
    assert made.metrics == {"loss": pytest.approx(0.25 * CE, abs=1e-6)}
    np.testing.assert_array_equal(made.payload[Part.BODY]["0.weight"], np.eye(2))


@pytest.mark.parametrize("rows", [{"2": np.ones(2)}, {"0": np.ones(3)}])
def test_prototypes_of_another_run_are_refused_by_name(rows: Any, site: Site) -> None:
    with pytest.raises(CodecError, match=r"prototype '\d' is"):
        FedProcClient().fit(site(), {**MODEL, Part.PROTOTYPES: rows})


def test_the_servers_step_by_hand() -> None:
    """Class 0: the mean of two contributors; class 1 has one; class 2 nobody, and is kept; class 3 is nowhere."""
    old = {**KNOWN, Part.PROTOTYPES: {"0": np.array([9.0, 9.0]), "2": np.array([0.1, 0.7])}}
    updates = [update(1.0, {0: [1.0, 0.0]}, 1.0), update(5.0, {0: [0.0, 0.5], 1: [0.25, 0.0]}, 3.0)]
    new = Server().aggregate(old, iter(updates), round_context())
    assert new[Part.BODY]["0.weight"].tolist() == [[3.0, 3.0]] * 2  # uniform, whatever counts are disclosed
    assert new[Part.HEAD]["bias"].tolist() == [3.0, 3.0]
    expected = {"0": [0.5, 0.25], "1": [0.25, 0.0], "2": [0.1, 0.7]}
    assert {name: row.tolist() for name, row in new[Part.PROTOTYPES].items()} == expected


def test_examples_weigh_models_and_never_prototypes() -> None:
    updates = [update(1.0, {0: [1.0, 0.0]}, 1.0), update(5.0, {0: [0.0, 0.5]}, 3.0)]
    new = Server(weighting="examples").aggregate(MODEL, updates, round_context())
    assert new[Part.BODY]["0.weight"].tolist() == [[4.0, 4.0]] * 2
    assert new[Part.PROTOTYPES]["0"].tolist() == [0.5, 0.25]


def test_a_class_that_nobody_holds_keeps_its_prototype_over_rounds() -> None:
    state: Payload = Server().init(MODEL, round_context(2))
    for rows in ({0: [0.1, 0.3], 1: [1.0, 0.0]}, {1: [0.0, 1.0]}, {}):
        state = codec.decode(codec.encode(Server().aggregate(state, [update(1.0, rows)], round_context())))
    assert {name: row.tolist() for name, row in state[Part.PROTOTYPES].items()} == {"0": [0.1, 0.3], "1": [0.0, 1.0]}


def test_the_first_state_has_no_prototypes_and_is_sent_and_loaded_as_it_is(site: Site) -> None:
    state = Server().init(MODEL, round_context(2))
    assert Part.PROTOTYPES not in state
    assert Server().broadcast(state, "ann") is state
    assert Server.global_model
    local = site()
    FedProcClient().load_global(local, KNOWN)
    assert same_tensors(parts(local.model), MODEL)


def test_single_precision_stays() -> None:
    updates = [update(value, {0: [1, 2]}, dtype="float32") for value in (1.0, 2.0)]
    new = Server().aggregate(MODEL, updates, round_context())
    assert {t.dtype.name for tensors in new.values() for t in tensors.values()} == {"float32"}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_what_one_half_sends_the_other_expects(weighting: Any, site: Site) -> None:
    made = FedProcClient().fit(site(lr=0.1), KNOWN).payload
    assert made.keys() == FedProcClient.sends == {Part.BODY, Part.HEAD, Part.PROTOTYPES}
    expected = Server(weighting=weighting).expects(KNOWN)
    assert expected.weight == (weighting == "examples")
    assert refusal(made, expected) == refusal({part: made[part] for part in MODEL}, expected) == ""
    foreign = {**made, Part.PROTOTYPES: {"2": np.zeros(2)}}
    assert refusal(foreign, expected) == "prototypes/2 is not part of this method's update"
