"""Images to try the pilot guide with: handwritten digits in place of lesions, other ones at every call."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

OWN_NAMES = {"Melanoma": 0, "Naevus": 1, "Keratosis": 2}  # a hospital's folder, and the digit that stands in for it
RUN_NAMES = {"mel": 0, "nv": 1, "bkl": 2}  # the evaluator's folders: the classes of the guide's recipe
KEPT = 4  # every fourth digit is the evaluator's alone: no site trains on what it scores
SIZE = (48, 40)  # of a file: width, height


def write(root: Path, names: Mapping[str, int] = OWN_NAMES, *, test: bool = False) -> int:
    """A folder for each class, with 12 to 40 grey images; how many in all.

    Args:
        test: of the digits that are kept for the evaluator.
    """
    rng, (pixels, digits) = np.random.default_rng(), load_digits(return_X_y=True)
    written = 0
    for name, digit in names.items():
        ours = np.flatnonzero((digits == digit) & ((np.arange(len(digits)) % KEPT == 0) == test))
        rows = rng.permutation(ours)[: rng.integers(12, 41)]
        (root / name).mkdir(parents=True, exist_ok=True)
        for number, row in enumerate(rows):
            image = Image.fromarray((pixels[row].reshape(8, 8) * 15).astype(np.uint8))
            image.resize(SIZE).save(root / name / f"{number:03}.png")
        written += len(rows)
    return written


if __name__ == "__main__":
    *options, folder = sys.argv[1:]
    made = write(Path(folder), RUN_NAMES, test=True) if "--test" in options else write(Path(folder))
    sys.stdout.write(f"{made} images in {folder}\n")
