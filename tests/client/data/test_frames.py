"""Of a file of several frames those count that the run's rule names, and all of them stay together."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from tests.support.image_files import classes, dicom, dicom_frames, input_, pages, ramp, save, settings
from tests.support.image_files import decoded as decode

from protofed.client.data import volumes
from protofed.client.data.decoding import list_parts
from protofed.client.data.file_entry import TooManyUnreadableError, UnreadableImageError
from protofed.client.data.grey_values import float_image
from protofed.client.data.image_files import Scan, scan
from protofed.client.data.site import load_site
from protofed.client.data.sources import infer_input, load
from protofed.common.config.tables import Frames, Input

RUN = ("mel", "nv")
# Four frames [2, 2] of 8 bits; no two are alike, and neither maximum nor mean is one of them.
FRAMES = np.array([[[0, 51], [102, 10]], [[51, 0], [0, 20]], [[204, 51], [0, 30]], [[0, 255], [51, 40]]], np.uint8)
EVERY_KIND = ("a.tif", "a.gif", "a.webp", "a.dcm")


def rule(frames: Any, **more: Any) -> Input:
    return input_((1, 2, 2), frames=frames, colours="convert", **more)


def made(path: Path, frames: NDArray[np.uint8] = FRAMES) -> Path:
    """A file of these grey frames; of WebP lossless, of GIF with a palette of shades."""
    if path.suffix == ".dcm":
        return dicom_frames(path, frames, 8)
    return pages(path, frames, **({"lossless": True} if path.suffix == ".webp" else {}))


def unit(path: Path, input_: Input, part: str = "") -> NDArray[np.float64]:
    """The one channel in 0..1, whatever the type."""
    pixels = decode(path, input_, part).squeeze(0)
    return pixels.astype(np.float64) / (255 if pixels.dtype == np.uint8 else 1)


def close(one: NDArray[Any], other: NDArray[Any], atol: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_each_rule_takes_its_frames(name: str, tmp_path: Path) -> None:
    path, expected = made(tmp_path / name), FRAMES / 255
    assert list_parts(path, "all") == ["frame 1", "frame 2", "frame 3", "frame 4"]
    assert list_parts(path, rule({"every": 3}).frames) == ["frame 1", "frame 4"]
    for number, frame in enumerate(expected, 1):
        close(unit(path, rule("all"), f"frame {number}"), frame)
    close(unit(path, rule("middle")), expected[2])
    close(unit(path, rule("max")), expected.max(0))
    close(unit(path, rule("mean")), expected.mean(0), 0.5 / 255 + 1e-5 if name == "a.webp" else 1e-5)  # WebP is in RGB


@pytest.mark.parametrize(("name", "said"), [("a.tif", "^4 frames or pages, expected one"), ("a.dcm", "several frames")])
@pytest.mark.parametrize("frames", ["one", "all", {"every": 2}])
def test_a_file_of_several_frames_is_no_single_image(frames: Any, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match=said):
        decode(made(tmp_path / name), rule(frames))


@pytest.mark.parametrize("frames", ["one", "middle", "max", "mean", "all", {"every": 9}])
def test_a_file_of_one_frame_is_that_frame_by_every_rule(frames: Any, tmp_path: Path) -> None:
    for name in EVERY_KIND:
        path = made(tmp_path / name, FRAMES[:1])
        assert list(list_parts(path, rule(frames).frames)) == [""]
        close(unit(path, rule(frames)), FRAMES[0] / 255)


def test_a_projection_is_of_values_after_the_window(tmp_path: Path) -> None:
    """The window cuts off 255 at 102: the mean of what is cut off is another one than what is cut off of the mean."""
    expected = (FRAMES.astype(float) / 102).clip(0, 1)
    for name in EVERY_KIND[:2]:
        path = made(tmp_path / name)
        close(unit(path, rule("mean", window=(51, 102))), expected.mean(0))
        close(unit(path, rule("max", window=(51, 102))), expected.max(0))
    path = made(tmp_path / "a.dcm")
    close(unit(path, rule("mean", window=(51, 102))), expected.mean(0))


def test_colours_are_projected_as_eight_bits(tmp_path: Path) -> None:
    frames = np.stack([np.full((2, 2, 3), shade, np.uint8) for shade in ([0, 9, 200], [255, 10, 100])])
    for path in (pages(tmp_path / "a.tif", frames), dicom_frames(tmp_path / "a.dcm", frames, 8)):
        found = {how: decode(path, input_((3, 2, 2), frames=how)) for how in ("max", "mean")}
        assert found["max"].dtype == found["mean"].dtype == np.uint8
        assert found["max"][:, 0, 0].tolist() == [255, 10, 200]
        assert found["mean"][:, 0, 0].tolist() == [128, 10, 150]  # halves to even, as NumPy rounds


def test_a_projection_holds_few_frames_at_a_time() -> None:
    alive = weakref.WeakValueDictionary[int, Any]()

    class Long:
        count, several = 100, ""

        def read(self, index: int) -> Any:
            assert len(alive) <= 2
            image = float_image(np.full((1, 1), index / 100, np.float32))
            alive[index] = image
            return image

    for how, expected in (("max", 0.99), ("mean", 0.495)):
        found = volumes.read_frame(Long(), rule(how).frames, None, None)
        assert found.getpixel((0, 0)) == pytest.approx(expected)


def test_frames_that_cannot_be_projected_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    path = tmp_path / "a.tif"
    Image.fromarray(ramp(2, 2, 1)).save(path, save_all=True, append_images=[Image.fromarray(ramp(2, 3, 1))])
    with pytest.raises(UnreadableImageError, match="several sizes or colours"):
        decode(path, rule("max"))
    monkeypatch.setattr(volumes, "MAX_FRAMES", 3)
    for how in ("middle", "max", "all"):
        with pytest.raises(UnreadableImageError, match="4 frames; expected 1 to 3"):
            decode(made(tmp_path / "b.tif"), rule(how))
    assert list(list_parts(tmp_path / "b.tif", "all")) == [""], "a header may claim any number"


def test_a_frame_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    for name in EVERY_KIND:
        with pytest.raises(UnreadableImageError, match="frame 5 of a file that has 4"):
            decode(made(tmp_path / name), rule("all"), "frame 5")
    with pytest.raises(ValueError, match="no part of a file"):
        decode(tmp_path / "a.tif", rule("all"), "slice 1")


def test_a_truncated_file_of_frames_is_unreadable_and_names_nobody(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a", FRAMES[0], 8, NumberOfFrames=4, PixelData=bytes(8))
    for frames, part in (("max", ""), ("all", "frame 4")):
        with pytest.raises(UnreadableImageError, match="truncated or damaged"):
            decode(path, rule(frames), part)


def test_a_grey_gif_stays_grey_and_a_coloured_one_stays_coloured(tmp_path: Path) -> None:
    exact = input_((1, 2, 2))
    grey = made(tmp_path / "a.gif")
    close(unit(grey, exact, "frame 3"), FRAMES[2] / 255)
    coloured = np.stack([np.full((2, 2, 3), shade, np.uint8) for shade in ([200, 9, 9], [7, 7, 7])])
    with pytest.raises(UnreadableImageError, match="RGB, and the run accepts grey"):
        decode(pages(tmp_path / "b.gif", coloured), exact, "frame 2")


def enhanced(path: Path, slopes: list[float], **more: Any) -> Path:
    """Frames of stored values 0 to 3, each with its own slope; they share a window of 0 to 8."""
    shared, window, own = Dataset(), Dataset(), []
    window.WindowCenter, window.WindowWidth, window.VOILUTFunction = 4, 8, "LINEAR_EXACT"
    shared.FrameVOILUTSequence = [window]
    for slope in slopes:
        rescale, group = Dataset(), Dataset()
        rescale.RescaleSlope, rescale.RescaleIntercept, rescale.RescaleType = slope, 0, "US"
        group.PixelValueTransformationSequence = [rescale]
        own.append(group)
    groups: dict[str, Any] = {"SharedFunctionalGroupsSequence": [shared], "PerFrameFunctionalGroupsSequence": own}
    return dicom_frames(path, np.tile(np.arange(4, dtype=np.uint16).reshape(1, 2, 2), (2, 1, 1)), **groups, **more)


def test_each_frame_of_an_enhanced_file_has_its_own_slope(tmp_path: Path) -> None:
    path, values = enhanced(tmp_path / "a", [1, 2]), np.arange(4).reshape(2, 2)
    close(unit(path, rule("all"), "frame 1"), values / 8)
    close(unit(path, rule("all"), "frame 2"), values / 4)
    close(unit(path, rule("mean")), values * 1.5 / 8)
    with pytest.raises(UnreadableImageError, match="not that of its functional groups"):
        decode(enhanced(tmp_path / "b", [1, 2, 3]), rule("max"))


def scanned(root: Path, frames: Frames, **more: Any) -> Scan:
    return scan(settings("folder", root, **more), RUN, len(RUN), frames)


def test_a_scan_lists_each_frame_and_the_file_is_their_group(tmp_path: Path) -> None:
    made(tmp_path / "mel" / "a.tif")
    save(tmp_path / "nv" / "b.png", ramp(2, 2, 1))
    (tmp_path / "nv" / "c.dcm").write_bytes(b"no image")
    found = scanned(tmp_path, "all")
    assert [(item.name, item.part, item.group, item.target) for item in found.items] == [
        *((f"mel/a.tif, frame {number}", f"frame {number}", "mel/a.tif", 0) for number in range(1, 5)),
        ("nv/b.png", "", "nv/b.png", 1),
        ("nv/c.dcm", "", "nv/c.dcm", 1),
    ]
    assert {item.path for item in found.items[:4]} == {tmp_path / "mel" / "a.tif"}
    assert [(item.name, item.group) for item in scanned(tmp_path, "middle").items] == [
        *(("mel/a.tif", None), ("nv/b.png", None), ("nv/c.dcm", None)),
    ]


def test_groups_of_the_data_stay_groups(tmp_path: Path) -> None:
    for name in ("P1_a", "P1_b", "P2_a"):
        made(tmp_path / "mel" / f"{name}.tif")
    assert {item.group for item in scanned(tmp_path, "all", group_pattern=r"(P\d)").items} == {"P1", "P2"}
    made(tmp_path / "nv" / "other.tif")
    found = scanned(tmp_path, "all", group_pattern=r"(P\d)")
    assert len(found.ungrouped) == 4, "a file without a patient is no patient of its own"


def test_no_header_is_read_where_a_file_gives_one_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "mel" / "a.tif")
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened"))
    for frames in ("one", "middle", "max", "mean"):
        assert len(scanned(tmp_path, frames).items) == 1


def stacks(root: Path, count: int) -> Path:
    """Files of three frames, whose shade is 3 * file + frame, in two classes."""
    for number in range(count):
        shades = 3 * number + np.arange(3, dtype=np.uint8).reshape(3, 1, 1)
        made(root / RUN[number % 2] / f"{number:02}.tif", np.broadcast_to(shades, (3, 2, 2)).astype(np.uint8))
    return root


@pytest.mark.parametrize("noisy", [False, True])
def test_frames_of_a_file_are_never_divided(noisy: bool, tmp_path: Path) -> None:
    data = settings("folder", stacks(tmp_path, 40), local_test_fraction=0.3)
    site = load_site(data, 0, rule("all"), 2, RUN, noisy=noisy)
    assert site.local_test is not None
    train, test = ([int(shade) // 3 for shade in part.pixels()[:, 0, 0, 0]] for part in (site.train, site.local_test))
    assert len(train) + len(test) == 120
    assert not set(train) & set(test)
    assert all((train + test).count(file) == 3 for file in range(40))
    if noisy:
        assert site.train.units is not None
        units = site.train.units.tolist()
        assert len(set(units)) == len(set(train)), "a file is one unit, whatever its frames"
        assert len(set(zip(units, train, strict=True))) == len(set(train))


def test_frames_that_cannot_be_read_are_named_by_their_part(tmp_path: Path) -> None:
    classes(tmp_path, {"nv": 20})
    dicom(tmp_path / "mel.dcm", FRAMES[0], 8, NumberOfFrames=2, PixelData=bytes(4)).rename(tmp_path / "nv" / "a.dcm")
    with pytest.raises(TooManyUnreadableError, match="2 × DICOM that is truncated") as caught:
        load(settings("folder", tmp_path), input_((3, 4, 4), frames="all", colours="convert"), RUN)
    assert [name for name, _ in caught.value.files] == ["nv/a.dcm, frame 1", "nv/a.dcm, frame 2"]


def test_without_a_run_the_middle_frame_tells_the_shape(tmp_path: Path) -> None:
    made(tmp_path / "nv" / "a.tif")
    found, _ = infer_input(settings("folder", tmp_path))
    assert (found.shape, found.frames) == ((1, 2, 2), "middle")
