"""What a server sees of a run under secure aggregation: one opened sum a round, the same of every site in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload, SiteId, Tensors, Update
from protofed.common.secure_aggregation.linear_form import SumLayout, Sums
from protofed.deploy.simulation.simulation import Simulation
from protofed.server.method import server_methods
from protofed.server.rounds.secure_aggregation.totals import lay_out, unmasked_total


def sums_of(running: Simulation) -> Iterator[tuple[dict[SiteId, Payload], dict[SiteId, Payload]]]:
    """By round and site, what the round's opened sum gives, as if it were the site's update; and where the site began.

    A simulation has the updates themselves. The sum is made of them by the server's own code, and they are dropped.
    """
    recipe = running.recipe
    method = server_methods.build(recipe.method.name, recipe.method.options)
    states = {
        row.round: codec.decode(running.blobs.get(row.state)) for row in running.ledger.rounds(recipe.name) if row.state
    }
    last = updates_of(running, 0)[0].payload
    for number in range(1, recipe.rounds + 1):
        updates, state = updates_of(running, number), states[number - 1]
        began = method.broadcast(state, "")
        if Part.BODY not in began:  # cwFedAVG sends a model for each class
            began = {part: last[part] for part in (Part.BODY, Part.HEAD)}
        last = as_update(opened(recipe, lay_out(method, state), updates))
        sites = [update.site for update in updates]
        yield dict.fromkeys(sites, last), dict.fromkeys(sites, began)


def updates_of(running: Simulation, number: int) -> list[Update]:
    """Those that count in a round."""
    rows = [row for row in running.ledger.updates(running.recipe.name, number) if row.counts]
    return [Update(row.task.site, codec.decode(running.blobs.get(row.digest)), {}, row.weight) for row in rows]


def opened(recipe: Recipe, layout: SumLayout, updates: Sequence[Update]) -> Sums:
    """What the server of a secure run has of a round."""
    fixed_point, fewest = recipe.federation.fixed_point, recipe.federation.min_contributors
    assert fixed_point is not None
    return Sums.opened(layout, unmasked_total(layout, lambda: updates, fixed_point, fewest), fixed_point)


def as_update(sums: Sums) -> Payload:
    """The sums divided by what they are over: the mean of updates, which attacks then read as one of them."""
    form = sums.layout.form
    found: dict[Part, Tensors] = {part: sums.mean(part) for part in form.means}
    if form.rows is not None:
        found[form.rows.part] = sums.row_means()
    if form.shares is None:
        return found
    mass = sums.mixture_mass()
    if form.shares is Part.CLASS_PRESENCE:
        return {**found, Part.CLASS_PRESENCE: {"present": mass}}
    for part in form.mixtures:
        mixtures = sums.mixtures(part)
        found[part] = {name: np.tensordot(mass / mass.sum(), stack, 1) for name, stack in mixtures.items()}
    return {**found, Part.CLASS_SHARES: {"shares": mass / mass.sum()}}
