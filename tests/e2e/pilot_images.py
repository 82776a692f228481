"""Images to try the pilot guide with: handwritten digits in place of lesions, other ones at every call."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

OWN_NAMES = {"Melanoma": 0, "Naevus": 1, "Keratosis": 2}  # a hospital's folder, and the digit that stands in for it
SIZE = (48, 40)  # of a file: width, height


def write(root: Path) -> int:
    """A folder for each class, with 12 to 40 grey images; how many in all."""
    rng, (pixels, digits) = np.random.default_rng(), load_digits(return_X_y=True)
    written = 0
    for name, digit in OWN_NAMES.items():
        rows = rng.permutation(np.flatnonzero(digits == digit))[: rng.integers(12, 41)]
        (root / name).mkdir(parents=True, exist_ok=True)
        for number, row in enumerate(rows):
            image = Image.fromarray((pixels[row].reshape(8, 8) * 15).astype(np.uint8))
            image.resize(SIZE).save(root / name / f"{number:03}.png")
        written += len(rows)
    return written


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))} images in {sys.argv[1]}\n")
