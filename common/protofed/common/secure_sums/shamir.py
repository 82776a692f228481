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
_FALSE = "the shares that sites revealed do not give the seed that was promised"


def split(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares of `SEED_BYTES` each, in the order of the sites that they are for."""
    return [share for _, share in Shamir.split(threshold, count, seed)]


def combined(
    shares: Mapping[int, Sequence[bytes]], threshold: int, are_seeds: Sequence[Callable[[bytes], bool]]
) -> list[bytes]:
    """The seeds of shares by their places, counted from 0; a few false ones do no harm if enough sound ones are there.

    Those whose shares gave one seed are the first to be asked for the next: who lies of all costs no more than of one.

    Args:
        shares: by place, one of each seed; who has one of another size is left out.
        are_seeds: for each, whether a result is the seed that its site promised.

    Raises:
        SecureSumError: there are fewer shares than the threshold, or too many of them are false.
    """
    usable = {place: given for place, given in shares.items() if all(len(share) == SEED_BYTES for share in given)}
    if len(usable) < threshold:
        raise SecureSumError("too-few-shares", f"{len(usable)} shares are there, and {threshold} are needed")
    places, seeds, left = sorted(usable), [], _MOST_TRIES
    sound = tuple(places[:threshold])
    for number, is_seed in enumerate(are_seeds):
        for some in itertools.chain([sound], _choices(places, threshold)):
            seed = Shamir.combine([(place + 1, usable[place][number]) for place in some])
            if is_seed(seed):
                seeds.append(seed)
                sound = some
                break
            left -= 1
            if not left:
                raise SecureSumError("false-shares", _FALSE)
        else:
            raise SecureSumError("false-shares", _FALSE)
    return seeds


def _choices(places: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """All choices, if they can be tried; else some at random, for the first in order are nearly the same."""
    if math.comb(len(places), count) <= _MOST_TRIES:
        yield from itertools.combinations(places, count)
        return
    rng = np.random.default_rng(0)
    while True:
        yield tuple(sorted(rng.choice(places, count, replace=False).tolist()))
