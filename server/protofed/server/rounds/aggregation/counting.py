"""Which accepted updates of a round count, with how many examples, and for which classes: pure functions.

What is published of a class comes from `min_contributors` sites or more: from one alone, it would be that site's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median_high, median_low
from typing import TypeAlias

import numpy as np

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors
from protofed.common.protocol.messages import TaskKind
from protofed.server.method import ExpectedUpdate
from protofed.server.storage.rows import UpdateRow

PAIR = 2
FEWEST = 2  # allowed outside of simulations
ROWS = frozenset({Part.PROTOTYPES, Part.CLASS_GRADIENTS})  # parts of a tensor a class, named by the class's number
BY_CLASS = ROWS | {Part.CLASS_PRESENCE}  # parts that show to which classes an update contributes
Contribution: TypeAlias = tuple[Part, str]  # the part, and the class's number as text


def refinement(accepted: Iterable[UpdateRow]) -> tuple[list[UpdateRow], dict[SiteId, str]]:
    """The evaluator's update that counts or, while none does, why those of before do not; it may be asked twice."""
    rows = [row for row in accepted if row.task.kind is TaskKind.REFINE]
    used = [row for row in rows if row.set_aside is None]
    return used, {} if used else {row.task.site: row.set_aside or "" for row in rows}


def outliers(norms: Mapping[SiteId, float], factor: float | None) -> dict[SiteId, str]:
    """The accepted updates of a cohort that are set aside, each with the reason.

    An update is set aside if its norm exceeds `factor` times the median of its cohort's, the upper one of an even
    number: for a factor of at least 1 that is always fewer than half. Of two updates it is the larger one, by the
    smaller: which of them is the broken one cannot be told, and an update that is too small does less harm. Nobody is
    set aside where the median is zero: most updates then do not say how large a change should be, and whoever did
    train would be the one to go (`max_relative_norm` still holds).

    Args:
        norms: of all accepted updates of one round, as `examined` gives them.
        factor: None or 0 turns the rule off.
    """
    if not factor or not norms:
        return {}
    median = median_low(norms.values()) if len(norms) == PAIR else median_high(norms.values())
    return {
        site: f"its norm of {norm:.6g} is more than {factor:g} times the cohort's median of {median:.6g}"
        for site, norm in sorted(norms.items())
        if 0 < factor * median < norm
    }


def weight_cap(rows: Iterable[UpdateRow], ratio: float) -> float:
    """The largest example count that an update of these counts with: `ratio` times the median of their claims.

    The median is the lower one of an even number: of two sites, neither counts more than `ratio` times the other.
    Infinite where no site discloses its count.
    """
    claims = [row.weight for row in rows if row.weight is not None]
    return ratio * median_low(claims) if claims else math.inf


def capped(row: UpdateRow, most: float) -> UpdateRow:
    """The update as the aggregation counts it; the ledger keeps what its site claims."""
    return row if row.weight is None or row.weight <= most else replace(row, weight=most)


def disagreeing(models: Mapping[SiteId, Digest], quorum: int) -> dict[SiteId, str]:
    """The first models that do not count, each with the reason; all, unless one alone has the most sites, and a quorum.

    Args:
        models: digest by site. A payload has one encoding, so equal models have equal digests.
    """
    makers = Counter(models.values())
    most = max(makers.values(), default=0)
    best = [model for model, count in makers.items() if count == most >= quorum]
    cause = "different versions of PyTorch or protofed, or a model of its own"
    return {
        site: f"its first model {model[:16]}… is that of {makers[model]} of {len(models)} sites: {cause}"
        for site, model in sorted(models.items())
        if best != [model]
    }


def check_contributors(recipe: Recipe, *, simulated: bool) -> None:
    """Check that a recipe for real sites publishes no class from one site alone.

    Raises:
        ConfigError: it would.
    """
    if not simulated and recipe.federation.min_contributors < FEWEST:
        raise ConfigError(
            f"recipe '{recipe.name}' is a simulation's: "
            f"federation.min_contributors = {recipe.federation.min_contributors} would publish "
            f"what comes of a class from one site alone; expected {FEWEST} or more (only simulations may take 1; "
            f"for real sites: --set federation.min_contributors={FEWEST})"
        )


def shows_classes(expected: ExpectedUpdate) -> bool:
    """Whether such updates show to which classes they contribute."""
    return any(spec.part in BY_CLASS for spec in (*expected.required, *expected.optional))


def contributions(data: Buffer) -> frozenset[Contribution]:
    """The classes that an encoded update contributes to; for rows of classes its header is enough.

    Raises:
        CodecError: the bytes are no payload.
    """
    specs = codec.manifest(data)
    rows: set[Contribution] = {(spec.part, spec.name) for spec in specs if spec.part in ROWS}
    if any(spec.part is Part.CLASS_PRESENCE for spec in specs):
        for present in codec.decode(data)[Part.CLASS_PRESENCE].values():
            rows |= {(Part.CLASS_PRESENCE, str(c)) for c in np.flatnonzero(present > 0)}
    return frozenset(rows)


def too_few(updates: Iterable[Buffer], fewest: int) -> frozenset[Contribution]:
    """The contributions that fewer than `fewest` of a round's encoded updates make."""
    counts = Counter(contribution for data in updates for contribution in contributions(data))
    return frozenset(contribution for contribution, count in counts.items() if count < fewest)


def without(payload: Payload, withheld: frozenset[Contribution]) -> Payload:
    """An update as if it did not make these contributions: their rows [...] removed, zeros in its presence [C]."""
    classes = {part: frozenset(c for of, c in withheld if of is part) for part in BY_CLASS & payload.keys()}
    changed: dict[Part, Tensors] = {}
    for part, dropped in classes.items():
        if part in ROWS:
            changed[part] = {name: row for name, row in payload[part].items() if name not in dropped}
        else:
            changed[part] = {name: _cleared(present, dropped) for name, present in payload[part].items()}
    return {**payload, **changed}


def _cleared(present: Array, classes: frozenset[str]) -> Array:
    cleared = present.copy()
    cleared[[int(c) for c in sorted(classes)]] = 0
    return cleared
