"""SCAFFOLD: the release's round, a step by hand, and its limit, FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.golden_nets import assert_near, stored, two_layers
from tests.support.half_rounds import GOLDEN, LocalOf, model, parts
from tests.support.round_contexts import round_context

from protofed.client.methods import scaffold
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.methods.scaffold import ScaffoldClient
from protofed.client.models.catalogue import architectures, build
from protofed.client.policy.policy import Policy
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.payload import Array, Part, Payload, Tensors, Update, same_tensors
from protofed.deploy.export.kept_states import kept
from protofed.deploy.simulation.simulation import everything, simulation
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.scaffold import ScaffoldServer
from protofed.testing.small_recipe import small_recipe

ORDER = ("body.0.weight", "body.0.bias", "head.weight", "head.bias")
FIRST = model()
ZEROS = {"body.0.weight": np.zeros((1, 1)), "head.weight": np.zeros((2, 1)), "head.bias": np.zeros(2)}


def controls(golden: Mapping[str, Array], prefix: str) -> Tensors:
    return {path: golden[f"{prefix}_{number}"] for number, path in enumerate(ORDER)}


def test_the_releases_round(local_of: LocalOf) -> None:
    """Two of five sites, two steps each."""
    with np.load(GOLDEN / "scaffold_pfllib_round.npz") as golden:
        received = {**stored(golden, "x_old"), Part.CONTROL: controls(golden, "c_global_old")}
        updates = []
        for site in ("c0", "c1"):
            x, y = golden[f"{site}_X"], golden[f"{site}_y"]
            local = local_of(two_layers(), x, y, 3, lr=golden["lr"].item(), batch_size=len(y) // 2)
            local.client_state[Part.CONTROL] = controls(golden, f"{site}_ci_old")
            update = ScaffoldClient().fit(local, received)
            assert_near(update.payload, stored(golden, f"{site}_y_i"))
            assert_near(local.client_state, {Part.CONTROL: controls(golden, f"{site}_ci_new")})
            moved = {path: c - received[Part.CONTROL][path] for path, c in update.payload[Part.CONTROL].items()}
            assert_near({Part.CONTROL: moved}, {Part.CONTROL: controls(golden, f"{site}_delta_c")})
            updates.append(update)
        server = ScaffoldServer(server_lr=golden["server_lr"].item())
        new = server.aggregate(received, updates, round_context(sites=golden["num_clients_total"].item()))
        assert_near(new, stored(golden, "x_new"))
        assert_near(new, {Part.CONTROL: controls(golden, "c_global_new")})


def test_a_sites_step_by_hand(tiny: LocalOf) -> None:
    """X = 2 of class 0, lr .1, equal logits: FedAvg's step moves the bias by (.05, -.05), the head's weight by .1."""
    local = tiny([[2.0]], [0], lr=0.1)
    local.client_state[Part.CONTROL] = {**ZEROS, "head.bias": np.array([0.1, -0.1])}
    received = {**FIRST, Part.CONTROL: {**ZEROS, "head.bias": np.array([0.4, 0.0])}}
    sent = ScaffoldClient().fit(local, received).payload
    assert sent.keys() == ScaffoldClient.sends
    np.testing.assert_allclose(sent[Part.HEAD]["bias"], [0.05 - 0.1 * 0.3, -0.05 - 0.1 * 0.1], atol=1e-15)
    np.testing.assert_allclose(local.client_state[Part.CONTROL]["head.bias"], [-0.5, 0.5], atol=1e-15)  # the gradient
    # c + (c_i+ - c_i) = (.4, 0) + (-.6, .6)
    np.testing.assert_allclose(sent[Part.CONTROL]["head.bias"], [-0.2, 0.6], atol=1e-15)
    np.testing.assert_allclose(sent[Part.CONTROL]["head.weight"], [[-1.0], [1.0]], atol=1e-15)


@pytest.mark.parametrize("plan", [{"weight_decay": 0.1}, {"optimizer": "adam"}], ids=["sgd", "adam"])
def test_a_control_variate_is_the_sites_own_step(plan: dict[str, Any], tiny: LocalOf) -> None:
    """The first step is FedAvg's whatever the correction, so c_i+ is how far that leads, in learning rates."""
    both, alone = (tiny([[2.0]], [0], lr=0.1, **plan) for _ in range(2))
    both.client_state[Part.CONTROL] = {path: array + 0.3 for path, array in ZEROS.items()}
    received = {**FIRST, Part.CONTROL: {path: array - 0.2 for path, array in ZEROS.items()}}
    ScaffoldClient().fit(both, received)
    y = FedAvgClient().fit(alone, FIRST).payload[Part.HEAD]["bias"]
    np.testing.assert_allclose(both.client_state[Part.CONTROL]["head.bias"], (0 - y) / 0.1, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_momentum_it_is_the_mean_gradient(momentum: float, tiny: LocalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same gradient in each step, which is then c_i+; divided by the steps' number it would be up to tenfold."""
    monkeypatch.setattr(
        scaffold, "supervised", lambda _local, logits, _labels: (logits * torch.tensor([2.0, -1.0])).sum()
    )
    local = tiny([[2.0]], [0], lr=0.1, epochs=7, momentum=momentum)
    local.client_state[Part.CONTROL] = {path: array + 0.3 for path, array in ZEROS.items()}
    sent = ScaffoldClient().fit(local, {**FIRST, Part.CONTROL: ZEROS}).payload
    np.testing.assert_allclose(local.client_state[Part.CONTROL]["head.bias"], [2.0, -1.0], atol=1e-12)
    np.testing.assert_allclose(sent[Part.CONTROL]["head.bias"], [2.0 - 0.3, -1.0 - 0.3], atol=1e-12)


def test_the_loss_that_a_site_reports_has_no_correction_in_it(tiny: LocalOf) -> None:
    """A term <y, c - c_i> would make it negative, and a server refuse it."""
    sites = [tiny([[2.0]], [0], lr=0.1) for _ in range(2)]
    sites[0].client_state[Part.CONTROL] = {path: array + 9.0 for path, array in ZEROS.items()}
    losses = [ScaffoldClient().fit(local, {**FIRST, Part.CONTROL: ZEROS}).metrics["loss"] for local in sites]
    assert losses[0] == losses[1] > 0


def test_a_control_variate_is_a_mean_over_the_steps_that_were_done(tiny: LocalOf) -> None:
    local = tiny([[2.0], [1.0], [0.5]], [0, 1, 0], lr=0.1, epochs=2, batch_size=2)
    sent = ScaffoldClient().fit(local, {**FIRST, Part.CONTROL: ZEROS}).payload
    moved = -sent[Part.HEAD]["bias"] / (4 * 0.1)  # two batches, twice
    np.testing.assert_allclose(local.client_state[Part.CONTROL]["head.bias"], moved, atol=1e-12)


def test_without_control_variates_a_round_is_fedavgs_to_the_bit(tiny: LocalOf) -> None:
    plan = {"lr": 0.1, "epochs": 3, "batch_size": 1, "momentum": 0.9, "max_grad_norm": 0.5}
    made, avg = (tiny([[2.0], [1.0]], [0, 1], **plan) for _ in range(2))
    state = ScaffoldServer().init(FIRST, round_context())
    assert same_tensors({Part.CONTROL: state[Part.CONTROL]}, {Part.CONTROL: ZEROS})
    sent, averaged = ScaffoldClient().fit(made, state).payload, FedAvgClient().fit(avg, FIRST).payload
    assert same_tensors({part: sent[part] for part in averaged}, averaged)


def test_two_sites_of_five_by_hand() -> None:
    """From x = 1 to a mean of 3, from c = 2 to one of 12; buffers are averaged whatever the server's rate."""

    def site(name: str, weight: float, control: float) -> Update:
        body = {"bn.weight": np.array([weight]), "bn.running_var": np.array([weight])}
        return Update(name, {Part.BODY: body, Part.HEAD: {}, Part.CONTROL: {"body.bn.weight": np.array([control])}})

    updates = [site("ann", 2.0, 10.0), site("bob", 4.0, 14.0)]
    new = ScaffoldServer(server_lr=0.5).aggregate(site("", 1.0, 2.0).payload, updates, round_context(sites=5))
    assert new[Part.BODY]["bn.weight"] == 2.0
    assert new[Part.BODY]["bn.running_var"] == 3.0
    assert new[Part.CONTROL]["body.bn.weight"] == pytest.approx(2 + 2 / 5 * 10)


def test_at_a_rate_of_1_the_model_is_fedavgs_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    models: list[Payload] = [
        {part: {"w": rng.standard_normal((5, 7)).astype(np.float32)} for part in (Part.BODY, Part.HEAD)} for _ in "abcd"
    ]
    state = ScaffoldServer().init(models[0], round_context())
    updates = [Update(str(n), {**sent, Part.CONTROL: state[Part.CONTROL]}) for n, sent in enumerate(models[1:])]
    new = ScaffoldServer().aggregate(state, updates, round_context())
    mean = FedAvgServer().aggregate(models[0], updates, round_context())
    assert same_tensors({part: new[part] for part in mean}, mean)


@pytest.mark.parametrize("name", sorted(architectures))
def test_every_weight_has_a_control_variate_and_no_statistic(name: str) -> None:
    built = build(NamedOptions(name=name), Input(shape=(3, 32, 32)), 3)
    state = ScaffoldServer().init(parts(built), round_context(3))
    assert set(state[Part.CONTROL]) == {path for path, _ in built.named_parameters()}


@pytest.mark.parametrize(
    ("fewest", "federation"),
    [(1, {}), (60, {}), (1, {"secure": True, "max_relative_norm": 0.02})],
    ids=["all", "rare units withheld", "scaled down"],
)
def test_c_is_the_mean_of_the_sites_own_as_they_left(fewest: int, federation: dict[str, Any], tmp_path: Path) -> None:
    recipe = small_recipe("scaffold", federation={"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, **federation})
    policy = Policy(everything(recipe).rules.model_copy(update={"min_images_per_unit": fewest}))
    with simulation(recipe, tmp_path, policy=policy) as running:
        running.go()
        published = running.run.published
    assert published is not None
    own = [kept(folder, recipe.name).client_state[Part.CONTROL] for folder in (tmp_path / "sites").glob("site-*")]
    assert len(own) == 3
    for path, c in published.state[Part.CONTROL].items():
        np.testing.assert_allclose(c, np.mean([c_i[path] for c_i in own], axis=0), atol=1e-6)
