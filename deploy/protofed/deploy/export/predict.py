"""`protofed predict`: classes and probabilities of images, by an exported model."""

from __future__ import annotations

import csv
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from protofed.common.errors import ConfigError, DataError
from protofed.common.storage.files import TEMPORARY, write_error
from protofed.deploy.console.progress import progress
from protofed.deploy.export import model_folder
from protofed.deploy.export.images import UnreadableFile, batches, images_of
from protofed.deploy.export.runtime import Runtime, chosen, predictor

SHOWN = 20  # unreadable images; the rest are only counted


@dataclass(frozen=True)
class PredictRequest:
    """What to predict, with what.

    Attributes:
        model: folder of `protofed export`.
        images: folder, or .npz.
        out: the table, CSV.
        batch: images at a time: bounds memory.
        allowed: plug-ins that may be imported.
        shown: a progress bar, on a terminal.
    """

    model: Path
    images: Path
    out: Path
    runtime: Runtime = "auto"
    device: str = "cpu"
    batch: int = 64
    allowed: frozenset[str] = frozenset()
    shown: bool = True


@dataclass
class Predicted:
    """What came of it."""

    runtime: Literal["onnx", "torch"]
    done: int = 0
    unreadable: list[UnreadableFile] = field(default_factory=list)


def predict(asked: PredictRequest) -> Predicted:
    """Write one row an image, in the order of their names: path, class, name, probability, p_NAME of every class.

    The table appears when all is done. Images that cannot be read have no row.

    Raises:
        DataError: there is no model, it was damaged or changed, or there are no images.
        ConfigError: what computes is not installed, or the device is not there.
    """
    contents = model_folder.read(asked.model)
    spec = contents.model
    shape, names = spec.input.shape, spec.classes
    runtime = chosen(asked.model, contents, asked.runtime, asked.device)
    answer = predictor(asked.model, contents, runtime, asked.device, asked.allowed)
    images = images_of(asked.images, spec.input)
    found = Predicted(runtime)
    with _table(asked.out) as file, progress("predicting", len(images), "images", shown=asked.shown) as bar:
        table = csv.writer(file)
        table.writerow(["path", "class", "name", "probability", *(f"p_{name}" for name in names)])
        for paths, pixels, bad in batches(images, shape, asked.batch):
            if paths:
                table.writerows(_rows(paths, _checked(answer(pixels), len(names)), names))
            found.done += len(paths)
            found.unreadable += bad
            bar.advance(len(paths) + len(bad))
    return found


def _rows(paths: Iterable[str], probabilities: NDArray[np.float32], names: tuple[str, ...]) -> Iterator[list[object]]:
    for path, row in zip(paths, probabilities.tolist(), strict=True):
        best = int(np.argmax(row))
        yield [path, best, names[best], f"{row[best]:.6f}", *(f"{value:.6f}" for value in row)]


def _checked(probabilities: NDArray[np.float32], classes: int) -> NDArray[np.float32]:
    if probabilities.shape[1:] != (classes,) or not np.isfinite(probabilities).all():
        raise DataError(
            f"the model gives {list(probabilities.shape[1:])} values, or values that are not finite; "
            f"expected {classes} probabilities: export it again"
        )
    return probabilities


@contextmanager
def _table(path: Path) -> Iterator[IO[str]]:
    """A file that is there when it is whole."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; expected the name of a .csv file")
    unfinished = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:  # what is read inside has its own errors
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
