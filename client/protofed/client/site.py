"""A site as its agent knows it, and a run as far as the site has prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import protofed.client.methods  # noqa: F401  (registers the client halves)
from protofed.client.data.examples import SiteData
from protofed.client.failures import FORESEEN, reason_of
from protofed.client.local import Checkpoints, Local, NoCheckpoints, seeded
from protofed.client.memory import Held, Store
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.split import SplitModel
from protofed.client.now import Now
from protofed.client.policy import Policy
from protofed.common.errors import TaskFailure
from protofed.common.payload import SiteId
from protofed.common.recipe import Recipe, parse_json
from protofed.common.task import Assignment, Role, Task


def no_checkpoints(_: Task) -> AbstractContextManager[Checkpoints]:
    """Of a site without a state folder, as in a simulation."""
    return nullcontext(NoCheckpoints())


@dataclass(frozen=True)
class Site:
    """Who this agent is and what it has.

    Attributes:
        load_data: the site's data, brought to the recipe's input; raises DataError.
        build_model: a model on the device; a simulation shares one among its sites.
        checkpoints: of a fit, as long as it is worked on.
    """

    name: SiteId
    roles: frozenset[Role]
    policy: Policy
    store: Store
    load_data: Callable[[Recipe], SiteData]
    build_model: Callable[[Recipe], SplitModel]
    checkpoints: Callable[[Task], AbstractContextManager[Checkpoints]] = no_checkpoints


@dataclass(frozen=True)
class Prepared:
    """One run, as far as this site has prepared for it."""

    recipe: Recipe
    method: ClientMethod
    model: SplitModel
    data: SiteData

    def local(self, site: SiteId, task: Task, held: Held, now: Now, checkpoints: Checkpoints) -> Local:
        """What the method works on in one task; what the site holds stays as it is."""
        recipe = self.recipe
        return Local(
            site=site,
            round=task.round,
            rounds=recipe.rounds,
            model=self.model,
            data=self.data,
            classes=recipe.classes,
            plan=recipe.plan,
            rng=seeded(recipe.seed, task.round, site, self.data.device),
            memory={part: dict(tensors) for part, tensors in held.memory.items()},
            steps=now.steps,
            check=now.check,
            checkpoints=checkpoints,
        )


def prepare(site: Site, assignment: Assignment) -> Prepared:
    """Check all that the server says before any of it is used, then load the data.

    Raises:
        TaskFailure: this site takes no part in the run; the reason is that of all its tasks.
    """
    try:
        recipe = parse_json(assignment.recipe, Recipe, f"the recipe of run {assignment.run}")
        method = client_methods.build(recipe.method.name, recipe.method.options)
        site.policy.admit(recipe.method.name, method.sends)
        return Prepared(recipe, method, site.build_model(recipe), site.load_data(recipe))
    except FORESEEN as error:
        raise TaskFailure(reason_of(error), str(error)) from error
