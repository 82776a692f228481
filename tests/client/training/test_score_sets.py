"""Which test images a model is scored on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protofed.client.data.site_data import Examples, SiteData
from protofed.client.models.split import SplitModel
from protofed.client.training.score_sets import of_personal, on_test, scores_of
from protofed.common.config.recipe import Input, Recipe
from protofed.testing.small_recipe import small_recipe

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
    return scores_of(of_personal(model(), site, recipe(most)), site, recipe(most))


def test_own_models_are_scored_on_the_runs_sample_of_the_shared_test_set() -> None:
    test, local = examples(2), examples(3)
    sampled = own_scores(data(test, local), 40)
    by_hand = own_scores(data(test.sample(40, SEED), local), None)
    whole = own_scores(data(test, local), None)
    assert sampled == by_hand
    assert sampled != whole
    assert {name: v for name, v in sampled.items() if ".local." in name} == {
        name: v for name, v in whole.items() if ".local." in name
    }
    assert sampled.keys() == whole.keys()  # no class is lost


@pytest.mark.parametrize("most", [N, N + 1])
def test_a_sample_of_all_images_changes_nothing(most: int) -> None:
    test = examples(2)
    assert own_scores(data(test), most) == own_scores(data(test), None)


def test_the_global_model_is_scored_on_all_images() -> None:
    test = examples(2)
    assert on_test(model(), data(test), recipe(40)) == on_test(model(), data(test), recipe(None))


def test_a_site_without_the_shared_test_set_has_nothing_to_sample() -> None:
    nothing, local = (
        Examples(torch.zeros(0, 1, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)),
        examples(3),
    )
    site = data(nothing, local)
    assert own_scores(site, 40) == own_scores(site, None)
