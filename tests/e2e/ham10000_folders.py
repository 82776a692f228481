"""HAM10000 as four hospitals would have it: `python -m tests.e2e.ham10000_folders NPZ OUT`.

NPZ has {train,val,test}_{images,labels,site,lesion}. OUT gets a folder for each acquisition site, and one for an
evaluator with the test images of all. In each: images as PNG, manifest.csv with the site's own names of the diagnoses,
its split, and the lesion as group; settings.toml with [data] and what the names mean in the run.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

VOCABULARY = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
_LONG = (
    "Actinic keratosis / Bowen's disease",
    "Basal cell carcinoma",
    "Benign keratosis-like lesion",
    "Dermatofibroma",
    "Melanoma",
    "Melanocytic nevus",
    "Vascular lesion",
)
_BRITISH = (
    "intraepithelial carcinoma",
    "basal-cell carcinoma",
    "seborrhoeic keratosis",
    "histiocytoma",
    "malignant melanoma",
    "melanocytic naevus",
    "haemangioma",
)


@dataclass(frozen=True)
class Hospital:
    """How one of them keeps its table."""

    name: str
    names: Sequence[str]  # of the diagnoses, as VOCABULARY
    separator: str = ","
    encoding: str = "utf-8"
    end: str = "\n"


HOSPITALS = (  # by the number in the arrays `site`
    Hospital("rosendahl", _LONG),
    Hospital("vidir-modern", _BRITISH, ";", "utf-8-sig", "\r\n"),  # as a spreadsheet saves it in much of Europe
    Hospital("vidir-molemax", [name.upper() for name in _LONG], "\t"),
    Hospital("vienna-dias", VOCABULARY),  # nothing to translate
)
EVALUATOR = Hospital("evaluator", VOCABULARY)


@dataclass(frozen=True)
class Lesion:
    """One image of one, with what a table says of it."""

    pixels: NDArray[np.uint8]  # [H, W, 3]
    label: int
    split: str
    group: int


def main(archive: Path, out: Path) -> None:
    """Write all of it."""
    with np.load(archive, allow_pickle=False) as arrays:
        found = {key: arrays[key] for key in arrays}
    for number, hospital in enumerate(HOSPITALS):
        print(f"{hospital.name}: {write(hospital, lesions(found, number), out)} images")  # noqa: T201
    tests = [lesion for number in range(len(HOSPITALS)) for lesion in lesions(found, number) if lesion.split == "test"]
    print(f"{EVALUATOR.name}: {write(EVALUATOR, tests, out)} images")  # noqa: T201
    print(f"class_names = {json.dumps(VOCABULARY)}")  # noqa: T201


def lesions(arrays: Mapping[str, NDArray[Any]], site: int) -> Iterator[Lesion]:
    """Those of one site, in the order of the arrays."""
    for split in ("train", "val", "test"):
        images, labels, groups = (arrays[f"{split}_{kind}"] for kind in ("images", "labels", "lesion"))
        for row in np.flatnonzero(arrays[f"{split}_site"] == site):
            yield Lesion(images[row], int(labels[row]), split, int(groups[row]))


def write(hospital: Hospital, kept: Iterator[Lesion] | Sequence[Lesion], out: Path) -> int:
    """One hospital's folder; how many images it has."""
    folder, rows = out / hospital.name, list(kept)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    names = [f"images/{number:05}.png" for number in range(len(rows))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name, row: Image.fromarray(row.pixels).save(folder / name), names, rows))
    manifest = folder / "manifest.csv"
    with manifest.open("w", encoding=hospital.encoding, newline="") as file:
        table = csv.writer(file, delimiter=hospital.separator, lineterminator=hospital.end)
        table.writerow(["path", "label", "split", "group"])
        for name, row in zip(names, rows, strict=True):
            table.writerow([name, hospital.names[row.label], row.split, f"lesion-{row.group:05}"])
    (folder / "settings.toml").write_text(settings(hospital, manifest), encoding="utf-8")
    return len(rows)


def settings(hospital: Hospital, manifest: Path) -> str:
    """The site's [data]; the rest is given on the command line."""
    lines = ["[data]", 'source = "manifest"', f"root = {json.dumps(str(manifest.resolve()))}"]
    if tuple(hospital.names) != VOCABULARY:
        own = [f"{json.dumps(name)} = {json.dumps(run)}" for name, run in zip(hospital.names, VOCABULARY, strict=True)]
        lines += ["", "[data.labels]  # this site's own names of the diagnoses -> the run's", *own]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
