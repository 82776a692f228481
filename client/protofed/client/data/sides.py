"""In a run with `[plan.dp]`: whether a unit is held out, by a keyed hash of this unit alone.

A unit is a patient with all of his images, or one image where the data have no groups. Noise bounds what one unit adds;
it does not bound a draw over all units, in which one more moves others between the sets. So no count, no order, no
label and no other unit decides here.

The key is `data.seed`, of the site's own settings. The promise holds for whoever knows it: a unit is trained on, and
then noise hides it, or it is not. A key of the state folder would move images from the test set into training when the
folder is lost, and simulations would not repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.partition import Indices
from protofed.common.errors import DataError

Groups: TypeAlias = NDArray[Any]  # [N], one value an example


def check_apart(groups: Groups, parts: list[Indices], of: str) -> None:
    """Check that no group is in two parts.

    Args:
        groups: [N].
        parts: indices into `groups`.
        of: what the parts are, for the message.

    Raises:
        DataError: with the number of groups that are; never their names.
    """
    names = np.concatenate([np.unique(groups[part]) for part in parts]) if parts else groups[:0]
    _, times = np.unique(names, return_counts=True)
    if crossing := int((times > 1).sum()):
        raise DataError(f"{crossing} groups are in more than one of {of}; expected each group in one")


Units: TypeAlias = NDArray[np.str_]  # [N], names the unit of each example, in hex
Flags: TypeAlias = NDArray[np.bool_]  # [N]
_BYTES = 16
_THREADS = 8


def units_of_groups(groups: Groups) -> Units:
    """The unit of each example by its group [N]: equal for equal groups."""
    return _units(f"group {_whole(name)}".encode() for name in groups.tolist())


def units_of_images(images: NDArray[Any]) -> Units:
    """The unit of each image of [N, ...]: equal images have one side. Labels do not count: a new one moves no image."""
    return _units(image.tobytes() for image in images)


def units_of_files(paths: Sequence[Path]) -> Units:
    """The unit of each file by its bytes, whatever size a run scales its image to; one that cannot be read has one."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return np.array(list(pool.map(_of_file, paths)), dtype=f"U{2 * _BYTES}")


def held_out(units: Units, fraction: float, seed: int, purpose: str) -> Flags:
    """Whether an example is held out: of the units this share, each by itself.

    Args:
        seed: the key.
        purpose: of the draw; another one is independent of this.
    """
    key, below = hashlib.blake2b(f"{seed}/{purpose}".encode()).digest(), round(fraction * 2**64)
    names, index = np.unique(units, return_inverse=True)
    drawn = [_number(name.encode(), key) < below for name in names.tolist()]
    return np.array(drawn, bool)[index]


def _whole(name: object) -> object:
    """A whole number by its integer: one row without a number makes the others of its column floats."""
    return int(name) if isinstance(name, float) and name.is_integer() else name


def _units(contents: Iterable[bytes]) -> Units:
    return np.array([_digest(content).hex() for content in contents], dtype=f"U{2 * _BYTES}")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_BYTES).digest()


def _number(unit: bytes, key: bytes) -> int:
    """From 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.blake2b(unit, key=key, digest_size=8).digest(), "big")


def _of_file(path: Path) -> str:
    try:
        if not path.is_file():  # opening a pipe would never end
            return _digest(b"").hex()
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_BYTES)).hexdigest()
    except OSError:  # it is left out, on whichever side
        return _digest(b"").hex()
