"""FedROD: the balanced softmax of the release, and a round of both heads by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.support.golden_nets import tensor
from tests.support.half_rounds import GOLDEN, LocalOf, model

from protofed.client.method import balanced_softmax
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.fedrod import FedRODClient
from protofed.client.models.split import dump
from protofed.common.payload import Part, same_tensors

FIRST = model()


def test_the_releases_balanced_softmax() -> None:
    with np.load(GOLDEN / "fedrod_losses.npz") as golden:
        logits = tensor(golden["logits"]).requires_grad_()
        loss = balanced_softmax(logits, tensor(golden["y"]), tensor(golden["sample_per_class"]))
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert loss.item() == pytest.approx(golden["balanced_softmax_loss"].item(), abs=1e-9)
        np.testing.assert_allclose(logits.grad, golden["balanced_softmax_grad"], atol=1e-9)
        counts = tensor(golden["counts2"])
        for scale in (1.0, 1 / 40):
            loss = balanced_softmax(tensor(golden["logits"]), tensor(golden["y"]), counts * scale)
            assert loss.item() == pytest.approx(golden["loss_counts2"].item(), abs=1e-9)


def test_a_class_that_a_site_lacks_gives_no_infinite_gradient() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = balanced_softmax(logits, torch.tensor([0]), torch.tensor([0.5, 0.5, 0.0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_round_by_hand(tiny: LocalOf) -> None:
    """Three examples x = 2, 2, 2 of classes 0, 0, 1; pi = (2/3, 1/3); one step of lr = .3 each.

    Of equal logits the balanced softmax gives p = pi, which is the mean of y: G does not move. P then moves by the
    cross-entropy's step, whose p is (.5, .5): the bias by .3 (2/3 - 1/2) = .05, the weight by twice that.
    """
    local = tiny([[2.0]] * 3, [0, 0, 1], lr=0.3)
    sent = FedRODClient().fit(local, FIRST).payload
    np.testing.assert_allclose(sent[Part.HEAD]["weight"], np.zeros((2, 1)), atol=1e-7)
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], np.zeros(2), atol=1e-7)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["bias"], [0.05, -0.05], atol=1e-7)
    np.testing.assert_allclose(local.client_state[Part.HEAD]["weight"], [[0.1], [-0.1]], atol=1e-7)


def test_a_site_predicts_with_the_sum_of_both_heads_and_keeps_its_own(tiny: LocalOf) -> None:
    local = tiny([[2.0], [1.0]], [0, 1], lr=0.1)
    own = {"weight": np.array([[2.0], [0.0]]), "bias": np.array([1.0, -1.0])}
    local.client_state[Part.HEAD] = own
    sent = FedRODClient().fit(local, FIRST).payload
    for name, array in local.client_state[Part.HEAD].items():
        assert not np.array_equal(array, own[name])
        np.testing.assert_allclose(dump(local.model.head)[name], sent[Part.HEAD][name] + array, atol=1e-12)
    assert same_tensors({Part.BODY: dump(local.model.body)}, {Part.BODY: sent[Part.BODY]})


def test_at_a_site_whose_classes_are_even_the_generic_model_is_fedavgs(tiny: LocalOf) -> None:
    rod, avg = (tiny([[2.0], [1.0]], [0, 1], lr=0.1, epochs=3) for _ in range(2))
    # Whatever P is.
    rod.client_state[Part.HEAD] = {"weight": np.array([[2.0], [0.0]]), "bias": np.array([1.0, -1.0])}
    ours, theirs = FedRODClient().fit(rod, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload
    for part in (Part.BODY, Part.HEAD):
        for name, array in theirs[part].items():
            np.testing.assert_allclose(ours[part][name], array, atol=1e-12)
