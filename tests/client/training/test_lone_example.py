"""BatchNorm and batches of one example: it joins the batch before; parts of a batch are larger than one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import build
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext, seeded
from protofed.client.training.loop import train, trains_on_one, without_lone
from protofed.common.config.recipe import Plan
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import FailureReason, TaskFailedError

COLOUR = Input(shape=(3, 32, 32))
BATCH_NORM = NamedOptions.model_validate({"name": "resnet18", "stem": "imagenet", "norm": "batch"})  # 1x1 at its end
MODELS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "1x1": ({"stem": "imagenet", "norm": "batch"}, 32, False),
    "2x2": ({"stem": "imagenet", "norm": "batch"}, 64, True),
    "4x4": ({"stem": "small", "norm": "batch"}, 32, True),
    "GroupNorm": ({"stem": "imagenet", "norm": "group"}, 32, True),
}


def site(count: int) -> SiteData:
    def examples(number: int) -> Examples:
        labels = torch.arange(number) % 4
        return Examples(torch.rand(number, *COLOUR.shape), labels)

    return SiteData(examples(count), examples(2), COLOUR, 4)


@pytest.mark.parametrize(("options", "size", "expected"), MODELS.values(), ids=MODELS)
def test_whether_a_model_trains_on_one_is_as_its_training(options: dict[str, Any], size: int, expected: bool) -> None:
    model = build(NamedOptions.model_validate({"name": "resnet18", **options}), Input(shape=(3, size, size)), 4).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    assert trains_on_one(model, (3, size, size)) is expected
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    try:
        model.train()(torch.rand(1, 3, size, size))
        works = True
    except ValueError:
        works = False
    assert works is expected


def test_a_layer_that_asks_for_values_is_left_to_the_first_fit() -> None:
    class Asks(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images * images.sum().item()

    model = SplitModel(nn.Sequential(Asks(), nn.Flatten(), nn.BatchNorm1d(4)), nn.Linear(4, 2))
    assert trains_on_one(model, (1, 2, 2))


def sizes(count: int, batch: int, **options: Any) -> list[int]:
    model = build(NamedOptions.model_validate({"name": "resnet18", **options}), COLOUR, 4)
    data = site(count)
    batches = data.batches(batch, torch.Generator().manual_seed(0))
    return [len(labels) for _, labels in without_lone(batches, model, COLOUR.shape)]


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [(33, 32, [33]), (32, 32, [32]), (34, 32, [32, 2]), (33, 16, [16, 17]), (1, 8, [1]), (3, 1, [1, 1, 1])],
)
def test_a_last_batch_of_one_joins_the_one_before(count: int, batch: int, expected: list[int]) -> None:
    assert sizes(count, batch, stem="imagenet", norm="batch") == expected
    left = [batch] * (count // batch) + [count % batch] * (count % batch > 0)
    assert sizes(count, batch, stem="small", norm="batch") == left  # of a model that trains on one


def test_a_joined_batch_has_the_images_of_both_and_parts_are_even() -> None:
    model, data = build(BATCH_NORM, COLOUR, 4), site(33)
    ((images, labels),) = without_lone(data.batches(32, torch.Generator().manual_seed(0)), model, COLOUR.shape)
    one, other = data.batches(32, torch.Generator().manual_seed(0))
    assert torch.equal(images, torch.cat((one[0], other[0])))
    assert torch.equal(labels, torch.cat((one[1], other[1])))
    short = Short(13, 4, batch_size=8)
    train(short.local, short)
    assert short.sizes == [8, 4, 4, 3, 2]  # not 4 and 1


# Parts of a batch, where memory is short


class Short:
    def __init__(self, count: int, room: int, **plan: Any) -> None:
        self.model = SplitModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4)), nn.Linear(4, 3))
        self.room, self.sizes = room, list[int]()
        labels = torch.arange(count) % 3
        data = SiteData(
            Examples(torch.rand(count, 1, 2, 2), labels),
            Examples(torch.rand(1, 1, 2, 2), labels[:1]),
            Input(shape=(1, 2, 2)),
            3,
        )
        rng = seeded(0, 1, "ann", torch.device("cpu"))
        self.local = FitContext("ann", 1, 1, self.model, data, 3, Plan(**plan), rng, client_state={})

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        self.sizes.append(len(labels))
        if len(labels) > self.room:
            raise torch.OutOfMemoryError("simulated")
        return nn.functional.cross_entropy(self.model(images), labels)


@pytest.mark.parametrize(
    ("count", "room", "why", "reason"),
    [
        (8, 1, "no two examples fit", FailureReason.OUT_OF_MEMORY),
        (5, 2, "no two examples fit", FailureReason.OUT_OF_MEMORY),
        (1, 9, "larger plan.batch_size", FailureReason.REFUSED),
    ],
)
def test_a_site_is_told_why_it_cannot_train(count: int, room: int, why: str, reason: FailureReason) -> None:
    short = Short(count, room, batch_size=8)
    with pytest.raises(TaskFailedError, match=why) as failed:
        train(short.local, short)
    assert failed.value.reason is reason
