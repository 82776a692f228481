"""MOON: the release's losses and step, and its limits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from tests.support.golden_nets import assert_near, tensor
from tests.support.half_rounds import GOLDEN, Linear, LocalOf
from torch import nn

from protofed.client.method import model_contrast
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.moon import MOONClient
from protofed.client.models.split import SplitModel, dump
from protofed.client.training.context import FitContext
from protofed.common.payload import Array, Part, Payload, same_tensors

LAYERS = {"0": "f", "2": "l1", "4": "l2"}  # of the body, by their names in the file


def network() -> SplitModel:
    body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    return SplitModel(body, nn.Linear(4, 3)).double()


def stored(golden: Mapping[str, Array], prefix: str) -> Payload:
    both = ("weight", "bias")
    body = {f"{ours}.{name}": golden[f"{prefix}_{theirs}_{name}"] for ours, theirs in LAYERS.items() for name in both}
    return {Part.BODY: body, Part.HEAD: {name: golden[f"{prefix}_l3_{name}"] for name in both}}


def test_the_releases_contrast() -> None:
    with np.load(GOLDEN / "moon_loss_and_step.npz") as golden:
        z, towards, away = (tensor(golden[f"z_{name}"]) for name in ("local", "global", "prev1"))
        loss = model_contrast(z, towards, away, golden["tau"].item())
        assert loss.item() == pytest.approx(golden["loss_con_1prev"].item(), abs=1e-9)


def test_the_releases_step(local_of: LocalOf) -> None:
    """The file's local model is not its global one: here the global one is put in the place of z_glob alone."""
    with np.load(GOLDEN / "moon_loss_and_step.npz") as golden:

        class Started(MOONClient):
            def load_global(self, local: FitContext, received: Payload) -> None:
                super().load_global(local, stored(golden, "init"))

        plan = {key: golden[key].item() for key in ("lr", "momentum", "weight_decay")}
        local = local_of(network(), golden["X"], golden["y"], 3, **plan)
        local.client_state[Part.BODY] = stored(golden, "prev1")[Part.BODY]
        method = Started(mu=golden["mu"].item(), temperature=golden["tau"].item())
        assert_near(method.fit(local, stored(golden, "glob")).payload, stored(golden, "after_1prev"))


FIRST: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0], [0.5]])},
    Part.HEAD: {"weight": np.array([[0.5, 0.0], [0.0, 0.5]]), "bias": np.zeros(2)},
}


@pytest.mark.parametrize(("mu", "remembers"), [(0.0, True), (5.0, False)])
def test_without_a_last_model_or_mu_it_is_fedavg(mu: float, remembers: bool, local_of: LocalOf, linear: Linear) -> None:
    plan = {"lr": 0.1, "epochs": 3, "batch_size": 1}
    moon, avg = (local_of(linear([[9.0], [9.0]], 2), [[2.0], [1.0]], [0, 1], 2, **plan) for _ in range(2))
    if remembers:
        moon.client_state[Part.BODY] = {"0.weight": np.array([[-1.0], [0.5]])}
    assert same_tensors(MOONClient(mu=mu).fit(moon, FIRST).payload, FedAvgClient().fit(avg, FIRST).payload)


def test_features_are_drawn_away_from_the_last_model(local_of: LocalOf, linear: Linear) -> None:
    """With features of another direction remembered, the next ones are farther from it than FedAvg's are."""
    last = np.array([[0.0], [1.0]])
    fits = {}
    for mu in (0.0, 5.0):
        local = local_of(linear([[9.0], [9.0]], 2), [[2.0]], [0], 2, lr=0.1)
        local.client_state[Part.BODY] = {"0.weight": last}
        fits[mu] = MOONClient(mu=mu).fit(local, FIRST).payload[Part.BODY]["0.weight"]
        assert same_tensors({Part.BODY: local.client_state[Part.BODY]}, {Part.BODY: dump(local.model.body)})

    def cosine(weight: Array) -> float:
        return float((weight * last).sum() / np.linalg.norm(weight))

    assert cosine(fits[5.0]) < cosine(fits[0.0])
