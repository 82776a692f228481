"""A row of a manifest may be a tile of a large image; all tiles of a slide stay together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from tests.support.image_files import decoded as decode
from tests.support.image_files import input_, save, settings

from protofed.client.data import decoding, volumes
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.image_files import Scan, scan
from protofed.client.data.sources import infer_input, load
from protofed.common.config.data import Data
from protofed.common.errors import DataError

RUN = ("mel", "nv")
TILE = input_((3, 16, 16))


def pixels(height: int, width: int) -> NDArray[np.uint8]:
    """[H, W, 3]: each pixel says where it lies."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack((rows % 251, columns % 241, (rows // 251) * 16 + columns // 241), axis=2).astype(np.uint8)


def slide(path: Path, height: int = 512, width: int = 768) -> Path:
    """A pyramid of two levels in tiles, which OpenSlide reads and Pillow takes for a file of two pages."""
    with tifffile.TiffWriter(path) as file:
        for step in (1, 4):
            level = np.ascontiguousarray(pixels(height, width)[::step, ::step])
            file.write(level, tile=(128, 128), photometric="rgb", subfiletype=int(step > 1), metadata=None)
    return path


def table(root: Path, text: str, **more: Any) -> Scan:
    (root / "tiles.csv").write_text(text)
    return scan(settings("manifest", root / "tiles.csv", **{"tile_size": 16, **more}), RUN, len(RUN))


@pytest.mark.parametrize("name", ["slide.tif", "image.png"])
def test_a_tile_is_its_pixels_at_full_resolution(name: str, tmp_path: Path) -> None:
    path = slide(tmp_path / name) if name == "slide.tif" else save(tmp_path / name, pixels(512, 768))
    for x, y in ((0, 0), (300, 470), (752, 496), (5, 250)):
        found = decode(path, TILE, f"tile {x},{y},16,16")
        assert np.array_equal(found, pixels(512, 768)[y : y + 16, x : x + 16].transpose(2, 0, 1))
    for x, y in ((753, 0), (0, 497), (10_000, 0)):
        with pytest.raises(UnreadableImageError, match="crosses the edge of its image of 768 x 512 pixels"):
            decode(path, TILE, f"tile {x},{y},16,16")


def test_a_tile_is_fitted_as_any_image(tmp_path: Path) -> None:
    path = slide(tmp_path / "a.tif")
    with pytest.raises(UnreadableImageError, match="32 x 32 pixels, and the run accepts 16 x 16"):
        decode(path, TILE, "tile 0,0,32,32")
    assert decode(path, input_((1, 16, 16), fit="stretch", colours="convert"), "tile 0,0,32,32").shape == (1, 16, 16)


def test_an_image_too_large_to_decode_whole_is_read_by_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And however large the file: only the tile has to fit."""
    tifffile.imwrite(tmp_path / "a.tif", pixels(512, 768), tile=(128, 128), photometric="rgb", metadata=None)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 1000)
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 1000)
    found = decode(tmp_path / "a.tif", TILE, "tile 300,100,16,16")
    assert np.array_equal(found, pixels(512, 768)[100:116, 300:316].transpose(2, 0, 1))
    monkeypatch.setattr(volumes, "MAX_PIXELS", 255)
    with pytest.raises(UnreadableImageError, match="a tile of more than 255 pixels"):
        decode(tmp_path / "a.tif", TILE, "tile 300,100,16,16")


def test_rows_of_one_slide_are_its_tiles_and_its_group(tmp_path: Path) -> None:
    slide(tmp_path / "a.tif")
    save(tmp_path / "more" / "b.png", pixels(64, 64))
    found = table(tmp_path, "path,label,X,y\na.tif,nv,0,16\na.tif,mel,512.0,0\nb,nv,0,0\n")
    found.check()
    assert [(item.name, item.part, item.target, item.group) for item in found.items] == [
        ("a.tif, tile 0,16,16,16", "tile 0,16,16,16", 1, "a.tif"),
        ("a.tif, tile 512,0,16,16", "tile 512,0,16,16", 0, "a.tif"),
        ("b, tile 0,0,16,16", "tile 0,0,16,16", 1, "more/b.png"),
    ]
    grouped = table(tmp_path, "path,label,x,y,group\na.tif,nv,0,0,P1\na.tif,nv,16,0,P1\n")
    assert [item.group for item in grouped.items] == ["P1", "P1"]
    crossing = table(tmp_path, "path,label,x,y,split\na.tif,nv,0,0,train\na.tif,nv,16,0,test\n")
    with pytest.raises(DataError, match="1 groups are in both train and test"):
        crossing.check()


def test_the_same_tile_twice_is_refused_and_so_is_an_image_in_a_table_without_tiles(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 4 has the path and tile of row 2; expected every image once"):
        table(tmp_path, "path,label,x,y\na.tif,nv,0,0\na.tif,nv,16,0\na.tif,mel,0,0\n")
    with pytest.raises(DataError, match="row 3 has the path of row 2; expected every image once"):
        table(tmp_path, "path,label,x,y\na.tif,nv,0,0\na.tif,nv,16,0\n", tile_size=None)


@pytest.mark.parametrize("corner", ["-1,0", "0.5,0", "Doe,0", "nan,0", "0,inf", "0,999999999999"])
def test_a_corner_that_is_none_is_refused_by_its_row(corner: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 2: its x and y are no place in an image; expected whole") as caught:
        table(tmp_path, f"path,label,x,y\na.tif,nv,{corner}\n")
    assert "Doe" not in str(caught.value)


def test_the_columns_are_needed_and_filled(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected one column 'y' in the heading, for tiles"):
        table(tmp_path, "path,label,x\na.tif,nv,0\n")
    with pytest.raises(DataError, match="row 2 has no y; expected one in every row"):
        table(tmp_path, "path,label,x,y\na.tif,nv,0,\n")
    with pytest.raises(ValueError, match="tile_size is of source manifest; remove it, or list the tiles"):
        Data.model_validate({"source": "folder", "tile_size": 16})


def test_tiles_of_slides_become_examples_and_no_slide_is_divided(tmp_path: Path) -> None:
    rows, corners = ["path,label,x,y"], [(x, 16 * y) for y in range(4) for x in (0, 64)]
    for number in range(20):
        save(tmp_path / f"{number}.png", np.full((80, 80, 3), number, np.uint8))
        rows += [f"{number}.png,{RUN[number % 2]},{x},{y}" for x, y in corners]
    (tmp_path / "tiles.csv").write_text("\n".join(rows))
    source = load(settings("manifest", tmp_path / "tiles.csv", tile_size=16), TILE, RUN)
    train, test = (set(half.pixels()[:, 0, 0, 0].tolist()) for half in (source.train, source.test))
    assert len(source.train) + len(source.test) == 160
    assert test
    assert not train & test
    found, _ = infer_input(settings("manifest", tmp_path / "tiles.csv", tile_size=16))
    assert found.shape == (3, 16, 16)


def test_what_is_no_slide_is_unreadable_and_without_openslide_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Doe.svs").write_bytes(b"no image")
    for name, said in (("Doe.svs", "neither a slide that OpenSlide reads nor"), ("none.svs", "no such file")):
        with pytest.raises(UnreadableImageError, match=said) as caught:
            decode(tmp_path / name, TILE, "tile 0,0,16,16")
        assert "Doe" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(DataError, match=r"\.whl\[histology\]'") as missing:
        decode(slide(tmp_path / "a.tif"), TILE, "tile 0,0,16,16")
    assert not isinstance(missing.value, UnreadableImageError)
    assert decode(save(tmp_path / "b.png", pixels(16, 16)), TILE, "tile 0,0,16,16").shape == (3, 16, 16)
