"""Units that answer to single images, or all to one measurement, are found by what they answer to the site's images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.client.base_checks.test_judge import CHECKED
from tests.support.scripted_server import RUN, AgentHarness, work
from torch import Tensor, nn

from protofed.client.base_checks.responses import (
    APART_ALONE,
    MIN_IMAGES,
    MIN_SEEN,
    MIN_UNITS,
    SEEING_ALONE,
    Responses,
    Seen,
    response_problem,
    responses,
)
from protofed.client.base_checks.statistics import BaseCheck
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import Batch, SiteData
from protofed.client.models.catalogue import build, first_model
from protofed.client.models.split import SplitModel, dump, load
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason
from protofed.common.payload import Part

TABLE = {**RUN, "input": {"shape": [1, 8, 8], "mean": [0.0], "std": [1.0]}, "model": {"name": "mlp", "hidden": [64]}}
RECIPE = Recipe.model_validate(TABLE)


def images(number: int = 128) -> Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def batch(number: int = 128) -> Batch:
    return images(number), torch.arange(number) % 3


def site_data(_: Recipe) -> SiteData:
    examples = Examples(images(), torch.arange(128) % 3)
    return SiteData(examples, examples, RECIPE.input, 3)


def prepared(change: Callable[[nn.Linear], None] = lambda _: None) -> SplitModel:
    """The built model, its first layer changed."""
    model = build(RECIPE.model, RECIPE.input, RECIPE.classes)
    load(model.body, first_model(RECIPE, frozenset())[Part.BODY])
    layer = next(module for module in model.body.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        change(layer)
    return model


def sorted_thresholds(layer: nn.Linear) -> None:
    """Every unit measures the brightness, with noise; the biases are its quantiles."""
    noise = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(2))
    layer.weight.copy_((1 + 0.01 * noise) / 8)
    layer.bias.copy_(-torch.linspace(3.0, 5.0, len(layer.bias)))


def one_image_each(layer: nn.Linear) -> None:
    """Every unit is positive for the image that it answers to most, and for hardly any other."""
    answers = images().flatten(1) @ layer.weight.T
    layer.bias.copy_(-answers.topk(2, dim=0).values.mean(0))


def refused(model: SplitModel, number: int = 128, rates: float = 1.0) -> BaseCheck | None:
    built = responses(prepared(), [batch(number)])
    problem = response_problem(responses(model, [batch(number)]), built, rates)
    return problem.check if problem else None


def blind(layer: nn.Linear) -> None:
    layer.bias.fill_(-100.0)


def faint(layer: nn.Linear) -> None:
    layer.weight.mul_(1e-3)


@pytest.mark.parametrize("trap", [sorted_thresholds, one_image_each, blind, faint])
def test_traps_are_found(trap: Callable[[nn.Linear], None]) -> None:
    assert refused(prepared(trap)) is BaseCheck.RESPONSE


def test_the_built_model_and_a_trained_one_pass_and_are_left_as_they_were() -> None:
    model = prepared()
    assert refused(model) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images()), torch.arange(128) % 3)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert refused(model) is None
    model = prepared().train()
    before = dump(model)
    responses(model, [batch(64), batch(64)])
    assert model.training
    assert all((before[name] == array).all() for name, array in dump(model).items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_fit_that_moves_far_makes_more_of_what_a_body_sees() -> None:
    def dimmed(layer: nn.Linear) -> None:
        layer.weight.mul_(0.2)

    dim = prepared(dimmed)
    assert [refused(dim, rates=rates) for rates in (0.0, 1.0, 4.0)] == [BaseCheck.RESPONSE, BaseCheck.RESPONSE, None]


@pytest.mark.parametrize(
    ("variance", "apart", "rates", "blind"),
    [
        (SEEING_ALONE, 0.0, 1.0, False),  # a first model that tells the site's classes apart hardly at all
        (0.99 * SEEING_ALONE, 0.99 * APART_ALONE, 1.0, True),
        (0.99 * SEEING_ALONE, APART_ALONE, 1.0, False),
        (0.99 * SEEING_ALONE, 0.0, 0.0, True),
        (SEEING_ALONE / 4, 0.0, 2.0, False),
        (0.99 * SEEING_ALONE / 4, 0.99 * APART_ALONE / 4, 2.0, True),
    ],
)
def test_a_built_body_that_is_blind_is_found_alone(variance: float, apart: float, rates: float, blind: bool) -> None:
    body = Responses({}, Seen(variance, 1.0, apart))
    assert (response_problem(body, body, rates) is not None) == blind


def test_how_far_classes_are_apart_is_no_matter_of_how_many_images() -> None:
    """Two classes 3 apart, of variance 1 in each of 16 directions; of 4 images a class chance alone adds 8 to 9."""
    draw, model = torch.Generator().manual_seed(3), SplitModel(nn.Flatten(), nn.Linear(16, 2))

    def seen(labels: Tensor) -> Seen:
        points = torch.randn(len(labels), 16, 1, 1, generator=draw)
        points[:, 0, 0, 0] += 3.0 * labels
        found = responses(model, [(points, labels)]).sight
        assert found is not None
        return found

    apart = [seen(torch.arange(8) % 2).apart for _ in range(200)]
    assert sum(apart) / len(apart) == pytest.approx(9.0, abs=1.0)
    alone = seen(torch.zeros(8, dtype=torch.int64))
    assert alone.apart == alone.variance


def test_few_images_tell_nothing_of_units_and_fewer_show_that_a_body_is_blind() -> None:
    assert refused(prepared(sorted_thresholds), MIN_IMAGES - 1) is None
    assert [refused(prepared(faint), number) for number in (MIN_SEEN - 1, MIN_SEEN)] == [None, BaseCheck.RESPONSE]


def test_and_in_few_features() -> None:
    narrow = Recipe.model_validate({**TABLE, "model": {"name": "mlp", "hidden": [64, MIN_UNITS - 1]}})
    built, blinded = (build(narrow.model, narrow.input, narrow.classes) for _ in range(2))
    load(blinded.body, dump(built.body))
    with torch.no_grad():
        [*_, last] = (module for module in blinded.body.modules() if isinstance(module, nn.Linear))
        last.weight.mul_(1e-3)
    found = [responses(model, [batch()]) for model in (built, blinded)]
    assert response_problem(found[0], found[0], 8.0) is None
    assert response_problem(found[1], found[0], 8.0) is not None


def test_a_body_that_is_blind_in_training_alone_is_found() -> None:
    """By the variance that it keeps, a batch normalisation makes much of what is nothing by a batch's own."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16))
    model = SplitModel(body, nn.Linear(16, 3))
    built = responses(model, [batch()])
    before = dump(model)
    assert response_problem(responses(model, [batch()]), built, 1.0) is None
    assert all((before[name] == array).all() for name, array in dump(model).items())
    assert all(module.track_running_stats for module in body.modules() if isinstance(module, nn.BatchNorm1d))
    layer, norm = body[1], body[2]
    assert isinstance(layer, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    with torch.no_grad():
        layer.weight.mul_(100)
        norm.weight.fill_(1e-4)
        norm.running_var.fill_(1e-8)  # type: ignore[union-attr]
        norm.bias.fill_(1.0)
        seen = model.eval().body(images()).var(0).sum()
    assert seen > 1
    assert response_problem(responses(model, [batch()]), built, 1.0) is not None


def test_a_site_declines_a_trap_of_a_late_round() -> None:
    site = AgentHarness(rules=dict(CHECKED), recipe=dict(TABLE), load_data=site_data)
    model = prepared(one_image_each)
    task = site.fit(3, {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)})
    site.fit(3, first_model(RECIPE, frozenset()), task_id="honest")
    work(site.agent(), 2)
    assert site.declined() == [(task.task_id, FailureReason.POLICY)]
    assert [pushed.task_id for pushed, _ in site.link.pushed] == ["honest"]
