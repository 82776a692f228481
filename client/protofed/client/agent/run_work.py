"""A site's work on the tasks of one run: each ends handed in, or declined by a code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from protofed.client.agent.computation import Computation, Elsewhere
from protofed.client.agent.dp_budget import DpBudget, Spending
from protofed.client.agent.heartbeat import idle_heartbeat_s
from protofed.client.agent.plain_fit import ComputedFit, Fit, NoisyFit, PlainFit
from protofed.client.agent.refinement import FirstModel, Refinement, warn_if_it_cannot
from protofed.client.agent.scores import OwnScoreKeeper, PlainScores, Scorer, SecureScores
from protofed.client.agent.secure_fit import SecureFit, SecureStep
from protofed.client.agent.task_tools import TaskTools
from protofed.client.secure_aggregation.membership import Membership
from protofed.client.secure_aggregation.steps import SumSteps
from protofed.client.site import FORESEEN, PreparedRun, Site, is_summed, prepare, reason_of
from protofed.client.status import DaemonStatus, TaskAbortedError
from protofed.client.training.context import FitProgress
from protofed.client.transport.link import Link
from protofed.common.errors import (
    FailureReason,
    FencedError,
    IncidentError,
    NotEnrolledError,
    PolicyViolationError,
    ProtocolError,
    ProtofedError,
    RevokedError,
    StateError,
    TaskFailedError,
)
from protofed.common.payload import Update
from protofed.common.protocol.messages import Activity, Assignment, Progress, Task, TaskKind

log = structlog.get_logger()


class Work(Protocol):
    """Work on the tasks of one kind."""

    def work(self, run: PreparedRun, task: Task) -> None:
        """Do a task to its end, whatever that is; an error declines it."""


class RunWork:
    """Prepares a run and has its tasks worked on; single-threaded.

    Args:
        accept: called when the site begins with a task.
        on_refusal: called with each update, or run, that the site's policy refused.
        on_withheld: called with each update that stays here without the server's knowing.
        on_spending: called with each fit with noise that is about to begin.
        elsewhere: computes for the site in other processes.
        membership: of secure sums; None: this site takes part in no run with them.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        status: DaemonStatus,
        accept: Callable[[], None],
        on_refusal: Callable[[Task, PolicyViolationError], None],
        on_withheld: Callable[[Task, PolicyViolationError], None],
        on_spending: Callable[[Spending], None],
        elsewhere: Elsewhere,
        membership: Membership | None,
    ) -> None:
        self._site, self._link, self._status, self._elsewhere = site, link, status, elsewhere
        self._run: PreparedRun | TaskFailedError = TaskFailedError(FailureReason.REFUSED, "no run was prepared")
        self.tools = TaskTools(site, link, status, accept, on_refusal, on_withheld)
        self.sums = SumSteps(site, link.fetch, membership)
        self._budget = DpBudget(site, status, on_spending)
        self._own_scores = OwnScoreKeeper(site, status)
        self._scorer = Scorer(site, status, self.tools.bases, elsewhere)
        self.tools.on_settled = self._scorer.clear

    def prepare(self, assignment: Assignment) -> None:
        """Prepare the run; of one that is refused, `_prepared` then declines every task by the same reason."""
        self.tools.bases.clear()
        try:
            self._run = prepare(self._site, assignment)
            self.sums.check_member(self._run)
        except TaskFailedError as failure:
            self._run = failure
            log.error("this site cannot take part in the run", run=assignment.run, why=str(failure))
            return
        self.sums.only(assignment.run)
        self.tools.guard.take_up(assignment.run)
        self._site.store.retain(assignment.keep_rounds)
        self._own_scores.take_up(assignment.run)
        federation = self._run.recipe.federation
        self._status.heartbeat_s, self._status.idle_heartbeat_s = federation.heartbeat_s, idle_heartbeat_s(federation)
        warn_if_it_cannot(self._site, self._run)
        log.info("ready", run=assignment.run, site=self._site.name, device=str(self._run.data.device))

    def no_budget(self, run: str) -> str:
        """Why the privacy budget has no further round of the prepared run; empty: it has, or none is prepared."""
        return self._budget.problem(run, self._run) if isinstance(self._run, PreparedRun) else ""

    def is_new(self, task: Task, run: str) -> bool:
        """Whether a task is one of the run that was not settled before."""
        return self.tools.guard.is_new(task, run)

    def hand_in_staged(self, run: str) -> None:
        """Push what fits of the prepared run have left without a receipt."""
        if isinstance(self._run, PreparedRun):
            self.sums.drop_over(run)
            for task, update in self._site.store.unsettled(run):
                log.info("handing in what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, partial(self._hand_in, task, update))

    def work_on(self, task: Task) -> None:
        """Do a task to its end, whatever that is.

        Raises:
            ProtocolError: about the daemon, not the task: it has to enroll again, or was replaced or revoked.
        """
        log.info("task begun", run=task.run, round=task.round, kind=task.kind.value)
        self._status.task_id, self._status.fit_progress = task.task_id, FitProgress()
        self._attempt(task, partial(self._do, task))

    def ahead(self, task: Task) -> list[Computation]:
        """What the site would compute for a task now: another process may begin with it; nothing is done here."""
        if not isinstance(run := self._run, PreparedRun):
            return []
        match task.kind:
            case TaskKind.FIT:
                return [Computation.for_fit(self._site, run, task)]
            case TaskKind.SCORE | TaskKind.SCORE_SUM:
                return self._scorer.ahead(run, task)
            case _:
                return []

    def decline(self, task: Task, reason: FailureReason, text: str) -> None:
        """Tell the server that a task is not done, by a code; `text` goes into this site's log."""
        log.error("task declined", run=task.run, round=task.round, reason=reason.value, why=text)
        self._link.beat(task.run, Progress(task.task_id, Activity.FAILED, failure=reason))

    def over(self, run: str) -> None:
        """Drop what secure sums of a run that has ended have left."""
        self.sums.over(run)

    def abandon(self, run: str) -> None:
        """Remove what waits to be sent of a run that the site has left."""
        try:
            self._site.store.abandon(run)
            self.sums.over(run)
        except StateError as error:  # it stays, and the link sends none of it
            log.warning("what was computed for a run that this site has left stays", run=run, why=str(error))

    def _do(self, task: Task) -> None:
        self.tools.write_receipts(task.run)
        run = self._prepared(task)
        self._work_for(run, task.kind).work(run, task)

    def _hand_in(self, task: Task, update: Update) -> None:
        run = self._prepared(task)
        self._fit(run).hand_in(run, task, update)

    def _work_for(self, run: PreparedRun, kind: TaskKind) -> Work:
        match kind:
            case TaskKind.INITIALISE:
                return FirstModel(self.tools)
            case TaskKind.FIT:
                return self._fit(run)
            case TaskKind.REFINE:
                return Refinement(self.tools)
            case TaskKind.SCORE:
                return PlainScores(self.tools, self._scorer, self._own_scores)
            case TaskKind.SCORE_SUM:
                return SecureScores(self.tools, self._scorer, self._own_scores, self.sums)
            case _:
                return SecureStep(self.tools, self.sums)

    def _fit(self, run: PreparedRun) -> PlainFit | SecureFit:
        fit: Fit = ComputedFit(self.tools, self._elsewhere)
        if run.noisy:
            fit = NoisyFit(self.tools, fit, self._budget)
        if is_summed(self._site, run.recipe):
            return SecureFit(self.tools, fit, self.sums, self._own_scores)
        return PlainFit(self.tools, fit, self._own_scores)

    def _attempt(self, task: Task, work: Callable[[], None]) -> None:
        """Run `work`, or decline the task by a reason code; the error's text stays in this site's log."""
        self._status.task_id, self._status.round = task.task_id, task.round
        try:
            work()
        except TaskAbortedError:
            log.info("task called off", run=task.run, round=task.round)
        except TaskFailedError as failure:
            self.decline(task, failure.reason, str(failure))
        except (
            NotEnrolledError,
            FencedError,
            RevokedError,
            IncidentError,
        ):  # about the daemon: `Agent.step` handles them
            raise
        except ProtocolError as error:
            log.warning("the server does not take this task any more", run=task.run, round=task.round, why=str(error))
        except FORESEEN as error:
            self.decline(task, reason_of(error), str(error))
        except ProtofedError:
            raise
        except Exception as error:  # from a driver, or a site's own model: decline this task, keep the daemon alive
            log.exception("task failed unforeseen", run=task.run, round=task.round)
            self.decline(task, reason_of(error), f"{type(error).__name__}: {error}")
        finally:
            self._status.task_id, self._status.activity = "", Activity.IDLE

    def _prepared(self, task: Task) -> PreparedRun:
        """The run, if the task is one of it.

        Raises:
            TaskFailedError: the run could not be prepared, or the task is not one of this run.
        """
        if isinstance(self._run, TaskFailedError):
            if isinstance(violation := self._run.__cause__, PolicyViolationError):  # the policy refused the whole run
                self.tools.on_refusal(task, violation)
            raise TaskFailedError(self._run.reason, str(self._run))
        self._run.check_task(task)
        return self._run
