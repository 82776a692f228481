"""Sums of the sites' own scores: which scores, where each stands in a site's vector, and what an opened sum says.

Each score s is a row [1], which its contributors have, like class rows: a score with fewer than `CONTRIBUTORS` sites is
not aggregated. The square of s is never aggregated: few whole numbers have a known sum and a known sum of squares. s is
rounded: a fine fraction tells its denominator, the size of a site's test set. Which rows there are follows from the
recipe alone. Every signature of a sum is bound to the recipe's digest. No word of a server, and no number of a site,
chooses among the rows.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

import numpy as np

from protofed.common.payload import Array, Part, Update
from protofed.common.protocol.messages import MIN_SECURE_SITES, Role, Scores
from protofed.common.protocol.scores import LOSS, ROUNDING, ScoreNames, Spread
from protofed.common.secure_aggregation.linear_form import CONTRIBUTORS as COUNTS
from protofed.common.secure_aggregation.linear_form import POINT, ROWS, ClassRows, SumForm, SumLayout
from protofed.common.secure_aggregation.messages import MAX_ROWS

CONTRIBUTORS = MIN_SECURE_SITES  # of two, each knows the other's
STEP = 2.0**-10  # of a score in a sum, as a share of its range: of a thousandth a test set's size cannot be read
LARGEST = POINT.limit  # a larger score, a loss, counts as this
_TABLE = "scores"  # [R, 1], of a part that only the layout has
FORM = SumForm(rows=ClassRows(Part.SECURE_AGGREGATION, (Part.SECURE_AGGREGATION, _TABLE)))


def list_scores(names: ScoreNames) -> tuple[str, ...]:
    """The scores that trainers of a run may have, sorted: rows of its sums. Classes too many for a sum are left out."""
    own = [name for name, family in names.families.items() if family.role is Role.TRAINER]
    rows = [LOSS, *(row for name in own for row in names.spelled(name))]
    whole = [row for row in rows if row in (LOSS, *own)]
    return tuple(sorted(rows if len(rows) <= MAX_ROWS else whole))


def lay_out_scores(names: ScoreNames) -> SumLayout:
    """Where the sums of a run's scores stand in a vector."""
    return SumLayout.of(FORM, (), {Part.SECURE_AGGREGATION: {_TABLE: np.zeros((len(list_scores(names)), 1))}})


def summable(names: ScoreNames, scores: Scores) -> dict[str, float]:
    """A run's scores among these, as they are aggregated: rounded, from -LARGEST to LARGEST, which also stands for NaN.

    None is left out for its value: how many sites have a score is opened, and would tell of their images.
    """
    known = {name: scores[name] for name in list_scores(names) if name in scores}
    return {name: _rounded(value, _step(names, name)) for name, value in known.items()}


def _rounded(value: float, step: float) -> float:
    return LARGEST if math.isnan(value) else round(min(max(value, -LARGEST), LARGEST) / step) * step


def _step(names: ScoreNames, name: str) -> float:
    family = names.family(name)
    return STEP if family is None else STEP * (family.high - family.low)


def as_update(site: str, names: ScoreNames, scores: Scores) -> Update:
    """A site's terms of the sums, as an update of `lay_out_scores`; the scores are `summable`."""
    rows = {str(row): name for row, name in enumerate(list_scores(names)) if name in scores}
    table = {row: np.array([scores[name]]) for row, name in rows.items()}
    return Update(site, {Part.SECURE_AGGREGATION: table})


def random_number() -> float:
    """A number that is in a sum in place of a score that is withheld: once `summable`, any that there is, each as
    likely.

    It hides the other terms, but for one sum of 2**16, near the ends. The mean over n sites is a score from 0 to 1 all
    the same (`is_score`) in n of 2**17.
    """
    steps = round(LARGEST / STEP)
    return (secrets.randbelow(2 * steps + 1) - steps) * STEP


def is_score(names: ScoreNames, name: str, value: float) -> bool:
    """Whether a score, or the mean of some, can have this value."""
    if (family := names.family(name)) is None:
        return name == LOSS
    slack = _step(names, name) + ROUNDING
    return family.low - slack <= value <= family.high + slack


def opened(names: ScoreNames, total: Array) -> dict[str, Spread]:
    """What an opened total [N] uint64 says of each score that enough sites hold: the mean over them.

    A score that a site withheld, by a random number in its place, is left out: the round has none.
    """
    sums = lay_out_scores(names).named(POINT.decoded(total))
    return {
        name: Spread(mean, None, None, sites)
        for name, count, (total,) in zip(list_scores(names), sums[COUNTS], sums[ROWS], strict=True)
        if (sites := round(count)) > 0 and is_score(names, name, mean := float(total) / sites)
    }


def simulate_total(names: ScoreNames, by_site: Iterable[Scores]) -> Array:
    """The total [N] uint64 that the masked vectors of these sites' scores open to, for a simulation, which has them."""
    layout = lay_out_scores(names)
    terms = [as_update("", names, summable(names, scores)) for scores in by_site]
    flags = [layout.flags(update) for update in terms]
    classes = np.sum(flags, axis=0) >= CONTRIBUTORS
    words = [layout.words(update, POINT, classes) for update in terms]
    return np.asarray(np.sum(words, axis=0, dtype=np.uint64))
