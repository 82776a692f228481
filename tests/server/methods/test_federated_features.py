"""Federated features against the release's numbers and numerical derivatives, and steps worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protofed.common.payload import Array
from protofed.server.methods.federated_features import distances, gradients, joined, matched, retrained

GOLDEN = Path(__file__).parents[2] / "golden" / "creff_gradient_matching.npz"
WIDE = 3  # D


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def loss(features: Array, classes: Array, classifier: Array, wanted: Array) -> float:
    return float(distances(gradients(features, classes, classifier), wanted, features.shape[-1])[0].sum())


def test_the_releases_distance() -> None:
    with np.load(GOLDEN) as golden:
        made, wanted = (
            np.column_stack([golden[f"gw_{which}"], golden[f"gb_{which}"]])[None] for which in ("syn", "real")
        )
        of_weight, _ = distances(made[..., :-1], wanted[..., :-1], 6)
        of_both, _ = distances(made, wanted, 6)
        assert of_weight.item() == pytest.approx(golden["dist_weight"].item(), abs=1e-9)
        assert of_both.item() == pytest.approx(golden["match_ours"].item(), abs=1e-9)


def test_the_releases_steps() -> None:
    with np.load(GOLDEN) as golden:
        features = golden["feature_syn_init"].reshape(3, golden["features_per_class"].item(), -1)
        after = golden["feature_syn_after"].reshape(features.shape)
        of_one = (golden["grad_client1_class1"] + golden["grad_client2_class1"]) / 2
        wanted = np.stack([golden["grad_client1_class0"], of_one])
        made = matched(
            features[:2],
            np.array([0, 1]),
            golden["classifier_W"],
            wanted,
            golden["match_epochs"].item(),
            golden["lr_feature"].item(),
        )
        np.testing.assert_allclose(made, after[:2], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(features[2], after[2])  # of a class that nobody has


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_by_class_are_those_of_the_mean_cross_entropy(bias: bool) -> None:
    features, classes, classifier = draw(0, 2, 4, WIDE), np.array([2, 0]), draw(1, 3, WIDE + bias)

    def cross_entropy(matrix: Array, s: int) -> float:
        logits = features[s] @ matrix[:, :WIDE].T + (matrix[:, WIDE] if bias else 0)
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[:, classes[s]]))

    made = gradients(features, classes, classifier)
    for s, row, column in np.ndindex(*made.shape):
        away = np.zeros_like(classifier)
        away[row, column] = 1e-6
        slope = (cross_entropy(classifier + away, s) - cross_entropy(classifier - away, s)) / 2e-6
        assert made[s, row, column] == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_goes_down_the_numerical_gradient(bias: bool) -> None:
    features, classes, classifier = draw(0, 2, 4, WIDE), np.array([2, 0]), draw(1, 3, WIDE + bias)
    wanted, lr = draw(2, 2, 3, WIDE + bias), 1e-3
    taken = (features - matched(features, classes, classifier, wanted, 1, lr)) / lr
    for at in np.ndindex(*features.shape):
        away = np.zeros_like(features)
        away[at] = 1e-6
        ahead, behind = (loss(features + sign * away, classes, classifier, wanted) for sign in (1, -1))
        assert taken[at] == pytest.approx((ahead - behind) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_that_real_features_make_are_matched(bias: bool) -> None:
    classes, classifier = np.array([0, 2]), draw(1, 3, WIDE + bias)
    wanted = gradients(draw(3, 2, 9, WIDE) + 1, classes, classifier)
    first = draw(0, 2, 20, WIDE)
    last = matched(first, classes, classifier, wanted, 500, 1.0)
    assert loss(last, classes, classifier, wanted) < 0.01 < 1 < loss(first, classes, classifier, wanted)


def test_a_step_by_hand() -> None:
    """W = 0, so p = (.5, .5), and a feature f of class 0 makes the gradient -f/2, f/2. Wanted are -(0, 1) and (0, 1).

    From f = (1, 0) both rows are at right angles, A = (0, 2), (0, -2); A^T (p - e_0) = (0, -1) + (0, -1), and the way
    through p is closed.
    """
    wanted = np.array([[[0.0, -1.0], [0.0, 1.0]]])
    made = matched(np.array([[[1.0, 0.0]]]), np.array([0]), np.zeros((2, 2)), wanted, 1, 0.1)
    np.testing.assert_allclose(made, [[[1.0, 0.2]]], atol=1e-5)  # eps


def test_rows_of_zeros_move_nothing_and_give_no_nan() -> None:
    features, classes, classifier = draw(0, 1, 4, WIDE), np.array([1]), np.zeros((2, WIDE))
    np.testing.assert_array_equal(matched(features, classes, classifier, np.zeros((1, 2, WIDE)), 9, 0.1), features)
    nothing = matched(np.zeros_like(features), classes, classifier, draw(1, 1, 2, WIDE), 9, 0.1)
    assert np.isfinite(nothing).all()


def test_a_classifier_by_hand() -> None:
    """Features 1 and -1 of two classes, from zeros: p - e_c = -.5, .5 and .5, -.5; the mean gradient is -.5 and .5."""
    features = np.array([[[1.0]], [[-1.0]]])
    np.testing.assert_allclose(retrained(features, 1, 0.1, bias=False), [[0.05], [-0.05]])
    np.testing.assert_allclose(retrained(features, 1, 0.1, bias=True), [[0.05, 0.0], [-0.05, 0.0]], atol=1e-17)


@pytest.mark.parametrize(("classes", "each"), [(3, 50), (40, 7)])  # several features of a class a batch, and one
def test_a_classifier_separates_features_that_can_be(classes: int, each: int) -> None:
    centres = 3 * draw(0, classes, 1, 64)
    features = centres + draw(1, classes, each, 64)
    classifier = retrained(features, 100, 0.1, bias=True)
    logits = features @ classifier[:, :-1].T + classifier[:, -1]
    assert (logits.argmax(axis=2) == np.arange(classes)[:, None]).all()


def test_dtypes_are_those_of_the_features_and_a_head_is_joined_as_it_is() -> None:
    features = draw(0, 1, 4, WIDE).astype(np.float32)
    wanted = draw(1, 1, 2, WIDE + 1).astype(np.float32)
    assert matched(features, np.array([0]), np.zeros((2, WIDE + 1), np.float32), wanted, 2, 0.1).dtype == np.float32
    head = {"weight": np.array([[1.0, 2.0]], np.float32), "bias": np.array([3.0], np.float32)}
    assert joined(head).tolist() == [[1.0, 2.0, 3.0]]
    assert joined(head).dtype == np.float32
    assert joined({"weight": head["weight"]}).tolist() == [[1.0, 2.0]]
