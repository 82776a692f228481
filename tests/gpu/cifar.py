"""CIFAR-10 on this machine: torchvision's folder, or an .npz with MedMNIST's keys. Nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protofed.client.data import sources
from protofed.client.data.examples import Examples
from protofed.common.config.data import Data
from protofed.common.config.tables import Input

FOLDER = "cifar-10-batches-py"  # torchvision's


def found(place: Path | None) -> Path | None:
    """The place, if CIFAR-10 is there: a folder in which torchvision finds it, or an .npz; None: it is not."""
    if place is None:
        return None
    return place if (place.suffix == ".npz" and place.is_file()) or (place / FOLDER).is_dir() else None


def data_of(place: Path) -> dict[str, Any]:
    """The keys `source` and `root` of a recipe's [data] for this place."""
    return {"source": "npz" if place.suffix == ".npz" else "cifar10", "root": str(place.resolve())}


def train_set(place: Path) -> Examples:
    """The 50,000 images to train on.

    Raises:
        DataError: they are damaged, or something else.
    """
    return sources.load(Data.model_validate(data_of(place)), Input(shape=(3, 32, 32))).train
