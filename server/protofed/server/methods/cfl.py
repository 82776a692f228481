"""CFL: Sattler, Müller and Samek, IEEE TNNLS 2020, Algorithm 3, server side (METHODS §5.18).

It splits a cluster by the cosines between its sites' updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from protofed.server.method import (
    Array,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    Update,
    like,
    server_methods,
)
from protofed.server.methods.mixtures import MODEL, row
from protofed.server.methods.site_rows import index_rows, parameters, row_numbers, with_rows

MIN_SPLIT_SITES = 3  # sites of a cluster that is split
Linkage: TypeAlias = Literal["single", "complete"]


def inner_products(model: Payload, updates: Sequence[Payload]) -> Array:
    """<dW_k, dW_l> of m updates of one model, [m, m] float64; its mean is ||mean dW||^2."""
    products = np.zeros((len(updates), len(updates)))
    for part, tensors in parameters(model).items():
        for name, origin in tensors.items():
            moved = [(update[part][name].astype(np.float64) - origin).reshape(-1) for update in updates]
            products += np.stack(moved) @ np.stack(moved).T
    return products


def bipartition(similarity: Array, linkage: Linkage) -> list[list[int]]:
    """Merge the two most similar of m clusters, again and again, until two clusters are left; [m, m].

    "single": two clusters are as similar as their nearest members. Then the greatest similarity between the last two
    is as small as it can be (Algorithm 1). "complete": they are as similar as their farthest members.
    """
    parts, near = [[k] for k in range(len(similarity))], np.array(similarity, np.float64)
    np.fill_diagonal(near, -np.inf)
    while len(parts) > 2:
        into, outgoing = sorted(divmod(int(near.argmax()), len(parts)))  # equal ones: the first
        near[into] = near[:, into] = (np.maximum if linkage == "single" else np.minimum)(near[into], near[outgoing])
        near[into, into] = -np.inf
        near = np.delete(np.delete(near, outgoing, 0), outgoing, 1)
        parts[into] = sorted(parts[into] + parts.pop(outgoing))
    return parts


@server_methods.register(Method("cfl", "CFL", "Sattler et al., TNNLS 2020"))
@dataclass(frozen=True)
class CFLServer:
    """FedAvg in each cluster; one whose sites pull apart while its model stands still is split in two.

    A row of part PRIVATE is the model of a cluster here, and a site's number that of its cluster.
    """

    global_model: ClassVar[bool] = False
    eps1: Annotated[float, Field(ge=0)] = 0.4  # a cluster is split where ||mean dW|| is below
    eps2: Annotated[float, Field(ge=0)] = 1.6  # and max ||dW|| above
    first_rounds: Annotated[int, Field(ge=0)] = 20  # in which none is
    linkage: Linkage = "single"  # of the bipartition, as in the paper's Algorithm 1; "complete": the authors' code

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """One cluster."""
        return {**model, Part.PRIVATE: with_rows({}, model, {0: model})}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The model of the site's cluster; of the largest one, for a site that comes new."""
        number = index_rows(state).get(site)
        return {part: state[part] for part in MODEL} if number is None else row(state[Part.PRIVATE], number)

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model."""
        return ExpectedUpdate(like(state, *MODEL))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """Split clusters; then w_c <- mean of w_k, that is w_c + mean dW_k, in each. One without an update stays."""
        known, members = index_rows(state), dict[int, list[Update]]()
        clusters = dict(known)
        for update in updates:
            members.setdefault(clusters.setdefault(update.site, _largest(known)), []).append(update)
        new, next_number = dict[int, Payload](), max(clusters.values(), default=0) + 1
        for number, received in sorted(members.items()):
            staying, leaving = self._parts(row(state[Part.PRIVATE], number), received, context.round)
            new[number] = _mean(staying)
            if leaving:
                new[next_number] = _mean(leaving)
                clusters |= {update.site: next_number for update in leaving}
                next_number += 1
        models = with_rows(state[Part.PRIVATE], state, new)
        return {**row(models, _largest(clusters)), Part.PRIVATE: {**models, **row_numbers(clusters)}}

    def _parts(self, model: Payload, updates: list[Update], round: int) -> tuple[list[Update], list[Update]]:
        """The updates of a cluster, those of the larger part first, with which sites stay that are not in the round."""
        if len(updates) < MIN_SPLIT_SITES or round <= self.first_rounds:
            return updates, []
        products = inner_products(model, [update.payload for update in updates])
        norms = np.sqrt(products.diagonal())
        if not (np.sqrt(max(products.mean(), 0.0)) < self.eps1 and norms.max() > self.eps2):
            return updates, []
        parts = bipartition(products / np.maximum(np.outer(norms, norms), 1e-12), self.linkage)
        larger, smaller = sorted(parts, key=lambda part: (-len(part), part))
        return [updates[k] for k in larger], [updates[k] for k in smaller]


def _mean(updates: Iterable[Update]) -> Payload:
    mean = Mean(MODEL)
    for update in updates:
        mean.add(update.payload)
    return mean.result()


def _largest(clusters: Mapping[SiteId, int]) -> int:
    """The cluster with the most sites; of equal ones, or if there are no sites yet, the first."""
    return min(Counter(clusters.values()).items(), key=lambda entry: (-entry[1], entry[0]), default=(0, 0))[0]
