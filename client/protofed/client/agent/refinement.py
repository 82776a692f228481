"""The task REFINE: an evaluator makes of a round's aggregate what the round publishes, on public images alone."""

from __future__ import annotations

from dataclasses import replace

import structlog

from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.agent.site import PreparedRun, Site
from protofed.client.method import refining
from protofed.client.state.store import SiteState
from protofed.client.training.context import Checkpoints
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Role, Task

log = structlog.get_logger()


def warn_if_it_cannot(site: Site, run: PreparedRun) -> None:
    """Say at once, and not after hours of the sites' training, that this evaluator has nothing to refine models on."""
    if Role.EVALUATOR in site.roles and refining(run.method) is not None and run.data.auxiliary is None:
        log.warning(
            "this evaluator scores, and declines to refine the model: it has no auxiliary images",
            run=run.recipe.name,
            missing="data.auxiliary_per_class",
        )


def for_refining(site: Site, run: PreparedRun) -> PreparedRun:
    """The run with the evaluator's auxiliary images as its only data.

    Raises:
        TaskFailedError: this site is no evaluator, or the run's method refines nothing.
        DataError: it has no auxiliary images.
    """
    if Role.EVALUATOR not in site.roles or refining(run.method) is None:
        text = "a task to refine a model: expected only by an evaluator, in a run whose method refines models"
        raise TaskFailedError(FailureReason.REFUSED, text)
    return replace(run, data=run.data.for_refining())


def refined(
    site: Site, run: PreparedRun, task: Task, base: Payload, status: DaemonStatus, checkpoints: Checkpoints
) -> Update:
    """What the method makes of the aggregate `base`; the same bytes whenever it is computed again.

    Args:
        run: as of `for_refining`.
    """
    method = refining(run.method)
    assert method is not None  # noqa: S101  (checked)
    update = method.refine(run.fit_context(site.name, task, SiteState(), status, checkpoints), base)
    reach("refined")
    return update
