"""No file that pydicom, Pillow or scikit-image test themselves with is read wrongly, or ends in a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pydicom
import pytest
from tests.support.foreign_images import compare

UNPACKED = "PROTOFED_FOREIGN_IMAGES"  # a folder of unpacked sdists: pip download --no-binary pillow --no-deps pillow
SUFFIXES = {".bmp", ".dib", ".gif", ".j2k", ".jp2", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the reference decoders about damaged files


@pytest.mark.slow
def test_pydicoms_own_files_are_read_as_pydicom_reads_them_or_refused() -> None:
    outcomes = compare(sorted((Path(pydicom.__file__).parent / "data" / "test_files").rglob("*")))
    print({outcome: len(files) for outcome, files in outcomes.items()})  # noqa: T201
    assert outcomes["wrong"] == outcomes["without a reference"] == []
    assert len(outcomes["equal"]) >= 60


@pytest.mark.slow
def test_images_of_sdists_are_read_as_tifffile_or_opencv_read_them_or_refused() -> None:
    root = os.environ.get(UNPACKED)
    if root is None:
        pytest.skip(f"{UNPACKED} names no folder of unpacked sdists (pillow, scikit-image)")
    outcomes = compare(sorted(path for path in Path(root).rglob("*") if path.suffix.lower() in SUFFIXES))
    print({outcome: len(files) for outcome, files in outcomes.items()})  # noqa: T201
    assert outcomes["wrong"] == []
    assert len(outcomes["equal"]) >= 500
