"""FedAvgM, FedAdam and FedYogi: two rounds each by hand, their limits, and buffers that no optimiser may move."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pytest
import torch
from tests.support.round_contexts import round_context

from protofed.client.models.catalogue import architectures, build
from protofed.common import codec
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.payload import Part, Payload, Update, is_buffer, same_tensors
from protofed.server.method import sent
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.fedopt import FedAdamServer, FedAvgMServer, FedOptServer, FedYogiServer

IMAGES = Input(shape=(3, 32, 32))
HALVES = (FedAvgMServer(), FedAdamServer(), FedYogiServer())
W = "body.conv.weight"


def model(weight: float, dtype: str = "float64") -> Payload:
    """One weight, and BatchNorm's buffers; its head has a 0-d tensor, as a cosine head does."""
    body = {
        "conv.weight": np.full((1, 2), weight, dtype),
        "bn.running_var": np.full(2, weight, dtype),
        "bn.num_batches_tracked": np.array(int(abs(weight)), np.int64),
    }
    return {Part.BODY: body, Part.HEAD: {"scale": np.array(weight, dtype)}}


def after(half: FedOptServer, state: Payload, means: Sequence[float]) -> Payload:
    """The state after rounds of two sites each, whose models have this mean."""
    for mean in means:
        updates = [Update("ann", model(mean - 1)), Update("bob", model(mean + 1))]
        state = codec.decode(codec.encode(half.aggregate(state, iter(updates), round_context())))
    return state


def weight(state: Payload) -> float:
    (value,) = {float(value) for value in (*state[Part.BODY]["conv.weight"].flat, state[Part.HEAD]["scale"])}
    return value


def moment(state: Payload, name: str) -> float:
    (value,) = {float(value) for value in state[Part.PRIVATE][f"{name}.{W}"].flat}
    return value


def test_two_rounds_of_fedavgm_by_hand() -> None:
    half = FedAvgMServer(server_lr=0.5, momentum=0.5)
    state = after(half, model(1.0), [3.0])  # delta 2
    assert (moment(state, "m"), weight(state)) == (2.0, 1 + 0.5 * 2)
    state = after(half, state, [4.0])  # delta 2 once more
    assert (moment(state, "m"), weight(state)) == (0.5 * 2 + 2, 2 + 0.5 * 3)


def test_two_rounds_of_fedadam_by_hand() -> None:
    """Without bias correction, which would double the first step: m / (1 - beta1)."""
    half = FedAdamServer(server_lr=1.5, beta1=0.5, beta2=0.875, tau=1.0)
    state = after(half, model(1.0), [6.0])  # delta 5: v = 7/8 * 1^2 + 1/8 * 25 = 4
    assert (moment(state, "m"), moment(state, "v")) == (2.5, 4.0)
    assert weight(state) == 1 + 1.5 * 2.5 / (2 + 1)
    state = after(half, state, [4.25])  # delta 2: v = 7/8 * 4 + 1/8 * 4 = 4
    assert (moment(state, "m"), moment(state, "v")) == (0.5 * 2.5 + 0.5 * 2, 4.0)
    assert weight(state) == 2.25 + 1.5 * 2.25 / (2 + 1)


def test_two_rounds_of_fedyogi_by_hand() -> None:
    """A small gradient after a large one: FedAdam would forget half of v, FedYogi takes off no more than delta^2."""
    half = FedYogiServer(server_lr=1.0, beta1=0.5, beta2=0.5, tau=1.0)
    state = after(half, model(1.0), [5.0])  # delta 4: v = 1 + 1/2 * 16 = 9
    assert (moment(state, "m"), moment(state, "v")) == (2.0, 9.0)
    assert weight(state) == 1 + 2 / (3 + 1)
    state = after(half, state, [2.5])  # delta 1: v = 9 - 1/2 * 1
    assert (moment(state, "m"), moment(state, "v")) == (0.5 * 2 + 0.5 * 1, 8.5)
    assert weight(state) == pytest.approx(1.5 + 1.5 / (sqrt(8.5) + 1), rel=1e-15)


def test_fedavgm_without_momentum_is_fedavg_up_to_rounding() -> None:
    rng = np.random.default_rng(0)
    models: list[Payload] = [
        {part: {"w": rng.standard_normal((5, 7)).astype(np.float32)} for part in Part} for _ in "abc"
    ]
    updates = [Update(str(site), payload, weight=float(site)) for site, payload in enumerate(models, 1)]
    for weighting in ("uniform", "examples"):
        half, plain = FedAvgMServer(momentum=0.0, weighting=weighting), FedAvgServer(weighting=weighting)
        made, mean = (each.aggregate(models[0], updates, round_context()) for each in (half, plain))
        for part in (Part.BODY, Part.HEAD):
            assert made[part]["w"].dtype == np.float32
            np.testing.assert_allclose(made[part]["w"], mean[part]["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: type(half).__name__)
def test_buffers_are_averaged_as_by_fedavg(half: FedOptServer) -> None:
    """Of 0.07 that two sites found, a step from 1 would leave most of 1: FedAdam's running variance was 0.91."""
    updates = [Update(site, model(0.07)) for site in ("ann", "bob")]
    state = half.aggregate(model(1.0), updates, round_context())
    mean = FedAvgServer().aggregate(model(1.0), updates, round_context())
    for name in ("bn.running_var", "bn.num_batches_tracked"):
        np.testing.assert_array_equal(state[Part.BODY][name], mean[Part.BODY][name])
    moments = ("m",) if isinstance(half, FedAvgMServer) else ("m", "v")
    assert set(state[Part.PRIVATE]) == {f"{m}.{path}" for m in moments for path in (W, "head.scale")}
    assert same_tensors(sent(half, state, "ann"), {part: state[part] for part in (Part.BODY, Part.HEAD)}), "no moments"
    assert {spec.part for spec in half.expects(state).required} == {Part.BODY, Part.HEAD}


@pytest.mark.parametrize("name", sorted(architectures))
def test_buffers_are_known_by_their_names(name: str) -> None:
    built = build(NamedOptions(name=name), IMAGES, 3)
    layers = torch.nn.InstanceNorm2d(3, track_running_stats=True), torch.nn.SyncBatchNorm(3)
    assert all(is_buffer(f"body.{path}") for net in (built, *layers) for path, _ in net.named_buffers())
    named = [path for path, _ in built.named_parameters()]
    assert not any(map(is_buffer, [*named, "running_variance", "running_var.weight"]))
