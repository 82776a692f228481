"""CReFF: each half by hand; what is FedAvg's in it is FedAvg's bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import LocalOf
from tests.support.round_contexts import round_context

from protofed.client.methods.creff import CReFFClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.common.errors import CodecError
from protofed.common.payload import Array, Part, Payload, Update, same_tensors
from protofed.server.method import sent
from protofed.server.methods.creff import FEATURES, KNOWN, RETRAINED, CReFFServer
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.federated_features import joined, matched, retrained

CLASSES, WIDE = 3, 2
HEAD = {"weight": np.array([[0.0], [0.0]]), "bias": np.array([0.5, 0.0])}
QUICK = CReFFServer(features=4, match_epochs=3, crt_epochs=2)


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def first(method: CReFFServer = QUICK, *, bias: bool = True) -> Payload:
    """The state before round 1."""
    head = {"weight": draw(0, CLASSES, WIDE), **({"bias": draw(1, CLASSES)} if bias else {})}
    return method.init({Part.BODY: {"w": draw(2, 2)}, Part.HEAD: head}, round_context(CLASSES))


def update(site: int, state: Payload, classes: set[int], weight: float | None = None) -> Update:
    matrix = state[Part.HEAD][RETRAINED]
    head = {name: draw(10 + site, *array.shape) for name, array in state[Part.HEAD].items() if name != RETRAINED}
    rows = {str(c): draw(100 * site + c, *matrix.shape) for c in classes}
    payload = {Part.BODY: {"w": draw(site, 2)}, Part.HEAD: head, Part.CLASS_GRADIENTS: rows}
    return Update(f"site-{site}", payload, weight=weight)


def received(matrix: Any) -> Payload:
    return {Part.BODY: {"0.weight": np.array([[1.0]])}, Part.HEAD: {**HEAD, RETRAINED: np.array(matrix)}}


def test_gradients_by_hand(tiny: LocalOf) -> None:
    """Of x = z = 1 and 0, both of class 0; the re-trained classifier has the logits ln 3 z and 0.

    p - e_0 is (-1/4, 1/4) for z = 1 and (-1/2, 1/2) for z = 0: by the weight the mean of p - e_0 times z, by the bias
    that of p - e_0. A body that was trained before, or FedAvg's classifier, would give other numbers.
    """
    local = tiny([[1.0], [0.0]], [0, 0], lr=0.1, epochs=3)
    made = CReFFClient().fit(local, received([[np.log(3), 0.0], [0.0, 0.0]])).payload
    assert made.keys() == CReFFClient.sends
    assert made[Part.CLASS_GRADIENTS].keys() == {"0"}
    np.testing.assert_allclose(made[Part.CLASS_GRADIENTS]["0"], [[-1 / 8, -3 / 8], [1 / 8, 3 / 8]], atol=1e-14)


def test_what_a_site_trains_sends_and_predicts_with_is_fedavg_s(tiny: LocalOf) -> None:
    sites = [tiny([[2.0], [1.0], [3.0]], [0, 1, 1], lr=0.1, epochs=2) for _ in range(2)]
    creff, fedavg = sites
    base = received([[3.0, 1.0], [0.0, 2.0]])
    made = CReFFClient().fit(creff, base)
    plain = FedAvgClient().fit(fedavg, {Part.BODY: base[Part.BODY], Part.HEAD: HEAD})
    model = {part: made.payload[part] for part in (Part.BODY, Part.HEAD)}
    assert same_tensors(model, plain.payload)
    assert made.metrics == plain.metrics
    (images, _), *_ = creff.data.ordered(creff.data.train, 3)
    np.testing.assert_array_equal(creff.model(images).numpy(force=True), fedavg.model(images).numpy(force=True))


def test_the_global_model_has_the_re_trained_classifier(tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0])
    CReFFClient().load_global(local, received([[3.0, 1.0], [0.0, 2.0]]))
    (images, _), *_ = local.data.ordered(local.data.train, 1)
    np.testing.assert_allclose(local.model(images).numpy(force=True), [[7.0, 2.0]])


@pytest.mark.parametrize("matrix", [[[1.0], [2.0]], [[1.0, 2.0]], [1.0, 2.0], 1.0, [[1.0] * 3] * 2])
def test_a_classifier_of_another_shape_is_refused(matrix: Any, tiny: LocalOf) -> None:
    with pytest.raises(CodecError):
        CReFFClient().load_global(tiny([[2.0]], [0]), received(matrix))


def test_a_class_of_few_images_stays(tiny: LocalOf) -> None:
    local = tiny([[2.0], [1.0], [1.0]], [0, 1, 1])
    made = CReFFClient(min_samples_per_class=2).fit(local, received([[3.0, 1.0], [0.0, 2.0]])).payload
    assert made[Part.CLASS_GRADIENTS].keys() == {"1"}


def test_the_first_head_is_both_classifiers_and_features_are_normal() -> None:
    state = first(CReFFServer())
    np.testing.assert_array_equal(state[Part.HEAD][RETRAINED], joined(state[Part.HEAD]))
    features = state[Part.PRIVATE][FEATURES]
    assert features.shape == (CLASSES, 100, WIDE)
    assert abs(features.mean()) < 0.1
    assert abs(features.std() - 1) < 0.1
    assert not state[Part.PRIVATE][KNOWN].any()
    assert sent(QUICK, state, "ann").keys() == {Part.BODY, Part.HEAD}, "and no features"
    assert QUICK.broadcast(state, "ann") is QUICK.broadcast(state, "bob")
    plain = {part: state[part] for part in (Part.BODY, Part.HEAD)}
    one, again, other = (QUICK.init(plain, round_context(CLASSES, seed=n))[Part.PRIVATE][FEATURES] for n in (7, 7, 8))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other), "they follow from the run's seed"


@pytest.mark.parametrize("bias", [True, False])
def test_a_round_by_its_steps(bias: bool) -> None:
    """Two sites have class 1, one has class 0, nobody class 2: that keeps its features, and FedAvg's row."""
    state = first(bias=bias)
    updates = [update(1, state, {0, 1}), update(2, state, {1})]
    after = QUICK.aggregate(state, updates, round_context())
    rows = [one.payload[Part.CLASS_GRADIENTS] for one in updates]
    wanted = np.stack([rows[0]["0"], (rows[0]["1"] + rows[1]["1"]) / 2])
    features = state[Part.PRIVATE][FEATURES]
    moved = matched(features[:2], np.array([0, 1]), state[Part.HEAD][RETRAINED], wanted, 3, 0.1)
    np.testing.assert_array_equal(after[Part.PRIVATE][FEATURES], np.concatenate([moved, features[2:]]))
    assert after[Part.PRIVATE][KNOWN].tolist() == [1, 1, 0]
    np.testing.assert_array_equal(after[Part.HEAD][RETRAINED][:2], retrained(moved, 2, 0.01, bias=bias))
    np.testing.assert_array_equal(after[Part.HEAD][RETRAINED][2], joined(after[Part.HEAD])[2])
    assert not np.array_equal(moved, features[:2])


def test_the_model_that_is_trained_is_fedavg_s() -> None:
    state = first()
    updates = [update(1, state, {0, 1}, 10.0), update(2, state, {1}, 30.0)]
    for weighting in ("uniform", "examples"):
        after = replace(QUICK, weighting=weighting).aggregate(state, updates, round_context())
        plain = FedAvgServer(weighting=weighting).aggregate(state, updates, round_context())
        head = {name: array for name, array in after[Part.HEAD].items() if name != RETRAINED}
        assert same_tensors({Part.BODY: after[Part.BODY], Part.HEAD: head}, plain)


def test_a_class_that_nobody_has_any_more_keeps_its_features_and_stays_in_the_classifier() -> None:
    state = first()
    once = QUICK.aggregate(state, [update(1, state, {0, 1})], round_context())
    then = QUICK.aggregate(once, [update(2, once, {1, 2})], round_context())
    np.testing.assert_array_equal(then[Part.PRIVATE][FEATURES][0], once[Part.PRIVATE][FEATURES][0])
    assert then[Part.PRIVATE][KNOWN].all()
    features = then[Part.PRIVATE][FEATURES]
    np.testing.assert_array_equal(then[Part.HEAD][RETRAINED], retrained(features, 2, 0.01, bias=True))


@pytest.mark.parametrize("classes", [set(), {1}])
def test_without_two_classes_the_classifier_is_fedavg_s(classes: set[int]) -> None:
    state = first()
    after = QUICK.aggregate(state, [update(1, state, classes)], round_context())
    np.testing.assert_array_equal(after[Part.HEAD][RETRAINED], joined(after[Part.HEAD]))
    assert sorted(classes) == np.flatnonzero(after[Part.PRIVATE][KNOWN]).tolist()


def test_an_update_is_fedavg_s_and_gradients_by_class() -> None:
    expected = QUICK.expects(first())
    assert {spec.path for spec in expected.required} == {"body/w", "head/weight", "head/bias"}
    rows = {(f"class-gradients/{c}", (CLASSES, WIDE + 1)) for c in range(CLASSES)}
    assert {(spec.path, spec.shape) for spec in expected.optional} == rows
    assert not expected.weight
    assert CReFFServer(weighting="examples").expects(first()).weight
