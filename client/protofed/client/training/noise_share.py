"""A site's share of the noise of a secure sum: the distributed Gaussian mechanism, on the ring of the sum.

Each of the sites adds N(0, s^2 / h) to each of its numbers, rounded to a step of the fixed point, and h of them or more
keep to the rules: the sum, which is all that anybody sees, has N(0, s^2) and more. Adding on the ring wraps and never
clips, so the sum of noisy terms is the noisy sum (Kairouz, Liu, Steinke, ICML 2021, whose noise is discrete from the
start). Rounded normal numbers are as good: given the fractions that rounding takes away, what is left is a discrete
Gaussian; and those fractions are uniform, whatever was added, but for factors of 1 + 2 exp(-2 pi^2 r^2) a number, r
being the noise in steps: recipes have 1024 or more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from protofed.client.training.dp import DpNoise
from protofed.common.config.plan import DpPlan, Plan
from protofed.common.errors import SecureSumError
from protofed.common.payload import Array, Payload
from protofed.common.secure_aggregation.linear_form import MEAN, WEIGHT, SumLayout
from protofed.common.tensors import norm_of

_ROUNDING = 2.0**-21  # of a float32 model's norm: what few roundings of two neighbours' models differ by, at most
_SLACK = 1.01  # the same of the step itself, which the number of units that are drawn multiplies
_CPU = torch.device("cpu")
# Std in steps of the fixed point: `DpNoise.normal` gives numbers below 9, and 16 times as many fit into a word.
MOST_STEPS = 2.0**59


def share_std(plan: Plan, round: int, rounds: int, base: Payload) -> float:
    """Std of a site's share on each number of its model; 0: the plan shares no noise.

    A unit moves the model by lr C / B at most, and float32 rounds what it moves.

    Args:
        base: the model that the fit starts from.
    """
    dp: DpPlan | None = plan.dp
    if dp is None or dp.shared_by is None:
        return 0.0
    exact = dp.noise_share(plan.learning_rate(round, rounds), plan.batch_size)
    rounding = dp.noise_multiplier * _ROUNDING * norm_of(base, {}) / math.sqrt(dp.shared_by)
    return _SLACK * exact + rounding


@dataclass(frozen=True)
class NoiseShare:
    """One site's share of the noise of one sum.

    Attributes:
        std: as of `share_std`, above 0.
    """

    noise: DpNoise
    std: float

    def on_words(self, layout: SumLayout, words: Array, bits: int) -> Array:
        """A site's terms [N] uint64 of all sums, with the noise: numbers of the ring, `bits` of them a fraction.

        Raises:
            SecureSumError: something is summed that is no mean of models: nothing would hide it.
        """
        noisy = words.copy()
        for key, term in layout.named(noisy).items():
            if key.startswith(MEAN):
                steps = np.rint(np.ldexp(self._drawn(key, term.shape), bits)).astype(np.int64)
                term += steps.view(np.uint64)
            elif key != WEIGHT:
                raise SecureSumError("other-form", f"{key} is summed, and noise that is shared hides means alone")
        return noisy

    def on_update(self, payload: Payload) -> Payload:
        """The same of the update of a simulated site, which is not summed under masks, in the model's precision."""
        return {
            part: {
                name: (array + self._drawn(f"{MEAN}{part}/{name}", array.shape)).astype(array.dtype)
                if array.dtype.kind == "f"
                else array
                for name, array in tensors.items()
            }
            for part, tensors in payload.items()
        }

    def _drawn(self, key: str, shape: tuple[int, ...]) -> Array:
        """Normal numbers of this shape, float64, the same for the same sum."""
        drawn: Array = self.noise.normal(shape, "share", key, device=_CPU).mul_(self.std).numpy()
        return drawn
