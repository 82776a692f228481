"""What a site computes for a task, a fit's outcome or a model's scores, apart from all that decides whether it does."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from protofed.client.models.mixture import start_of
from protofed.client.models.split import dump, load
from protofed.client.policy.rare_units import withhold_rare_units
from protofed.client.site import PreparedRun, Site, Train, trains_to_its_end
from protofed.client.state.store import FitOutcome, SiteState
from protofed.client.status import DaemonStatus
from protofed.client.training.context import Checkpoints, FitContext, FitStart, NoCheckpoints
from protofed.client.training.evaluation import Tally, of_personal, on_local_test, on_test, scores_of
from protofed.client.training.own_buffers import memory_with_buffers, with_own_buffers
from protofed.common import codec
from protofed.common.config.recipe import Federation
from protofed.common.failpoint import reach
from protofed.common.payload import NOT_A_MOVE, Array, Part, Payload, SiteId, norm_of, relative_bound
from protofed.common.protocol.messages import Scores, Task
from protofed.common.secure_aggregation.score_sums import LARGEST


class ScoredModel(StrEnum):
    """Which model is scored, and on what."""

    OWN = "own"  # the site's, on all test sets that it has
    GLOBAL_LOCALLY = "global-locally"  # the global one, on the site's own test set
    GLOBAL = "global"  # the global one, on the test set that all share


@dataclass(frozen=True, eq=False)
class Computation:
    """Everything on which a result depends, but the base: a site that has the same computes the same.

    Attributes:
        state: of the site, from which it starts; empty for scores of the global model.
        fewest: as `withhold_rare_units` takes it.
        scored: None: it is a fit.
        to_its_end: as in `FitContext`.
    """

    site: SiteId
    run: PreparedRun
    task: Task
    state: SiteState
    fewest: int = 1
    scored: ScoredModel | None = None
    to_its_end: bool = False

    @classmethod
    def for_fit(cls, site: Site, run: PreparedRun, task: Task) -> Computation:
        """A site's fit, from what it kept of the last round that counts."""
        state = site.store.last_counted(task.run, task.memory_before)
        fewest = site.policy.rules.min_images_per_unit
        return cls(site.name, run, task, state, fewest, to_its_end=trains_to_its_end(site, run))

    @property
    def key(self) -> Hashable:
        """Equal for computations with the same result."""
        return self.site, self.task.task_id, self.state.round, self.scored


class Elsewhere(Protocol):
    """Other processes that compute for this site; the results are those that it would have itself."""

    def fit(self, work: Computation) -> FitOutcome | None:
        """A fit's outcome; None: the site must compute it itself."""

    def score(self, work: Computation) -> Scores | None:
        """A model's scores; None: the site must compute them itself."""


class Nowhere:
    """There are no other processes."""

    def fit(self, work: Computation) -> None:
        """Always None."""

    def score(self, work: Computation) -> None:
        """Always None."""


def fit(work: Computation, base: Payload, status: DaemonStatus, checkpoints: Checkpoints, train: Train) -> FitOutcome:
    """What a fit leaves: its update, without what rare units learnt, and the state that the site keeps.

    Of a fit that diverged and went on to its end nothing leaves (`withheld`), and nothing is kept.

    Args:
        train: `Site.fit`.

    Raises:
        PolicyRefusedError: as of `withhold_rare_units`.
    """
    local = work.run.fit_context(work.site, work.task, work.state, status, checkpoints)
    local.to_its_end = work.to_its_end
    received = FitStart(start_of(base, local.data.label_frequencies()))
    update = train(work.run, work.task, local, with_own_buffers(base, local))
    reach("fit-done")
    memory = memory_with_buffers(local, update.payload, work.state.memory)
    start = local.start or received
    sent = start.sent or start.model
    leaving = withhold_rare_units(
        update.payload,
        sent,
        local.model,
        local.data,
        work.fewest,
        first=start.model,
        trained=local.sent_model,
        check=local.check,
    )
    if work.run.recipe.federation.secure:
        leaving = within_bounds(leaving, sent, work.run.recipe.federation)
    memory = _moved_by_what_leaves(memory, update.payload, leaving)
    personal = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
    outcome = FitOutcome(replace(update, payload=leaving), memory, personal)
    return outcome if not work.to_its_end or _is_finite(outcome) else _with_numbers(outcome, work.state)


def _is_finite(outcome: FitOutcome) -> bool:
    payloads = (outcome.update.payload, outcome.memory, outcome.personal)
    return all(codec.first_not_finite(payload) is None for payload in payloads) and all(
        map(math.isfinite, outcome.update.metrics.values())
    )


def _with_numbers(outcome: FitOutcome, before: SiteState) -> FitOutcome:
    """A diverged fit's: an update of the same parts, names and shapes as any other's, and what the site had before."""
    metrics = {name: value if math.isfinite(value) else LARGEST for name, value in outcome.update.metrics.items()}
    update = replace(outcome.update, payload=_finite(outcome.update.payload), metrics=metrics)
    trained = replace(outcome.trained, withheld=True)
    return FitOutcome(update, before.memory, before.personal or _finite(outcome.personal), trained)


def _finite(payload: Payload) -> Payload:
    return {
        part: {name: np.nan_to_num(array, posinf=0, neginf=0) for name, array in tensors.items()}
        for part, tensors in payload.items()
    }


def _moved_by_what_leaves(memory: Payload, trained: Payload, leaving: Payload) -> Payload:
    """The memory, whose control variates move by what leaves of their update, as the server's do (METHODS §5.3)."""
    own, made, left = (payload.get(Part.CONTROL, {}) for payload in (memory, trained, leaving))
    moved = {path: np.asarray(own[path] + (left[path] - made[path])) for path in own.keys() & left.keys()}
    return {**memory, Part.CONTROL: {**own, **moved}} if moved else memory


def score(work: Computation, base: Payload, status: DaemonStatus) -> Scores:
    """The scores of a model, by name."""
    run = work.run
    if work.scored is not ScoredModel.GLOBAL:
        return scores_of(predictions(work, base, status), run.data, run.recipe)
    local = _context(work, status)
    run.method.install(local, base)
    return on_test(run.model, run.data, run.recipe, local.check)


def predictions(work: Computation, base: Payload, status: DaemonStatus) -> dict[str, Tally]:
    """What a model answers on the site's own test sets, by the prefix of its scores: of all but GLOBAL."""
    run, local = work.run, _context(work, status)
    if work.scored is ScoredModel.GLOBAL_LOCALLY:
        run.method.install(local, base)
        return on_local_test(run.model, run.data, "global", local.check)
    # Of OWN, too: the method may replace the head, and the weights need the right one.
    run.method.install(local, with_own_buffers(base, local))
    if run.method.declares.personal != "installed" and (personal := work.state.personal) is not None:
        load(run.model.body, personal[Part.BODY])
        load(run.model.head, personal[Part.HEAD])
    return of_personal(run.model, run.data, run.recipe, local.check)


def _context(work: Computation, status: DaemonStatus) -> FitContext:
    return work.run.fit_context(work.site, work.task, work.state, status, NoCheckpoints())


def within_bounds(payload: Payload, base: Payload, rules: Federation) -> Payload:
    """The update, moved as far from `base` as the recipe lets a site move it, in the same direction.

    The norm is the server's of a run without secure sums: of (payload - base), or of the tensor itself where the base
    has none. What says who counts, and not how far, stays as it is.

    Args:
        base: the model that the fit started from.
    """
    moving = {part: tensors for part, tensors in payload.items() if part not in NOT_A_MOVE}
    most = min(rules.max_update_norm, relative_bound(norm_of(base, {}), rules.max_relative_norm))
    norm = norm_of(moving, base)
    if not norm > most:  # NaN is refused by the policy, by name
        return payload
    scaled = {
        part: {name: _towards(base.get(part, {}).get(name), array, most / norm) for name, array in tensors.items()}
        for part, tensors in moving.items()
    }
    return {**payload, **scaled}


def _towards(origin: Array | None, array: Array, share: float) -> Array:
    """This share of the way from the origin; integer tensors as they are."""
    if array.dtype.kind != "f":
        return array
    start = origin.astype(np.float64) if origin is not None and origin.shape == array.shape else 0.0
    return np.asarray(start + share * (array.astype(np.float64) - start), dtype=array.dtype)
