"""Models of single sites as rows [S, ...] of one part of a state: each site keeps its row (METHODS §5.15-5.18).

Beside the tensors of `mixtures.stacked`, part PRIVATE has for each site that has a row `row.SITE`, its number [] int64.
Memory is that of S models; of a site that is not in a round the newest one stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from protofed.server.method import Array, Part, Payload, SiteId, Tensors, Update, describe, distance_norm, is_buffer
from protofed.server.methods.mixtures import MODEL, row

_ROW = "row."


def index_rows(state: Payload) -> dict[SiteId, int]:
    """The row of each site that has one, in the rows' order."""
    numbers = {name: int(number) for name, number in state.get(Part.PRIVATE, {}).items() if name.startswith(_ROW)}
    return {name.removeprefix(_ROW): numbers[name] for name in sorted(numbers, key=lambda name: (numbers[name], name))}


def row_numbers(rows: Mapping[SiteId, int]) -> dict[str, Array]:
    """Tensors of part PRIVATE, as `index_rows` reads them."""
    return {f"{_ROW}{site}": np.array(number) for site, number in rows.items()}


def with_rows(models: Tensors, like: Payload, replaced: Mapping[int, Payload]) -> dict[str, Array]:
    """The stacked models [S, ...] with these rows replaced, or added after the last one.

    Args:
        models: empty at first; tensors that belong to no model are left out.
        like: BODY and HEAD of the models' structure.
    """
    new: dict[str, Array] = {}
    for spec in describe({part: like[part] for part in MODEL}):
        path = f"{spec.part}.{spec.name}"
        old = models.get(path, np.empty((0, *spec.shape), spec.dtype))
        new[path] = np.empty((max([len(old), *(number + 1 for number in replaced)]), *spec.shape), spec.dtype)
        new[path][: len(old)] = old
        for number, payload in replaced.items():
            new[path][number] = payload[spec.part][spec.name]
    return new


def with_newest(state: Payload, updates: Iterable[Update], part: Part = Part.PRIVATE) -> dict[Part, Tensors]:
    """The state with what these sites sent as their rows of a part; a site's first update gets the next row.

    Args:
        part: PRIVATE, or one that sites are sent; the rows' numbers are in PRIVATE in any case.
    """
    rows, replaced = index_rows(state), dict[int, Payload]()
    for update in updates:
        replaced[rows.setdefault(update.site, len(rows))] = update.payload
    models = with_rows(state.get(part, {}), state, replaced)
    private = models if part is Part.PRIVATE else {}
    return {**state, part: models, Part.PRIVATE: {**private, **row_numbers(rows)}}


def pick_model(state: Payload, site: SiteId) -> Payload:
    """BODY and HEAD of the site's row in part PRIVATE; of the state itself, while the site has none."""
    number = index_rows(state).get(site)
    return {part: state[part] for part in MODEL} if number is None else row(state[Part.PRIVATE], number)


def parameters(model: Payload) -> Payload:
    """BODY and HEAD without buffers, such as running statistics: what distances between models are of."""
    return {part: {name: array for name, array in model[part].items() if not is_buffer(name)} for part in MODEL}


def distance(one: Payload, other: Payload) -> float:
    """||w - w'|| over the parameters of two models."""
    return distance_norm(parameters(one), other)
