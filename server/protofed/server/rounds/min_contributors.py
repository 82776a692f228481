"""What is published of a class comes from `min_contributors` sites or more: from one alone, it would be that site's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from protofed.common import codec
from protofed.common.codec import Buffer
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, Payload, Tensors
from protofed.server.method import ExpectedUpdate

FEWEST = 2  # allowed outside of simulations
ROWS = frozenset({Part.PROTOTYPES, Part.CLASS_GRADIENTS})  # parts of a tensor a class, named by the class's number
BY_CLASS = ROWS | {Part.CLASS_PRESENCE}  # parts that show to which classes an update contributes
Contribution: TypeAlias = tuple[Part, str]  # the part, and the class's number as text


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
