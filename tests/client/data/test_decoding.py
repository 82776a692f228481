"""An image file becomes what the run wants, or is refused with a reason that names nothing of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from structlog.testing import capture_logs
from tests.support import tiff_files
from tests.support.image_files import GREY, RGB, STEP, input_, ramp, save
from tests.support.image_files import decoded as decode

from protofed.client.data import decoding
from protofed.client.data.file_entry import UnreadableImageError
from protofed.common.config.tables import Input
from protofed.common.errors import DataError


def first(pixels: NDArray[Any]) -> NDArray[Any]:
    """[H, W, channels] or [H, W] as [channels, H, W]."""
    return np.atleast_3d(pixels).transpose(2, 0, 1)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp"])
def test_eight_bits_stay_as_they_are(suffix: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"lossless": True} if suffix == "webp" else {}
    made = decode(save(tmp_path / f"a.{suffix}", **more), RGB)
    assert made.dtype == np.uint8
    assert made.flags["C_CONTIGUOUS"]
    assert np.array_equal(made, first(ramp()))
    os.rename(tmp_path / f"a.{suffix}", tmp_path / "IM000001")  # the content counts and not the name
    assert np.array_equal(decode(tmp_path / "IM000001", RGB), first(ramp()))


def test_a_window_becomes_zero_to_one_by_hand_whatever_holds_the_values(tmp_path: Path) -> None:
    values, window = np.array([[0, 900], [1000, 5000]], np.uint16), input_((1, 2, 2), window=(1000, 400))  # 800..1200
    inverted = tiff_files.write(tmp_path / "i.tif", 65535 - values, 16, tiff_files.WHITE_IS_ZERO)
    for path in (save(tmp_path / "a.png", values), inverted):
        np.testing.assert_allclose(decode(path, window)[0], [[0.0, 0.25], [0.5, 1.0]], atol=STEP)
    packed = tiff_files.write(tmp_path / "p.tif", values[:, :1] + 900, 12, tiff_files.BLACK_IS_ZERO)
    np.testing.assert_allclose(decode(packed, input_((1, 2, 1), window=(1000, 400)))[0], [[0.25], [1.0]], atol=STEP)
    long = tiff_files.write(tmp_path / "l.tif", np.array([[0, 3_000_000_000]], np.uint32), 32, tiff_files.BLACK_IS_ZERO)
    assert decode(long, input_((1, 1, 2), window=(1e5, 2e5)))[0, 0].tolist() == [0, 1]


def test_a_window_is_for_eight_bits_and_deep_grey_becomes_three_channels(tmp_path: Path) -> None:
    pixels = np.zeros((1, 1, 3), np.uint8)
    pixels[0, 0] = (0, 50, 150)
    made = decode(save(tmp_path / "a.png", pixels), input_((3, 1, 1), window=(100, 100)))
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[:, 0, 0], [0, 0, 1])
    made = decode(save(tmp_path / "a.png", np.full((4, 4), 13107, np.uint16)), input_((3, 4, 4), colours="convert"))
    assert made.shape == (3, 4, 4)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, 0.2, atol=STEP)


def test_floating_point_files_hold_zero_to_one_or_need_a_window_and_signed_values_need_one(tmp_path: Path) -> None:
    half = save(tmp_path / "a.tif", np.full((4, 4), 0.5, np.float32))
    np.testing.assert_allclose(decode(half, GREY), np.full((1, 4, 4), 0.5), atol=STEP)
    for kind, value, window, expected in ((np.float32, -300, (-300, 100), 0.5), (np.int32, -5, (0, 20), 0.25)):
        path = save(tmp_path / "b.tif", np.full((4, 4), value, kind))
        with pytest.raises(UnreadableImageError, match=r"input\.window"):
            decode(path, GREY)
        np.testing.assert_allclose(decode(path, input_((1, 4, 4), window=window)), expected, atol=STEP)
    with pytest.raises(UnreadableImageError, match="no numbers"):
        decode(save(tmp_path / "c.tif", np.full((4, 4), np.nan, np.float32)), GREY)


def test_colours_are_converted_only_where_the_run_says_so(tmp_path: Path) -> None:
    grey, colour = save(tmp_path / "g.png", ramp(channels=1)), save(tmp_path / "c.png")
    with pytest.raises(UnreadableImageError, match=r"input\.colours"):
        decode(grey, RGB)
    with pytest.raises(UnreadableImageError, match="RGB, and the run accepts grey"):
        decode(colour, GREY)
    repeated = decode(grey, input_((3, 4, 4), colours="convert"))
    assert np.array_equal(repeated, np.repeat(ramp(channels=1)[None], 3, axis=0))
    luma = decode(colour, input_((1, 4, 4), colours="convert"))[0]
    red, green, blue = ramp().astype(float).transpose(2, 0, 1)
    assert np.abs(luma - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 0.51  # ITU-R 601, rounded


def palette(colours: list[tuple[int, int, int]]) -> Image.Image:
    image = Image.new("P", (4, 4))
    image.putpalette([value for colour in colours for value in colour])
    image.putdata([index % len(colours) for index in range(16)])
    return image


def test_palettes_and_single_bits_become_what_they_mean(tmp_path: Path) -> None:
    palette([(0, 0, 0), (90, 90, 90)]).save(tmp_path / "grey.png")
    palette([(0, 0, 0), (250, 90, 9)]).save(tmp_path / "red.gif")
    Image.fromarray(ramp(channels=1) % 2 == 1).save(tmp_path / "bit.png")
    assert decode(tmp_path / "grey.png", GREY)[0, 0].tolist() == [0, 90, 0, 90]
    assert decode(tmp_path / "red.gif", RGB)[:, 0, 1].tolist() == [250, 90, 9]
    assert decode(tmp_path / "bit.png", GREY)[0, 0].tolist() == [0, 255, 0, 255]


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1)])
def test_alpha_is_dropped_or_refused_where_it_matters(mode: str, channels: int, tmp_path: Path) -> None:
    image = Image.fromarray(ramp(channels=channels)).convert(mode)
    image.save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png", input_((channels, 4, 4))), first(ramp(channels=channels)))
    image.putpixel((0, 0), (*([9] * channels), 254))
    image.save(tmp_path / "b.png")
    with pytest.raises(UnreadableImageError, match="transparent"):
        decode(tmp_path / "b.png", input_((channels, 4, 4)))


def test_a_transparent_colour_is_alpha_too(tmp_path: Path) -> None:
    palette([(0, 0, 0), (250, 90, 9)]).save(tmp_path / "a.png", transparency=1)
    Image.fromarray(ramp()).save(tmp_path / "b.png", transparency=(0, 1, 2))
    Image.fromarray(ramp()).save(tmp_path / "c.png", transparency=(9, 9, 9))
    deep = save(tmp_path / "d.png", np.array([[7, 9]], np.uint16), transparency=9)
    for path, wanted in ((tmp_path / "a.png", RGB), (tmp_path / "b.png", RGB), (deep, input_((1, 1, 2)))):
        with pytest.raises(UnreadableImageError, match="transparent"):
            decode(path, wanted)
    assert np.array_equal(decode(tmp_path / "c.png", RGB), first(ramp()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_says(orientation: int, tmp_path: Path) -> None:
    turns: dict[int, Callable[[NDArray[Any]], NDArray[Any]]] = {  # what undoes each orientation, as NumPy has it
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.T,
        6: lambda a: a[::-1].T,
        7: lambda a: a[::-1, ::-1].T,
        8: lambda a: a.T[::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.png", ramp(2, 3, 1), exif=exif)
    expected = turns[orientation](ramp(2, 3, 1))
    assert np.array_equal(decode(path, input_((1, *expected.shape)))[0], expected)


def test_another_size_cmyk_and_other_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match=r"input\.fit"):
        decode(save(tmp_path / "a.png", ramp(5, 4)), RGB)
    Image.new("CMYK", (4, 4)).save(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImageError, match="colours as CMYK"):
        decode(tmp_path / "a.jpg", RGB)
    with pytest.raises(DataError, match=r"2 channels; image files have 1 or 3") as caught:
        decode(save(tmp_path / "a.png"), Input(shape=(2, 4, 4)))
    assert not isinstance(caught.value, UnreadableImageError)


def test_of_a_phones_jpeg_the_first_picture_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phones write a preview or a depth map behind the photograph."""
    monkeypatch.setattr(decoding, "_first_picture", Lock())
    photograph, preview = (Image.fromarray(np.full((4, 4, 3), shade, np.uint8)) for shade in (200, 20))
    photograph.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    with capture_logs() as logs:
        shades = [decode(tmp_path / "a.jpg", RGB).mean() for _ in range(3)]
    assert np.abs(np.array(shades) - 200).max() <= 2
    assert len(logs) == 1
    assert "hold several pictures" in logs[0]["event"]


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)])
def test_a_thin_image_is_fitted_in_memory_that_the_result_bounds(
    fit: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized: list[int] = []
    resize = Image.Image.resize

    def counted(image: Image.Image, wanted: tuple[int, int], *rest: Any) -> Image.Image:
        # Pillow resizes rows first: the width that is wanted, of all rows of the box or image.
        box = rest[1] if len(rest) > 1 and rest[1] is not None else (0, 0, *image.size)
        resized.append(wanted[0] * max(wanted[1], math.ceil(box[3] - box[1])))
        return resize(image, wanted, *rest)

    monkeypatch.setattr(Image.Image, "resize", counted)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 100_000)
    Image.new("L", size, 255).save(tmp_path / "a.png")
    made = decode(tmp_path / "a.png", input_((1, 224, 224), fit=fit))
    assert made.shape == (1, 224, 224)
    assert made.max() == 255
    assert max(resized) <= 100_000


def test_crop_is_the_middle_of_the_whole_scaled_image(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 91, 3), np.uint8)
    made = decode(save(tmp_path / "a.png", pixels), input_((3, 24, 16), fit="crop"))
    whole = np.asarray(Image.fromarray(pixels).resize((59, 24), Image.Resampling.BILINEAR))
    assert np.abs(made.astype(int) - first(whole[:, 21:37])).max() <= 1
    pixels = np.zeros((4, 12), np.uint8)
    pixels[:, 4:8] = 200
    assert (decode(save(tmp_path / "a.png", pixels), input_((1, 4, 4), fit="crop")) == 200).all()
    assert (decode(save(tmp_path / "b.png", pixels.T), input_((1, 4, 4), fit="crop")) == 200).all()


def test_stretch_is_pillows_resize_and_pad_puts_it_in_the_middle_of_black(tmp_path: Path) -> None:
    pixels = ramp(9, 13)
    made = decode(save(tmp_path / "a.png", pixels), input_((3, 4, 6), fit="stretch"))
    expected = Image.fromarray(pixels).resize((6, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(made, first(np.asarray(expected)))
    made = decode(save(tmp_path / "a.png", np.full((4, 8, 3), 200, np.uint8)), input_((3, 4, 4), fit="pad"))
    assert made[0].tolist() == [[0] * 4, [200] * 4, [200] * 4, [0] * 4]
    tall = decode(save(tmp_path / "b.png", np.full((8, 2), 200, np.uint8)), input_((1, 4, 4), fit="pad"))
    assert tall[0].tolist() == [[0, 200, 0, 0]] * 4  # the odd column of black is on the right


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    to_height=st.integers(1, 12),
    to_width=st.integers(1, 12),
    fit=st.sampled_from(["stretch", "crop", "pad"]),
    dtype=st.sampled_from(["uint8", "uint16"]),
)
@example(height=1, width=40, to_height=12, to_width=1, fit="crop", dtype="uint16")
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_the_size_the_shape_is_the_runs(
    height: int, width: int, to_height: int, to_width: int, fit: str, dtype: str, tmp_path: Path
) -> None:
    most = np.iinfo(dtype).max
    path = save(tmp_path / "a.png", np.full((height, width), most, dtype))
    made = decode(path, input_((1, to_height, to_width), fit=fit))
    assert made.shape == (1, to_height, to_width)
    white = 255 if dtype == "uint8" else 1
    assert set(np.unique(made).tolist()) <= ({white} if fit != "pad" else {0, white})
    assert made[0, (to_height - 1) // 2, (to_width - 1) // 2] == white
