"""`protofed predict`: classes and probabilities of images from an exported model."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from protofed.common.csv_cells import CsvTable
from protofed.common.errors import ConfigError, DataError
from protofed.common.storage.files import TEMPORARY, write_error
from protofed.deploy.console.progress import progress
from protofed.deploy.export import model_folder
from protofed.deploy.export.images import UnreadableFile, batches, images_of
from protofed.deploy.export.runtime import Runtime, chosen, predictor

SHOWN = 20  # unreadable images listed; the rest are only counted


@dataclass(frozen=True)
class PredictRequest:
    """The options of one prediction.

    Attributes:
        model: folder that `protofed export` wrote.
        images: folder, or .npz.
        out: the CSV file to write.
        batch: images per batch; it bounds memory.
        allowed: plug-ins that may be imported.
        shown: show a progress bar, on a terminal.
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
    """The outcome: which runtime computed, how many images were classified, and which could not be read."""

    runtime: Literal["onnx", "torch"]
    done: int = 0
    unreadable: list[UnreadableFile] = field(default_factory=list)


def predict(request: PredictRequest) -> Predicted:
    """Write one row per image, ordered by name: path, class, name, probability, and p_NAME for every class.

    The file appears only when it is complete. Unreadable images have no row.

    Raises:
        DataError: the model is missing, damaged or changed, or there are no images.
        ConfigError: the runtime is not installed, or the device is not available.
    """
    contents = model_folder.read(request.model)
    spec = contents.model
    shape, names = spec.input.shape, spec.classes
    runtime = chosen(request.model, contents, request.runtime, request.device)
    answer = predictor(request.model, contents, runtime, request.device, request.allowed)
    images = images_of(request.images, spec.input)
    result = Predicted(runtime)
    with _table(request.out) as file, progress("predicting", len(images), "images", shown=request.shown) as bar:
        table = CsvTable(file)
        table.row(["path", "class", "name", "probability", *(f"p_{name}" for name in names)])
        for paths, pixels, unreadable in batches(images, shape, request.batch):
            if paths:
                for row in _rows(paths, _checked(answer(pixels), len(names)), names):
                    table.row(row)
            result.done += len(paths)
            result.unreadable += unreadable
            bar.advance(len(paths) + len(unreadable))
    return result


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
    """Open a text file that gets its name only when it is complete."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; expected the name of a .csv file")
    unfinished = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:  # of the table only: reading images raises other classes
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
