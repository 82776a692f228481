"""Tasks that have nothing of a site's data in their result: the run's first model, and a refined aggregate."""

from __future__ import annotations

from dataclasses import replace

import structlog

from protofed.client.agent.task_tools import TaskTools
from protofed.client.method import RefiningMethod, refining
from protofed.client.models.catalogue import first_model
from protofed.client.site import PreparedRun, Site
from protofed.client.state.store import SiteState
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.payload import Update
from protofed.common.protocol.messages import Activity, Role, Task

log = structlog.get_logger()


class FirstModel:
    """An INITIALISE task: makes the run's first model from the recipe's seed."""

    def __init__(self, tools: TaskTools) -> None:
        self._tools = tools

    def work(self, run: PreparedRun, task: Task) -> None:
        """Make it, and push."""
        tools, policy = self._tools, self._tools.site.policy
        tools.begin(task)
        update = Update(tools.site.name, first_model(run.recipe, policy.rules.plugins))
        released = tools.passed(task, lambda: policy.release_public(update, run.gate_context()))
        tools.check_taken(tools.push(task, released))


class Refinement:
    """A REFINE task: an evaluator makes of a round's aggregate what the round publishes, on public images alone."""

    def __init__(self, tools: TaskTools) -> None:
        self._tools = tools

    def work(self, run: PreparedRun, task: Task) -> None:
        """Refine the round's aggregate on this evaluator's auxiliary images, and push."""
        tools, policy = self._tools, self._tools.site.policy
        tools.begin(task)
        method, run = _for_refining(tools.site, run)
        base = tools.bases.get(run, task)
        tools.passed(task, lambda: tools.judge.judge_by_images(run, task, base))
        with tools.site.checkpoints(task) as checkpoints:
            tools.status.activity = Activity.TRAINING
            context = run.fit_context(tools.site.name, task, SiteState(), tools.status, checkpoints)
            update = method.refine(context, base)  # the same bytes whenever it is computed again
            reach("refined")
            released = tools.passed(task, lambda: policy.release_public(update, run.gate_context()))
            # Within the block: nothing is staged, so a restart goes on behind its epochs.
            tools.check_taken(tools.push(task, released))


def warn_if_it_cannot(site: Site, run: PreparedRun) -> None:
    """Say at once, and not after hours of the sites' training, that this evaluator has nothing to refine models on."""
    if Role.EVALUATOR in site.roles and refining(run.method) is not None and run.data.auxiliary is None:
        log.warning(
            "this evaluator scores, and declines to refine the model: it has no auxiliary images",
            run=run.recipe.name,
            missing="data.auxiliary_per_class",
        )


def _for_refining(site: Site, run: PreparedRun) -> tuple[RefiningMethod, PreparedRun]:
    """The method that refines, and the run with the evaluator's auxiliary images as its only data.

    Raises:
        TaskFailedError: this site is no evaluator, or the run's method refines nothing.
        DataError: it has no auxiliary images.
    """
    if Role.EVALUATOR not in site.roles or (method := refining(run.method)) is None:
        text = "a task to refine a model: expected only by an evaluator, in a run whose method refines models"
        raise TaskFailedError(FailureReason.REFUSED, text)
    return method, replace(run, data=run.data.for_refining())
