"""Images to be classified are what a site would have trained on: the same files, frames, volumes, tiles and pixels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.image_files import decoded, dicom, dicom_frames, input_, pages, ramp, save, settings
from torch import Tensor

from protofed.client.data.decoding import decode, in_unit
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.image_files import scan
from protofed.common import plugins
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, DataError
from protofed.deploy.export.images import Images, ImageSource, read_images

RULES = ["one", "middle", "max", "mean", "all", {"every": 2}]
AXIAL = [1, 0, 0, 0, 1, 0]
STACK = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) * 10  # [slices, H, W]


def rule(frames: Any, **more: Any) -> Input:
    return input_((1, 3, 2), frames=frames, **more)


def series(folder: Path, stack: NDArray[np.uint8] = STACK) -> Path:
    """A file for each slice, whose names are in the reverse order of the slices."""
    folder.mkdir(parents=True)
    for z, plane in enumerate(stack):
        place: dict[str, Any] = {"ImageOrientationPatient": AXIAL, "ImagePositionPatient": [0, 0, z]}
        dicom(folder / f"{99 - z}", plane, 8, **place)
    return folder


def nifti(path: Path) -> None:
    make: Any = nibabel.Nifti1Image
    make(STACK.T, np.eye(4)).to_filename(path)


def names(images: Images) -> list[str]:
    return [images.name(index) for index in range(len(images))]


def pixels_or_reason(images: Images, index: int) -> object:
    try:
        return images.read(index).tolist()
    except UnreadableImageError as error:
        return str(error)


def of_site(path: Path, input_: Input, part: str) -> object:
    try:
        return in_unit(decode(path, input_, part)).tolist()
    except UnreadableImageError as error:
        return str(error)


@pytest.mark.parametrize("frames", RULES, ids=str)
@pytest.mark.parametrize("by_folder", [False, True])
def test_they_are_the_images_that_a_site_has_of_these_files(frames: Any, by_folder: bool, tmp_path: Path) -> None:
    """The same names, pixels and reasons, whatever the rule; a name may end in anything but a suffix of no image."""
    series(tmp_path / "ct" / "P1")
    for folder in ("ct/P2", "mr/P3", "mr/P5"):
        (tmp_path / folder).mkdir(parents=True)
    dicom_frames(tmp_path / "ct" / "P2" / "1.2.840.7", STACK, 8)
    nifti(tmp_path / "mr" / "P3" / "t1.nii.gz")
    pages(tmp_path / "mr" / "P4" / "scan.tif", STACK)
    (tmp_path / "mr" / "P5" / "odd.xyz").write_bytes(b"no image, which the file's name does not say")
    (tmp_path / "mr" / "P5" / "notes.txt").write_bytes(b"no image, which its name says")
    data = settings("folder", tmp_path, series="folder" if by_folder else None)
    items = scan(data, ("ct", "mr"), 2, rule(frames).frames).items
    images = read_images(ImageSource(tmp_path, series=by_folder), rule(frames))
    assert names(images) == [item.name for item in items]
    assert {name.partition("/")[0] for name in names(images)} == {"ct", "mr"}
    for index, item in enumerate(items):
        assert pixels_or_reason(images, index) == of_site(item.path, rule(frames), item.part)


def test_a_folder_is_a_series_where_that_is_said_and_so_is_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = series(tmp_path / "new scan")
    assert names(read_images(ImageSource(folder), rule("all"))) == ["96", "97", "98", "99"]
    found = read_images(ImageSource(folder, series=True), rule("all"))
    assert names(found) == [f"new scan, frame {number}" for number in range(1, 5)]
    np.testing.assert_allclose(np.concatenate([found.read(i) for i in range(4)]), STACK / 255, atol=1e-5)
    monkeypatch.chdir(folder)
    assert names(read_images(ImageSource(Path(), series=True), rule("middle"))) == ["new scan"]
    with pytest.raises(UnreadableImageError, match="a series of 4 DICOM files; expected one image a file"):
        read_images(ImageSource(folder, series=True), rule("one")).read(0)


def test_one_file_may_be_given(tmp_path: Path) -> None:
    path = dicom_frames(tmp_path / "scan.dcm", STACK, 8)
    found = read_images(ImageSource(path), rule({"every": 3}))
    assert names(found) == ["scan.dcm, frame 1", "scan.dcm, frame 4"]
    np.testing.assert_allclose(found.read(1)[0], STACK[3] / 255, atol=1e-5)


def listed(folder: Path, text: str) -> Path:
    (folder / "new.csv").write_text(text)
    return folder / "new.csv"


def test_a_list_names_files_series_and_tiles_in_its_order_and_needs_no_label(tmp_path: Path) -> None:
    large = ramp(40, 40, 1)
    save(tmp_path / "more" / "slide.png", large)
    series(tmp_path / "ct")
    tiles = listed(tmp_path, "path;x;y;split;group\nslide;8;16;new;\nmore/slide.png;0;0;;P1\n")
    found = read_images(ImageSource(tiles, tile_size=8), input_((1, 8, 8)))
    assert names(found) == ["slide, tile 8,16,8,8", "more/slide.png, tile 0,0,8,8"]
    np.testing.assert_array_equal(found.read(0)[0], in_unit(large[16:24, 8:16]))
    paths = listed(tmp_path, "path\nct\nslide\nnowhere.png\n")
    found = read_images(ImageSource(paths), rule("all"))
    assert names(found) == [*(f"ct, frame {number}" for number in range(1, 5)), "slide", "nowhere.png"]
    with pytest.raises(UnreadableImageError, match="no such file"):
        found.read(5)


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("file\na.png\n", {}, "row 1: expected one column 'path' in the heading$"),
        ("path,x\na.png,1\n", {"tile_size": 8}, "row 1: expected one column 'y' in the heading, for tiles"),
        ("path,x,y\n,1,1\n", {"tile_size": 8}, "row 2 has no path; expected"),
        ("path,x,y\na.png,1,1\na.png,9,9\n", {}, "row 3 has the path of row 2.*Tiles of one image need a tile size"),
        ("path\ntwice.png\n", {}, "row 2: several files below its folder have this name; expected one"),
        ("path\n../a.png\n", {}, "row 2: its path leads out of the manifest's folder"),
        ("path\n", {}, "has no images"),
    ],
)
def test_a_list_that_is_wrong_is_refused_by_its_row(text: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder / "twice.png")
    with pytest.raises(DataError, match=said):
        read_images(ImageSource(listed(tmp_path, text), **more), rule("one"))


def test_an_option_of_another_source_is_refused(tmp_path: Path) -> None:
    for source in (listed(tmp_path, "path\n"), save(tmp_path / "a.png"), tmp_path / "some.npz"):
        with pytest.raises(ConfigError, match="--series is for a folder"):
            read_images(ImageSource(source, series=True), rule("one"))
    for source in (tmp_path, tmp_path / "a.png", tmp_path / "some.npz"):
        with pytest.raises(ConfigError, match=r"--tile-size is for a \.csv with columns path, x and y"):
            read_images(ImageSource(source, tile_size=8), rule("one"))


def test_a_library_that_a_file_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nifti(tmp_path / "a.nii")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(DataError, match=r"NIfTI files need nibabel.*\[nifti\]"):
        read_images(ImageSource(tmp_path), rule("all"))
    with pytest.raises(DataError, match=r"NIfTI files need nibabel.*\[nifti\]"):
        read_images(ImageSource(tmp_path), rule("middle")).read(0)


class Halved:
    """A plug-in."""

    def __call__(self, image: Tensor) -> Tensor:
        return image // 2


PLUGIN = f"{__name__}:Halved"


def transforms(*names: str) -> Sequence[dict[str, Any]]:
    return [{"transform": name} for name in names]


def test_a_runs_transforms_prepare_files_and_not_arrays(tmp_path: Path) -> None:
    image = save(tmp_path / "a.png", STACK[3])
    flat = rule("one", prepare=[{"transform": "monai/ScaleIntensity", "minv": 0.5, "maxv": 1.0}])
    found = read_images(ImageSource(image), flat).read(0)
    np.testing.assert_array_equal(found, decoded(image, flat))
    assert found.min() == pytest.approx(0.5, abs=1e-4)
    for larger in (1, 2):
        np.savez(tmp_path / "a.npz", images=STACK.repeat(larger, axis=1))
        assert read_images(ImageSource(tmp_path / "a.npz"), flat).read(0).min() < 0.1


def test_code_that_prepares_images_runs_only_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_allowed", set())
    save(tmp_path / "a.png", STACK[3])
    halved = rule("one", prepare=transforms(PLUGIN))
    with pytest.raises(ConfigError, match=f"prepared by the code {PLUGIN}.*add --allow-plugin {PLUGIN}"):
        read_images(ImageSource(tmp_path), halved)
    found = read_images(ImageSource(tmp_path), halved, frozenset({PLUGIN})).read(0)
    np.testing.assert_array_equal(found[0], in_unit(STACK[3] // 2))


def test_what_prepares_images_is_missed_before_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", STACK[3])
    smooth = rule("one", prepare=transforms("monai/MedianSmooth"))
    monkeypatch.setitem(sys.modules, "monai.transforms", None)
    with pytest.raises(ConfigError, match=r"'monai/MedianSmooth' needs its library.*\[monai\]"):
        read_images(ImageSource(tmp_path), smooth)
    monkeypatch.setitem(sys.modules, "protofed.client.data.preparation", None)
    with pytest.raises(ConfigError, match=r"prepared by monai/MedianSmooth, and PyTorch is not installed.*\[client\]"):
        read_images(ImageSource(tmp_path), smooth)
