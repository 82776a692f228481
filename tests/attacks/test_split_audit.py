"""From the files on disk, nothing more is told of a unit than the accountant says; by the split without noise it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.attacks.split_audit import CLIP, SETTINGS, Setting, World, audit, lower_bound, write

IDS = [setting.name for setting in SETTINGS]
MOVED = 1 + 1e-3  # C: float32 rounds


def test_the_bound_by_hand() -> None:
    apart = lower_bound(np.zeros(2000), np.ones(2000))
    # Of 1000 answers none is wrong: ln((0.025^(1/1000) - 1e-5) / (1 - 0.025^(1/1000)))
    least = 0.025 ** (1 / 1000)
    assert apart == pytest.approx(np.log((least - 1e-5) / (1 - least)), abs=1e-6)
    draw = np.random.default_rng(0)
    assert lower_bound(draw.normal(size=2000), draw.normal(size=2000)) < 0.3


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_a_unit_moves_the_sum_by_c_and_the_bound_stays_below_epsilon(setting: Setting, tmp_path: Path) -> None:
    found = audit(setting, 600, tmp_path)
    assert found.moved <= MOVED
    assert found.bound < found.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_the_same_of_many_fits(setting: Setting, tmp_path: Path) -> None:
    found = audit(setting, 20_000, tmp_path)
    assert found.bound < found.epsilon


@pytest.mark.parametrize("unit", ["image", "patient"])
def test_the_split_of_runs_without_noise_would_be_found_out(unit: str, tmp_path: Path) -> None:
    found = audit(Setting(unit, by_unit=False), 2000, tmp_path)
    assert found.moved > 3
    assert found.bound > found.epsilon


def test_noise_that_is_weak_is_seen_so_the_audit_could_find_more(tmp_path: Path) -> None:
    assert audit(Setting(noise=0.5), 2000, tmp_path).bound > 2.0


@pytest.mark.parametrize("setting", [Setting(), Setting("patient", noise=1.0, rate=0.2)], ids=lambda s: s.name)
def test_the_sums_of_the_audit_are_those_of_a_whole_fit(setting: Setting, tmp_path: Path) -> None:
    write(tmp_path, setting, None)
    world = World.of(tmp_path, setting)
    short, whole = world.sums(7), world.fitted(7)
    assert float((short - whole).norm() / short.norm()) < 0.01
    assert float((short - world.sums(8)).norm() / short.norm()) > 0.1  # another secret's


def test_a_deep_image_moves_the_others_by_roundings_alone(tmp_path: Path) -> None:
    """All become 16 bits with it: what it moves beside its own gradient is no part of a unit's."""
    setting = Setting(held_out=0.0)
    write(tmp_path, setting, None)
    before = World.of(tmp_path, setting)
    deep = np.random.default_rng(1).integers(0, 2**16, (8, 8)).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "train" / "class-0" / "P0000300_0.tif")
    after = World.of(tmp_path, setting)
    assert len(after.clipped) == len(before.clipped) + 1
    place = sum(len(list((tmp_path / "train" / f"class-{c}").iterdir())) for c in range(1)) - 1
    others = torch.cat((after.clipped[:place], after.clipped[place + 1 :]))
    assert float((others.sum(0) - before.clipped.sum(0)).norm()) < 1e-4 * CLIP


def test_nothing_is_found_where_the_unit_is_held_out(tmp_path: Path) -> None:
    setting = Setting(held_out=0.5, units=40)
    write(tmp_path / "without", setting, None)
    without, seen = World.of(tmp_path / "without", setting), set[int]()
    for more in range(8):
        write(tmp_path / f"{more}", setting, more)
        world = World.of(tmp_path / f"{more}", setting)
        seen.add(len(world.clipped) - len(without.clipped))
        if len(world.clipped) == len(without.clipped):
            assert torch.equal(world.clipped, without.clipped)
    assert seen == {0, 1}
