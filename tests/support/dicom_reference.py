"""What pydicom's own pixel functions make of a DICOM file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut


def reference(path: Path) -> NDArray[np.float64]:
    """[H, W] or [H, W, 3] in 0..1."""
    found = pydicom.dcmread(path, force=True)
    stored = found.pixel_array
    match found.PhotometricInterpretation:
        case "PALETTE COLOR":
            coloured = apply_color_lut(stored, found)
            return np.asarray(coloured / (255 if coloured.max() < 256 else 65535))
        case "MONOCHROME1":
            return 1 - _grey(stored, found)
        case "MONOCHROME2":
            return _grey(stored, found)
        case _:
            return np.asarray(stored / np.iinfo(stored.dtype).max)


def _grey(stored: NDArray[np.generic], found: Dataset) -> NDArray[np.float64]:
    shown = apply_voi_lut(apply_modality_lut(stored, found), found)
    tables = found.get("VOILUTSequence") or found.get("ModalityLUTSequence")
    if tables and "LUTDescriptor" in tables[0]:
        low, high = 0.0, (1 << int(tables[0].LUTDescriptor[2])) - 1.0
    else:
        bits, signed = int(found.BitsStored), int(found.PixelRepresentation)
        ends = np.array([-(1 << bits - 1), (1 << bits - 1) - 1] if signed else [0, (1 << bits) - 1])
        low, high = sorted(apply_modality_lut(ends, found).tolist())
    return np.asarray((shown.astype(np.float64) - low) / (high - low))
