"""Prototypes for classes that a site does not have, so that those it sends do not tell which ones it has.

Sending a class's received prototype back would tell: the server knows what it sent. A decoy moves as the site's own
prototypes do: as far, within the space of their movements, and in every round of a run the same way. A direction at
random, or another one in every round, would stand out beside them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from protofed.common.payload import Array, Tensors

UNIT = 1e-3  # lengths closer to 1 than this are those of unit vectors
NO_OWN_MOVE = 0.1  # share of its length that a prototype moves, where none of the site's own says how far
Rows = Mapping[int, Array]  # [D] by class


def by_class(prototypes: Tensors) -> dict[int, Array]:
    """Rows [D] by class, of prototypes that are sent one by one or as a matrix [C, D]."""
    rows: dict[int, Array] = {}
    for name, tensor in prototypes.items():
        if name.isdecimal() and tensor.ndim == 1:
            rows[int(name)] = tensor
        elif tensor.ndim == 2:
            rows.update(enumerate(tensor))
    return rows


def run_secret(secret: bytes, run: str) -> bytes:
    """What the decoys of one run are drawn from; the same in every round, and after a restart."""
    return hashlib.blake2b(run.encode(), key=secret, digest_size=32).digest()


def decoys(own: Rows, classes: Iterable[int], received: Rows, secret: bytes) -> dict[int, Array]:
    """A decoy for each of these classes, [D] each, of the dtype of the site's own rows.

    It starts at the received row; of a class without one, at the mean of the site's own rows. It moves by a combination
    of what the site's own rows have moved from the same start, whose weights and length (a quantile of theirs) are
    drawn once for a class and a run. Where no own row has a negative number, a decoy has none.

    Args:
        own: what the site sends of the classes that it has.
        classes: those that it has not.
        received: what the server sent.
        secret: of this run alone.
    """
    absent = list(classes)
    like = next(iter({**received, **own}.values()))
    exact: dict[int, Array] = {c: row.astype(np.float64) for c, row in own.items()}
    base: dict[int, Array] = {c: row.astype(np.float64) for c, row in received.items()}
    centre: Array = np.mean(list((exact or base).values()), axis=0)
    unit = all(abs(_length(row) - 1) < UNIT for row in (exact or base).values())
    least = 0.0 if exact and all(row.min() >= 0 for row in exact.values()) else -math.inf
    known = _Movements({c: row - base[c] for c, row in exact.items() if c in base}, NO_OWN_MOVE * _length(centre))
    unknown = _Movements({c: row - centre for c, row in exact.items() if c not in base}, NO_OWN_MOVE * _length(centre))

    def decoy(c: int) -> Array:
        movement = (known if c in base else unknown).draw(_generator(secret, c), like.size)
        moved = np.maximum(_moved(base.get(c, centre), movement, unit=unit), least)
        length = _length(moved)
        return np.asarray(moved / length if unit and length else moved).astype(like.dtype)

    return {c: decoy(c) for c in absent}


@dataclass(frozen=True)
class _Movements:
    """How the site's own rows have moved.

    Attributes:
        seen: [D] each, by class.
        else_length: how far a row moves where none was seen.
    """

    seen: Rows
    else_length: float

    def draw(self, generator: np.random.Generator, size: int) -> Array:
        """One like them, [D]; the same draws whichever classes the site has."""
        share, anywhere = generator.uniform(), generator.normal(size=size)
        weights = generator.normal(size=1 + max(self.seen, default=0))
        ways = {c: move / _length(move) for c, move in self.seen.items() if _length(move)}
        length = float(np.quantile([_length(move) for move in self.seen.values()] or [self.else_length], share))
        # Of a single one the combination would be its own way, or straight back.
        way = sum((weights[c] * way for c, way in ways.items()), np.zeros(size)) if len(ways) > 1 else anywhere
        return np.asarray(length * way / (_length(way) or 1.0))


def _moved(base: Array, movement: Array, *, unit: bool) -> Array:
    """`base`, moved; on the unit sphere, if all is there: as far as a straight line."""
    if not unit or not _length(base):
        return np.asarray(base + movement)
    base = base / _length(base)
    aside = movement - (movement @ base) * base
    if not _length(aside):  # a line has no other side
        return base
    angle = 2 * math.asin(min(_length(movement) / 2, 1.0))
    return np.asarray(math.cos(angle) * base + math.sin(angle) * aside / _length(aside))


def _generator(secret: bytes, c: int) -> np.random.Generator:
    key = hashlib.blake2b(str(c).encode(), key=secret, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


def _length(row: Array) -> float:
    return float(np.linalg.norm(row))
