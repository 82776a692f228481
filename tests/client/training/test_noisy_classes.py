"""Class means and shares from noisy sums and counts: by hand, clipped by patient, absent below a noisy threshold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.dp_contexts import with_noise
from tests.support.training_doubles import LocalOf
from torch import Tensor

from protofed.client.training.context import FitContext
from protofed.client.training.loop import class_means, frequent, means_by_class
from protofed.client.training.noisy_steps import label_shares, noisy_matrix
from protofed.common.config.recipe import DpCost, DpPlan
from protofed.common.errors import ConfigError, TaskFailedError

TINY = 1e-9


def noisy(
    local: FitContext, multiplier: float | None = TINY, *, cost: DpCost | None = None, **plan: float
) -> FitContext:
    dp = DpPlan(
        noise_multiplier=1.0,
        sampling_rate=0.5,
        class_noise_multiplier=multiplier,
        **{"min_noisy_count": 0.5, "max_feature_norm": 10.0, **plan},
    )
    return with_noise(local, dp, cost or DpCost(epochs=(), class_releases=3))


def of_units(local: FitContext, *units: int) -> FitContext:
    train = replace(local.data.train, units=torch.tensor(units))
    return replace(local, data=replace(local.data, train=train))


def pixels(images: Tensor) -> Tensor:
    return images.flatten(1)


def test_without_noise_worth_the_name_they_are_the_true_means(local_of: LocalOf) -> None:
    found = class_means(noisy(local_of([1.0, 2.0, 4.0, 6.0], [0, 0, 1, 1])), pixels)
    assert found.keys() == {0, 1}  # no class 2
    assert [found[c].tolist() for c in (0, 1)] == [pytest.approx([1.5]), pytest.approx([5.0])]
    assert found[0].dtype == torch.float32
    few = noisy(local_of([1.0, 3.0], [0, 0]), min_noisy_count=0.1)
    weighted = class_means(few, pixels, lambda features, _: features.squeeze(1) / 4)
    assert weighted[0].tolist() == pytest.approx([(1 * 0.25 + 3 * 0.75) / (0.25 + 0.75)])
    far = noisy(local_of([50.0], [0]), max_feature_norm=1.0, min_noisy_count=0.0)
    assert class_means(far, pixels)[0].tolist() == pytest.approx([50.0], rel=1e-5)  # sum and count alike


def test_a_patient_counts_once_however_many_images_it_has(local_of: LocalOf) -> None:
    local = local_of([2.0] * 6 + [4.0] * 2, [0] * 8)
    local = of_units(local, *[7] * 6, 1, 2)
    (matrix,) = (noisy_matrix(noisy(local), torch.ones(8, 1), local.data.train.labels),)
    assert matrix[0].item() == pytest.approx(3.0)  # of three patients
    shared = local_of([0.0] * 4, [0, 0, 1, 1])
    spread = noisy_matrix(noisy(of_units(shared, 5, 5, 5, 5)), torch.ones(4, 1), shared.data.train.labels)
    assert spread[:2].flatten().tolist() == pytest.approx([math.sqrt(0.5)] * 2)  # one patient of two classes: norm 1


def test_one_patient_more_moves_the_matrix_by_1_at_most(local_of: LocalOf) -> None:
    draw = torch.Generator().manual_seed(0)
    values, labels = 9 * torch.randn(12, 5, generator=draw), torch.randint(3, (12,), generator=draw)
    units = (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8)  # the last one has four images
    matrices = []
    for count in (8, 12):
        local = of_units(local_of([0.0] * count, labels[:count].tolist()), *units[:count])
        local = replace(local, classes=3)
        matrices.append(noisy_matrix(noisy(local, 1.0), values[:count], labels[:count]))
    assert (matrices[1] - matrices[0]).norm().item() == pytest.approx(1.0)  # far above it, before it is clipped


def test_noise_is_of_the_multiplier_on_every_number_and_of_each_release_its_own(local_of: LocalOf) -> None:
    local = replace(local_of([0.0], [0]), classes=2000)
    local, labels = noisy(local, 3.0), local.data.train.labels
    one, other = (noisy_matrix(local, torch.zeros(1, 10), labels) for _ in range(2))
    assert one.shape == (2000, 10)
    assert one.std().item() == pytest.approx(3.0, rel=4 / math.sqrt(2 * 20_000))
    assert not (one == other).any()


def test_features_that_are_no_numbers_count_as_nothing(local_of: LocalOf) -> None:
    local = local_of([1.0, float("nan"), 3.0], [0, 0, 0])
    assert class_means(noisy(local, min_noisy_count=0.1), pixels)[0].isfinite().all()


def test_shares_are_those_of_noisy_counts_and_a_class_below_the_threshold_is_absent(local_of: LocalOf) -> None:
    local = noisy(local_of([1.0] * 5 + [2.0] * 2, [0] * 5 + [1] * 2), min_noisy_count=3.0)
    means = class_means(local, pixels)
    assert means.keys() == {0}
    ghosts = {0: torch.ones(1), 2: torch.ones(1)}  # of class 2 there is no example
    assert frequent(local, ghosts, 4).keys() == {0, 2}
    local = local_of([0.0] * 8, [0] * 6 + [1] * 2)
    assert label_shares(local).tolist() == [0.75, 0.25, 0.0]
    assert label_shares(noisy(local)).tolist() == pytest.approx([0.75, 0.25, 0.0])
    assert label_shares(noisy(local, min_noisy_count=4.0)).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert label_shares(noisy(local, min_noisy_count=40.0)).tolist() == pytest.approx([1 / 3] * 3)
    rough = label_shares(noisy(local, 5.0))
    assert rough.sum().item() == pytest.approx(1.0)
    assert (rough >= 0).all()
    assert rough.tolist() != pytest.approx([0.75, 0.25, 0.0])


def test_what_has_no_noise_is_not_released(local_of: LocalOf) -> None:
    local = local_of([1.0], [0])
    with pytest.raises(ConfigError, match="class_noise_multiplier"):
        class_means(noisy(local, None), pixels)
    with pytest.raises(ConfigError):
        means_by_class(noisy(local), lambda x, _: (pixels(x), torch.ones(len(x))), 8)
    with pytest.raises(TaskFailedError):
        class_means(noisy(local, cost=DpCost(epochs=(1,))), pixels)
