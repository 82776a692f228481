"""Runs under secure aggregation: which may, and the next state from the total of the sites' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, SecureAggregationError, StateError
from protofed.common.payload import Array, Payload, Update
from protofed.common.protocol.messages import MAX_SECURE_SITES, MIN_SECURE_SITES
from protofed.common.secure_aggregation.linear_form import WEIGHT, FixedPoint, SumLayout, Sums, read_form
from protofed.common.secure_aggregation.messages import MAX_ROWS
from protofed.server.method import RoundContext, ServerMethod, SummableServerMethod, sent


def check_secure(recipe: Recipe, method: ServerMethod) -> None:
    """Check that a recipe with `federation.secure = true` can run so.

    Raises:
        ConfigError: its method has no linear form with these options, or too many classes.
    """
    if not recipe.federation.secure:
        return
    if counts_contributors(method, recipe) and recipe.classes > MAX_ROWS:
        raise ConfigError(
            f"recipe '{recipe.name}' has {recipe.classes} classes; expected at most {MAX_ROWS} with "
            f"federation.secure = true, because method {recipe.method.name} aggregates by class"
        )


def counts_contributors(method: ServerMethod, recipe: Recipe) -> bool:
    """Whether sites count the contributors of each class before they send numbers: the method sums some by class."""
    return read_form(method, recipe.method.name).by_class


def lay_out(method: ServerMethod, state: Payload) -> SumLayout:
    """The layout of the vectors of a round that starts from this state, of a method that passed `check_secure`."""
    form = cast("SummableServerMethod", method).sum_form()
    return SumLayout.of(form, method.expects(state).required, sent(method, state, ""))


def check_total(layout: SumLayout, total: Array, fixed_point: FixedPoint, sites: int) -> None:
    """Check that an opened total [N] uint64 is one of numbers that so many sites can have sent.

    A site whose images decide that nothing of its update leaves sends random words, and nobody learns which site.

    Raises:
        SecureAggregationError: it is not.
    """
    numbers = fixed_point.decoded(total)
    # Noise comes on top of what is clipped to the limit: its std is a 16th of the limit at most.
    within = max(-float(np.min(numbers)), float(np.max(numbers))) <= 2 * sites * fixed_point.limit
    weight = float(layout.named(numbers).get(WEIGHT, np.array(sites)))
    if not within or (layout.form.weighting == "uniform" and weight != sites):
        raise SecureAggregationError(
            "withheld",
            "its numbers are random: a site's policy keeps its update back because of its images. Which site that is, "
            "only the site itself knows; its log and `protofed client doctor` say why",
        )


def next_state(
    method: ServerMethod,
    state: Payload,
    layout: SumLayout,
    total: Array,
    fixed_point: FixedPoint,
    context: RoundContext,
) -> Payload:
    """The state that a method makes of an opened total [N] uint64."""
    return cast("SummableServerMethod", method).from_sums(state, Sums.opened(layout, total, fixed_point), context)


def unmasked_total(
    layout: SumLayout, updates: Callable[[], Iterable[Update]], fixed_point: FixedPoint, min_contributors: int
) -> Array:
    """The total [N] uint64 that sites' masked vectors open to, for a simulation, which has the updates themselves.

    Args:
        updates: gives them anew at each call: who holds which class is known only when all were read once.

    Raises:
        StateError: there are fewer sites than an aggregation takes, or more, or an update cannot be aggregated.
    """
    flags = [_flags(layout, update) for update in updates()]
    if not MIN_SECURE_SITES <= len(flags) <= MAX_SECURE_SITES:
        raise StateError(
            f"a secure aggregation takes {MIN_SECURE_SITES} to {MAX_SECURE_SITES} sites; this round has {len(flags)}"
        )
    enough, total = np.sum(flags, axis=0) >= min_contributors, np.zeros(layout.size, dtype=np.uint64)
    for update in updates():
        total += _words(layout, update, fixed_point, enough)
    return total


def _flags(layout: SumLayout, update: Update) -> Array:
    with _named(update):
        return layout.flags(update)


def _words(layout: SumLayout, update: Update, fixed_point: FixedPoint, enough: Array) -> Array:
    with _named(update):
        return layout.words(update, fixed_point, enough)


@contextmanager
def _named(update: Update) -> Iterator[None]:
    try:
        yield
    except SecureAggregationError as error:
        raise StateError(f"the update of {update.site} cannot be aggregated: {error}") from error
