"""Decoys: prototypes for classes that a site lacks, so that those it sends do not reveal which classes it has.

Sending a class's received prototype back would reveal it: the server knows what it sent. A decoy moves as the site's
own prototypes do: as far, within the span of their movements, and in every round of a run the same way. A random
direction, or another one in every round, would stand out beside them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from protofed.common.payload import Array, Tensors

UNIT_TOLERANCE = 1e-3  # rows whose lengths are closer to 1 than this count as unit vectors
DEFAULT_MOVE = 0.1  # how far a decoy moves, as a share of the mean row's length, where no own row has moved
Rows = Mapping[int, Array]  # [D] by class


def by_class(prototypes: Tensors) -> dict[int, Array]:
    """Rows [D] by class, of prototypes sent as rows named by class or as a matrix [C, D]; others are left out."""
    rows: dict[int, Array] = {}
    for name, tensor in prototypes.items():
        if name.isdecimal() and tensor.ndim == 1:
            rows[int(name)] = tensor
        elif tensor.ndim == 2:
            rows.update(enumerate(tensor))
    return rows


def run_secret(secret: bytes, run: str) -> bytes:
    """The seed of a run's decoys, 32 bytes: the same in every round and after a restart, unlinkable between runs."""
    return hashlib.blake2b(run.encode(), key=secret, digest_size=32).digest()


def decoys(own: Rows, classes: Iterable[int], received: Rows, secret: bytes) -> dict[int, Array]:
    """A decoy [D] for each of `classes`, of the dtype of the site's own rows.

    It starts at the received row, or at the mean of the site's own rows for a class without one. It moves by a random
    combination of the own rows' movements from their starts; weights and length (a quantile of their lengths) are drawn
    once for a class and a run. If no own row has a negative entry, no decoy has one.

    Args:
        own: the rows [D] that the site sends for the classes that it has.
        classes: the classes that it lacks.
        received: the rows [D] that the server sent; one of `own` and `received` is not empty.
        secret: `run_secret` of this run.
    """
    lacking = list(classes)
    like = next(iter({**received, **own}.values()))
    exact: dict[int, Array] = {c: row.astype(np.float64) for c, row in own.items()}
    base: dict[int, Array] = {c: row.astype(np.float64) for c, row in received.items()}
    centre: Array = np.mean(list((exact or base).values()), axis=0)
    unit = all(abs(_length(row) - 1) < UNIT_TOLERANCE for row in (exact or base).values())
    # Rows after a ReLU have no negative entries: a decoy with one would stand out.
    minimum = 0.0 if exact and all(row.min() >= 0 for row in exact.values()) else -math.inf
    default = DEFAULT_MOVE * _length(centre)
    from_received = _Movements({c: row - base[c] for c, row in exact.items() if c in base}, default)
    from_centre = _Movements({c: row - centre for c, row in exact.items() if c not in base}, default)

    def decoy(c: int) -> Array:
        movement = (from_received if c in base else from_centre).draw(_generator(secret, c), like.size)
        moved = np.maximum(_moved(base.get(c, centre), movement, unit=unit), minimum)
        length = _length(moved)
        return np.asarray(moved / length if unit and length else moved).astype(like.dtype)

    return {c: decoy(c) for c in lacking}


@dataclass(frozen=True)
class _Movements:
    """The movements of the site's own rows.

    Attributes:
        by_class: movement [D] by class.
        default_length: how far a decoy moves if there is no movement.
    """

    by_class: Rows
    default_length: float

    def draw(self, generator: np.random.Generator, size: int) -> Array:
        """A movement [D] like them."""
        # Always all three draws, one weight for each class: what is drawn must not depend on the classes that a site
        # has, so that a decoy moves the same way in every round.
        quantile, random_direction = generator.uniform(), generator.normal(size=size)
        weights = generator.normal(size=1 + max(self.by_class, default=0))
        directions = {c: move / _length(move) for c, move in self.by_class.items() if _length(move)}
        lengths = [_length(move) for move in self.by_class.values()] or [self.default_length]
        length = float(np.quantile(lengths, quantile))
        if len(directions) > 1:
            direction = sum((weights[c] * unit for c, unit in directions.items()), np.zeros(size))
        else:  # the combination of a single direction would be that direction, or its opposite
            direction = random_direction
        return np.asarray(length * direction / (_length(direction) or 1.0))


def _moved(base: Array, movement: Array, *, unit: bool) -> Array:
    """`base` [D] moved by `movement` [D]; with `unit` along a great circle, by an arc whose chord is as long."""
    if not unit or not _length(base):
        return np.asarray(base + movement)
    base = base / _length(base)
    tangent = movement - (movement @ base) * base
    if not _length(tangent):  # the movement is along `base` itself, as always with D = 1
        return base
    angle = 2 * math.asin(min(_length(movement) / 2, 1.0))
    return np.asarray(math.cos(angle) * base + math.sin(angle) * tangent / _length(tangent))


def _generator(secret: bytes, c: int) -> np.random.Generator:
    key = hashlib.blake2b(str(c).encode(), key=secret, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


def _length(row: Array) -> float:
    return float(np.linalg.norm(row))
