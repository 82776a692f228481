"""Shares of a seed: any `threshold` of them give it back, fewer say nothing of it (Shamir 1979, in GF(2**128))."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from Crypto.Protocol.SecretSharing import Shamir

from protofed.common.errors import SecureSumError

SEED_BYTES = 16
_MOST_TRIES = 1000  # of choosing sound shares among damaged ones


def split(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares of `SEED_BYTES` each, in the order of the sites that they are for."""
    return [share for _, share in Shamir.split(threshold, count, seed)]


def combined(shares: Mapping[int, bytes], threshold: int, is_seed: Callable[[bytes], bool]) -> bytes:
    """The seed of shares by their places, counted from 0; a few false shares do no harm if enough sound ones are there.

    Args:
        is_seed: whether a result is the seed that its site promised.

    Raises:
        SecureSumError: there are fewer shares than the threshold, or too many of them are false.
    """
    if len(shares) < threshold:
        raise SecureSumError("too-few-shares", f"{len(shares)} shares are there, and {threshold} are needed")
    chosen = itertools.combinations(sorted(shares.items()), threshold)
    for some in itertools.islice(chosen, _MOST_TRIES):
        seed = Shamir.combine([(place + 1, share) for place, share in some])
        if is_seed(seed):
            return seed
    raise SecureSumError("false-shares", "the shares that sites revealed do not give the seed that was promised")
