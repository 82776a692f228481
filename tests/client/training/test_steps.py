"""Groups of parameters, and what a method does after each step, by hand: APFL's branch and SCAFFOLD's correction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.branched import Branched
from tests.support.training_doubles import LocalOf, Short
from torch import Tensor, nn

from protofed.client.models.split import dump
from protofed.client.training.context import FitContext
from protofed.client.training.loop import Loss, Step, Trained, train
from protofed.client.training.progress import ParameterGroup
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.payload import Part


def product(body: Tensor, head: Tensor) -> Loss:
    """The mean of body * head * x: its gradient by one of them is the mean image times the other."""
    return lambda x, _: (x.double().flatten(1) * body * head).mean()


def free(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def of_model(local: FitContext) -> tuple[nn.Parameter, nn.Parameter]:
    return local.model.get_parameter("body.weight"), local.model.get_parameter("head.weight")


def numbers(*tensors: Tensor) -> list[float]:
    return [tensor.item() for tensor in tensors]


# Groups


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1 - 0.1 * (2 + 0.5)]),  # the plan's: lr .1, weight decay .5
        ({"lr": 0.2}, [1 - 0.2 * 2.5]),
        ({"weight_decay": 0.0}, [0.8]),
        ({"optimizer": "adam", "weight_decay": 0.0}, [0.9]),  # whose first step is lr long
        ({"max_grad_norm": 1.0, "weight_decay": 0.0}, [0.9]),
        ({"max_grad_norm": math.inf, "weight_decay": 0.0}, [0.8]),
    ],
)
def test_a_group_has_its_own_settings_or_the_plans(
    settings: dict[str, Any], expected: list[float], local_of: LocalOf
) -> None:
    local = local_of([2.0], lr=0.1, weight_decay=0.5, max_grad_norm=1e6)
    (one,) = free(1.0)
    train(local, product(one, torch.tensor(1.0)), [ParameterGroup([one], **settings)])
    assert numbers(one) == pytest.approx(expected, abs=1e-7)


def test_a_group_has_its_own_momentum_and_is_clipped_by_itself(local_of: LocalOf) -> None:
    local = local_of([1.0, 1.0], batch_size=1, lr=0.1, momentum=0.9)
    with_plans, without = free(1.0, 1.0)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        return (with_plans + without) * x.mean()

    train(local, loss, [with_plans, ParameterGroup([without], momentum=0.0)])
    assert numbers(with_plans, without) == pytest.approx([1 - 0.1 - 0.19, 0.8], abs=1e-7)
    local = local_of([1.0], lr=0.1, max_grad_norm=1.0)
    first, second, apart = free(0.0, 0.0, 0.0)

    def clipped(x: Tensor, _: Tensor) -> Tensor:
        return (3 * first + 4 * second + 12 * apart) * x.mean()

    train(local, clipped, [first, ParameterGroup([apart]), second])
    assert numbers(first, second, apart) == pytest.approx([-0.06, -0.08, -0.1], abs=1e-6)  # norms 5 and 12


def test_a_branch_beside_a_model_does_not_change_a_bit_of_it(local_of: LocalOf) -> None:
    plan = {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.5, "epochs": 3, "batch_size": 2}
    alone, beside = (local_of([0.5, 1.25, -2.0, 0.75, 3.0], body=0.3, head=0.7, **plan) for _ in range(2))
    train(alone, product(*of_model(alone)))
    v = free(2.0, -1.0)

    def both(x: Tensor, y: Tensor) -> Tensor:
        return product(*of_model(beside))(x, y) + product(*v)(x, y)

    train(beside, both, [*beside.model.parameters(), ParameterGroup(v)])
    assert numbers(*of_model(beside)) == numbers(*of_model(alone))
    assert numbers(*v) != [2.0, -1.0]


@pytest.mark.parametrize("twice", ["in two groups", "in one"])
def test_a_tensor_is_trained_once(twice: str, local_of: LocalOf) -> None:
    local = local_of([1.0])
    body = of_model(local)[0]
    groups: list[Any] = [body, body] if twice == "in one" else [body, ParameterGroup([body])]
    with pytest.raises(ValueError, match="expected each once"):
        train(local, product(*of_model(local)), groups)
    kept = torch.ones(())  # what needs no gradient stays
    train(local, product(*of_model(local)), [*local.model.parameters(), ParameterGroup([kept])])
    assert kept.item() == 1.0


# After each step


def test_apfl_by_hand(local_of: LocalOf) -> None:
    local = local_of([1.0], body=1.0, head=2.0, lr=0.1)
    w, v, (alpha,) = of_model(local), free(3.0, 1.0), free(0.5)

    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return product(*(alpha * own + (1 - alpha) * common.detach() for own, common in zip(v, w, strict=True)))(x, y)

    def after(step: Step) -> None:
        step(mixed)
        alpha.clamp_(0, 1)

    mixture = ParameterGroup([alpha], momentum=0.0, max_grad_norm=math.inf)
    assert train(local, product(*w), [*w, ParameterGroup(v), mixture], after=after).steps == 1
    # w: gradient (2, 1). Then v_bar = .5 (3, 1) + .5 (.8, 1.9) = (1.9, 1.45), where the gradient is (1.45, 1.9).
    assert numbers(*w) == pytest.approx([0.8, 1.9], abs=1e-12)
    assert numbers(*v) == pytest.approx([3 - 0.1 * 0.5 * 1.45, 1 - 0.1 * 0.5 * 1.9], abs=1e-12)
    # alpha: <v - w, gradient> = (3 - .8) 1.45 + (1 - 1.9) 1.9 = 1.48
    assert alpha.item() == pytest.approx(0.5 - 0.148, abs=1e-12)


def test_scaffold_by_hand(local_of: LocalOf) -> None:
    local = local_of([1.0, 2.0], batch_size=1, round=2, rounds=3, lr=0.2, schedule="exponential", lr_decay=0.5)
    y, c, c_i = of_model(local)[0], 0.3, 0.1
    x = y.item()
    assert local.lr == 0.1

    def after(_: Step) -> None:
        y.sub_(local.lr * (c - c_i))

    trained = train(local, product(y, torch.tensor(1.0)), [y], after=after)
    # y <- y - eta (g - c_i + c): 1 - .1 * 1.2 = .88, .88 - .1 * 2.2 = .66
    assert y.item() == pytest.approx(0.66, abs=1e-12)
    assert trained.steps == 2
    # c_i+ = c_i - c + (x - y) / (J eta): the mean gradient
    assert c_i - c + (x - y.item()) / (trained.steps * local.lr) == pytest.approx(1.5, abs=1e-12)


def test_a_further_step_has_the_loss_that_it_moves_by_and_does_not_count(local_of: LocalOf) -> None:
    local = local_of([1.0, 3.0], batch_size=2, lr=0.1, epochs=2)
    losses = []
    (v,) = free(5.0)
    one = torch.tensor(1.0)
    groups, trained = [*local.model.parameters(), v], product(*of_model(local))
    made = train(local, trained, groups, after=lambda step: losses.append(step(product(v, one)).item()))
    assert losses == pytest.approx([10.0, 2 * (5 - 0.2)], abs=1e-12)
    alone = local_of([1.0, 3.0], batch_size=2, lr=0.1, epochs=2)
    assert made == train(alone, product(*of_model(alone))) == Trained(made.loss, steps=2)


@pytest.mark.parametrize(
    ("room", "first", "further"),
    [(7, [7, 7], [7, 7]), (4, [7, 4, 3], [7, 4, 3, 4, 3]), (2, [7, 2, 2, 2, 1], [7, 4] + 2 * [2, 2, 2, 1])],
)
def test_a_further_step_is_made_of_parts(room: int, first: list[int], further: list[int], local_of: LocalOf) -> None:
    plan = {"batch_size": 7, "epochs": 2, "lr": 0.1, "max_grad_norm": 0.5}
    found, times = [], 0
    for client_state in (7, room):
        local, v = local_of([0.5, 1.25, -2.0, 0.75, 3.0, -0.25, 1.5], **plan), free(2.0, -1.0)
        own, other = Short(product(*of_model(local)), 7), Short(product(*v), client_state)

        def after(step: Step, other: Loss = other) -> None:
            nonlocal times
            times += 1
            step(other)

        train(local, own, [*local.model.parameters(), ParameterGroup(v)], after=after)
        found.append(numbers(*of_model(local), *v))
    assert found[1] == pytest.approx(found[0], abs=1e-12)
    assert times == 2 + 2  # once a batch
    assert (own.sizes, other.sizes) == (first, further)  # the step that fitted is not taken again


def test_a_further_loss_that_is_not_finite_ends_the_task(local_of: LocalOf) -> None:
    local, (v,) = local_of([1.0], epochs=3), free(1.0)
    groups = [*local.model.parameters(), v]
    bad = product(v, torch.tensor(math.nan))
    with pytest.raises(TaskFailedError) as failed:
        train(local, product(*of_model(local)), groups, after=lambda step: step(bad))
    assert failed.value.reason is FailureReason.NUMERIC
    assert local.fit_progress.epoch == 1


def test_all_of_it_in_one_method_trains_its_model_as_it_would_alone(local_of: LocalOf) -> None:
    """But for the corrections, which begin at zero: in the first step there are none."""
    plan = {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.1}
    sites = [local_of([0.5, 1.25], [0, 0], body=0.3, head=0.7, **plan) for _ in range(2)]
    for local in sites:
        local.model.head = nn.Linear(1, local.classes).double()
        nn.init.constant_(local.model.head.get_parameter("weight"), 0.5)
        nn.init.zeros_(local.model.head.get_parameter("bias"))
    received = {Part.BODY: dump(sites[0].model.body), Part.HEAD: dump(sites[0].model.head)}
    Branched().fit(sites[0], received)
    sites[1].train_calls = 0
    super(Branched, Branched()).fit(sites[1], received)
    assert dump(sites[0].model.body) == dump(sites[1].model.body)
    v = sites[0].client_state[Part.BODY]
    assert v["alpha"] != 0.5
    assert v["body.weight"] != pytest.approx(1.1 * 0.3, abs=1e-9)
