"""What a site reports of a round: scores of its own model, as a trainer, and of the global one, as an evaluator."""

from __future__ import annotations

from protofed.client.agent.base_models import BaseModelCache
from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.agent.site import PreparedRun, Site
from protofed.client.models.split import load
from protofed.client.state.store import SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.score_sets import of_personal, on_local_test, on_test
from protofed.common.codec import Digest
from protofed.common.payload import Part
from protofed.common.protocol.messages import Activity, Role, Scores, Task


class Scorer:
    """One site's."""

    def __init__(self, site: Site, now: DaemonStatus, bases: BaseModelCache) -> None:
        self._site, self._now, self._bases = site, now, bases
        self._personal: tuple[tuple[str, int, Digest | None], Scores] | None = None  # of which model, and which

    def forget(self) -> None:
        """The site's own model is another one now."""
        self._personal = None

    def scores(self, run: PreparedRun, task: Task) -> Scores:
        """All that the site's roles can tell."""
        held = self._site.store.last_counted(task.run, task.round + 1)
        scores: dict[str, float] = {}
        if Role.TRAINER in self._site.roles:
            scores |= self._of_personal(run, task, held)
        if Role.EVALUATOR in self._site.roles:
            self._install(run, task, SiteState())
            scores |= on_test(run.model, run.data, run.recipe)
        return scores

    def _of_personal(self, run: PreparedRun, task: Task, held: SiteState) -> Scores:
        """Of the site's own model, taken once for each model; and of the global one on the site's own test set."""
        installed = run.method.personal == "installed"
        model = (task.run, held.round, task.base_digest if installed else None)
        if self._personal is None or self._personal[0] != model:
            self._personal = model, self._taken(run, task, held, installed=installed)
        found = dict(self._personal[1])
        if not installed and run.data.local_test is not None:
            self._install(run, task, SiteState())
            found |= on_local_test(run.model, run.data, run.recipe, "global")
        return found

    def _taken(self, run: PreparedRun, task: Task, held: SiteState, *, installed: bool) -> Scores:
        if not installed and held.personal is None:
            return {}
        self._install(run, task, held)  # puts the method's own head in place
        if not installed and held.personal is not None:
            load(run.model.body, held.personal[Part.BODY])
            load(run.model.head, held.personal[Part.HEAD])
        return of_personal(run.model, run.data, run.recipe)

    def _install(self, run: PreparedRun, task: Task, held: SiteState) -> None:
        base = self._bases.of(task)
        self._now.activity = Activity.SCORING
        run.method.install(run.local(self._site.name, task, held, self._now, NoCheckpoints()), base)
