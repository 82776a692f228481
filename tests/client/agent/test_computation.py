"""What a unit learnt from fewer images than the policy says does not leave, in any layer of any architecture."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_server import RUN
from torch import nn

from protofed.client.agent.computation import Computation, active_images, fit, unit_layers, withhold_rare_units
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.catalogue import build
from protofed.client.models.split import SplitModel, dump, load
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.client.site import DaemonStatus, PreparedRun
from protofed.client.state.store import SiteState
from protofed.client.training.context import FitContext, FitStart, NoCheckpoints
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Task, TaskKind

CLASSES, EXAMPLES = 3, 20
IMAGES = Input(shape=(1, 16, 16))


def data_of(input_: Input = IMAGES, examples: int = EXAMPLES) -> SiteData:
    draw = torch.Generator().manual_seed(3)
    train = Examples(torch.rand(examples, *input_.shape, generator=draw), torch.arange(examples) % CLASSES)
    return SiteData(train, train, input_, CLASSES)


def made(name: str, input_: Input = IMAGES, **options: Any) -> SplitModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build(NamedOptions(name=name, **options), input_, CLASSES)


def parts(model: SplitModel) -> Payload:
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}


def trap(model: SplitModel, data: SiteData) -> Payload:
    with torch.no_grad():
        images = torch.cat([images for images, _ in data.ordered(data.train, 64)]).flatten(1)
        bright = images.mean(1).sort(descending=True).values
        linear = model.body.get_submodule("linear1")
        assert isinstance(linear, nn.Linear)
        linear.weight.fill_(1 / images.shape[1])
        between = (bright[:-1] + bright[1:]) / 2
        linear.bias.copy_(-between[: len(linear.bias)])
    return parts(model)


def trained(model: SplitModel, data: SiteData, lr: float = 0.05, steps: int = 3) -> Payload:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        for images, labels in data.ordered(data.train, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return parts(model)


@pytest.fixture
def trapped() -> tuple[SiteData, SplitModel, Payload]:
    """Data, a model of ten units of which unit i is active for i + 1 images, and its parts."""
    data, model = data_of(), made("mlp", hidden=[10])
    return data, model, trap(model, data)


def test_a_unit_that_one_image_activates_leaves_as_it_came(trapped: tuple[SiteData, SplitModel, Payload]) -> None:
    data, model, base = trapped
    assert active_images(model, data, unit_layers(model, data))[0].tolist() == list(range(1, 11))
    after = trained(model, data, lr=1e-4, steps=1)
    left = withhold_rare_units(after, base, model, data, 4)
    for name in ("linear1.weight", "linear1.bias"):
        assert np.array_equal(left[Part.BODY][name][:3], base[Part.BODY][name][:3])
        assert np.array_equal(left[Part.BODY][name][3:], after[Part.BODY][name][3:])
        assert not np.array_equal(after[Part.BODY][name][:3], base[Part.BODY][name][:3])  # there was something to take
    assert np.array_equal(left[Part.HEAD]["weight"][:, :3], base[Part.HEAD]["weight"][:, :3])
    assert np.array_equal(left[Part.HEAD]["weight"][:, 3:], after[Part.HEAD]["weight"][:, 3:])
    assert np.array_equal(left[Part.HEAD]["bias"], after[Part.HEAD]["bias"])


def test_the_control_variates_of_such_a_unit_leave_as_they_came(trapped: tuple[SiteData, SplitModel, Payload]) -> None:
    data, model, base = trapped
    after = trained(model, data, lr=1e-4, steps=1)
    paths = {f"{part}.{name}": array for part, tensors in base.items() for name, array in tensors.items()}
    controls = {
        path: np.full_like(array, number) for number, path in enumerate(sorted(paths)) for array in [paths[path]]
    }
    mean_step = {path: array + 7 for path, array in controls.items()}
    left = withhold_rare_units({**after, Part.CONTROL: mean_step}, {**base, Part.CONTROL: controls}, model, data, 4)
    for path in ("body.linear1.weight", "body.linear1.bias"):
        assert np.array_equal(left[Part.CONTROL][path][:3], controls[path][:3])
        assert np.array_equal(left[Part.CONTROL][path][3:], mean_step[path][3:])
    assert np.array_equal(left[Part.CONTROL]["head.weight"][:, :3], controls["head.weight"][:, :3])
    assert np.array_equal(left[Part.CONTROL]["head.weight"][:, 3:], mean_step["head.weight"][:, 3:])
    assert np.array_equal(left[Part.CONTROL]["head.bias"], mean_step["head.bias"])


def test_the_image_of_a_trap_is_not_in_what_leaves(trapped: tuple[SiteData, SplitModel, Payload]) -> None:
    data, model, base = trapped
    after = trained(model, data, lr=1e-3, steps=1)
    image = next(iter(data.ordered(data.train, EXAMPLES)))[0].flatten(1)

    def read(payload: Payload) -> float:
        """The best match of unit 0's movement, a multiple of one image, with any image: 1 is a copy."""
        moved = torch.from_numpy(payload[Part.BODY]["linear1.weight"][0] - base[Part.BODY]["linear1.weight"][0])
        return float(nn.functional.cosine_similarity(moved.unsqueeze(0), image).abs().max())

    assert read(after) > 0.999
    assert read(withhold_rare_units(after, base, model, data, 4)) == 0.0


def test_a_unit_that_is_rare_only_after_the_fit_leaves_as_it_came_and_one_that_all_killed_as_they_left_it() -> None:
    data, model = data_of(), made("mlp", hidden=[10])
    base = parts(model)
    left = withhold_rare_units(trap(model, data), base, model, data, 4)
    assert np.array_equal(left[Part.BODY]["linear1.bias"][:3], base[Part.BODY]["linear1.bias"][:3])
    bias = model.body.get_submodule("linear1").get_parameter("bias")
    with torch.no_grad():
        bias.fill_(10.0)
    base = parts(model)
    with torch.no_grad():
        bias[0] = -100.0
    after = parts(model)
    left = withhold_rare_units(after, base, model, data, 4)
    assert np.array_equal(left[Part.BODY]["linear1.bias"], after[Part.BODY]["linear1.bias"])


@pytest.mark.parametrize(("fewest", "payload"), [(1, None), (4, {}), (4, {Part.HEAD: {"w": np.ones(2)}})])
def test_where_there_is_nothing_to_hide_the_update_is_the_same_object(
    fewest: int, payload: Payload | None, trapped: tuple[SiteData, SplitModel, Payload]
) -> None:
    data, model, base = trapped
    update = parts(model) if payload is None else payload
    assert withhold_rare_units(update, base, model, data, fewest) is update


def test_the_model_is_afterwards_what_the_fit_left_and_the_generator_where_it_was() -> None:
    data, model = data_of(), made("resnet18", norm="batch")
    base = parts(model)
    after = trained(model, data, steps=1)
    model.body.get_submodule("bn1").train()
    model.body.get_submodule("conv1").eval()
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    withhold_rare_units(after, base, model, data, EXAMPLES + 1)
    for part, tensors in parts(model).items():
        assert all(np.array_equal(tensor, after[part][name]) for name, tensor in tensors.items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"hidden": [12, 8]}),
        ("digits-cnn", {}),
        ("fedavg-cnn", {}),
        ("conv2cifar", {}),
        ("simple-cnn", {"projection": 32}),
        ("resnet18", {}),
        ("resnet18", {"norm": "batch", "stem": "imagenet", "projection": 16}),
        ("resnet50", {"norm": "batch", "projection": 16}),
    ],
)
def test_where_every_unit_is_rare_layers_around_rectifiers_leave_as_they_came(
    name: str, options: dict[str, Any]
) -> None:
    data, model = data_of(), made(name, **options)
    base = parts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    after = parts(model)
    left = withhold_rare_units(after, base, model, data, EXAMPLES + 1)
    last = {"digits-cnn": {"linear.bias"}, "simple-cnn": {"l2.bias"}}  # no rectifier follows
    free = last.get(name, {"fc.l2.bias"} if "projection" in options else set())
    learnt = {key for key, tensor in left[Part.BODY].items() if not np.array_equal(tensor, base[Part.BODY][key])}
    assert learnt == free


def test_columns_of_a_flattened_channel_are_those_of_its_pixels() -> None:
    data, model = data_of(), made("digits-cnn")
    with torch.no_grad():  # channel 5 of the last convolution is dead for all images
        model.body.get_submodule("conv2").get_parameter("bias")[5] = -1e3
    base = parts(model)
    rare = np.flatnonzero(active_images(model, data, unit_layers(model, data))[1] < 4)
    assert 5 in rare
    assert len(rare) < 32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6)
    left = withhold_rare_units(parts(model), base, model, data, 4)
    same = left[Part.BODY]["linear.weight"] == base[Part.BODY]["linear.weight"]
    assert same.all(axis=0).nonzero()[0].tolist() == [16 * unit + pixel for unit in rare for pixel in range(16)]
    rows = (left[Part.BODY]["conv2.weight"] == base[Part.BODY]["conv2.weight"]).reshape(32, -1).all(axis=1)
    assert rows.nonzero()[0].tolist() == rare.tolist()


def test_what_reads_a_rare_unit_and_was_not_received_stays(trapped: tuple[SiteData, SplitModel, Payload]) -> None:
    data, model, base = trapped
    with pytest.raises(PolicyRefusedError) as refused:
        withhold_rare_units(trained(model, data), {Part.BODY: base[Part.BODY]}, model, data, 4)
    assert (refused.value.rule, refused.value.tensor) == ("min_images_per_unit", "head/weight")


def test_counts_depend_neither_on_batches_nor_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = data_of(), made("fedavg-cnn")
    layers = unit_layers(model, data)
    at_once = active_images(model, data, layers)
    monkeypatch.setattr("protofed.client.agent.computation.BATCH", 3)
    assert all(np.array_equal(a, b) for a, b in zip(at_once, active_images(model, data, layers), strict=True))
    data, model = data_of(), made("resnet18")
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    load(other.body, dump(model.body))
    assert unit_layers(model, data) == unit_layers(other, data)


# What a fit begins with, whatever was received


TASK = Task(TaskKind.FIT, "run", 1, "t", None, 0, 9.0)
FEW = 4  # of the ten units the first three answer to fewer images


def left_of(received: Payload, first: Payload, start: FitStart | None) -> tuple[Payload, Payload]:
    """What leaves of a fit that begins with `first` and says `start`, and what it had trained."""
    data, model = data_of(), made("mlp", hidden=[10])
    recipe = Recipe.model_validate({**RUN, "input": {"shape": [1, 16, 16]}})
    found: list[Payload] = []

    def train(run: PreparedRun, task: Task, local: FitContext, base: Payload) -> Update:
        load(local.model.body, first[Part.BODY])
        load(local.model.head, first[Part.HEAD])
        local.start = start
        found.append(trained(local.model, data, lr=1e-4, steps=1))
        return local.update(found[0])

    run = PreparedRun(recipe, FedAvgClient(), model, data, 0)
    work = Computation("ann", run, TASK, SiteState(), FEW)
    return fit(work, received, DaemonStatus(), NoCheckpoints(), train).update.payload, found[0]


def models() -> tuple[Payload, Payload]:
    """A model as it is made, and one whose first units measure brightness, with thresholds between the images."""
    model, data = made("mlp", hidden=[10]), data_of()
    return parts(model), trap(made("mlp", hidden=[10]), data)


def withheld(left: Payload, learnt: Payload, as_in: Payload) -> list[bool]:
    """Of each unit, whether its row is another one's and no longer what was learnt."""
    rows = (payload[Part.BODY]["linear1.weight"] for payload in (left, learnt, as_in))
    sent, own, expected = rows
    return [bool((s == e).all() and (s != o).any()) for s, o, e in zip(sent, own, expected, strict=True)]


def test_of_a_fit_they_leave_as_in_the_model_that_it_begins_with() -> None:
    _, first = models()
    left, learnt = left_of(first, first, None)
    assert withheld(left, learnt, first) == [True] * 3 + [False] * 7
    received, first = models()
    left, learnt = left_of(received, first, FitStart(first))
    assert withheld(left, learnt, first) == [True] * 3 + [False] * 7


def test_where_another_model_computes_its_units_count_and_what_was_sent_takes_the_place() -> None:
    received, first = models()
    other = {part: {n: np.full_like(a, 0.5) for n, a in tensors.items()} for part, tensors in first.items()}
    left, learnt = left_of(received, first, FitStart(first, sent=other))
    assert withheld(left, learnt, other) == [True] * 3 + [False] * 7
    assert torch.equal(*(torch.tensor(p[Part.BODY]["linear1.weight"][3:]) for p in (left, learnt)))


@pytest.mark.parametrize("said", [True, False])
def test_where_a_fit_leaves_another_model_the_units_of_the_one_that_it_sends_count(said: bool) -> None:
    received, learnt = models()
    data, model = data_of(), made("mlp", hidden=[10])
    recipe = Recipe.model_validate({**RUN, "input": {"shape": [1, 16, 16]}})

    def train(run: PreparedRun, task: Task, local: FitContext, base: Payload) -> Update:
        load(local.model.body, received[Part.BODY])  # the site's own, in which every unit sees many images
        local.sent_model = learnt if said else None
        return local.update(learnt)

    work = Computation("ann", PreparedRun(recipe, FedAvgClient(), model, data, 0), TASK, SiteState(), FEW)
    left = fit(work, received, DaemonStatus(), NoCheckpoints(), train).update.payload
    assert withheld(left, learnt, received)[:3] == [True] * 3
    assert withheld(left, learnt, received)[3:] == [False] * 7
