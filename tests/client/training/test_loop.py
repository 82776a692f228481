"""The SGD loop and the class means, by hand; what runs out of memory or of numbers is told apart.

Gradients by class are those of autograd, over all batches; models whose head is not linear are refused by name.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import cast

import numpy as np
import pytest
import torch
from tests.support.training_doubles import LocalOf, Short
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import CosineHead, SplitModel
from protofed.client.training.context import FitContext, FitProgress
from protofed.client.training.loop import (
    BATCH,
    Loss,
    Trained,
    class_gradients,
    class_means,
    frozen,
    named,
    remembered,
    stacked,
    train,
)
from protofed.client.training.progress import ParameterGroup
from protofed.common.config.recipe import Plan
from protofed.common.config.tables import Input
from protofed.common.errors import CodecError, ConfigError, DataError, FailureReason, TaskFailedError
from protofed.common.payload import Part, Tensors


def mean_of(local: FitContext) -> Loss:
    return lambda x, _: cast("Tensor", local.model(x)).mean()


def squares(local: FitContext) -> Loss:
    return lambda x, _: (cast("Tensor", local.model(x)) - 1).square().mean()


def weights(local: FitContext) -> tuple[float, float]:
    return local.model.get_parameter("body.weight").item(), local.model.get_parameter("head.weight").item()


def only_body(local: FitContext) -> list[nn.Parameter]:
    return list(local.model.body.parameters())


def test_one_epoch_by_hand(local_of: LocalOf) -> None:
    local = local_of([1, 2, 3], batch_size=2, lr=0.1)
    loss = train(local, mean_of(local), only_body(local)).loss
    # batch (1, 2): loss 1.5, w = 1 - .1 * 1.5 = .85; batch (3): loss 2.55, w = .85 - .3
    assert loss == pytest.approx((2 * 1.5 + 2.55) / 3, abs=1e-6)  # by example, not by batch
    assert weights(local) == pytest.approx((0.55, 1.0), abs=1e-12)
    without_last = local_of([1, 2, 3], batch_size=2, lr=0.1, drop_last=True)
    assert train(without_last, mean_of(without_last), only_body(without_last)).loss == pytest.approx(1.5, abs=1e-6)
    assert weights(without_last)[0] == pytest.approx(0.85, abs=1e-12)


def test_momentum_and_weight_decay_by_hand(local_of: LocalOf) -> None:
    local = local_of([1, 2, 3], batch_size=2, lr=0.1, momentum=0.9, weight_decay=0.5)
    train(local, mean_of(local), only_body(local))
    # v = 1.5 + .5 * 1 = 2, w = .8; v = .9 * 2 + 3 + .5 * .8 = 5.2, w = .8 - .52
    assert weights(local)[0] == pytest.approx(0.28, abs=1e-12)
    local = local_of([1.0], lr=0.1, weight_decay=0.5)
    train(local, mean_of(local), [ParameterGroup(only_body(local), weight_decay=0.0)])
    assert weights(local)[0] == pytest.approx(0.9, abs=1e-12)
    train(local, mean_of(local), only_body(local))  # the next one has it again
    assert weights(local)[0] == pytest.approx(0.9 - 0.1 * (1 + 0.5 * 0.9), abs=1e-12)
    local = local_of([1.0], lr=0.1, momentum=0.9)
    for left in (0.9, 0.8):
        train(local, mean_of(local), only_body(local))
        assert weights(local)[0] == pytest.approx(left, abs=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "decay", "expected"),
    [("sgd", 0.5, 1 - 0.1 * 2.5), ("adam", 0.5, 0.9), ("adamw", 0.5, 0.95 - 0.1), ("adamw", 0.0, 0.9)],
)
def test_optimizers(optimizer: str, decay: float, expected: float, local_of: LocalOf) -> None:
    local = local_of([2.0], optimizer=optimizer, lr=0.1, weight_decay=decay)
    train(local, mean_of(local), only_body(local))
    assert weights(local)[0] == pytest.approx(expected, abs=1e-8)  # Adam's first step is lr long, whatever the gradient


@pytest.mark.parametrize(
    ("plan", "rates"),
    [
        ({"schedule": "constant", "lr_decay": 0.5}, {1: 0.8, 4: 0.8}),
        ({"schedule": "exponential", "lr_decay": 0.5}, {1: 0.8, 2: 0.4, 4: 0.1}),
        ({"schedule": "step", "lr_decay": 0.1}, {1: 0.8, 2: 0.8, 3: 0.08, 4: 0.008}),
        ({"schedule": "step", "lr_decay": 0.5, "lr_steps": [0.25]}, {1: 0.8, 2: 0.4, 4: 0.4}),
        ({"warmup_rounds": 2}, {1: 0.4, 2: 0.8, 3: 0.8, 4: 0.8}),
        ({"schedule": "exponential", "lr_decay": 0.5, "warmup_rounds": 4}, {1: 0.2, 2: 0.2, 3: 0.15, 4: 0.1}),
        ({"schedule": "cosine"}, {1: 0.8, 2: 0.4 * (1 + math.sqrt(0.5)), 3: 0.4, 4: 0.4 * (1 - math.sqrt(0.5))}),
    ],
)
def test_schedules_count_rounds_from_1(plan: dict[str, object], rates: dict[int, float], local_of: LocalOf) -> None:
    for number, rate in rates.items():
        made = Plan.model_validate({"lr": 0.8, **plan})
        assert made.learning_rate(number, 4) == pytest.approx(rate, abs=1e-12)
        local = local_of([1.0], lr=0.8, round=number, rounds=4, **plan)
        train(local, mean_of(local), only_body(local))
        assert weights(local)[0] == pytest.approx(1 - rate, abs=1e-12)


@pytest.mark.parametrize(("clip", "share"), [(None, 1.0), (1.0, 0.2), (10.0, 1.0)])
def test_the_norm_of_all_gradients_together_is_clipped(clip: float | None, share: float, local_of: LocalOf) -> None:
    local = local_of([1.0], body=4.0, head=3.0, lr=0.1, max_grad_norm=clip)
    train(local, mean_of(local))  # gradients 3 and 4: norm 5
    assert weights(local) == pytest.approx((4 - 0.3 * share, 3 - 0.4 * share), abs=1e-6)


def test_only_the_given_parameters_are_trained_and_no_frozen_one_meanwhile(local_of: LocalOf) -> None:
    local = local_of([2.0], lr=0.1, weight_decay=0.5)
    train(local, mean_of(local), local.model.head.parameters())
    assert weights(local) == pytest.approx((1.0, 1 - 0.1 * 2.5), abs=1e-12)
    local = local_of([2.0], lr=0.1, weight_decay=0.5)
    with frozen(local.model.body):
        train(local, mean_of(local))
    assert weights(local) == pytest.approx((1.0, 0.75), abs=1e-12)
    train(local, mean_of(local), only_body(local))
    assert weights(local)[0] == pytest.approx(1 - 0.1 * (2 * 0.75 + 0.5), abs=1e-12)


def test_epochs_are_the_plans_unless_given(local_of: LocalOf) -> None:
    for epochs, left in ((None, 0.7), (1, 0.9), (0, 1.0)):
        local = local_of([1.0], lr=0.1, epochs=3)
        trained = train(local, mean_of(local), only_body(local), epochs)
        assert weights(local)[0] == pytest.approx(left, abs=1e-12)
        assert trained.steps == (3 if epochs is None else epochs)
    assert trained == Trained(loss=0.0, steps=0)


def test_training_is_in_training_mode_and_epochs_are_shuffled_by_the_sites_generator() -> None:
    images = torch.arange(8.0).view(-1, 1, 1, 1) / 8
    examples = Examples(images, torch.zeros(8, dtype=torch.int64))
    data = SiteData(examples, examples, Input(shape=(1, 1, 1), mean=(0.0,), std=(1.0,)), 2)
    seen: dict[int, list[float]] = {}
    for run, seed in enumerate((3, 3, 4)):
        model = SplitModel(nn.Flatten(), nn.Linear(1, 2)).eval()
        rng = torch.Generator().manual_seed(seed)
        local = FitContext("ann", 1, 1, model, data, 2, Plan(epochs=2, batch_size=3), rng, client_state={})

        def loss(x: Tensor, _: Tensor, model: SplitModel = model, run: int = run) -> Tensor:
            assert model.training
            seen.setdefault(run, []).extend(x.flatten().tolist())
            return cast("Tensor", model(x)).mean()

        train(local, loss)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0][:8] != seen[0][8:]
    assert sorted(seen[0][:8]) == sorted(seen[0][8:]) == images.flatten().tolist()


PIXELS = [0.5, 1.25, -2.0, 0.75, 3.0, -0.25, 1.5]


@pytest.mark.parametrize(
    ("room", "sizes"),
    [
        (7, [7, 7]),
        (4, [7, 4, 3, 4, 3]),  # what fits is remembered
        (2, [7, 4, 2, 2, 2, 1, 2, 2, 2, 1]),
        (1, [7, 4, 2] + [1] * 14),
    ],
)
def test_a_batch_that_does_not_fit_is_trained_on_in_parts(room: int, sizes: list[int], local_of: LocalOf) -> None:
    plan = {"batch_size": 7, "epochs": 2, "lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.5}
    whole, parts = (local_of(PIXELS, body=0.3, head=0.7, **plan) for _ in range(2))
    expected, short = train(whole, squares(whole)), Short(squares(parts), room)
    assert train(parts, short).loss == pytest.approx(expected.loss, rel=1e-6)
    assert weights(parts) == pytest.approx(weights(whole), abs=1e-12)
    assert short.sizes == sizes


def test_gradients_of_a_part_before_memory_ran_out_do_not_count(local_of: LocalOf) -> None:
    whole, parts = (local_of(PIXELS[:4], body=0.3, lr=0.1, batch_size=4) for _ in range(2))
    train(whole, squares(whole))
    short = Short(squares(parts), 2)

    def fails_once_late(x: Tensor, y: Tensor) -> Tensor:
        if len(short.sizes) == 2:  # [4, 2]: the second half of the first try
            short.sizes.append(-1)
            raise torch.OutOfMemoryError("simulated")
        return short(x, y)

    train(parts, fails_once_late)
    assert weights(parts) == pytest.approx(weights(whole), abs=1e-12)
    assert short.sizes == [4, 2, -1, 1, 1, 1, 1]


def test_what_did_not_fit_is_freed_before_the_cache_is(local_of: LocalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    local, computed, held = local_of(PIXELS[:4], batch_size=4), list[weakref.ref[Tensor]](), list[bool]()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        features = local.model.body(x)
        computed.append(weakref.ref(features))
        return short(features, y)

    short = Short(lambda features, _: local.model.head(features).square().mean(), 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(any(ref() is not None for ref in computed)))
    train(local, loss)
    assert held == [False, False]  # from 4 examples to 2, and to 1


def test_one_example_too_many_ends_the_task(local_of: LocalOf) -> None:
    local = local_of(PIXELS, batch_size=7)
    before = weights(local)
    with pytest.raises(TaskFailedError) as failed:
        train(local, Short(squares(local), 0))
    assert failed.value.reason is FailureReason.OUT_OF_MEMORY
    assert weights(local) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_task(bad: float, local_of: LocalOf) -> None:
    local = local_of([1, 2, 3, 4], batch_size=2, epochs=5)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        mean = cast("Tensor", local.model(x)).mean()
        return mean * bad if local.fit_progress.epoch == 2 else mean

    with pytest.raises(TaskFailedError, match=r"plan\.lr") as failed:
        train(local, loss)
    assert failed.value.reason is FailureReason.NUMERIC
    assert local.fit_progress.epoch == 2


def test_a_reader_sees_how_far_training_is(local_of: LocalOf) -> None:
    local = local_of([1, 2, 3], batch_size=2, epochs=2)
    reader = local.fit_progress = FitProgress()  # what the heartbeat holds since before the training began
    seen = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen.append(astuple(reader))
        return mean_of(local)(x, y)

    train(local, loss)
    assert seen == [(1, 2), (1, 2), (2, 2), (2, 2)]  # epoch of epochs, at each batch
    assert reader == FitProgress(epoch=2, epochs=2)


class StopError(Exception):
    """Called off."""


def stop_at(call: int) -> Callable[[], None]:
    """A check that raises when it is called for the `call`th time."""
    calls = iter(range(1, call + 1))

    def check() -> None:
        if next(calls) == call:
            raise StopError

    return check


def test_a_task_called_off_stops_between_batches(local_of: LocalOf) -> None:
    local = local_of([1, 1, 1, 1], batch_size=1, lr=0.1, epochs=3)
    local.check = stop_at(3)
    with pytest.raises(StopError):
        train(local, mean_of(local), only_body(local))
    assert weights(local)[0] == pytest.approx(0.8, abs=1e-12)  # two steps


def test_a_site_without_training_examples_has_no_means_and_is_not_trained(local_of: LocalOf) -> None:
    local = local_of([1.0])
    local.data = SiteData.for_scoring(local.data.test, local.data.input, local.classes)
    with pytest.raises(DataError, match="only test examples"):
        train(local, mean_of(local))
    assert class_means(local, lambda x: x.flatten(1)) == {}
    local.model.head = nn.Linear(1, 2)
    assert class_gradients(local) == {}


def test_class_means_by_hand(local_of: LocalOf) -> None:
    local = local_of([1, 2, 4, 8], [0, 2, 0, 2])
    local.model.train()
    modes: list[tuple[bool, bool]] = []

    def embed(x: Tensor) -> Tensor:
        modes.append((local.model.training, torch.is_grad_enabled()))
        return torch.cat([x.flatten(1), -x.flatten(1)], dim=1)

    means = class_means(local, embed)
    assert {c: mean.tolist() for c, mean in means.items()} == {0: [2.5, -2.5], 2: [5.0, -5.0]}  # class 1 is not there
    assert modes == [(False, False)]


def test_class_means_go_over_all_batches(local_of: LocalOf) -> None:
    pixels, labels = [float(i) for i in range(1100)], [i % 2 for i in range(1100)]
    local = local_of(pixels, labels)
    sizes: list[int] = []

    def embed(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.flatten(1)

    assert {c: mean.item() for c, mean in class_means(local, embed).items()} == {0: 549.0, 1: 550.0}
    assert sizes == [*[128] * 8, 76]
    local.check = stop_at(2)
    with pytest.raises(StopError):
        class_means(local, embed)


@pytest.mark.parametrize(
    ("given", "made"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_class_means_are_as_exact_as_their_features(given: torch.dtype, made: torch.dtype, local_of: LocalOf) -> None:
    local = local_of([1.0, 2.0, 2.0], [0, 0, 0])
    (mean,) = class_means(local, lambda x: x.flatten(1).to(given)).values()
    assert mean.dtype == made
    assert mean.item() == pytest.approx(5 / 3, rel=torch.finfo(made).eps)


def test_frozen_gives_back_what_was_free_even_after_an_error() -> None:
    module, seen = nn.Linear(1, 1), list[bool]()
    module.bias.requires_grad_(False)

    def fail() -> None:
        with frozen(module):
            seen.extend(parameter.requires_grad for parameter in module.parameters())
            raise StopError

    with pytest.raises(StopError):
        fail()
    assert seen == [False, False]
    assert module.weight.requires_grad
    assert not module.bias.requires_grad  # it was not free before


def test_other_tensors_than_the_models_can_be_trained(local_of: LocalOf) -> None:
    local, extra = local_of([2.0], lr=0.1), torch.ones(2, dtype=torch.float64, requires_grad=True)
    train(local, lambda x, y: mean_of(local)(x, y) * extra[0], [extra])
    assert extra.tolist() == pytest.approx([0.8, 1.0], abs=1e-12)
    assert weights(local) == (1.0, 1.0)


def test_prototypes_go_by_name_and_come_back() -> None:
    means = {10: torch.tensor([1.0, 2.0], dtype=torch.float64), 2: torch.tensor([3.0, 4.0], dtype=torch.float64)}
    rows = named(means)
    assert {name: row.tolist() for name, row in rows.items()} == {"10": [1.0, 2.0], "2": [3.0, 4.0]}
    for row in rows.values():
        row.flags.writeable = False  # as views of a received blob are; torch would warn
    matrix, known = stacked(rows, 11, like=torch.zeros(5, 2, dtype=torch.float64))
    assert (matrix.shape, matrix.dtype, known.dtype) == ((11, 2), torch.float64, torch.bool)
    assert known.nonzero().flatten().tolist() == [2, 10]
    assert matrix[[2, 10]].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert matrix[~known].abs().sum() == 0
    matrix += 1
    assert rows["2"].tolist() == [3.0, 4.0]  # it is a copy
    matrix, known = stacked({}, 3, like=torch.zeros(7, 2))
    assert torch.equal(matrix, torch.zeros(3, 2))
    assert known.tolist() == [False] * 3


@pytest.mark.parametrize(
    "rows",
    [
        {"3": np.ones(2)},
        {"-1": np.ones(2)},
        {"mean": np.ones(2)},
        {"²": np.ones(2)},
        {"0": np.ones(3)},
        {"0": np.ones((1, 2))},
        {"0": np.array(1.0)},
    ],
)
def test_prototypes_that_do_not_fit_are_refused_by_name(rows: Tensors) -> None:
    (name,) = rows
    with pytest.raises(CodecError, match=rf"'{name}' is .*class of 0 to 2"):
        stacked(rows, 3, like=torch.zeros(3, 2))


def test_memory_comes_before_the_first_value(local_of: LocalOf) -> None:
    local, first = local_of([1.0]), torch.ones(2)
    assert remembered(local, Part.PROTOTYPES, "margins", first) is first
    local.client_state[Part.PROTOTYPES] = {"another": np.zeros(2)}
    assert remembered(local, Part.PROTOTYPES, "margins", first) is first
    kept = np.array([0.25, -1.0])
    kept.flags.writeable = False
    local.client_state[Part.PROTOTYPES] = {"margins": kept}
    again = remembered(local, Part.PROTOTYPES, "margins", first)
    again += 1
    assert again.tolist() == [1.25, 0.0]
    assert kept.tolist() == [0.25, -1.0]  # memory counts only if the update does


CLASSES, WIDE = 4, 3


def site(labels: list[int], head: nn.Module) -> FitContext:
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(len(labels), 1, 2, 2, generator=draw)
    examples = Examples(images, torch.tensor(labels))
    data = SiteData(examples, examples, Input(shape=(1, 2, 2)), classes=CLASSES)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.5))
    model = SplitModel(body, head).train()
    return FitContext("ann", 1, 1, model, data, CLASSES, Plan(), torch.Generator().manual_seed(0), client_state={})


@pytest.mark.parametrize("bias", [False, True])
def test_they_are_those_of_autograd_in_evaluation_mode(bias: bool) -> None:
    local = site([0, 2, 0, 2, 2, 3] * BATCH, nn.Linear(WIDE, CLASSES, bias=bias))
    buffers = {name: buffer.clone() for name, buffer in local.model.named_buffers()}
    random = local.rng.get_state(), torch.get_rng_state()
    made = class_gradients(local)
    assert made.keys() == {0, 2, 3}  # class 1 is not there
    train = local.data.train
    for c, gradient in made.items():
        ((images, labels),) = local.data.ordered(train.take((train.labels == c).nonzero()[:, 0]), 9**9)
        expected = torch.autograd.grad(cross_entropy(local.model(images), labels), list(local.model.head.parameters()))
        torch.testing.assert_close(gradient, torch.column_stack(list(expected)), atol=1e-6, rtol=1e-5)
    for name, buffer in local.model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert all(
        torch.equal(*states) for states in zip(random, (local.rng.get_state(), torch.get_rng_state()), strict=True)
    )


def test_class_gradients_end_between_batches_and_are_summed_in_float32() -> None:
    local = site([0], nn.Linear(WIDE, CLASSES))
    local.check = stop_at(1)
    with pytest.raises(StopError):
        class_gradients(local)
    local = site([0] * 3, nn.Linear(WIDE, CLASSES))
    local.model.to(torch.bfloat16)
    local.model.body = nn.Sequential(_Cast(), local.model.body)
    assert class_gradients(local)[0].dtype == torch.float32
    with pytest.raises(ConfigError, match="CosineHead"):
        class_gradients(site([0], CosineHead(torch.eye(CLASSES, WIDE), 1.0, fixed=True)))


class _Cast(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [B, ...]."""
        return images.to(torch.bfloat16)
