"""Differential privacy of one fit: what its noise and samples are drawn from, and how many it has drawn.

Noise comes from a stream cipher, not from PyTorch's generators. On the CPU these take 32 bits of a seed. Whoever has an
update could try all seeds until one takes the noise away.

A site's share of the noise of a secure aggregation: the distributed Gaussian mechanism, on the ring of the sum.

Each of the sites adds N(0, s^2 / h) to each of its numbers, rounded to a step of the fixed point. If h sites or more
keep to the rules, the sum, which is all that anybody sees, has N(0, s^2) and more. Adding on the ring wraps and never
clips, so the sum of noisy terms is the noisy sum (Kairouz, Liu, Steinke, ICML 2021, whose noise is discrete from the
start). Rounded normal numbers are as good: given the fractions that rounding takes away, what is left is a discrete
Gaussian; and those fractions are uniform, whatever was added, but for factors of 1 + 2 exp(-2 pi^2 r^2) a number, r
being the noise in steps: recipes have 1024 or more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofed.common.config.recipe import DpCost, DpPlan, Plan
from protofed.common.errors import FailureReason, SecureAggregationError, TaskFailedError
from protofed.common.payload import Array, Payload, distance_norm
from protofed.common.secure_aggregation.keys import add_mask
from protofed.common.secure_aggregation.linear_form import MEAN, WEIGHT, SumLayout

SIMULATED_SECRET = bytes(32)  # of all sites of a simulation, whose runs repeat: it protects nobody
_FRACTION_BITS = 53  # of a float64 below 1
_FRACTION = (1 << _FRACTION_BITS) - 1


def fit_seed(secret: bytes, *depends: str | int) -> bytes:
    """The seed, 32 bytes, of one fit's noise.

    Args:
        secret: of the site, 32 bytes.
        depends: all that the fit's result depends on. Of two fits that differ in any of it, and had the same noise, the
            difference would be without noise.
    """
    return hashlib.blake2b(json.dumps(depends).encode(), key=secret, digest_size=32).digest()


class DpNoise:
    """Random numbers of one fit; each `path` names a stream of its own, the same after a restart.

    Args:
        seed: 32 bytes, as of `fit_seed`.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def identity(self) -> str:
        """Names this noise and no other, in hex, and tells nothing of it: for the ledger."""
        return self._key(("identity",)).hex()

    def normal(self, shape: Sequence[int], *path: str | int, device: torch.device) -> Tensor:
        """Standard normal numbers of this shape [...], float64 on the device.

        In double precision, to be added in it and rounded after. If floats are drawn as such, their last bits tell what
        was added (Mironov, CCS 2012).
        """
        count = math.prod(shape)
        half = (count + 1) // 2
        uniform = self._uniform(2 * half, path).to(device)
        radius = uniform[:half].log_().mul_(-2).sqrt_()  # Box and Muller, 1958
        angle = uniform[half:].mul_(2 * math.pi)
        return torch.cat((radius * angle.cos(), radius.mul_(angle.sin_())))[:count].reshape(tuple(shape))

    def chosen(self, count: int, rate: float, *path: str | int) -> Tensor:
        """[count] bool on the CPU, each true with probability `rate`, independently."""
        return self._uniform(count, path) < rate

    def number(self, *path: str | int) -> int:
        """A seed for a generator of PyTorch's, of what needs no cipher: augmentation and dropout."""
        return int.from_bytes(self._key(path)[:7], "big")

    def _uniform(self, count: int, path: tuple[str | int, ...]) -> Tensor:
        """[count] float64 on the CPU, above 0 and below 1."""
        words = np.zeros(count, np.uint64)
        add_mask(words, self._key(path))
        bits = torch.from_numpy(words.view(np.int64)).bitwise_and_(_FRACTION)
        return bits.double().add_(0.5).mul_(2.0**-_FRACTION_BITS)

    def _key(self, path: tuple[str | int, ...]) -> bytes:
        return hashlib.blake2b(json.dumps(path).encode(), key=self._seed, digest_size=32).digest()


@dataclass
class DpContext:
    """What a fit under `[plan.dp]` may spend, and has spent.

    Attributes:
        cost: that the method has declared for a round.
        steps: noisy steps started.
        releases: class sums and counts released.
    """

    plan: DpPlan
    cost: DpCost
    noise: DpNoise
    steps: int = 0
    releases: int = 0

    def begin_steps(self, count: int) -> None:
        """Count the steps of a call of `train`, before the first is taken.

        Raises:
            TaskFailedError: they are more than the method has declared; nothing of the fit leaves.
        """
        self.steps += count
        if self.steps > (declared := self.cost.steps(self.plan)):
            raise _undeclared(f"{self.steps} noisy steps", str(declared))

    def begin_release(self) -> int:
        """Count a class release; its number, from 1.

        Raises:
            TaskFailedError: as of `begin_steps`.
        """
        self.releases += 1
        if self.releases > self.cost.class_releases:
            raise _undeclared(f"{self.releases} class releases", str(self.cost.class_releases))
        return self.releases


def _undeclared(actual: str, declared: str) -> TaskFailedError:
    text = f"the method uses {actual} in a round, and has declared {declared} (dp_cost). The update is not sent"
    return TaskFailedError(FailureReason.INTERNAL, text)


_ROUNDING = 2.0**-21  # of a float32 model's norm: what few roundings of two neighbours' models differ by, at most
_SLACK = 1.01  # the same of the step itself, which the number of units that are drawn multiplies
_CPU = torch.device("cpu")
# Std in steps of the fixed point: `DpNoise.normal` gives numbers below 9, and 16 times as many fit into a word.
MAX_STEPS = 2.0**59


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
    rounding = dp.noise_multiplier * _ROUNDING * distance_norm(base, {}) / math.sqrt(dp.shared_by)
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
            SecureAggregationError: something is aggregated that is no mean of models: nothing would hide it.
        """
        noisy = words.copy()
        for key, term in layout.named(noisy).items():
            if key.startswith(MEAN):
                steps = np.rint(np.ldexp(self._drawn(key, term.shape), bits)).astype(np.int64)
                term += steps.view(np.uint64)
            elif key != WEIGHT:
                raise SecureAggregationError("other-form", f"{key} is aggregated, and shared noise hides means only")
        return noisy

    def on_update(self, payload: Payload) -> Payload:
        """The same for the update of a simulated site, which is aggregated without masks, in the model's precision."""
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
