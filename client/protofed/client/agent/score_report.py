"""The scores that a site takes of a round: of its own model as a trainer, of the global one as an evaluator."""

from __future__ import annotations

import structlog

from protofed.client.agent.base_models import BaseModelCache
from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.agent.site import PreparedRun, Site
from protofed.client.models.split import load
from protofed.client.privacy.score_disclosures import is_own
from protofed.client.state.store import SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.score_sets import of_personal, on_local_test, on_test
from protofed.common.codec import Digest
from protofed.common.errors import StateError
from protofed.common.payload import Part
from protofed.common.protocol.messages import Activity, Role, Scores, Task, score_family

log = structlog.get_logger()


class Scorer:
    """Computes a site's scores; those of its own model once for each model."""

    def __init__(self, site: Site, status: DaemonStatus, bases: BaseModelCache) -> None:
        self._site, self._status, self._bases = site, status, bases
        self._personal: tuple[tuple[str, int, Digest | None], Scores] | None = None  # which model's, and its scores

    def clear(self) -> None:
        """Forget the personal model's scores; called when a fit was settled."""
        self._personal = None

    def scores(self, run: PreparedRun, task: Task) -> Scores:
        """All scores that the site's roles give, by name; the policy still decides which of them leave."""
        state = self._site.store.last_counted(task.run, task.round + 1)
        scores: dict[str, float] = {}
        if Role.TRAINER in self._site.roles:
            scores |= self._trainer_scores(run, task, state)
        if Role.EVALUATOR in self._site.roles:
            self._install(run, task, SiteState())
            scores |= on_test(run.model, run.data, run.recipe)
        return scores

    def _trainer_scores(self, run: PreparedRun, task: Task, state: SiteState) -> Scores:
        """Scores of the site's own model, and of the global one on the site's own test set."""
        # An "installed" personal model is made from the base, so another base makes another model.
        installed = run.method.personal == "installed"
        key = (task.run, state.round, task.base_digest if installed else None)
        if self._personal is None or self._personal[0] != key:
            self._personal = key, self._personal_scores(run, task, state, installed=installed)
        scores = dict(self._personal[1])
        if not installed and run.data.local_test is not None:
            self._install(run, task, SiteState())
            scores |= on_local_test(run.model, run.data, run.recipe, "global")
        return scores

    def _personal_scores(self, run: PreparedRun, task: Task, state: SiteState, *, installed: bool) -> Scores:
        if not installed and state.personal is None:
            return {}
        self._install(run, task, state)  # also where the method replaces the head: the weights below need the right one
        if not installed and state.personal is not None:
            load(run.model.body, state.personal[Part.BODY])
            load(run.model.head, state.personal[Part.HEAD])
        return of_personal(run.model, run.data, run.recipe)

    def _install(self, run: PreparedRun, task: Task, state: SiteState) -> None:
        base = self._bases.get(task)
        self._status.activity = Activity.SCORING
        run.method.install(run.fit_context(self._site.name, task, state, self._status, NoCheckpoints()), base)


class OwnScoreKeeper:
    """Shows the site its own scores, whatever its policy lets leave: in its metrics, its log and its state folder."""

    def __init__(self, site: Site, status: DaemonStatus) -> None:
        self._site, self._status = site, status

    def take_up(self, run: str) -> None:
        """Show what was kept of a run, in place of another run's."""
        kept = self._site.store.own_scores
        try:
            self._status.own_scores = {} if kept is None else _families(kept.latest(run))
        except StateError as error:
            self._status.own_scores = {}
            log.warning("the site's own scores cannot be read", run=run, why=str(error))

    def keep(self, task: Task, scores: Scores) -> None:
        """Keep those of a task's scores that are the site's own; a disk that takes none is only logged."""
        own = {name: value for name, value in scores.items() if is_own(name)}
        if not own:
            return
        families = _families(own)
        self._status.own_scores = {**self._status.own_scores, **families}
        if (kept := self._site.store.own_scores) is None:
            return  # a simulation without a state folder: hundreds of sites would share one log
        rounded = {name: round(value, 4) for name, value in families.items()}
        log.info("own scores", run=task.run, round=task.round, scores=rounded)
        try:
            kept.record(task.run, task.round, own)
        except StateError as error:
            log.warning("the site's own scores could not be written", run=task.run, why=str(error))


def _families(scores: Scores) -> dict[str, float]:
    """Without the scores of single classes, of which there may be thousands."""
    return {name: value for name, value in scores.items() if score_family(name) == name}
