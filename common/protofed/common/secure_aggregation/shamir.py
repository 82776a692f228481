"""Shares of a seed: any `threshold` of them give it back, fewer say nothing of it (Shamir 1979, in GF(2**128))."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir

from protofed.common.errors import SecureSumError

SEED_BYTES = 16
_MOST_TRIES = 1000  # of choosing sound shares among damaged ones, of all seeds together: of 34 shares 23 s


def split(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares of `SEED_BYTES` each, in the order of the sites that they are for."""
    return [share for _, share in Shamir.split(threshold, count, seed)]


def combined(
    shares: Mapping[int, Sequence[bytes]], threshold: int, are_seeds: Sequence[Callable[[bytes], bool]]
) -> list[bytes | None]:
    """The seeds of shares by their places, counted from 0; a few false ones do no harm if enough sound ones are there.

    Those whose shares gave one seed are asked for all others at once: who lies of all costs no more than of one.

    Args:
        shares: by place, one of each seed; who has one of another size is left out.
        are_seeds: for each, whether a result is the seed that its site promised.

    Returns:
        None for a seed that no choice of shares gave.

    Raises:
        SecureSumError: there are fewer shares than the threshold.
    """
    usable = {place: given for place, given in shares.items() if all(len(share) == SEED_BYTES for share in given)}
    if len(usable) < threshold:
        raise SecureSumError("too-few-shares", f"{len(usable)} shares are there, and {threshold} are needed")
    seeds: list[bytes | None] = [None] * len(are_seeds)

    def gives(some: tuple[int, ...], number: int) -> bool:
        seed = Shamir.combine([(place + 1, usable[place][number]) for place in some])
        seeds[number] = seed if are_seeds[number](seed) else None
        return seeds[number] is not None

    def missing() -> list[int]:
        return [number for number, seed in enumerate(seeds) if seed is None]

    places = sorted(usable)
    for number in missing():
        gives(tuple(places[:threshold]), number)
    for some, turn in _choices(places, threshold, len(missing())):
        if not (left := missing()):
            break
        # One seed a try, in turn: that of a site which dealt false shares must not use up the tries of all others.
        if gives(some, left[turn % len(left)]):
            for number in missing():
                gives(some, number)
    return seeds


def _choices(places: Sequence[int], count: int, seeds: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Choices of places, each with a turn: all pairs, if they can be tried; else some choices at random, for the first
    in order are nearly the same.
    """
    if math.comb(len(places), count) * seeds <= 2 * _MOST_TRIES:
        yield from ((some, turn) for turn in range(seeds) for some in itertools.combinations(places, count))
        return
    rng = np.random.default_rng(0)
    for turn in range(_MOST_TRIES):
        yield tuple(sorted(rng.choice(places, count, replace=False).tolist())), turn
