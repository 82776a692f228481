"""Auxiliary images: balanced, at no site, in no test set; and the same ones wherever the settings are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.client.data.examples import Examples
from protofed.client.data.site import draw_auxiliary, load_site, load_sites, load_test
from protofed.client.data.site_data import SiteData
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

DIGITS = Input(shape=(1, 8, 8))
FIVE = {"kind": "dirichlet", "sites": 5, "beta": 0.5}
SMALL = Input(shape=(1, 2, 2))


def data(**options: Any) -> Data:
    return Data.model_validate({"source": "digits", "partition": FIVE, "auxiliary_per_class": 4, **options})


def images(*examples: Examples) -> set[bytes]:
    return {image.numpy().tobytes() for some in examples for image in some.pixels()}


def auxiliary(of: SiteData) -> Examples:
    assert of.auxiliary is not None
    return of.auxiliary


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_tail": 0.05},
        {"validation_fraction": 0.2},
        {"merge_test_into_train": True, "local_test_fraction": 0.25},
        {"local_test": "by-class"},
    ],
    ids=["plain", "long tail", "validation", "merged", "by class"],
)
def test_they_are_balanced_at_no_site_and_in_no_test_set(options: dict[str, Any]) -> None:
    sites, evaluator = load_sites(data(**options), DIGITS, 10), load_test(data(**options), DIGITS, 10)
    assert auxiliary(evaluator).labels.bincount().tolist() == [4] * 10
    assert len(evaluator.train) == 0
    for site in sites:
        assert site.auxiliary is None
        held = [site.train, site.test] + ([] if site.local_test is None else [site.local_test])
        assert not images(auxiliary(evaluator)) & images(*held)
    assert not images(auxiliary(evaluator)) & images(evaluator.test)


def test_without_the_key_nothing_changes_and_with_it_the_test_set_is_the_same() -> None:
    without = load_sites(data(auxiliary_per_class=None), DIGITS, 10)
    assert load_test(data(auxiliary_per_class=None), DIGITS, 10).auxiliary is None
    sites = load_sites(data(), DIGITS, 10)
    assert images(without[0].test) == images(sites[0].test)
    assert sum(len(site.train) for site in sites) == sum(len(site.train) for site in without) - 40


def test_daemons_of_one_source_draw_the_same_as_a_simulation() -> None:
    sites, evaluator = load_sites(data(), DIGITS, 10), load_test(data(), DIGITS, 10)
    one = load_site(data(), 1, DIGITS, 10)
    assert torch.equal(one.train.pixels(), sites[1].train.pixels())
    assert torch.equal(auxiliary(one).pixels(), auxiliary(evaluator).pixels())  # a site that evaluates as well has them
    other = load_test(data(seed=1), DIGITS, 10)
    assert images(auxiliary(other)) != images(auxiliary(evaluator))


def examples(*pixels: int, classes: int = 2) -> Examples:
    made = torch.tensor(pixels, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    return Examples(made, torch.arange(len(pixels)) % classes)


def test_an_image_of_the_test_set_is_none_whatever_set_it_stands_in() -> None:
    train, test = examples(1, 2, 3, 4, 5, 6), examples(3, 2)
    assert draw_auxiliary(train, test, 2, 2, seed=0).tolist() == [0, 3, 4, 5]  # not 2 and 1, which are 3 and 2


def test_a_set_that_cannot_spare_auxiliary_images_is_refused(tmp_path: Path) -> None:
    images_, labels = np.arange(48, dtype=np.uint8).reshape(12, 2, 2, 1), np.arange(12) % 2
    same = tmp_path / "set.npz"
    np.savez(same, train_images=images_, train_labels=labels, test_images=images_, test_labels=labels)
    own = Data.model_validate({"source": "npz", "root": str(same), "auxiliary_per_class": 1})
    with pytest.raises(DataError, match="auxiliary_per_class"):
        load_test(own, SMALL, 2)
    np.savez(tmp_path / "test.npz", test_images=images_, test_labels=labels)  # test images alone
    alone = {"source": "npz", "root": str(tmp_path / "test.npz")}
    assert load_test(Data.model_validate(alone), SMALL, 2).auxiliary is None
    with pytest.raises(DataError):
        load_test(Data.model_validate({**alone, "auxiliary_per_class": 1}), SMALL, 2)


@pytest.mark.parametrize("each", [4, 1])
def test_a_class_with_too_few_images_is_named(each: int) -> None:
    train = examples(1, 2, 3, 4, 5, 6) if each > 1 else examples(1, 3, 5, classes=1)  # of class 1: three, none
    with pytest.raises(DataError, match=f"auxiliary_per_class = {each}: class [01] has fewer"):
        draw_auxiliary(train, examples(9), each, 2, seed=0)


def test_what_a_method_refines_on_is_these_images_alone() -> None:
    evaluator = load_test(data(), DIGITS, 10)
    refining = evaluator.for_refining()
    assert images(refining.train) == images(refining.test) == images(auxiliary(evaluator))
    assert (refining.local_test, refining.scores_only) == (None, False)
    with pytest.raises(DataError, match="auxiliary_per_class"):
        load_test(data(auxiliary_per_class=None), DIGITS, 10).for_refining()
