"""APFL: a step by hand, the release's alpha, the limits of alpha, and a global branch that is FedAvg's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.golden_nets import tensor
from tests.support.half_rounds import GOLDEN, LocalOf, model, parts
from torch import Tensor, nn

from protofed.client.methods import apfl
from protofed.client.methods.apfl import APFLClient
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import SplitModel, dump
from protofed.common.payload import Part, Payload, same_tensors

FIRST = model()
OWN: Payload = {
    Part.PRIVATE: {
        "body.0.weight": np.array([[1.0]]),
        "head.weight": np.array([[-0.1], [0.1]]),
        "head.bias": np.array([0.95, 1.05]),
        "alpha": np.array(0.5),
    }
}


def test_a_step_by_hand(tiny: LocalOf) -> None:
    """X = 2 of class 0, lr .1. w goes from zeros to weights (.1, -.1) and biases (.05, -.05).

    The mixture of both halves is then zeros, but for the biases (.5, .5): of equal logits the gradient is (-1, 1) by
    the head's weights and (-.5, .5) by its biases.
    """
    local = tiny([[2.0]], [0], lr=0.1)
    local.client_state.update(OWN)
    sent = APFLClient().fit(local, FIRST).payload
    assert sent.keys() == APFLClient.sends
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [0.05, -0.05], atol=1e-15)
    own = local.client_state[Part.PRIVATE]
    np.testing.assert_allclose(own["head.weight"], [[-0.1 + 0.1 * 0.5], [0.1 - 0.1 * 0.5]], atol=1e-15)
    np.testing.assert_allclose(own["head.bias"], [0.95 + 0.1 * 0.25, 1.05 - 0.1 * 0.25], atol=1e-15)
    # <v - w, gradient> = (-.2, .2) (-1, 1) + (.9, 1.1) (-.5, .5) = .4 + .1
    assert own["alpha"] == pytest.approx(0.5 - 0.1 * 0.5, abs=1e-15)


@pytest.mark.parametrize(("eta", "expected"), [("eta", "alpha_new"), (1.0, "alpha_new_eta1_clipped")])
def test_releases_alpha(eta: float | str, expected: str, local_of: LocalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is alpha grad_v + (1 - alpha) grad_w: here that of a linear loss, at any mixture."""
    with np.load(GOLDEN / "apfl_alpha_update.npz") as golden:
        lr, alpha = golden[eta].item() if isinstance(eta, str) else eta, golden["alpha"].item()
        gradient = alpha * golden["grad_personal"] + (1 - alpha) * golden["grad_local"]  # [39]
        monkeypatch.setattr(apfl, "supervised", lambda _local, logits, _labels: logits.mean())
        linear_model = SplitModel(nn.Flatten(), nn.Linear(39, 1, bias=False)).double()
        local = local_of(linear_model, [gradient], [0], 1, lr=lr)
        local.client_state[Part.PRIVATE] = {"head.weight": golden["v_personal"][None], "alpha": golden["alpha"]}
        before = golden["w_local"] + lr * gradient  # w's own step takes it off
        APFLClient(alpha_decay=0.02).fit(local, {Part.BODY: {}, Part.HEAD: {"weight": before[None]}})
        assert local.client_state[Part.PRIVATE]["alpha"] == pytest.approx(golden[expected].item(), abs=1e-9)


def test_alpha_stays_between_0_and_1(tiny: LocalOf) -> None:
    """Between a model that is right and one that is wrong the gradient is large, towards the right one."""
    for biases, clipped in (([9.0, -9.0], 1.0), ([-9.0, 9.0], 0.0)):
        local = tiny([[2.0]], [0], lr=0.5)
        local.client_state[Part.PRIVATE] = {**OWN[Part.PRIVATE], "head.bias": np.array(biases)}
        wrong = {**FIRST, Part.HEAD: {**FIRST[Part.HEAD], "bias": -np.array(biases)}}
        APFLClient().fit(local, wrong)
        assert local.client_state[Part.PRIVATE]["alpha"] == clipped


def test_when_alpha_is_learned(tiny: LocalOf) -> None:
    found = {}
    for adapt in ("never", "round", "step"):
        for count in (1, 3):
            x, y = [[2.0], [2.0], [2.0]][:count], [0, 0, 0][:count]
            local = tiny(x, y, lr=0.1, batch_size=1)
            local.client_state.update(OWN)
            APFLClient(adapt=adapt).fit(local, FIRST)
            found[adapt, count] = local.client_state[Part.PRIVATE]["alpha"].item()
    assert found["never", 1] == found["never", 3] == 0.5
    assert found["round", 1] == found["round", 3] == found["step", 1] != 0.5
    assert found["step", 3] != found["step", 1]


def normed() -> SplitModel:
    torch.manual_seed(5)
    return SplitModel(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 3)).double()


EXAMPLES = np.random.default_rng(3).standard_normal((8, 2))
PLAN: dict[str, Any] = {"lr": 0.1, "epochs": 3, "batch_size": 4, "momentum": 0.9, "max_grad_norm": 0.5}


@pytest.mark.parametrize("adapt", ["never", "round", "step"])
def test_the_global_branch_is_fedavgs_to_the_bit(adapt: Any, local_of: LocalOf) -> None:
    """Batch normalisation's statistics, too: the mixture has its own."""
    both, alone = (local_of(normed(), EXAMPLES, np.arange(8) % 3, 3, **PLAN) for _ in range(2))
    first = parts(both.model)
    made, plain = APFLClient(adapt=adapt, weighting="examples").fit(both, first), FedAvgClient().fit(alone, first)
    assert same_tensors(made.payload, plain.payload)
    assert made.metrics == plain.metrics
    own = both.client_state[Part.PRIVATE]
    assert own["body.1.num_batches_tracked"] == 6
    assert not np.allclose(own["body.1.running_mean"], plain.payload[Part.BODY]["1.running_mean"], atol=1e-6)


def test_at_alpha_1_the_own_model_trains_alone(local_of: LocalOf) -> None:
    both, alone = (local_of(normed(), EXAMPLES, np.arange(8) % 3, 3, **PLAN) for _ in range(2))
    first = parts(both.model)
    own = {part: {n: np.asarray(1.5 * a, a.dtype) for n, a in tensors.items()} for part, tensors in first.items()}
    flat = {f"{part}.{n}": a for part, tensors in own.items() for n, a in tensors.items()}
    both.client_state[Part.PRIVATE] = {**flat, "alpha": np.array(1.0)}
    APFLClient(adapt="never").fit(both, first)
    trained = FedAvgClient().fit(alone, own).payload
    for part, tensors in trained.items():
        assert all(np.array_equal(both.client_state[Part.PRIVATE][f"{part}.{n}"], a) for n, a in tensors.items())
    APFLClient().load_global(both, first)
    assert same_tensors(parts(both.model), trained)


def test_a_site_predicts_with_the_mixture_once_it_has_one(tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0], lr=0.1)
    APFLClient().load_global(local, FIRST)
    assert same_tensors({Part.HEAD: dump(local.model.head)}, {Part.HEAD: FIRST[Part.HEAD]})
    local.client_state[Part.PRIVATE] = {**OWN[Part.PRIVATE], "alpha": np.array(0.0)}
    APFLClient().load_global(local, FIRST)
    assert same_tensors(parts(local.model), FIRST)
    local.client_state[Part.PRIVATE] = {**OWN[Part.PRIVATE], "alpha": np.array(0.25)}
    APFLClient().load_global(local, FIRST)
    np.testing.assert_allclose(dump(local.model.head)["bias"], [0.25 * 0.95, 0.25 * 1.05], atol=1e-15)


def test_a_sites_first_own_model_is_the_global_one(tiny: LocalOf) -> None:
    """Then the mixture is it, too, whatever alpha, which so has no gradient."""
    local = tiny([[2.0]], [0], lr=0.1, weight_decay=0.0)
    APFLClient(alpha=0.25).fit(local, FIRST)
    own = local.client_state[Part.PRIVATE]
    # v - w after w's first step is -(.05, -.05) of the biases and -(.1, -.1) of the weights.
    p: Tensor = tensor(np.array([0.75 * (0.1 * 2 + 0.05), -0.75 * (0.1 * 2 + 0.05)])).softmax(0) - tensor(np.eye(2)[0])
    np.testing.assert_allclose(own["head.bias"], -0.1 * 0.25 * p, atol=1e-15)
    inner = -(0.05 * p[0] - 0.05 * p[1]) - (0.1 * 2 * p[0] - 0.1 * 2 * p[1])
    assert own["alpha"] == pytest.approx(0.25 - 0.1 * inner.item(), abs=1e-15)
