"""Runs a method's server half on blobs: decodes updates, aggregates them, stores states and broadcasts.

Which accepted updates of a round count, with how many examples, and for which classes, pure functions say. What is
published of a class comes from `min_contributors` sites or more: from one alone, it would be that site's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low
from typing import NamedTuple, TypeAlias

import numpy as np

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, OutOfSpaceError, StateError
from protofed.common.failpoint import reach
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors, Update, unit
from protofed.common.protocol.messages import TaskKind
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.keys import Vector
from protofed.common.secure_aggregation.linear_form import FixedPoint
from protofed.server.method import ExpectedUpdate, RoundContext, ServerMethod, refining, sent
from protofed.server.rounds.aggregation.robust_rule import ROWS, RobustRule
from protofed.server.rounds.secure_aggregation.steps import SumRecord
from protofed.server.rounds.secure_aggregation.totals import check_total, lay_out, next_state, unmasked_total
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.rows import UpdateRow

PAIR = 2  # updates of which none is the odd one out
MIN_CONTRIBUTORS = 2  # allowed outside of simulations
BY_CLASS = ROWS | {Part.CLASS_PRESENCE}  # parts that show to which classes an update contributes
Contribution: TypeAlias = tuple[Part, str]  # the part, and the class's number as text


def refinement(accepted: Iterable[UpdateRow]) -> tuple[list[UpdateRow], dict[SiteId, str]]:
    """The evaluator's update that counts or, while none does, why those of before do not; it may be asked twice."""
    rows = [row for row in accepted if row.task.kind is TaskKind.REFINE]
    used = [row for row in rows if row.rejected is None]
    return used, {} if used else {row.task.site: row.rejected or "" for row in rows}


def outliers(norms: Mapping[SiteId, float], factor: float | None) -> dict[SiteId, str]:
    """The accepted updates of a cohort that are rejected, each with the reason.

    An update is rejected if its norm exceeds `factor` times the median of its cohort's norms, the upper one of an even
    number. For a factor of at least 1 this is always fewer than half. Of two updates, the larger one is compared with
    the smaller: nobody can tell which one is broken, and an update that is too small does less harm. Nobody is rejected
    where the median is zero. Most updates then do not say how large a change should be, and the rule would reject
    whoever did train (`max_relative_norm` still holds).

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
    """The largest example count that an update counts with: `ratio` times the median of the claims.

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
    if not simulated and recipe.federation.min_contributors < MIN_CONTRIBUTORS:
        raise ConfigError(
            f"recipe '{recipe.name}' is for simulations: "
            f"with federation.min_contributors = {recipe.federation.min_contributors} the server would publish "
            f"what one site alone sent for a class. Expected {MIN_CONTRIBUTORS} or more: "
            f"--set federation.min_contributors={MIN_CONTRIBUTORS}"
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


_Arrays: TypeAlias = dict[tuple[Part, str], int]  # which array is where, by its id
Opened: TypeAlias = Mapping[Digest, Payload]  # updates as views of their blobs, which were checked
CHECKED_AT_ONCE = 4  # blobs: a hash lets go of Python's lock, and takes a core as long as reading memory does
KEPT = 64  # payloads that are known again by their arrays; a method with more clusters of sites encodes some anew
SHIFT, MIN_DISTANCE, COVERED = "prototype_shift", "prototype_min_distance", "classes_covered"
BLOCK = 256  # classes whose distances to all others are in memory at a time


@dataclass(frozen=True)
class Published:
    """A published state, its blob's address and its statistics (none for a state that was restored)."""

    address: Digest
    state: Payload
    statistics: Mapping[str, float] = field(default_factory=dict)


class _Stored(NamedTuple):
    """A payload in the store; as long as it is kept its arrays are alive, and their ids mean them."""

    payload: Payload
    arrays: _Arrays
    address: Digest
    nbytes: int


class Publisher:
    """One run's method over the blob store.

    Args:
        min_contributors: if fewer updates of a round contribute to a class, the class keeps what was published before.
        sums: under secure aggregation, its fixed point: states are made of the updates' sums alone. None: without.
        recipe: its fingerprint, which sites bind their masks to.
        robust: what bounds bad updates before they are aggregated; None: nothing does.
    """

    def __init__(
        self,
        method: ServerMethod,
        blobs: Blobs,
        min_contributors: int,
        sums: FixedPoint | None = None,
        recipe: Digest | None = None,
        robust: RobustRule | None = None,
    ) -> None:
        self._method, self._blobs, self._fewest = method, blobs, min_contributors
        self._fixed_point, self._recipe, self._robust = sums, recipe, robust
        # Payloads stored lately that are made of the state's own arrays, so that they take no memory of their own.
        self._stored: list[_Stored] = []

    def restore(self, address: Digest) -> Published:
        """A state that was published before.

        Raises:
            StateError: its blob is gone or damaged.
        """
        self._stored.clear()
        return Published(address, codec.decode(self._blobs.view(address)))

    def damaged(self, rows: Sequence[UpdateRow]) -> dict[SiteId, str]:
        """By site, why its acknowledged update can no longer be read."""
        damaged = {}
        for row in rows:
            try:
                self._blobs.view(row.digest)
            except OutOfSpaceError:
                continue  # no verdict on the blob: it could not be opened now
            except StateError as error:
                damaged[row.task.site] = str(error)
        return damaged

    @property
    def needed(self) -> int:
        """Updates that the run's robust rule needs in a round."""
        return 1 if self._robust is None else self._robust.needed

    def chooses(self, state: Payload | None) -> bool:
        """Whether the run's robust rule may leave updates out of an aggregation on top of this state."""
        return self._robust is not None and state is not None and self._robust.chooses

    def opened(self, rows: Sequence[UpdateRow]) -> Opened:
        """Updates that are read in several passes, each checked once, by a few threads; let go of before `uncache`.

        Raises:
            StateError: an update's blob is gone or damaged.
        """
        with ThreadPoolExecutor(CHECKED_AT_ONCE, "opened") as pool:
            data = pool.map(self._blobs.view, [row.digest for row in rows])
            return {row.digest: codec.view(of) for row, of in zip(rows, data, strict=True)}

    def rejected(
        self, state: Payload | None, rows: Sequence[UpdateRow], opened: Opened | None = None
    ) -> dict[SiteId, str]:
        """By site, why the run's robust rule leaves its update out of the aggregation.

        Args:
            opened: these updates, or some of them; the others are read.

        Raises:
            StateError: an update's blob is gone or damaged.
        """
        if self._robust is None or state is None or not self._robust.chooses:
            return {}
        return self._robust.rejected(state, list(self._updates(_ordered(rows), opened)))

    def weighs(self, state: Payload | None) -> bool:
        """Whether the server weighs updates by their sites' example counts; a first model is one update.

        Under secure aggregation each site weighs its own, and the server sees no count.
        """
        return state is not None and self._fixed_point is None and self._method.expects(state).weight

    def recomputed(
        self, state: Payload | None, rows: Sequence[UpdateRow], context: RoundContext, groups: Groups = ()
    ) -> Payload:
        """The state that a round published, of all updates that count in it: an evaluator's, too, if it was refined.

        Args and raises as of `aggregated`.
        """
        refinements = [row for row in rows if row.task.kind is TaskKind.REFINE]
        by_sites = [row for row in rows if row.task.kind is not TaskKind.REFINE]
        new = self.aggregated(state, by_sites, context, groups)
        return self.refined(new, refinements[0], context) if refinements else new

    def refined(self, aggregate: Payload, row: UpdateRow, context: RoundContext) -> Payload:
        """The state that a round publishes, from its aggregate and from what an evaluator made of the aggregate.

        Raises:
            StateError: the evaluator's blob is gone or damaged, or the result is not finite.
        """
        method, (update,) = refining(self._method), self._updates([row])
        assert method is not None  # noqa: S101  (no other method has such rows)
        return _finite(method.refined(aggregate, update, context), "what an evaluator made of the aggregate")

    def aggregated(
        self, state: Payload | None, rows: Sequence[UpdateRow], context: RoundContext, groups: Groups = ()
    ) -> Payload:
        """The next state, of `aggregate` these updates; args and raises as there."""
        return self.aggregate(state, rows, context, groups)[0]

    def aggregate(
        self,
        state: Payload | None,
        rows: Sequence[UpdateRow],
        context: RoundContext,
        groups: Groups = (),
        opened: Opened | None = None,
    ) -> tuple[Payload, Mapping[str, float]]:
        """The next state, and statistics of the updates; the first model makes the first state.

        Updates are read in site order: the result does not depend on arrival. Memory holds one of them or, under a
        robust rule, a block of each.

        Args:
            context: of the round that the updates are of.
            groups: that the run's secure aggregation is over.
            opened: these updates, or some of them; the others are read.

        Raises:
            StateError: an update's blob is gone or damaged, or the result is not finite.
            SecureAggregationError: what sites revealed does not open their sum.
        """
        ordered, statistics = _ordered(rows), dict[str, float]()
        if state is None:
            new = self._method.init(next(self._updates(ordered)).payload, context)
        elif self._fixed_point is not None:
            layout = lay_out(self._method, state)
            if self._recipe is not None and any(row.task.sum_of is not None for row in rows):
                contributors = layout.form.by_class
                record = SumRecord.of(rows, self._recipe, self._blobs.view, groups, contributors=contributors)
                total = record.total()
                reach("sum-opened")
                check_total(layout, total, self._fixed_point, len(record.survivors(Vector.VALUES)))
            else:  # a simulation's, whose updates are here
                total = unmasked_total(layout, lambda: self._updates(ordered), self._fixed_point, self._fewest)
            new = next_state(self._method, state, layout, total, self._fixed_point, context)
        else:
            if self._robust is not None:
                opened = opened or self.opened(ordered)
            updates = self._shared(state, ordered, opened)
            if self._robust is not None:
                limited = self._robust.made(state, list(updates), [row.norm for row in ordered])
                updates, statistics = limited.updates, dict(limited.statistics)
            new = self._method.aggregate(state, updates, context)
        return _finite(new, "the aggregate"), statistics

    def publish(self, state: Payload, before: Payload | None = None) -> Published:
        """Store a new state durably, with statistics of its change from the state `before`.

        Raises:
            OutOfSpaceError, DiskFailureError: it could not be stored.
        """
        self._stored.clear()
        return Published(self.store(state, state)[0], state, prototype_statistics(before, state))

    def recheck(self) -> None:
        """Look at the disk before anything stored is relied on again: what has changed there is written anew."""
        self._stored.clear()

    def broadcasts(self, state: Payload, sites: Sequence[SiteId], attempt: int = 1) -> dict[SiteId, tuple[Digest, int]]:
        """By site, digest and bytes of what it is sent.

        A round that is tried again may have failed because its blobs rotted: sites refuse what has another digest.

        Equal payloads are stored once: those of the same arrays are encoded once, too, and the store finds the others
        by their content. What a method computes for each site anew is not kept in memory.
        """
        if attempt > 1:
            self.recheck()
        return {site: self.store(sent(self._method, state, site), state) for site in sites}

    def uncache(self, rows: Sequence[UpdateRow]) -> None:
        """Let go of the updates of an aggregate: a retry, or a verification, reads them from the disk."""
        for row in rows:
            self._blobs.uncache(row.digest)

    def stored(self, address: Digest) -> Payload | None:
        """A payload of the newest state's arrays, if it is at this address. May be called from any thread."""
        return next((stored.payload for stored in tuple(self._stored) if stored.address == address), None)

    def _shared(self, state: Payload, rows: Sequence[UpdateRow], opened: Opened | None) -> Iterator[Update]:
        """The updates without the classes to which too few of them contribute.

        All headers are read before the first update is decoded: who contributes is known only when all are.
        """
        if self._fewest < MIN_CONTRIBUTORS or not shows_classes(self._method.expects(state)):
            return self._updates(rows, opened)
        withheld = too_few((self._blobs.view(row.digest) for row in rows), self._fewest)
        updates = self._updates(rows, opened)
        return (replace(update, payload=without(update.payload, withheld)) for update in updates)

    def _updates(self, rows: Sequence[UpdateRow], opened: Opened | None = None) -> Iterator[Update]:
        known = opened or {}
        for row in rows:
            payload = known[row.digest] if row.digest in known else codec.view(self._blobs.view(row.digest))
            yield Update(row.task.site, payload, row.metrics, row.weight)

    def store(self, payload: Payload, state: Payload) -> tuple[Digest, int]:
        """Digest and bytes of a payload's blob, stored durably unless it is there already.

        Args:
            state: that it is made of: what has this state's arrays alone is encoded once.

        Raises:
            OutOfSpaceError, DiskFailureError: it could not be stored.
        """
        arrays = _arrays(payload)
        for known in self._stored:
            if known.arrays == arrays:
                return known.address, known.nbytes
        pieces = codec.encoded(payload)  # not joined: a model's size of memory
        address, size = self._blobs.put(*pieces), sum(map(len, pieces))
        if set(arrays.values()) <= set(_arrays(state).values()):
            self._stored.append(_Stored(payload, arrays, address, size))
            del self._stored[:-KEPT]
        return address, size


def _ordered(rows: Sequence[UpdateRow]) -> list[UpdateRow]:
    return sorted(rows, key=lambda row: row.task.site)


def _arrays(payload: Payload) -> _Arrays:
    return {(part, name): id(array) for part, tensors in payload.items() for name, array in tensors.items()}


def _finite(state: Payload, what: str) -> Payload:
    if path := codec.first_not_finite(state):
        raise StateError(f"{what} is unusable: {path} has values that are not finite")
    return state


def prototype_statistics(before: Payload | None, after: Payload) -> dict[str, float]:
    """Statistics of a new state's prototypes; what is not defined is left out (everything, without prototypes).

    The distance of two prototypes is 1 - cos, from 0 to 2; a prototype of length 0 has none.

    Args:
        before: the state that it was made from; None: it is the first.

    Returns:
        `prototype_shift`: mean distance of the prototypes to those of the same classes before;
        `prototype_min_distance`: the smallest distance between two classes';
        `classes_covered`: classes whose prototype is new or has moved, because somebody in the round had examples.
    """
    new = _by_class(after.get(Part.PROTOTYPES, {}))
    if len({row.shape for row in new.values()}) != 1:  # none, or no prototypes
        return {}
    old = _by_class((before or {}).get(Part.PROTOTYPES, {}))
    both = sorted(c for c in new if c in old and old[c].shape == new[c].shape)
    covered = 0 if before is None else sum(c not in old or not np.array_equal(old[c], new[c]) for c in new)
    values = {
        SHIFT: _mean_distance(_directions(old, both), _directions(new, both)),
        MIN_DISTANCE: _closest(_directions(new, sorted(new))),
        COVERED: float(covered),
    }
    return {name: value for name, value in values.items() if value is not None}


def _by_class(prototypes: Tensors) -> dict[int, Array]:
    """Prototype [D] by class, from one matrix [C, D] (FedNH) or a row for each class that has one (FedPRP, FedProc)."""
    if "mean" in prototypes:
        return dict(enumerate(prototypes["mean"]))
    return {int(name): row for name, row in prototypes.items() if name.isdecimal()}


def _directions(rows: dict[int, Array], classes: list[int]) -> Array:
    """Unit rows [C, D] in float64; a row of length 0 stays 0."""
    return unit(np.array([rows[c].reshape(-1) for c in classes], np.float64)) if classes else np.empty((0, 0))


def _mean_distance(old: Array, new: Array) -> float | None:
    """Between rows [C, D] of the same classes; None if no class has a direction in both."""
    both = old.any(axis=1) & new.any(axis=1)  # [C]
    if not both.any():
        return None
    cosines = np.einsum("cd,cd->c", old[both], new[both])
    return float(np.clip(1 - cosines, 0, 2).mean())


def _closest(directions: Array) -> float | None:
    """The smallest distance between two rows [C, D]; None if fewer than two have a direction."""
    nonzero = directions[directions.any(axis=1)]
    if len(nonzero) < 2:
        return None
    largest = -1.0
    for start in range(0, len(nonzero), BLOCK):
        cosines = nonzero[start : start + BLOCK] @ nonzero.T
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = -1  # a prototype is not its own neighbour
        largest = max(largest, float(cosines.max()))
    return min(2.0, max(0.0, 1 - largest))
