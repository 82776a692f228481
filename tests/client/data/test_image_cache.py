"""Decoded images on a disk: the same examples as in memory, whatever ends a process, and nothing twice."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.support.image_files import classes, input_, save, settings

from protofed.client.data import image_cache
from protofed.client.data.decoding_processes import decode_onto
from protofed.client.data.image_cache import ImageCache, clear_cache, list_caches
from protofed.client.data.pictures import FilePicture
from protofed.client.data.reading import Reading, read_images
from protofed.client.data.site import load_simulation, load_site
from protofed.common.config.settings import Cache
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

GREY = input_((1, 6, 5), fit="stretch")
RUN = ("mel", "nv")


def cache(folder: Path, input_: Input = GREY, **more: Any) -> ImageCache:
    return ImageCache(Cache(folder=folder, processes=1, **more), input_)


def pictures(folder: Path, count: int, *, deep: Sequence[int] = ()) -> list[FilePicture]:
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 65536 if number in deep else 256, (7, 8)) for number in range(count)]
    kinds = [np.uint16 if number in deep else np.uint8 for number in range(count)]
    return [
        FilePicture(save(folder / f"{number:03}.png", pixels.astype(kind)))
        for number, (pixels, kind) in enumerate(zip(made, kinds, strict=True))
    ]


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are decoded from now on: in this process, as the others have their own memory."""
    names, real = list[str](), decode_onto

    def noted(folder: Path, input_: Input, chunks: Any, processes: int) -> Any:
        names.extend(picture.path.name for chunk in chunks for _, picture, _ in chunk)
        return real(folder, input_, chunks, processes)

    monkeypatch.setattr(image_cache, "decode_onto", noted)
    return names


@pytest.mark.parametrize("deep", [(), (3,), range(9)], ids=["8 bits", "mixed", "16 bits"])
def test_what_is_mapped_is_what_memory_would_hold(deep: Sequence[int], tmp_path: Path) -> None:
    some = pictures(tmp_path / "in", 9, deep=deep)
    (tmp_path / "in" / "004.png").write_bytes(b"Doe")
    here, there = (read_images(some, GREY, each) for each in (None, cache(tmp_path / "cache")))
    assert there.images.dtype == here.images.dtype == (torch.uint16 if deep else torch.uint8)
    assert there.reasons == here.reasons
    assert [row < 0 for row in there.rows] == [number == 4 for number in range(9)]
    for one, other in zip(here.rows, there.rows, strict=True):
        if one >= 0:
            assert torch.equal(here.images[one].view(torch.int8), there.images[other].view(torch.int8))


def test_a_second_time_nothing_is_decoded_and_of_changed_files_those_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = pictures(tmp_path / "in", 5)
    first = cache(tmp_path / "cache").prepare(some)
    names = decoded(monkeypatch)
    again = cache(tmp_path / "cache").prepare(some)
    assert (names, again.rows.tolist()) == ([], first.rows.tolist())
    save(some[2][0], np.full((7, 8), 200, np.uint8))
    os.utime(some[3][0], (1, 1))  # touched: its content is the same
    some[4][0].rename(tmp_path / "in" / "new.png")
    moved = [*some[:4], FilePicture(tmp_path / "in" / "new.png")]
    changed = cache(tmp_path / "cache").prepare(moved)
    assert names == ["002.png"]
    assert (changed.images.open()[changed.rows[2]] == 200).all()
    assert [*changed.rows[:2], *changed.rows[3:]] == [*first.rows[:2], *first.rows[3:]]


KILLED = """
import os, signal, sys
from pathlib import Path
from protofed.client.data import image_cache
from protofed.client.data.pictures import FilePicture
from protofed.common.config.settings import Cache
from protofed.common.config.tables import Input

if __name__ == "__main__":
    folder, files, after, where = Path(sys.argv[1]), sorted(Path(sys.argv[2]).iterdir()), int(sys.argv[3]), sys.argv[4]
    image_cache.CHUNK, image_cache.COMMIT_BYTES = 2, 60
    calls, real = 0, getattr(image_cache._Builder, where)

    def ends(self, *arguments):
        global calls
        calls += 1
        if calls > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    setattr(image_cache._Builder, where, ends)
    settings = Cache(folder=folder, processes=1)
    cache = image_cache.ImageCache(settings, Input(shape=(1, 6, 5), fit="stretch"), lambda done, total: None)
    cache.prepare([FilePicture(path) for path in files])
"""


@pytest.mark.parametrize(
    ("where", "after"), [("build", 0), ("_run", 0), ("_commit", 0), ("_commit", 1), ("_commit", 3)]
)
def test_a_build_that_was_killed_ends_as_any_other(where: str, after: int, tmp_path: Path) -> None:
    some = pictures(tmp_path / "in", 9, deep=(3,))
    whole = cache(tmp_path / "whole").prepare(some)
    (tmp_path / "script.py").write_text(KILLED)
    command = list(
        map(str, [sys.executable, *(tmp_path / name for name in ("script.py", "cache", "in")), after, where])
    )
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    later = cache(tmp_path / "cache").prepare(some)
    assert later.rows.tolist() == whole.rows.tolist()
    assert np.array_equal(later.images.open(), whole.images.open())


def test_what_took_long_is_entered_however_small_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "CHUNK", 2)
    monkeypatch.setattr(image_cache, "COMMIT_S", 0)
    entered = list[int | None]()
    settings = Cache(folder=tmp_path / "cache", processes=1)
    counting = ImageCache(settings, GREY, lambda *_: entered.append(list_caches(tmp_path / "cache")[0].images))
    counting.prepare(pictures(tmp_path / "in", 6))
    assert entered == [2, 4, 6]


def test_a_disk_without_the_room_is_named_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = pictures(tmp_path / "in", 5)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 149))
        with pytest.raises(DataError, match=r"need 0.0 GB more in .*, whose disk has 0.0 GB free.*cache\.folder"):
            cache(tmp_path / "cache").prepare(some)
        assert not (cache(tmp_path / "cache").folder / "8.bin").stat().st_size  # not a byte
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 150))
        assert len(cache(tmp_path / "cache").prepare(some).rows) == 5


def test_a_disk_that_fills_up_meanwhile_keeps_what_was_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, some, of_run = tmp_path / "disk", pictures(tmp_path / "in", 40), input_((1, 200, 200), fit="stretch")
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=800k", "none", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("no disk of its own can be mounted here")
    try:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**9))
        monkeypatch.setattr(image_cache, "CHUNK", 2)
        monkeypatch.setattr(image_cache, "COMMIT_BYTES", 1)
        with pytest.raises(DataError, match=r"is full; what was decoded is kept.*cache\.folder"):
            cache(disk, of_run).prepare(some)
        (entry,) = list_caches(disk)
        assert 0 < (entry.images or 0) < 20
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_longest_unused_go_first_and_not_the_one_in_use(tmp_path: Path) -> None:
    some, folder = pictures(tmp_path / "in", 4), tmp_path / "cache"
    wide = [input_((1, 64, 64 + step), fit="stretch") for step in range(3)]
    for number, of_run in enumerate(wide[:2]):
        cache(folder, of_run).prepare(some)
        os.utime(cache(folder, of_run).folder / "used", (100 - number, 100 - number))
    each = max(entry.nbytes for entry in list_caches(folder))
    with capture_logs() as logs:
        cache(folder, wide[2], disk_gb=2.4 * each / 1e9).prepare(some)
    assert {entry.name for entry in list_caches(folder)} == {cache(folder, wide[n]).folder.name for n in (0, 2)}
    assert [entry["name"] for entry in logs if "longest" in entry["event"]] == [cache(folder, wide[1]).folder.name]
    with pytest.raises(DataError, match=r"need 0\.0 GB, and cache\.disk_gb allows 1e-06"):
        cache(folder, wide[1], disk_gb=1e-6).prepare(some)


def test_bytes_that_changed_on_the_disk_are_decoded_again(tmp_path: Path) -> None:
    some, of_run = pictures(tmp_path / "in", 5), cache(tmp_path / "cache")
    before = of_run.prepare(some)
    pixels = before.images.open().copy()
    with (of_run.folder / "8.bin").open("r+b") as file:
        file.seek(2 * 30 + 7)
        file.write(bytes([255 - int(pixels[2].flat[7])]))
    with capture_logs() as logs:
        after = cache(tmp_path / "cache").prepare(some)
    assert [entry["count"] for entry in logs if "damaged" in entry["event"]] == [1]
    assert np.array_equal(after.images.open()[after.rows], pixels[before.rows])


def test_it_is_for_its_owner_alone_and_names_no_file(tmp_path: Path) -> None:
    some, of_run = pictures(tmp_path / "in" / "Doe^Jane", 3), cache(tmp_path / "cache")
    of_run.prepare(some)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert (modes, stat.S_IMODE(of_run.folder.stat().st_mode)) == ({0o600}, 0o700)
    assert all(b"Doe" not in path.read_bytes() for path in of_run.folder.iterdir())
    assert (of_run.folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [of_run.folder.name]  # nothing of ours beside it


def test_what_is_listed_can_be_cleared_but_not_under_a_build(tmp_path: Path) -> None:
    of_run = cache(tmp_path / "cache")
    of_run.prepare(pictures(tmp_path / "in", 3))
    (entry,) = list_caches(tmp_path / "cache")
    assert (entry.name, entry.images, entry.preparation["input"]["fit"]) == (of_run.folder.name, 3, "stretch")
    with image_cache._locked(of_run.folder, wait=False):
        assert not clear_cache(tmp_path / "cache", entry.name)
    assert clear_cache(tmp_path / "cache", entry.name)
    assert (list_caches(tmp_path / "cache"), list_caches(tmp_path / "none")) == ([], [])


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    of_run, other = cache(tmp_path / "cache"), tmp_path / "cache" / "mine"
    of_run.prepare(pictures(tmp_path / "in", 3))
    other.mkdir()
    for path in (other / "preparation.json", of_run.folder / "notes.txt"):
        path.write_text("{}")
    assert [entry.name for entry in list_caches(tmp_path / "cache")] == [of_run.folder.name]
    assert clear_cache(tmp_path / "cache", of_run.folder.name)
    assert [path.name for path in of_run.folder.iterdir()] == ["notes.txt"]
    assert len(of_run.prepare(pictures(tmp_path / "in", 3)).rows) == 3  # and it is made anew


def test_who_waited_while_the_folder_was_removed_begins_anew(tmp_path: Path) -> None:
    of_run = cache(tmp_path / "cache")
    of_run.prepare(some := pictures(tmp_path / "in", 3))
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        with image_cache._locked(of_run.folder, wait=False):
            waiting = pool.submit(of_run.prepare, some)
            while not any("waiting for it" in entry["event"] for entry in logs):
                time.sleep(0.01)
            shutil.rmtree(of_run.folder)
        assert (waiting.result().rows >= 0).all()
    assert [entry.images for entry in list_caches(tmp_path / "cache")] == [3]


def test_an_index_that_is_none_is_named_with_what_to_do(tmp_path: Path) -> None:
    of_run = cache(tmp_path / "cache")
    of_run.prepare(pictures(tmp_path / "in", 3))
    (of_run.folder / "index.sqlite").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(DataError, match="protofed client cache clear"):
        cache(tmp_path / "cache").prepare(pictures(tmp_path / "in", 3))
    (entry,) = list_caches(tmp_path / "cache")
    assert (entry.images, clear_cache(tmp_path / "cache", entry.name)) == (None, True)  # as the message says


@pytest.mark.parametrize("noisy", [False, True])
def test_a_site_has_the_same_batches_from_the_disk(noisy: bool, tmp_path: Path) -> None:
    root = classes(tmp_path / "in", {"mel": 25, "nv": 40})
    data = settings("folder", root, local_test_fraction=0.3)
    of_run = input_((3, 4, 4))
    sites = [
        load_site(data, 0, of_run, 2, RUN, Reading(Cache(folder=tmp_path / "cache", memory_mb=mb)), noisy=noisy)
        for mb in (10, 0)
    ]
    assert [site.train.source is None for site in sites] == [True, False]
    here, there = sites
    assert here.local_test is not None
    assert there.local_test is not None
    for one, other in ((here.train, there.train), (here.local_test, there.local_test)):
        assert one.fingerprint() == other.fingerprint()
        assert list(one.digests()) == list(other.digests())
        assert one.contrast() == other.contrast()
    for augmentation in ("none", "crop-flip"):
        epochs = [list(site.batches(4, torch.Generator().manual_seed(1), augmentation)) for site in sites]
        for (images, labels), (same, alike) in zip(*epochs, strict=True):
            assert torch.equal(images, same)
            assert torch.equal(labels, alike)
    ordered = [torch.cat([images for images, _ in site.ordered(site.train, 7)]) for site in sites]
    assert torch.equal(*ordered)
    assert torch.equal(here.at(torch.tensor([3, 1]))[0], there.at(torch.tensor([3, 1]))[0])


def test_sites_of_a_simulation_are_views_of_one_array(tmp_path: Path) -> None:
    root = classes(tmp_path / "in", {"mel": 60, "nv": 60})
    data = settings("folder", root, partition={"kind": "dirichlet", "sites": 3, "beta": 1.0})
    for memory_mb in (10, 0):
        reading = Reading(Cache(folder=tmp_path / "cache", memory_mb=memory_mb))
        sites, evaluator = load_simulation(data, input_((3, 4, 4)), 2, RUN, reading)
        arrays = {id(each.images) for site in sites for each in (site.train, site.test)} | {id(evaluator.test.images)}
        assert len(arrays) == 1


def test_the_rows_of_a_batch_are_asked_for_together_even_after_the_folder_was_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_images(pictures(tmp_path / "in", 9), GREY, cache(tmp_path / "cache"))
    examples = read.examples(np.arange(9), torch.zeros(9, dtype=torch.int64))
    whole, asked = examples.pixels().clone(), list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: asked.append(call[1] // call[2]))
    rows = torch.tensor([7, 2, 5])
    assert torch.equal(examples.read(rows), whole[rows])
    assert asked == [7, 2, 5]
    clear_cache(tmp_path / "cache", next((tmp_path / "cache").iterdir()).name)
    assert torch.equal(examples.read(rows), whole[rows])
