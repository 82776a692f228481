"""The data of sites in a block of memory: what comes out is what went in, and no copy of it."""

from __future__ import annotations

from mmap import mmap

import pytest
import torch

from protofed.client.data.examples import Examples
from protofed.client.data.shared import Contents, Shared, share
from protofed.client.data.site_data import SiteData
from protofed.common.config.tables import Input

INPUT = Input(shape=(1, 2, 3), mean=(0.3,), std=(0.2,))


def examples(count: int, seed: int, *, floats: bool = False) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 1, 2, 3), dtype=torch.uint8, generator=rng)
    return Examples(images / 255 if floats else images, torch.randint(4, (count,), generator=rng))


@pytest.fixture
def sites() -> dict[str, SiteData]:
    test, local = examples(5, 0), examples(1, 1)
    return {
        "evaluator": SiteData.for_scoring(test, INPUT, 4),
        "site-1": SiteData(examples(3, 2), test, INPUT, 4, local_test=local),
        "site-2": SiteData(examples(7, 3, floats=True), test, INPUT, 4),
    }


def held(sites: dict[str, SiteData], *, augmented: bool = False) -> tuple[Shared, mmap, Contents]:
    contents, memory = share(sites, lambda nbytes: mmap(-1, nbytes), augmented=augmented)
    sent = Contents.model_validate_json(contents.model_dump_json())
    return Shared(sent, memory, INPUT, 4), memory, contents


def test_sites_come_out_as_they_went_in(sites: dict[str, SiteData]) -> None:
    shared, _, _ = held(sites)
    for name, site in sites.items():
        out = shared.site(name)
        assert (out.scores_only, out.classes, out.input) == (site.scores_only, 4, INPUT)
        assert (out.local_test is None) == (site.local_test is None)
        for one, other in ((out.train, site.train), (out.test, site.test), (out.local_test, site.local_test)):
            if one is not None and other is not None:
                assert torch.equal(one.pixels(), other.pixels())
                assert torch.equal(one.labels, other.labels)
                assert torch.equal(one.normalised(INPUT), other.normalised(INPUT))


def test_units_and_a_site_without_a_test_set_come_out_too() -> None:
    out = held({"site-1": SiteData(examples(2, 4), examples(0, 5), INPUT, 4, own_test=True)})[0].site("site-1")
    assert (out.own_test, len(out.test), out.local_test) == (True, 0, None)
    units, some = torch.tensor([4, 4, 0]), examples(3, 2)
    site = SiteData(Examples(some.pixels(), some.labels, units), examples(5, 0), INPUT, 4)
    out = held({"site-1": site})[0].site("site-1")
    assert out.train.units is not None
    assert out.train.units.tolist() == [4, 4, 0]
    assert out.test.units is None
    assert out.train.fingerprint() == site.train.fingerprint()


def test_a_common_test_set_and_normalised_images_are_there_once(sites: dict[str, SiteData]) -> None:
    shared, memory, contents = held(sites)
    assert shared.site("site-1").test is shared.site("site-2").test
    assert len(contents.examples) == 5
    before = bytes(memory)
    site = shared.site("site-2")
    assert (
        site.placed(torch.device("cpu")).train.normalised(INPUT).data_ptr() == site.train.normalised(INPUT).data_ptr()
    )
    site.train.normalised(INPUT).zero_()  # it is the block's
    assert bytes(memory) != before


def test_images_that_are_augmented_are_not_normalised_before(sites: dict[str, SiteData]) -> None:
    _, _, contents = held(sites, augmented=True)
    kept = {
        name: contents.arrays[contents.examples[entry.train].array].normalised is not None
        for name, entry in contents.sites.items()
    }
    assert kept == {"evaluator": False, "site-1": False, "site-2": False}
    assert contents.arrays[contents.examples[contents.sites["site-1"].test].array].normalised is not None
