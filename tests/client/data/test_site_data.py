"""Batches are the same on every device and whatever the memory; what cannot be trained on is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from protofed.client.data import examples, site_data
from protofed.client.data.augmentation import AUGMENTATIONS, normaliser
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData, class_balanced, fits
from protofed.common.config.recipe import Augment, Sampling
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

RUN = Input(shape=(3, 6, 5), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
META = torch.device("meta")
GREY = Examples(torch.zeros(2, 1, 6, 5), torch.zeros(2).long())
AUGMENTS: list[Augment] = ["none", *AUGMENTATIONS]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(count: int, seed: int = 0, classes: int = 4) -> Examples:
    images = torch.randint(256, (count, 3, 6, 5), generator=rng(seed), dtype=torch.uint8)
    return Examples(images, torch.arange(count) % classes)


def site(count: int = 10) -> SiteData:
    return SiteData(some(count), some(7, seed=1), RUN, classes=4)


def epoch(
    data: SiteData, seed: int = 0, size: int = 4, augment: Augment = "none", sampling: Sampling = "shuffled"
) -> tuple[Tensor, Tensor]:
    images, labels = zip(*data.batches(size, rng(seed), augment, sampling=sampling), strict=True)
    return torch.cat(images), torch.cat(labels)


def test_an_epoch_is_every_example_once_in_the_generators_order() -> None:
    data = site()
    images, labels = epoch(data)
    order = torch.randperm(10, generator=rng())
    assert torch.equal(labels, data.train.labels[order])
    assert torch.equal(images, data.train.normalised(RUN)[order])
    assert not torch.equal(labels, epoch(data, seed=1)[1])


def skewed() -> SiteData:
    """Eleven examples of class 0, two of class 3, one of class 1, none of class 2; all images differ."""
    labels = torch.tensor([0] * 5 + [3] + [0] * 6 + [1, 3])
    return SiteData(Examples(some(14).pixels(), labels), some(7, seed=1), RUN, classes=4)


def test_an_epoch_by_classes_has_as_many_draws_and_each_class_as_often() -> None:
    data, seen = skewed(), torch.zeros(4, dtype=torch.int64)
    made = [epoch(data, seed, sampling="class-balanced") for seed in range(60)]
    for images, labels in made:
        counts = labels.bincount(minlength=4)
        assert sorted(counts.tolist()) == [0, 4, 5, 5]  # 14 draws of three classes
        assert counts[2] == 0
        seen += counts
        known = data.train.normalised(RUN)
        rows = [int((known == image).flatten(1).all(1).nonzero()) for image in images]
        assert data.train.labels[rows].tolist() == labels.tolist()
    assert (seen[[0, 1, 3]] / seen.sum() - 1 / 3).abs().max() < 0.02  # the draw that is left is of any of them
    assert len({tuple(labels.tolist()) for _, labels in made}) == len(made)


def test_examples_of_a_class_are_drawn_alike_and_with_replacement() -> None:
    labels = torch.tensor([1] * 3 + [0] * 597)
    draw, times = rng(), torch.zeros(600, dtype=torch.int64)
    for _ in range(100):
        times += class_balanced(labels, torch.randperm(600, generator=draw), draw).bincount(minlength=600)
    assert times[:3].sum() == times[3:].sum() == 30_000
    assert (times[:3] - 10_000).abs().max() < 500  # of 10 000 +- 82
    assert (times[3:] > 0).all()
    assert times[3:].max() < 100  # of 50 +- 7


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("sampling", ["shuffled", "class-balanced"])
def test_an_epoch_follows_from_the_generator_alone(augment: Augment, sampling: Sampling) -> None:
    data = skewed()
    first, second, other = (epoch(data, seed, augment=augment, sampling=sampling)[0] for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first, epoch(data, 3, sampling=sampling)[0]) == (augment == "none")
    sizes = [len(y) for _, y in data.batches(4, rng(), augment, drop_last=True, sampling=sampling)]
    assert sizes == [4, 4, 4]


@pytest.mark.parametrize(
    ("size", "drop_last", "sizes"),
    [(4, False, [4, 4, 2]), (4, True, [4, 4]), (5, True, [5, 5]), (64, False, [10]), (64, True, [10])],
)
@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_have_the_size_asked_for(size: int, drop_last: bool, sizes: list[int], augment: Augment) -> None:
    made = list(site().batches(size, rng(), augment, drop_last))
    assert [len(images) for images, _ in made] == [len(labels) for _, labels in made] == sizes


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_random_numbers_are_drawn_at_the_call_and_from_the_generator_alone(augment: Augment) -> None:
    before = torch.get_rng_state()
    one, two = rng(), rng()
    pending = site().batches(4, one, augment)
    drawn = one.get_state()
    list(pending)
    torch.randperm(10, generator=two)
    AUGMENTATIONS[augment].draw(10, two)
    assert torch.equal(one.get_state(), drawn)
    assert torch.equal(two.get_state(), drawn)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_are_the_same_without_a_normalised_copy(augment: Augment, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = epoch(site(), augment=augment)
    monkeypatch.setattr(examples, "KEPT_BYTES", 0)
    data = site()
    assert torch.equal(epoch(data, augment=augment)[0], kept)
    assert data.train.shared.keys() == {"made of"}  # nothing was kept


def test_the_border_is_black_before_normalisation() -> None:
    white = Examples(torch.full((200, 3, 6, 5), 255, dtype=torch.uint8), torch.zeros(200, dtype=torch.int64))
    images, _ = epoch(SiteData(white, white, RUN, 4), augment="crop-flip")
    black = torch.tensor([-0.2, -0.8, -0.3])  # (0 - mean) / std
    light = torch.tensor([1.8, 3.2, 0.7])
    is_black = torch.isclose(images, black.view(3, 1, 1)).all(dim=1)
    assert torch.equal(is_black, ~torch.isclose(images, light.view(3, 1, 1)).all(dim=1))
    assert 0.2 < float(is_black.float().mean()) < 0.9


def test_ordered_is_every_example_in_its_own_order_and_frequencies_are_shares() -> None:
    data = site()
    made = list(data.ordered(data.test, 3))
    assert [len(labels) for _, labels in made] == [3, 3, 1]
    assert torch.equal(torch.cat([images for images, _ in made]), data.test.normalised(RUN))
    assert torch.equal(torch.cat([labels for _, labels in made]), data.test.labels)
    train = Examples(torch.zeros(4, 3, 6, 5), torch.tensor([2, 0, 2, 2]))
    assert SiteData(train, some(3), RUN, 4).label_frequencies().tolist() == [0.25, 0.0, 0.75, 0.0]


def test_sites_share_one_placed_and_one_normalised_test_set() -> None:
    test = some(5)
    first, second = (SiteData(some(n), test, RUN, 4).placed(torch.device("cpu")) for n in (3, 4))
    assert first.test is second.test
    assert first.test.normalised(RUN) is second.test.normalised(RUN)
    assert first.train is not second.train


@pytest.mark.parametrize("augment", AUGMENTS)
def test_data_that_stays_on_the_host_is_moved_batch_by_batch(augment: Augment) -> None:
    data = SiteData(some(10), some(3), RUN, 4, device=META)  # meta: a device with shapes and no numbers
    made = [*data.batches(4, rng(), augment), *data.ordered(data.test, 2)]
    assert {tensor.device for batch in made for tensor in batch} == {META}
    assert [images.shape[0] for images, _ in made] == [4, 4, 2, 2, 1]
    assert {images.dtype for images, _ in made} == {torch.float32}
    assert data.train.pixels().device == torch.device("cpu")


def test_data_fit_a_gpu_up_to_a_quarter_of_its_memory_with_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400, 1000))
    assert [fits(size, torch.device("cuda")) for size in (100, 101)] == [True, False]
    data = site()
    placed = data.placed(torch.device("cuda"))  # it does not fit, and stays where it is
    assert placed.device.type == "cuda"
    assert (placed.train, placed.test) == (data.train, data.test)
    raw = 10 * 3 * 6 * 5 + 10 * 8
    assert some(10).nbytes == raw + 4 * 900
    monkeypatch.setattr(examples, "KEPT_BYTES", 4 * 900 - 1)
    assert some(10).nbytes == raw


@pytest.mark.parametrize("augment", AUGMENTS)
def test_only_a_batch_at_a_time_is_in_page_locked_memory(augment: Augment, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[Tensor] = []

    def recorded(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        staged.append(torch.empty(*shape, dtype=dtype))
        return staged[-1]

    monkeypatch.setattr(site_data, "page_locked", recorded)
    there, here = (SiteData(some(10), some(3), RUN, 4, device=device) for device in (META, torch.device("cpu")))
    shapes = [images.shape for images, _ in there.batches(4, rng(), augment)]
    assert Counter(tensor.shape for tensor in staged) == Counter(
        part for shape in shapes for part in (shape, shape[:1])
    )
    if augment == "none":
        finish = normaliser(RUN, torch.uint8, torch.device("cpu"))
        pixels = [finish(tensor) for tensor in staged if tensor.dtype == torch.uint8]  # threads read them in any order
        for images, _ in here.batches(4, rng()):
            assert any(raw.shape == images.shape and torch.equal(raw, images) for raw in pixels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("room", [True, False])
def test_a_gpu_sees_the_same_batches(augment: Augment, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_data, "fits", lambda *_: room)
    images, labels = epoch(site(), augment=augment)
    there, there_labels = epoch(site().placed(torch.device("cuda")), augment=augment)
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), images)
    assert torch.equal(there_labels.cpu(), labels)


def test_a_site_may_have_a_test_set_of_its_own_beside_or_instead_of_the_common_one() -> None:
    test, own = some(5), some(2, seed=3)
    both = SiteData(some(3), test, RUN, 4, local_test=own)
    assert (both.test is test, both.local_test is own) == (True, True)
    only = SiteData(some(3), some(0), RUN, 4, local_test=own)
    assert not list(only.ordered(only.test, 2))
    assert [labels.tolist() for _, labels in only.ordered(own, 2)] == [[0, 1]]
    assert SiteData(some(3), test, RUN, 4).local_test is None


@pytest.mark.parametrize(("room", "moved"), [(15, [3, 4, 8]), (14, [])])
def test_an_own_test_set_is_placed_with_the_others(
    room: int, moved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def move(self: Examples, _: torch.device) -> Examples:
        done.append(len(self))
        return self

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * room * some(1).nbytes, 1 << 30))
    monkeypatch.setattr(Examples, "on", move)
    data = SiteData(some(8), some(4), RUN, 4, local_test=some(3)).placed(torch.device("cuda"))
    assert sorted(done) == moved
    assert data.local_test is not None
    done.clear()
    assert SiteData(some(8), some(4), RUN, 4).placed(torch.device("cuda")).local_test is None
    assert sorted(done) == [4, 8]


@pytest.mark.parametrize(
    ("train", "test", "own", "said"),
    [
        (some(0), some(3), None, "no training examples"),
        (some(3), some(0), None, "no test examples"),
        (some(3), some(3), some(0), "no local test examples"),
        (some(8, classes=5), some(3), None, "labels are 0 to 4, but the run has 4 classes; expected 0 to 3"),
        (some(3), some(8, classes=6), None, "labels are 0 to 5"),
        (Examples(some(2).pixels(), torch.tensor([0.0, math.nan])), some(3), None, "1 of 2 labels are NaN"),
        (some(3), some(3), some(8, classes=6), "labels are 0 to 5"),
        (Examples(some(3).pixels(), torch.tensor([0, -1, 2])), some(3), None, "labels are -1 to 2"),
        (GREY, some(3), None, r"\[1, 6, 5\].*\[3, 6, 5\]"),
        (some(3), some(3), GREY, r"\[1, 6, 5\].*\[3, 6, 5\]"),
    ],
)
def test_data_that_cannot_be_used_are_refused(train: Examples, test: Examples, own: Examples | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        SiteData(train, test, RUN, 4, local_test=own)


def test_an_evaluators_data_have_nothing_to_train_on() -> None:
    data = SiteData.for_scoring(some(5), RUN, 4)
    assert (len(data.train), len(data.test), data.label_frequencies().tolist()) == (0, 5, [0.0] * 4)
    assert not list(data.ordered(data.train, 2))
    with pytest.raises(DataError, match="only test examples"):
        data.batches(2, rng())
    with pytest.raises(DataError, match="no test examples"):
        SiteData.for_scoring(some(0), RUN, 4)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(2, 6, 5), torch.zeros(2).long(), r"shape \[2, 6, 5\]"),
        (torch.zeros(2, 3, 6, 5).double(), torch.zeros(2).long(), "float64"),
        (torch.zeros(2, 3, 6, 5), torch.zeros(3).long(), r"shape \[3\]; expected one for each of 2"),
    ],
)
def test_examples_have_one_shape_and_dtype(images: Tensor, labels: Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Examples(images, labels)


@pytest.mark.parametrize("scale", [1, 255])
def test_contrast_is_how_far_two_images_typically_are_apart(scale: int) -> None:
    levels = torch.tensor([0.0, 0.2, 0.0, 0.2, 0.2])  # of whole images: three pairs of four differ by 0.2
    images = levels.reshape(-1, 1, 1, 1).expand(5, 1, 2, 2)
    given = images.contiguous() if scale == 1 else (images * 255).round().to(torch.uint8)
    assert Examples(given, torch.zeros(5, dtype=torch.int64)).contrast() == pytest.approx(0.2)


def test_contrast_and_fingerprints() -> None:
    alike = Examples(torch.full((600, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(600) % 3)
    assert alike.contrast() == 0.0
    assert alike.take(torch.tensor([0])).contrast() == math.inf
    mostly = Examples(
        torch.cat([alike.pixels(), torch.zeros(200, 1, 2, 2, dtype=torch.uint8)]), torch.zeros(800).long()
    )
    assert mostly.contrast() == 0.0
    assert some(6).fingerprint() == some(6).fingerprint()
    assert len({some(6).fingerprint(), some(6, seed=1).fingerprint(), of_patients().fingerprint()}) == 3
    assert some(6).fingerprint() != some(5).fingerprint()


def test_a_part_is_held_out_of_training_and_is_the_same_each_time() -> None:
    data = site(count=40)  # ten examples of each of four classes
    rest, held_out = data.held_out(0.2)
    assert held_out.labels.bincount().tolist() == [2] * 4
    assert rest.train.labels.bincount().tolist() == [8] * 4
    both = torch.cat([rest.train.pixels(), held_out.pixels()]).flatten(1)
    assert sorted(both.tolist()) == sorted(data.train.pixels().flatten(1).tolist())
    assert (rest.test, rest.classes) == (data.test, data.classes)
    again, held_again = data.held_out(0.2)
    assert again.train is rest.train  # with its normalised copy: a fit in every round asks for it
    assert held_again is held_out
    other, _ = site(count=40).held_out(0.2)
    assert torch.equal(other.train.pixels(), rest.train.pixels())
    assert len(data.held_out(0.5)[1]) == 20
    few = site(count=7)
    assert [len(part) for part in (few.held_out(0.2)[0].train, few.held_out(0.2)[1])] == [7, 0]


# Units: whose examples they are


def of_patients() -> Examples:
    return Examples(some(6).pixels(), some(6).labels, torch.tensor([3, 0, 3, 1, 1, 0]))


def test_units_stay_with_their_examples() -> None:
    examples = of_patients()
    taken = examples.take(torch.tensor([2, 3, 0])).units
    assert taken is not None
    assert taken.tolist() == [3, 1, 3]
    moved = examples.on(META)
    assert {moved.pixels().device, moved.labels.device} == {META}
    assert examples.on(META) is moved
    assert moved.units is examples.units  # on the CPU, where they are drawn
    assert some(6).take(torch.tensor([1])).units is None
    for units in (torch.zeros(5, dtype=torch.int64), torch.zeros(6)):
        with pytest.raises(DataError):
            Examples(some(6).pixels(), some(6).labels, units)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_examples_by_their_rows_are_those_of_an_epoch(augment: Augment) -> None:
    data, rows = site(), torch.tensor([7, 1, 4])
    moves = None if augment == "none" else AUGMENTATIONS[augment].draw(3, rng())
    images, labels = data.at(rows, augment, moves)
    assert torch.equal(labels, data.train.labels[rows])
    plain = data.train.normalised(RUN)[rows]
    assert images.shape == plain.shape
    assert torch.equal(images, plain) is (augment == "none")


@pytest.mark.parametrize(("shape", "batch"), [((3, 32, 32), 128), ((3, 224, 224), 111), ((1, 4096, 4096), 1)])
def test_scores_take_fewer_images_at_a_time_the_larger_they_are(shape: tuple[int, int, int], batch: int) -> None:
    one = Examples(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert SiteData(one, one, Input(shape=shape), 2).scoring_batch == batch
