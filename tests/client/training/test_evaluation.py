"""Which test images a model is scored on, in evaluation mode, and in one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel
from protofed.client.tasks.classification import CLASSES
from protofed.client.training.evaluation import compute_scores, of_personal, on_test, predict
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input
from protofed.common.errors import DataError, WithdrawnError
from protofed.testing.small_recipe import small_recipe

PLAIN = Input(shape=(1, 1, 1), mean=(0.0,), std=(1.0,))


class Told(nn.Module):
    """Gives the row of logits whose number is written in the image's only pixel."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(images.flatten() * 255).round().long()]


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteData, "scoring_batch", 4)


def test_a_scoring_can_be_ended_at_each_batch() -> None:
    images = torch.arange(20, dtype=torch.uint8).view(-1, 1, 1, 1)
    test, checks = Examples(images, torch.zeros(20, dtype=torch.int64)), list[None]()
    data = SiteData(test, test, PLAIN, 20)
    predict(Told(torch.eye(20)), data, check=lambda: checks.append(None))
    assert len(checks) == 5

    def left() -> None:
        raise WithdrawnError("the site has left")

    with pytest.raises(WithdrawnError):
        predict(Told(torch.eye(20)), data, check=left)


def test_predictions_are_of_the_examples_that_it_is_given() -> None:
    test, other = (Examples(torch.full((n, 1, 1, 1), 1, dtype=torch.uint8), torch.ones(n).long()) for n in (3, 2))
    data = SiteData(test, test, PLAIN, 2)
    made = predict(Told(torch.eye(2)), data)
    assert (made.outputs.tolist(), made.targets.tolist()) == ([[0.0, 1.0]] * 3, [1, 1, 1])
    assert len(predict(Told(torch.eye(2)), data, other).targets) == 2
    with pytest.raises(DataError, match="at least one"):
        predict(Told(torch.eye(2)), data, test.take(torch.tensor([], dtype=torch.int64)))


class Counting(nn.Module):
    """Two classes; remembers the modes that it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.frozen = nn.BatchNorm2d(1).eval()
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append((self.training, self.norm.training, torch.is_grad_enabled()))
        normed: Tensor = self.frozen(self.norm(images))
        return normed.flatten(1).repeat(1, 2)


def test_a_prediction_evaluates_and_puts_every_mode_back() -> None:
    test = Examples(torch.rand(10, 1, 1, 1), torch.zeros(10, dtype=torch.int64))
    model = Counting()
    predict(model, SiteData(test, test, PLAIN, 2))
    assert model.modes == [(False, False, False)] * 3
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert model.norm.state_dict()["running_mean"].tolist() == [0.0]  # the test set taught it nothing


N, SEED = 400, 6


def examples(seed: int) -> Examples:
    """One pixel an image, and ten classes of which the first half is three times as frequent."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (N, 1, 1, 1), generator=rng, dtype=torch.uint8)
    return Examples(images, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9] * (N // 20)))


def recipe(most: int | None) -> Recipe:
    evaluation = {} if most is None else {"personal_test_images": most}
    return small_recipe("fedavg", seed=SEED, input={"shape": [1, 1, 1]}, evaluation=evaluation)


def model() -> SplitModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(16, 10, bias=False)  # which calls different images different classes
        return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(1, 16), nn.ReLU()), head)


def data(test: Examples, local: Examples | None = None) -> SiteData:
    return SiteData(examples(1), test, Input(shape=(1, 1, 1)), 10, local_test=local)


def own_scores(site: SiteData, most: int | None) -> dict[str, float]:
    return compute_scores(of_personal(model(), site, recipe(most)), site, recipe(most))


def test_own_models_are_scored_on_the_runs_sample_of_the_shared_test_set() -> None:
    test, local = examples(2), examples(3)
    sampled = own_scores(data(test, local), 40)
    by_hand = own_scores(data(test.sample(40, SEED, CLASSES.strata), local), None)
    whole = own_scores(data(test, local), None)
    assert sampled == by_hand
    assert sampled != whole
    assert {name: v for name, v in sampled.items() if ".local." in name} == {
        name: v for name, v in whole.items() if ".local." in name
    }
    assert sampled.keys() == whole.keys()  # no class is lost


def test_a_sample_is_of_a_larger_shared_test_set_and_for_own_models_alone() -> None:
    test = examples(2)
    assert own_scores(data(test), N) == own_scores(data(test), N + 1) == own_scores(data(test), None)
    assert on_test(model(), data(test), recipe(40)) == on_test(model(), data(test), recipe(None))
    site = data(test.take(torch.tensor([], dtype=torch.int64)), examples(3))
    assert own_scores(site, 40) == own_scores(site, None)
