"""DP-SGD by hand: gradients by example, clipping by patient, noise of a public scale, a fit that dies and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.support.dp_contexts import with_noise
from tests.support.training_doubles import Deadly, KilledError, LocalOf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import Loss, Trained, client_methods
from protofed.client.methods import fednh, fedproc, fedprp
from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import SplitModel, dump
from protofed.client.task import build_client_task
from protofed.client.training import noisy_steps
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train
from protofed.client.training.noisy_steps import ClippedSum, PerExample, check_model
from protofed.client.training.progress import ParameterGroup, on_disk
from protofed.common.config.recipe import AugmentationSetting, DpCost, DpPlan, Plan
from protofed.common.config.tables import Input, NamedOptions, NamedTransform
from protofed.common.errors import ConfigError, FailureReason, TaskFailedError
from protofed.common.payload import Part
from protofed.common.protocol.messages import Task, TaskKind

CPU = torch.device("cpu")
CLASSES = 4
SIDES = {"digits-cnn": 8, "mlp": 8, "resnet18": 8, "resnet50": 8}
METHODS = {"fednh": fednh, "fedproc": fedproc, "fedprp": fedprp}


def images_of(model: str, count: int = 5) -> tuple[Input, Tensor, Tensor]:
    side = SIDES.get(model, 16)
    draw = torch.Generator().manual_seed(1)
    shape = (1, side, side)
    return Input(shape=shape), torch.randn(count, *shape, generator=draw), torch.arange(count) % CLASSES


def one_by_one(loss: Loss, trained: Sequence[Tensor], images: Tensor, labels: Tensor) -> list[Tensor]:
    rows = [torch.autograd.grad(loss(images[i : i + 1], labels[i : i + 1]), list(trained)) for i in range(len(labels))]
    return [torch.stack(some) for some in zip(*rows, strict=True)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for some, other in zip(found, expected, strict=True):
        rtol, atol = (1e-4, 1e-6) if some.dtype == torch.float32 else (1e-9, 1e-12)
        torch.testing.assert_close(some, other, rtol=rtol, atol=atol)


# Gradients by example


@pytest.mark.parametrize("name", sorted(architectures))
def test_gradients_are_those_of_a_loop_over_examples(name: str) -> None:
    torch.manual_seed(0)
    input_, images, labels = images_of(name, count=2 if name.startswith("resnet") else 5)
    model = build(NamedOptions(name=name), input_, CLASSES).to(memory_format=torch.channels_last).train().double()
    trained, images = list(model.parameters()), images.double()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    gradients, losses = PerExample(model, trained, loss)(images, labels)
    assert_close(gradients, one_by_one(loss, trained, images, labels))
    torch.testing.assert_close(losses, cross_entropy(model(images), labels, reduction="none").detach())
    check_model(model.float(), input_, CPU)
    assert all(parameter.grad is None for parameter in trained)


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        ({"name": "multi-label"}, torch.tensor([[1, 0, -1, 0], [-1] * 4, [0, 0, 0, 0], [1, 1, 1, 1], [0, -1, 1, 1.0]])),
        ({"name": "regression", "range": [20, 80]}, torch.tensor([20.0, 35.0, 50.0, 79.5, 80.0])),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_gradients_of_findings_and_numbers_are_by_example_however_much_is_known(
    task: dict[str, Any], targets: Tensor
) -> None:
    torch.manual_seed(0)
    input_, images, _ = images_of("digits-cnn")
    learnt = build_client_task(NamedOptions.model_validate(task))
    model = build(NamedOptions(name="digits-cnn"), input_, targets[0].numel()).double()
    trained, images = list(model.parameters()), images.double()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return learnt.loss(model(x), y)

    gradients, losses = PerExample(model, trained, loss)(images, targets)
    assert_close(gradients, one_by_one(loss, trained, images, targets))
    whole = loss(images, targets)
    torch.testing.assert_close(losses.mean(), whole.detach())
    assert_close([gradient.mean(0) for gradient in gradients], torch.autograd.grad(whole, trained))


def loss_of(method: str, options: Mapping[str, Any]) -> tuple[FitContext, Loss, list[Tensor]]:
    """What a method's last call of `train` is given, with a prototype of every class but the last."""
    torch.manual_seed(0)
    input_, images, labels = images_of("digits-cnn", count=12)
    model = build(NamedOptions(name="digits-cnn"), input_, CLASSES)
    examples = Examples(images.sigmoid(), labels)
    data = SiteData(examples, examples, input_, CLASSES)
    local = FitContext("ann", 2, 4, model, data, CLASSES, Plan(), torch.Generator().manual_seed(0), {})
    rows = normalize(torch.randn(CLASSES, 64)).numpy()
    by_class = {str(c): row for c, row in enumerate(rows[:-1])}
    received: dict[Part, Any] = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head), Part.PROTOTYPES: by_class}
    if method == "fednh":
        received |= {Part.HEAD: {"scale": np.array(5.0, np.float32)}, Part.PROTOTYPES: {"mean": rows}}
    found: list[tuple[Loss, list[Tensor]]] = []

    def seen(_: FitContext, loss: Loss, parameters: Any = None, **__: object) -> Trained:
        trained = local.model.parameters() if parameters is None else parameters
        found.append((loss, [tensor for tensor in trained if tensor.requires_grad]))
        return Trained(loss=0.0, steps=0)

    with patch.object(METHODS[method], "train", seen):
        client_methods.build(method, dict(options)).fit(local, received)
    return local, *found[-1]


@pytest.mark.parametrize(("method", "options"), [("fednh", {}), ("fedproc", {}), ("fedprp", {"inter": 0.0})])
def test_a_methods_loss_of_a_batch_is_the_mean_of_its_examples(method: str, options: Mapping[str, Any]) -> None:
    local, loss, trained = loss_of(method, options)
    images, labels = local.data.train.normalised(local.data.input), local.data.train.labels
    gradients, losses = PerExample(local.model, trained, loss)(images, labels)
    assert_close(gradients, one_by_one(loss, trained, images, labels))
    whole = loss(images, labels)
    torch.testing.assert_close(losses.mean(), whole.detach())
    assert_close([gradient.mean(0) for gradient in gradients], torch.autograd.grad(whole, trained))


def test_fedprps_softmax_over_the_batch_is_no_such_mean() -> None:
    """So `dp_cost` refuses it: of one image it is 0."""
    local, loss, trained = loss_of("fedprp", {"inter": 0.5})
    images, labels = local.data.train.normalised(local.data.input), local.data.train.labels
    _, losses = PerExample(local.model, trained, loss)(images, labels)
    assert loss(images, labels).item() > losses.mean().item() + 0.1


def test_each_example_has_its_own_dropout_and_its_gradients_are_of_the_models_tensors() -> None:
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(64, CLASSES)).train()
    images = torch.ones(20, 1, 8, 8)
    call = PerExample(model, [model.head.get_parameter("weight")], lambda x, y: cross_entropy(model(x), y))
    (gradients,), _ = call(images, torch.zeros(20, dtype=torch.int64))
    assert len({tuple(gradient.flatten().tolist()) for gradient in gradients}) == 20
    model = SplitModel(nn.Flatten(), nn.Linear(64, CLASSES))
    weight = model.head.get_parameter("weight")
    call = PerExample(model, [weight], lambda x, y: cross_entropy(model(x), y) + weight.square().sum())
    with pytest.raises(ConfigError, match="modules only"):
        call(torch.ones(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="only the model's parameters are trained"):
        PerExample(model, [torch.ones(3, requires_grad=True)], lambda x, y: cross_entropy(model(x), y))


class OneByOne(nn.Module):
    """Asks a tensor for its values: no rule of `torch.func` has that."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * float(x.sum().item())


@pytest.mark.parametrize(
    "body",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten()),
        nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten()),
        nn.Sequential(nn.Linear(8, 8), OneByOne()),
    ],
)
def test_a_model_without_gradients_by_example_is_refused(body: nn.Module) -> None:
    with pytest.raises(ConfigError):
        check_model(SplitModel(body, nn.Linear(64, CLASSES)), Input(shape=(1, 8, 8)), CPU)


def test_batch_normalisation_is_refused_with_the_option_that_has_none() -> None:
    options = {"name": "resnet18", "norm": "batch"}
    model = build(NamedOptions.model_validate(options), Input(shape=(1, 8, 8)), CLASSES)
    with pytest.raises(ConfigError, match='norm = "group"'):
        check_model(model, Input(shape=(1, 8, 8)), CPU)


# Clipping


def test_a_patients_gradient_is_clipped_as_a_whole_over_all_tensors() -> None:
    a, b = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.3, 0.0], [-3.0, 0.0]]), torch.tensor([[0.0], [4.0], [0.4], [0.0]])
    units = torch.tensor([7, 7, 8, 9])
    clipped = ClippedSum([torch.zeros(2), torch.zeros(1)], most=1.0)
    clipped.add([a, b], units, ends=True)
    # 7: (3, 0 | 4), of norm 5: a fifth of it. 8: (.3, 0 | .4), of norm .5: whole. 9: a third.
    assert clipped.total[0].tolist() == pytest.approx([0.6 + 0.3 - 1.0, 0.0])
    assert clipped.total[1].tolist() == pytest.approx([0.8 + 0.4])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_micro_batches_do_not_divide_a_patient(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, units = torch.randn(7, 3, generator=draw) * 2, torch.tensor([1, 1, 1, 1, 2, 5, 5])
    expected = sum(  # by hand
        (rows[units == unit].sum(0) * min(1.0, 1.0 / float(rows[units == unit].sum(0).norm())) for unit in (1, 2, 5)),
        torch.zeros(3),
    )
    clipped = ClippedSum([torch.zeros(3)], most=1.0)
    for begin in range(0, 7, size):
        end = min(begin + size, 7)
        ends = end == 7 or bool(units[end] != units[end - 1])
        clipped.add([rows[begin:end]], units[begin:end], ends=ends)
    torch.testing.assert_close(clipped.total[0], expected)


def test_a_gradient_that_is_no_number_counts_as_nothing_and_leaves_other_patients_theirs() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[nan, 1.0], [0.3, 0.4], [inf, 0.0], [1e30, 1e30], [0.0, 0.0]])
    clipped = ClippedSum([torch.zeros(2)], most=1.0)
    clipped.add([rows], None, ends=True)
    assert clipped.total[0].tolist() == pytest.approx([0.3, 0.4])
    rows, units = torch.tensor([[0.3, 0.4], [nan, 1.0], [inf, 0.0], [0.1, 0.0]]), torch.tensor([1, 2, 2, 3])
    clipped = ClippedSum([torch.zeros(2)], most=1.0)
    clipped.add([rows], units, ends=True)
    assert clipped.total[0].tolist() == pytest.approx([0.3 + 0.1, 0.4 + 1.0])


# Steps, by the fixture's site: features body * x, mean output body * head * x, in double precision

TINY = 1e-9


def mean_of(local: FitContext) -> Loss:
    return lambda x, _: cast("Tensor", local.model(x)).mean()


def body_of(local: FitContext) -> float:
    return local.model.get_parameter("body.weight").item()


def trained_once(local: FitContext, dp: DpPlan, **arguments: Any) -> FitContext:
    local = with_noise(local, dp)
    train(local, mean_of(local), list(local.model.body.parameters()), **arguments)
    return local


@pytest.mark.parametrize(
    ("units", "most", "moved"),
    [(None, 0.5, 0.5 + 0.5 + 0.25), ([4, 1, 4], 0.4, 0.4 + 0.4)],  # over the recipe's batch size, not over 3
    ids=["one step", "patients are what is clipped"],
)
def test_one_step_by_hand(units: list[int] | None, most: float, moved: float, local_of: LocalOf) -> None:
    local = local_of([0.25, 2.0, 0.25] if units else [1.0, 2.0, 0.25], lr=0.1, batch_size=10)
    if units is not None:
        local = replace(local, data=replace(local.data, train=replace(local.data.train, units=torch.tensor(units))))
    local = trained_once(local, DpPlan(noise_multiplier=TINY, max_unit_norm=most, sampling_rate=1.0))
    assert body_of(local) == pytest.approx(1 - 0.1 * moved / 10, abs=1e-6)


def test_sampled_patients_come_whole(local_of: LocalOf) -> None:
    local = local_of([1.0] * 6, lr=1.0, batch_size=1)
    train_set = replace(local.data.train, units=torch.tensor([0, 1, 2, 0, 1, 2]))
    local = replace(local, data=replace(local.data, train=train_set))
    moved = set()
    for seed in range(20):
        fresh = with_noise(
            replace(local, model=local_of([1.0]).model),
            DpPlan(noise_multiplier=TINY, max_unit_norm=100.0, sampling_rate=0.5),
            seed=str(seed).encode(),
        )
        one = fresh.model.get_parameter("body.weight")
        sampled: list[int] = []
        with patch.object(fresh.data.__class__, "at", autospec=True, side_effect=_counting(sampled)):
            train(fresh, mean_of(fresh), [one])
        moved.add(sum(sampled) % 2)
    assert moved == {0}


def _counting(sampled: list[int]) -> Callable[..., Any]:
    real = SiteData.at

    def at(data: SiteData, rows: Tensor, *rest: Any) -> Any:
        sampled.append(len(rows))
        return real(data, rows, *rest)

    return at


def noise_of(count: int, dp: DpPlan, local_of: LocalOf, batch_size: int, seed: bytes = b"seed") -> float:
    local = with_noise(local_of([0.0] * count, lr=1.0, batch_size=batch_size), dp, seed=seed)
    train(local, mean_of(local), list(local.model.body.parameters()))
    return 1.0 - body_of(local)


def test_the_noise_is_of_public_numbers_alone(local_of: LocalOf) -> None:
    dp = DpPlan(noise_multiplier=2.0, max_unit_norm=3.0, sampling_rate=1.0)
    drawn = [noise_of(1, dp, local_of, 10, seed=str(n).encode()) for n in range(400)]
    assert np.std(drawn) == pytest.approx(2.0 * 3.0 / 10, rel=4 / np.sqrt(2 * 400))
    assert abs(np.mean(drawn)) < 4 * 0.6 / np.sqrt(400)
    for count in (2, 50, 300):  # images without a gradient: the noise alone moves the model
        assert noise_of(count, dp, local_of, 10) == noise_of(1, dp, local_of, 10)


def test_steps_are_of_the_recipe_and_without_units_noise_alone(local_of: LocalOf) -> None:
    dp = DpPlan(noise_multiplier=1.0, sampling_rate=1e-5)
    local = with_noise(local_of([5.0, 7.0], lr=0.001, batch_size=4), dp)
    with patch.object(DpPlan, "steps", lambda _, epochs: 3 * epochs):  # 100,000 of them say no more
        trained = train(local, mean_of(local), list(local.model.body.parameters()))
    assert (trained.steps, trained.loss) == (3, 0.0)
    assert body_of(local) not in (1.0, pytest.approx(1.0, abs=1e-7))
    for count in (1, 9):
        local = with_noise(local_of([0.0] * count, lr=0.1), DpPlan(noise_multiplier=1.0, sampling_rate=0.3))
        body = list(local.model.body.parameters())
        assert train(local, mean_of(local), body, epochs=2).steps == 7
        assert local.dp is not None
        assert local.dp.steps == 7


def test_one_patient_more_moves_the_sum_by_the_clipped_norm_at_most(local_of: LocalOf) -> None:
    dp, moved = DpPlan(noise_multiplier=1.0, max_unit_norm=0.7, sampling_rate=1.0), []
    for pixels in ([1.0, 0.1], [1.0, 0.1, 50.0]):  # the last one is the one more, drawn after all others
        local = with_noise(local_of(pixels, lr=1.0, batch_size=1), dp)
        train(local, mean_of(local), list(local.model.body.parameters()))
        moved.append(body_of(local))
    assert moved[0] - moved[1] == pytest.approx(0.7, abs=1e-6)


def test_groups_are_clipped_together_and_a_regularizer_by_nobody(local_of: LocalOf) -> None:
    local = local_of([1.0], body=4.0, head=3.0, lr=0.1, batch_size=1)
    local = with_noise(local, DpPlan(noise_multiplier=TINY, max_unit_norm=1.0, sampling_rate=1.0))
    body, head = local.model.body.parameters(), local.model.head.parameters()
    train(local, mean_of(local), [ParameterGroup(body), ParameterGroup(head, lr=1.0)])
    found = [local.model.get_parameter(f"{part}.weight").item() for part in ("body", "head")]
    assert found == pytest.approx([4 - 0.1 * 0.6, 3 - 1.0 * 0.8], abs=1e-5)  # gradients 3 and 4
    for dp in (None, DpPlan(noise_multiplier=TINY, max_unit_norm=1e6, sampling_rate=1.0)):
        local = local_of([1.0, 2.0, 3.0], lr=0.1, batch_size=3)
        local = local if dp is None else with_noise(local, dp)
        weight = local.model.get_parameter("body.weight")
        train(local, mean_of(local), [weight], regularizer=lambda weight=weight: 5 * weight.square())  # type: ignore[misc]
        assert body_of(local) == pytest.approx(1 - 0.1 * (2 + 10), abs=2e-3 if dp else 1e-12)


def test_an_infinite_loss_ends_no_fit_and_a_model_that_is_none_does(local_of: LocalOf) -> None:
    dp = DpPlan(noise_multiplier=TINY, sampling_rate=1.0)
    local = with_noise(local_of([1.0, float("inf"), 1.0], lr=0.1, batch_size=1), dp)
    trained = train(local, mean_of(local), list(local.model.body.parameters()))
    assert body_of(local) == pytest.approx(1 - 0.1 * 2, abs=1e-6)
    assert trained.loss == pytest.approx(2 / 3)
    local = with_noise(local_of([1.0], lr=1e38, batch_size=1), dp, seed=b"x")
    local.plan = local.plan.model_copy(update={"lr": float("inf")})
    with pytest.raises(TaskFailedError) as caught:
        train(local, mean_of(local), list(local.model.body.parameters()))
    assert caught.value.reason is FailureReason.NUMERIC


def test_without_noise_to_draw_and_with_steps_of_a_methods_own_nothing_is_trained(local_of: LocalOf) -> None:
    local, dp = local_of([1.0]), DpPlan(noise_multiplier=1.0, sampling_rate=1.0)
    local.plan = local.plan.model_copy(update={"dp": dp})
    with pytest.raises(ConfigError):
        train(local, mean_of(local))
    assert body_of(local) == 1.0
    local = with_noise(local_of([1.0]), dp)
    with pytest.raises(ConfigError, match="after"):
        train(local, mean_of(local), after=lambda _: None)


def test_a_call_beyond_what_is_declared_changes_nothing_and_no_count_leaves(local_of: LocalOf) -> None:
    local = with_noise(local_of([1.0]), DpPlan(noise_multiplier=1.0, sampling_rate=0.5), DpCost(epochs=(1,)))
    train(local, mean_of(local))
    before = body_of(local)
    with pytest.raises(TaskFailedError):
        train(local, mean_of(local))
    assert body_of(local) == before
    local = local_of([1.0, 2.0])
    assert local.update({}).weight == 2.0
    assert with_noise(local, DpPlan(noise_multiplier=1.0, sampling_rate=0.5)).update({}).weight is None


def test_micro_batches_shrink_until_they_fit(local_of: LocalOf) -> None:
    dp, sizes = DpPlan(noise_multiplier=1.0, max_unit_norm=0.5, sampling_rate=1.0), list[int]()
    whole = trained_once(local_of([0.1 * n for n in range(9)], lr=0.1), dp)
    real = PerExample.__call__

    def short_of_memory(self: PerExample, images: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        sizes.append(len(labels))
        if len(labels) > 2:
            raise torch.OutOfMemoryError("too many")
        return real(self, images, labels)

    with patch.object(PerExample, "__call__", short_of_memory):
        split = trained_once(local_of([0.1 * n for n in range(9)], lr=0.1), dp)
    assert sizes == [noisy_steps.MICRO_BATCH, 4, 2, 2, 2, 2, 1]
    assert body_of(split) == pytest.approx(body_of(whole), abs=1e-12)
    none_fits = patch.object(PerExample, "__call__", side_effect=torch.OutOfMemoryError("none fits"))
    with none_fits, pytest.raises(TaskFailedError) as caught:
        trained_once(local_of([0.1] * 9, lr=0.1), dp)
    assert caught.value.reason is FailureReason.OUT_OF_MEMORY


# A fit that dies


TASK = Task(TaskKind.FIT, "run", 2, "n1", None, 0, 60.0)
NOISE = (NamedTransform.model_validate({"transform": "monai/RandGaussianNoise", "prob": 0.5}),)
STEPS = 2 * (3 + 1)  # two calls: three epochs of two steps, and one


def dying_fit(state: Path, at: int = -1, augmentation: AugmentationSetting = "crop-flip") -> bytes | None:
    """Two calls of `train` on a net with dropout, augmentation and momentum; None: it died at that step."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Dropout(0.3))
        model = SplitModel(body, nn.Linear(6, 2))
    draw = torch.Generator().manual_seed(7)
    examples = Examples(torch.rand(24, 1, 4, 4, generator=draw), torch.arange(24) % 2, torch.arange(24) // 3)
    data = SiteData(examples, examples, Input(shape=(1, 4, 4)), 2)
    plan = Plan(epochs=3, batch_size=4, lr=0.1, momentum=0.9, augmentation=augmentation, checkpoint=True)
    local = FitContext("ann", 2, 4, model, data, 2, plan, torch.Generator().manual_seed(1), {}, check=Deadly(at))
    local = with_noise(local, DpPlan(noise_multiplier=0.5, sampling_rate=0.5))
    torch.manual_seed(at)  # whatever the process's own generators are at: a fit seeds what it draws from
    with suppress(KilledError), on_disk(state, TASK) as kept:
        local = replace(local, checkpoints=kept)
        train(local, lambda x, y: cross_entropy(local.model(x), y))
        train(local, lambda x, y: cross_entropy(local.model(x), y), list(local.model.head.parameters()), epochs=1)
        return b"".join(array.tobytes() for part in (model.body, model.head) for array in dump(part).values())
    return None


@pytest.mark.parametrize("augmentation", ["crop-flip", NOISE], ids=["by name", "of transforms"])
def test_a_fit_that_dies_at_any_step_goes_on_to_the_same_bytes(
    augmentation: AugmentationSetting, tmp_path: Path
) -> None:
    undisturbed = dying_fit(tmp_path / "undisturbed", augmentation=augmentation)
    assert undisturbed is not None
    for at in range(STEPS):
        assert dying_fit(tmp_path / str(at), at, augmentation) is None
        assert dying_fit(tmp_path / str(at), augmentation=augmentation) == undisturbed
    assert dying_fit(tmp_path / "after", STEPS, augmentation) == undisturbed
