"""FEDIC: the calibration of an ensemble worked by hand, the distillation, and what the server makes of the models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.half_rounds import LocalOf, parts
from tests.support.round_contexts import round_context
from torch import nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import Trained, client_methods, distillation, site_models, train
from protofed.client.methods import fedic
from protofed.client.methods.fedic import FEDICClient
from protofed.client.models.calibration import CalibratedEnsemble, CalibrationNetwork
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import Plan
from protofed.common.config.tables import Input
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Exchange, Part, Payload, Update, same_tensors
from protofed.common.secure_aggregation.linear_form import read_form
from protofed.server.method import server_methods
from protofed.server.methods.fedic import FEDICServer

LN2, LN3 = math.log(2), math.log(3)


def set_to(network: CalibrationNetwork, **values: list[float]) -> CalibrationNetwork:
    with torch.no_grad():
        for name, value in values.items():
            parameter = network.get_parameter(name.replace("_", "."))
            parameter.copy_(torch.tensor(value).reshape(parameter.shape))
    return network


def test_the_calibration_by_hand() -> None:
    """Two models, one image, two classes, features of one number.

    e_k = sigmoid(logits_k . a + b) with a = (1, 0), b = 0: logits (ln 3, 0) and (0, 4) give 3/4 and 1/2, that is 3/5
    and 2/5 of the ensemble (0.6 ln 3, 1.6). Scale (2, 1/2) and bias (0, 1): (1.2 ln 3, 1.8). The gate is
    sigmoid(u * mean feature) = sigmoid(2 ln 2 * 1/2) = 2/3 of it, and 1/3 of the fine-tuned logits (3, 0).
    """
    network = set_to(
        CalibrationNetwork(2, 1), weigh_weight=[1.0, 0.0], scale=[2.0, 0.5], bias=[0.0, 1.0], gate_weight=[2 * LN2]
    )
    logits = torch.tensor([[[LN3, 0.0]], [[0.0, 4.0]]])  # [K, B, C]
    features = torch.tensor([[[1.0]], [[0.0]]])  # [K, B, D], of mean 1/2
    mixed = network(logits, features, torch.tensor([[3.0, 0.0]]))
    expected = [2 / 3 * 1.2 * LN3 + 1 / 3 * 3, 2 / 3 * 1.8]
    assert mixed.shape == (1, 2)
    assert mixed[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_network_that_was_not_trained_is_half_the_plain_mean_of_the_models() -> None:
    logits, tuned = torch.randn(5, 4, 3), torch.randn(4, 3)
    mixed = CalibrationNetwork(3, 2)(logits, torch.randn(5, 4, 2), tuned)
    assert torch.allclose(mixed, (logits.mean(0) + tuned) / 2, atol=1e-6)


def test_the_order_of_the_models_does_not_matter_to_what_they_say() -> None:
    network = set_to(CalibrationNetwork(3, 2), weigh_weight=[1.0, -2.0, 0.5], weigh_bias=[0.3])
    logits, features, tuned = torch.randn(4, 2, 3), torch.randn(4, 2, 2), torch.randn(2, 3)
    backwards = network(logits.flip(0), features.flip(0), tuned)
    assert torch.allclose(network(logits, features, tuned), backwards, atol=1e-5)


def test_the_distillation_by_hand() -> None:
    """T = 2: the teacher's logits (2 ln 3, 0) are 3/4 and 1/4, the student's (0, 0) one half each."""
    loss = distillation(torch.zeros(1, 2), torch.tensor([[2 * LN3, 0.0]]), 2.0)
    assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)
    same = torch.randn(3, 4)
    assert distillation(same, same, 2.0).item() == pytest.approx(0.0, abs=1e-6)
    batch = torch.cat([torch.zeros(1, 2), torch.zeros(1, 2)]), torch.tensor([[2 * LN3, 0.0], [0.0, 0.0]])
    assert distillation(*batch, 2.0).item() == pytest.approx(loss.item() / 2, abs=1e-6)  # a mean over the batch


def model(seed: int) -> SplitModel:
    torch.manual_seed(seed)
    return SplitModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)).double()


def aggregate(*seeds: int) -> Payload:
    updates = [Update(f"s{seed}", parts(model(seed))) for seed in seeds]
    return FEDICServer().aggregate(parts(model(0)), updates, round_context())


@pytest.fixture
def local(local_of: LocalOf) -> FitContext:
    draw = np.random.default_rng(3)
    return local_of(model(9), draw.normal(size=(8, 3)), np.arange(8) % 2, 2, batch_size=4, lr=0.5, momentum=0.9)


def test_an_ensemble_computes_with_the_sites_models_and_leaves_the_live_one_as_it_is() -> None:
    live, one, two, tuned = (model(seed) for seed in (9, 1, 2, 3))
    before, images = parts(live), torch.randn(5, 3, dtype=torch.float64)
    teacher = CalibratedEnsemble(live, [parts(one), parts(two)], parts(tuned))
    with torch.no_grad():
        expected = ((one(images) + two(images)) / 2 + tuned(images)) / 2
        assert torch.allclose(teacher(images), expected)
    assert same_tensors(parts(live), before)
    assert {name for name, _ in teacher.named_parameters()} == {
        *("network.scale", "network.bias", "network.weigh.weight", "network.weigh.bias"),
        *("network.gate.weight", "network.gate.bias"),
    }
    with pytest.raises(CodecError):
        CalibratedEnsemble(live, [], parts(tuned))


def test_without_distillation_the_mean_is_trained_by_adam_on_the_auxiliary_images(local: FitContext) -> None:
    """Lambda = 0 leaves cross-entropy: 5 steps are three epochs of two batches, of the method's own Adam."""
    received, method = aggregate(1, 2), FEDICClient(steps=5, distilled=0.0, refine_lr=0.02, refine_decay=0.1)
    update = method.refine(local, received)
    plan = {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.1, "epochs": 3, "momentum": 0.0}
    plain = replace(local, plan=local.plan.model_copy(update=plan), model=model(8))
    method.load_global(plain, received)
    train(plain, lambda x, y: cross_entropy(plain.model(x), y))
    assert same_tensors(update.payload, parts(plain.model))
    assert not same_tensors(update.payload, {part: received[part] for part in (Part.BODY, Part.HEAD)})


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "steps"), [(3, False, 6), (3, True, 6), (7, True, 5), (64, False, 5), (64, True, 5)]
)
def test_each_training_has_the_steps_asked_for_rounded_up_to_whole_epochs(
    batch_size: int, drop_last: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 images: batches of 3, 3 and 2, of which the last may be left out; 5 steps are asked for."""
    taken = list[int]()

    def counted(*arguments: Any) -> Trained:
        taken.append((trained := train(*arguments)).steps)
        return trained

    monkeypatch.setattr(fedic, "train", counted)
    torch.manual_seed(0)
    images = Examples(torch.rand(8, 1, 1, 3), torch.arange(8) % 2)
    data = SiteData(images, images, Input(shape=(1, 1, 3)), 2)
    small = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(3, 4)), nn.Linear(4, 2))
    received = FEDICServer().aggregate(parts(small), [Update("ann", parts(small))], round_context())
    plan, rng = Plan(batch_size=batch_size, drop_last=drop_last), torch.Generator().manual_seed(0)
    FEDICClient(steps=5).refine(FitContext("eva", 1, 1, small, data, 2, plan, rng, client_state={}), received)
    assert taken == [steps] * 3


def test_the_distillation_pulls_the_mean_towards_the_ensemble(local: FitContext) -> None:
    """Lambda = 1 never sees a label: with the same teacher, the model comes nearer to it than by labels alone."""
    received = aggregate(1, 2)
    images = torch.cat([x for x, _ in local.data.ordered(local.data.train, 8)])

    def distance(method: FEDICClient) -> float:
        method.refine(local, received)
        student, tuned = parts(local.model), _tuned(method, local, received)
        teacher = CalibratedEnsemble(local.model, site_models(received), tuned)
        probe = model(8)
        method.load_global(replace(local, model=probe), student)
        with torch.no_grad():
            return distillation(probe(images), teacher(images), 2.0).item()

    towards = distance(FEDICClient(steps=200, distilled=1.0, refine_lr=0.01, refine_decay=0.0))
    away = distance(FEDICClient(steps=200, distilled=0.0, refine_lr=0.01, refine_decay=0.0))
    assert towards < away / 2


def _tuned(method: FEDICClient, local: FitContext, received: Payload) -> Payload:
    """The mean, fine-tuned as in the first of the three trainings."""
    other = replace(local, model=model(8))
    FEDICClient(steps=method.steps, distilled=0.0, refine_lr=0.01, refine_decay=0.0).refine(other, received)
    return parts(other.model)


def test_a_fit_is_fedavgs(local: FitContext) -> None:
    start = parts(model(4))
    update = client_methods.build("fedic", {}).fit(local, start)
    other = replace(local, model=model(9))
    assert same_tensors(update.payload, client_methods.build("fedavg", {}).fit(other, start).payload)


def test_the_aggregate_is_the_mean_and_the_models_and_the_state_is_the_evaluators() -> None:
    server, models = FEDICServer(), [parts(model(seed)) for seed in (1, 2, 3)]
    state = server.aggregate(parts(model(0)), [Update(f"s{n}", one) for n, one in enumerate(models)], round_context())
    weight = np.stack([one[Part.HEAD]["weight"] for one in models])
    assert np.allclose(state[Part.HEAD]["weight"], weight.mean(0))
    assert np.array_equal(state[Part.SITE_MODELS]["head.weight"], weight)
    sent = server.to_refine(state)
    assert all(same_tensors(one, two) for one, two in zip(site_models(sent), models, strict=True))
    refined = server.refined(state, Update("eva", models[1]), round_context())
    assert same_tensors(refined, models[1])
    assert Part.SITE_MODELS not in server.broadcast(refined, "s1")
    expected = {spec.path for spec in server.expects_refined(state).required}
    assert expected == {f"{part}/{name}" for part in models[0] for name in models[0][part]}


def test_examples_weigh_the_mean_and_not_the_evaluators_update() -> None:
    server = FEDICServer(weighting="examples")
    updates = [Update("a", parts(model(1)), weight=1.0), Update("b", parts(model(2)), weight=3.0)]
    state = server.aggregate({}, updates, round_context())
    one, two = (parts(model(seed))[Part.HEAD]["bias"] for seed in (1, 2))
    assert np.allclose(state[Part.HEAD]["bias"], (one + 3 * two) / 4)
    assert server.expects(state).weight
    assert not server.expects_refined(state).weight


def test_sites_models_go_to_the_evaluator_and_in_no_sum() -> None:
    assert client_methods.build("fedic", {}).declares.exchanges == {Exchange.SHARE}
    with pytest.raises(ConfigError):
        read_form(server_methods.build("fedic", {}), "fedic")
