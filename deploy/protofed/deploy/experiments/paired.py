"""Paired differences over seeds: a seed deals the data and draws the model alike for all recipes.

The interval is Student's t of the differences: with few seeds a bootstrap of percentiles is far too narrow (three
values have ten different resamples), and an interval by inverting an exact test has no 95 % below six seeds. It takes
the differences as normal. The test does not: under the hypothesis that a recipe is as good as the reference every
difference has either sign with equal chance, and p is the share of all 2^n signs whose mean is as far from 0. Its
smallest value with n seeds is 2 / 2^n, whatever the differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from protofed.common.protocol.scores import spread

CONFIDENCE, LEVEL = 0.95, 0.05
MOST_EXACT = 16  # seeds; of more, so many signs are drawn as these have
TIE = 2.0**-30  # of the largest difference: the unit of means; shares of images are no odd halves of a power of two
_SEED = 0  # of those that are drawn


@dataclass(frozen=True)
class PairedDifference:
    """A recipe's score less the reference's, over the seeds that both have.

    Attributes:
        mean: of the differences.
        low, high: the 95 % interval; None: of one seed there is none.
        p: two-sided, of the sign-flip test; None: likewise.
        corrected: p after Holm's correction over the rows of a column.
    """

    seeds: tuple[int, ...]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    corrected: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the corrected p is at most 5 %."""
        return self.corrected is not None and self.corrected <= LEVEL


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that the signs of so many differences can have."""
    return 2.0 ** (1 - min(seeds, MOST_EXACT))


def seeds_needed(rows: int) -> int:
    """The fewest seeds of which a difference may be significant at 5 %, corrected over so many rows."""
    return next(n for n in range(1, MOST_EXACT + 1) if rows * smallest_p(n) <= LEVEL or n == MOST_EXACT)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> PairedDifference | None:
    """By seed, a recipe's scores less the reference's; None: no seed has both."""
    seeds = tuple(sorted(values.keys() & reference.keys()))
    if not seeds:
        return None
    differences = np.array([values[seed] - reference[seed] for seed in seeds])  # [seeds]
    found = PairedDifference(seeds, spread(differences.tolist()).mean)
    if len(seeds) == 1:
        return found
    low, high = _interval(differences)
    return replace(found, low=low, high=high, p=_sign_flip_p(differences))


def corrected(differences: Mapping[str, PairedDifference]) -> dict[str, PairedDifference]:
    """The rows of a column with Holm's correction: the k-th smallest p of m times m - k + 1; p never falls."""
    ranked = sorted((name for name, of in differences.items() if of.p is not None), key=lambda n: _p(differences[n]))
    found, least = dict(differences), 0.0
    for rank, name in enumerate(ranked):
        least = max(least, min(1.0, (len(ranked) - rank) * _p(differences[name])))
        found[name] = replace(differences[name], corrected=least)
    return found


def _p(of: PairedDifference) -> float:
    return 1.0 if of.p is None else of.p


def _interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    count = len(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(differences.std(ddof=1)) / math.sqrt(count)
    mean = float(differences.mean())
    return mean - half, mean + half


def _sign_flip_p(differences: NDArray[np.float64]) -> float:
    """Over all 2^n signs; of more than 2^16, over as many that are drawn.

    Means are rounded to whole units of `TIE`: those that are equal but for last bits would count as farther from 0, or
    not, by chance. SciPy lets the last bits of a mean differ, which may be near 0, not those of the differences.
    """
    if not differences.any():
        return 1.0
    step = float(np.abs(differences).max()) * TIE
    test = stats.permutation_test(
        (differences,),
        lambda sample, axis: np.rint(sample.mean(axis) / step),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**MOST_EXACT,
        batch=1024,
        rng=np.random.default_rng(_SEED),
    )
    return float(test.pvalue)


def can_show(seeds: Collection[int], rows: int) -> str:
    """What so many seeds can show at all, in a sentence.

    Args:
        seeds: the different numbers of seeds of the rows that are tested.
        rows: tested ones of a column.
    """
    n = max(seeds)
    least = smallest_p(n)
    needed = seeds_needed(rows)
    of = f"With {'at most ' if len(set(seeds)) > 1 else ''}{n} seeds no p is below {least:.3g} (2 / 2^{n})"
    if rows > 1:
        of += f", {min(1.0, rows * least):.3g} after Holm's correction over {rows} rows"
    if rows * least > LEVEL:
        return f"{of}: no difference can be significant at 5 %, however large. That takes {needed} seeds or more."
    return f"{of}."
