"""Each image of a site is told as it is stored: a frame by its slice's size, a tile by its own, a series as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from tests.support.image_files import dicom, dicom_frames, input_, pages, save, settings

from protofed.client.data.image_files import scan
from protofed.common.config.tables import Input
from protofed.deploy.site.survey import SurveyedImage, survey_files

STACK = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) * 10  # [slices, H, W]
RUN = ("mel", "nv")


def surveyed(source: str, root: Path, run: Input, **more: Any) -> list[SurveyedImage]:
    return list(survey_files(scan(settings(source, root, **more), RUN, len(RUN), run.frames), run).images)


def formats(images: list[SurveyedImage]) -> list[tuple[str, str, tuple[int, int] | None]]:
    return [(image.name, image.format, image.size) for image in images]


@pytest.mark.parametrize("frames", ["middle", {"every": 3}], ids=str)
def test_volumes_are_told_by_their_slices(frames: Any, tmp_path: Path) -> None:
    for folder in ("P1/s1", "P2", "P3", "P4"):
        (tmp_path / "nv" / folder).mkdir(parents=True)
    for z, plane in enumerate(STACK):
        dicom(tmp_path / "nv" / "P1" / "s1" / f"{z}", plane.astype(np.uint16), 12, InstanceNumber=z)
    dicom_frames(tmp_path / "nv" / "P2" / "a.dcm", STACK, 8)
    make: Any = nibabel.Nifti1Image
    affine = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1.0]])  # the slices are stored first
    make(STACK.astype(np.int16), affine).to_filename(tmp_path / "nv" / "P3" / "b.nii.gz")
    pages(tmp_path / "nv" / "P4" / "c.tif", STACK)
    run = input_((1, 3, 2), frames=frames, window=(120, 240))
    images = surveyed("folder", tmp_path, run, series="folder")
    parts = [""] if frames == "middle" else [", frame 1", ", frame 4"]
    told = {
        "nv/P1/s1": "DICOM series, MONOCHROME2, 12 bits",
        "nv/P2": "DICOM, MONOCHROME2, 8 bits",
        "nv/P3": "NIfTI, grey, 16 bits",
        "nv/P4": "TIFF, grey, 8 bits",
    }
    assert formats(images) == [(f"{name}{part}", kind, (2, 3)) for name, kind in told.items() for part in parts]
    assert {image.problem for image in images} == {None}


def tiles(root: Path, rows: str) -> Path:
    (root / "tiles.csv").write_text(f"path,label,x,y\n{rows}")
    return root / "tiles.csv"


def test_tiles_are_told_by_their_own_size(tmp_path: Path) -> None:
    large = np.zeros((256, 384, 3), np.uint8)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for level in (large, large[::4, ::4]):
            file.write(level, tile=(128, 128), photometric="rgb", subfiletype=int(level is not large), metadata=None)
    save(tmp_path / "b.png", large[..., 0])
    (tmp_path / "c.svs").write_bytes(b"no slide")
    os.mkfifo(tmp_path / "d.svs")
    rows = "a.tif,nv,0,0\na.tif,nv,16,0\na.tif,nv,376,0\nb.png,mel,0,0\nc.svs,mel,0,0\nd.svs,mel,0,0\n"
    images = surveyed("manifest", tiles(tmp_path, rows), input_((3, 16, 16), colours="convert"), tile_size=16)
    slide = "slide (generic-tiff), RGB, 8 bits"
    assert [(image.format, image.size) for image in images] == [
        *[(slide, (16, 16))] * 3,
        ("PNG, grey, 8 bits", (16, 16)),
        *[("", (16, 16))] * 2,
    ]
    problems = [image.problem or "" for image in images]
    assert [problem.partition(" of its image")[0] for problem in problems] == [
        *["", "", "a tile that crosses the edge", ""],
        "neither a slide that OpenSlide reads nor an image that Pillow reads whole",
        "no regular file",
    ]
