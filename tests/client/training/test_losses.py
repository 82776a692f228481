"""Losses of the methods against the released codes' numbers, and by hand.

What other models lose on a site's examples, and how far they are; by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel, dump
from protofed.client.site import TaskAbortedError
from protofed.client.training.context import FitContext
from protofed.client.training.losses import (
    WORST,
    Distance,
    class_shares,
    compute_losses,
    distance,
    distribution_gap,
    inter_class,
    intra_class,
    logit_adjusted,
    prototypical_contrast,
)
from protofed.common.config.recipe import Plan
from protofed.common.config.tables import Input
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload

GOLDEN = Path(__file__).parents[2] / "golden"
WDR = np.load(GOLDEN / "cwfedavg_wdr_values.npz")
GPC = np.load(GOLDEN / "fedproc_gpc_loss.npz")
DRO = np.load(GOLDEN / "fedprp_dro_loss.npz")
MARGINS = {"noeps": torch.zeros(4).double(), "eps1": torch.ones(4).double(), "epsv": torch.tensor(DRO["eps_vector"])}
DISTANCES: tuple[Distance, ...] = ("euclidean", "cosine", "negated-cosine")
Dro = Callable[..., tuple[Tensor, Tensor, Tensor]]


def tensor(values: Any, grad: bool = False) -> Tensor:
    made = torch.tensor(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.float64)
    return made.requires_grad_(grad)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, [of])
    return grad


def close(actual: Tensor, expected: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach(), expected, rtol=0, atol=atol)


# Logit adjustment


def test_logits_are_adjusted_by_hand() -> None:
    """Two classes as 3 : 1: logits (0, 0) + 2 (log .75, log .25) are the logarithms of 9 : 1."""
    logits = tensor([[0.0, 0.0], [0.0, 0.0]], grad=True)
    loss = logit_adjusted(logits, torch.tensor([0, 1]), tensor([0.75, 0.25]), 2.0)
    close(loss, (-math.log(0.9) - math.log(0.1)) / 2)
    close(gradient(loss, logits), [[-0.05, 0.05], [0.45, -0.45]])


# CwFedAvg's regularizer


@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_regularizer_is_the_released_codes(case: int) -> None:
    weight, p = tensor(WDR[f"head{case}"], grad=True), tensor(WDR[f"p{case}"])
    omega = distribution_gap(weight, p)
    close(class_shares(weight), WDR[f"ptilde{case}"])
    close(omega, WDR[f"omega{case}"])
    close(gradient(omega, weight), WDR[f"grad{case}"])


def test_shares_by_hand_and_no_gradient_where_there_is_no_gap() -> None:
    weight = tensor([[3.0, 4.0], [0.0, 0.0], [-9.0, 12.0]])
    close(class_shares(weight), [0.25, 0.0, 0.75], 1e-15)
    close(distribution_gap(weight, tensor([0.25, 0.75, 0.0])), 0.75 * math.sqrt(2), 1e-15)
    weight = tensor(2 * np.eye(4), grad=True)
    omega = distribution_gap(weight, tensor([0.25] * 4))
    assert omega.item() == 0.0
    assert torch.equal(gradient(omega, weight), torch.zeros(4, 4).double())


@pytest.mark.parametrize("zero", [slice(0, 1), slice(None)])
def test_rows_of_zeros_give_finite_gradients(zero: slice) -> None:
    rows = np.array([[1.0, -2.0], [0.5, 0.5], [3.0, 0.0]])
    rows[zero] = 0.0
    weight = tensor(rows, grad=True)
    omega = distribution_gap(weight, tensor([0.5, 0.5, 0.0]))
    grad = gradient(omega, weight)
    assert math.isfinite(omega.item())
    assert torch.isfinite(grad).all()


# FedProc's contrast


def test_the_contrast_is_the_released_codes() -> None:
    z, centers, y = tensor(GPC["z_unit"], grad=True), tensor(GPC["centers_raw"]), tensor(GPC["y"])
    known = torch.ones(4, dtype=torch.bool)
    loss = prototypical_contrast(z, y, centers, known)
    close(loss, GPC["loss"])
    close(gradient(loss, z), GPC["dL_dz_unit"])
    lengths = tensor([[1e-3], [1.0], [5.0], [1e4]])  # only directions of prototypes matter
    close(prototypical_contrast(z, y, centers * lengths, known), GPC["loss"], 1e-12)


def test_the_contrast_by_hand_and_of_a_batch_without_known_classes() -> None:
    z, known = tensor([[0.6, 0.8]]), torch.tensor([True] * 2)
    loss = prototypical_contrast(z, torch.tensor([1]), tensor(np.eye(2) * 7), known)
    close(loss, math.log(1 + math.exp(-0.2)), 1e-15)
    z = tensor([[0.6, 0.8], [0.0, 1.0]], grad=True)
    loss = prototypical_contrast(z, torch.tensor([0, 0]), tensor(np.eye(2)), torch.tensor([False, True]))
    assert loss.item() == 0.0
    assert torch.equal(gradient(loss, z), torch.zeros(2, 2).double())


def test_a_class_without_a_prototype_neither_attracts_nor_counts() -> None:
    """Class 2 is not known: its column is no alternative to the others, its example adds 0 to a mean over 4."""
    z, y = tensor(GPC["z_unit"], grad=True), torch.tensor([0, 1, 3, 2, 0])
    known = torch.tensor([True, True, False, True])
    centers = tensor(GPC["centers_raw"])
    loss = prototypical_contrast(z, y, centers, known)
    units = (centers / centers.norm(dim=1, keepdim=True))[known]
    counted = [0, 1, 2, 4]
    scores = torch.softmax(z.detach()[counted] @ units.T, dim=1)
    close(loss, -scores[range(4), [0, 1, 2, 0]].log().sum() / 5, 1e-12)  # class 3 is the third that is known
    grad = gradient(loss, z)
    assert torch.equal(grad[3], torch.zeros(6).double())
    assert (grad[counted].norm(dim=1) > 0).all()
    garbage = centers.index_fill(0, torch.tensor([2]), 1e6)
    assert torch.equal(prototypical_contrast(z, y, garbage, known), loss)  # what its row holds has no say


# FedPRP's intra-class loss


def test_the_intra_class_loss_by_hand() -> None:
    """((1 - 0)^2 + (2 - 4)^2 + 0 + 0) / (2 * 2): the second example's class has no prototype, but is in the mean."""
    features, labels = tensor([[1.0, 2.0], [9.0, 9.0]], grad=True), torch.tensor([1, 0])
    prototypes, known = tensor([[7.0, 7.0], [0.0, 4.0]]), torch.tensor([False, True])
    loss = intra_class(features, labels, prototypes, known)
    assert loss.item() == 1.25
    assert gradient(loss, features).tolist() == [[0.5, -1.0], [0.0, 0.0]]


# FedPRP's inter-class loss


@pytest.fixture
def dro() -> Dro:
    """Loss of a golden case, with its features and margins."""

    def make(order: str, tau: float, eps: str, distance: Distance) -> tuple[Tensor, Tensor, Tensor]:
        features, labels = tensor(DRO["batch_features"], grad=True), tensor(DRO[f"y_{order}"])
        margins = MARGINS[eps].clone().requires_grad_()
        return inter_class(features, labels, tensor(DRO["centroids"]), margins, tau, distance), features, margins

    return make


@pytest.mark.parametrize(("distance", "name"), [("euclidean", "euclid"), ("cosine", "cosdist")])
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("tau", [1.0, 0.07])
@pytest.mark.parametrize("eps", MARGINS)
def test_the_inter_class_loss_meant(order: str, tau: float, eps: str, distance: Distance, name: str, dro: Dro) -> None:
    close(dro(order, tau, eps, distance)[0], DRO[f"numpy_intended_{name}_{order}_tau{tau}_{eps}_loss"])


ALIGNED = [case for case in itertools.product(("sorted", "unsorted"), MARGINS) if case != ("unsorted", "epsv")]


@pytest.mark.parametrize(("order", "eps"), ALIGNED)  # the others mix up the margins
@pytest.mark.parametrize("tau", [1.0, 0.07])
@pytest.mark.parametrize(("distance", "release"), [("euclidean", "drolt"), ("negated-cosine", "fedprp_release")])
def test_loss_and_gradient_of_releases(
    order: str, eps: str, tau: float, distance: Distance, release: str, dro: Dro
) -> None:
    loss, features, _ = dro(order, tau, eps, distance)
    close(loss, DRO[f"{release}_{order}_tau{tau}_{eps}_loss"])
    close(gradient(loss, features), DRO[f"{release}_{order}_tau{tau}_{eps}_grad"])


@pytest.mark.parametrize("eps", ["eps1", "epsv"])
@pytest.mark.parametrize("tau", [1.0, 0.07])
def test_gradient_of_the_margins(eps: str, tau: float, dro: Dro) -> None:
    loss, _, margins = dro("sorted", tau, eps, "euclidean")
    close(gradient(loss, margins), DRO[f"drolt_sorted_tau{tau}_{eps}_grad_eps"])


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_order_of_a_batch_has_no_say(distance: Distance) -> None:
    features, labels, centroids = (tensor(DRO[name]) for name in ("batch_features", "y_unsorted", "centroids"))
    order = torch.argsort(labels, stable=True)
    whole, turned = (
        inter_class(z, y, centroids, MARGINS["epsv"], 0.07, distance)
        for z, y in ((features, labels), (features[order], labels[order]))
    )
    close(turned, whole, 1e-12)


@pytest.mark.parametrize(("distance", "falls"), [("euclidean", True), ("cosine", True), ("negated-cosine", False)])
@pytest.mark.parametrize("tau", [1.0, 0.07])
def test_nearer_to_the_own_centroid_is_better_but_in_the_release(distance: Distance, falls: bool, tau: float) -> None:
    features, labels, centroids = (tensor(DRO[name]) for name in ("batch_features", "y_sorted", "centroids"))
    losses = [
        inter_class(torch.lerp(features, centroids[labels], share), labels, centroids, MARGINS["eps1"], tau, distance)
        for share in (0.0, 0.1, 0.2, 0.3)
    ]
    assert all((after < before) == falls for before, after in itertools.pairwise(losses))


def test_the_inter_class_loss_by_hand() -> None:
    """Centroid 0 of class 0 at x = 0, its example at 1; the other class's at 3, centroid 2; margins 1 and 1/2, tau 2.

    Class 0: scores -(1 + 1)/2 and -3/2; class 1: -(2 - 1)/2 and -(1 + 1/2)/2. Class 2 is not in the batch.
    """
    features, labels = tensor([[1.0], [3.0]]), torch.tensor([0, 1])
    centroids, margins = tensor([[0.0], [2.0], [1.0]]), tensor([1.0, 0.5, 9.0])
    loss = inter_class(features, labels, centroids, margins, temperature=2.0)
    first, second = math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(0.25))
    close(loss, (first + second) / 2, 1e-15)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("more", [1, 5, 40])
def test_classes_that_are_not_in_the_batch_have_no_say(distance: Distance, more: int) -> None:
    """Of more classes than the batch has examples not even all are looked at."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([2, 0, 2, 5])
    features, few, eps = (torch.randn(size, generator=draw).double() for size in ((4, 3), (6, 3), (6,)))
    z, margins = features.requires_grad_(), eps.requires_grad_()
    loss = inter_class(z, labels, few, margins, 0.5, distance)
    grads = torch.autograd.grad(loss, [z, margins])
    many = torch.cat((few, torch.full((more, 3), 1e3, dtype=torch.float64)))
    wide = torch.cat((eps.detach(), torch.full((more,), 1e3, dtype=torch.float64))).requires_grad_()
    again = inter_class(z, labels, many, wide, 0.5, distance)
    close(again, loss.detach(), 1e-12)
    grad, wide_grad = torch.autograd.grad(again, [z, wide])
    close(grad, grads[0], 1e-12)
    close(wide_grad[:6], grads[1], 1e-12)
    assert torch.equal(wide_grad[6:], torch.zeros(more).double())


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("at", ["the centroid", "zero"])
def test_a_feature_without_a_direction_gives_finite_gradients(distance: Distance, at: str) -> None:
    """A class's only example is its own centroid."""
    centroids = tensor([[1.0, 2.0], [-1.0, 0.5]])
    features = (centroids * (at != "zero")).clone().requires_grad_()
    loss = inter_class(features, torch.tensor([0, 1]), centroids, torch.ones(2).double(), 0.07, distance)
    assert math.isfinite(loss.item())
    assert torch.isfinite(gradient(loss, features)).all()


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_class_alone_with_one_example_has_no_alternative(distance: Distance) -> None:
    features = tensor([[1.0, 2.0]], grad=True)
    loss = inter_class(features, torch.tensor([1]), tensor(np.eye(2)), torch.ones(2).double(), 0.07, distance)
    assert loss.item() == 0.0
    assert torch.equal(gradient(loss, features), torch.zeros(1, 2).double())


TWO = Input(shape=(1, 1, 1))
SOME = Examples(torch.zeros(3, 1, 1, 1), torch.tensor([0, 0, 1]))


def model(*bias: float, mean: float = 0.0) -> Payload:
    """Of the image 0 its logits are the head's biases, in evaluation mode, whatever the running mean is."""
    body = {"1.running_mean": np.array([mean]), "1.running_var": np.ones(1), "1.num_batches_tracked": np.array(3)}
    return {Part.BODY: body, Part.HEAD: {"weight": np.zeros((2, 1)), "bias": np.array(bias)}}


@pytest.fixture
def local() -> FitContext:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1, affine=False))
    data = SiteData(SOME, SOME, TWO, 2)
    split = SplitModel(body, nn.Linear(1, 2)).float()
    return FitContext("ann", 1, 1, split, data, 2, Plan(), torch.Generator(), client_state={})


def test_losses_are_means_in_evaluation_mode_in_any_batches(local: FitContext, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    found = compute_losses(local, [model(1.0, -1.0), model(0.0, 0.0, mean=5.0), model(-1.0, 1.0)], SOME)
    assert found == pytest.approx([(2 * right + wrong) / 3, math.log(2), (2 * wrong + right) / 3])
    assert dump(local.model.body)["1.num_batches_tracked"] == 3  # no training mode: nothing was counted
    monkeypatch.setattr("protofed.client.training.losses.BATCH", 2)
    assert compute_losses(local, [model(1.0, -1.0)], SOME) == pytest.approx(found[:1])


def test_a_model_that_gives_no_numbers_is_the_worst_and_a_distance_is_over_parameters(local: FitContext) -> None:
    found = compute_losses(local, [model(np.nan, 0.0), model(3e38, -3e38), model(0.0, 0.0)], SOME)
    assert found == [WORST, WORST, pytest.approx(math.log(2))]
    assert distance(local, model(3.0, 0.0), model(0.0, 4.0, mean=100.0)) == pytest.approx(5.0)


def test_a_model_of_another_shape_is_refused_and_an_aborted_task_ends(local: FitContext) -> None:
    with pytest.raises(CodecError):
        compute_losses(local, [model(1.0, -1.0, 0.0)], SOME)

    def aborted() -> None:
        raise TaskAbortedError

    local.check = aborted
    with pytest.raises(TaskAbortedError):
        compute_losses(local, [model(1.0, -1.0)], SOME)
