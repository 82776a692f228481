"""Numbers as integers of the ring modulo 2**64, whose sums are exact and do not depend on order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from protofed.common.errors import ConfigError, SecureSumError
from protofed.common.payload import Array
from protofed.common.protocol.messages import MAX_SUMMED

WORD_BITS = 64
_BLOCK = 1 << 15  # numbers: temporaries of the vector's size would be new pages, ten times the arithmetic's time


@dataclass(frozen=True)
class FixedPoint:
    """A number x is round(x * 2**bits); its magnitude is at most `limit`, which keeps every sum within the ring.

    Attributes:
        limit: largest magnitude of a number of one site.
        bits: of the fraction.
        most: sites of one sum.

    Raises:
        ConfigError: a sum of so many such numbers could overflow.
    """

    limit: float
    bits: int
    most: int

    def __post_init__(self) -> None:
        needed = math.log2(self.limit) + self.bits + math.log2(self.most) + 1  # and the sign
        if needed > WORD_BITS or self.most * round(math.ldexp(self.limit, self.bits)) >= 2 ** (WORD_BITS - 1):
            raise ConfigError(
                f"a sum over {self.most} sites of numbers up to {self.limit:g} with {self.bits} bits of a fraction "
                f"needs {needed:.1f} bits; expected at most {WORD_BITS}: make the limit or the number of bits smaller"
            )

    def encoded(self, numbers: Array) -> Array:
        """Floats of any shape as uint64 of that shape, clipped to the limit.

        Who refused a number beyond it would tell the server, which chooses the limit, one bit of one site.

        Raises:
            SecureSumError: a number is none.
        """
        wide = np.asarray(numbers, dtype=np.float64)
        if math.isnan(float(np.min(wide, initial=0.0))):
            raise SecureSumError("no-number", "a sum takes numbers alone, and one is none")
        flat, words, scaled = wide.reshape(-1), np.empty(wide.size, dtype=np.int64), np.empty(_BLOCK)
        for begin in range(0, len(flat), _BLOCK):
            piece = flat[begin : begin + _BLOCK]
            block = np.clip(piece, -self.limit, self.limit, out=scaled[: len(piece)])
            np.multiply(block, 2.0**self.bits, out=block)  # exact
            words[begin : begin + _BLOCK] = np.rint(block, out=block)
        return words.view(np.uint64).reshape(wide.shape)

    def decoded(self, total: Array) -> Array:
        """A sum as float64."""
        return np.multiply(total.view(np.int64), 2.0**-self.bits, dtype=np.float64)


# Of every run: a server that could make it coarse, or the limit low, would have each site add a threshold of what it
# learnt, which adding up does not hide. A step is below float32's own of all numbers from 2^-16 on.
POINT = FixedPoint(limit=65536.0, bits=40, most=MAX_SUMMED)
