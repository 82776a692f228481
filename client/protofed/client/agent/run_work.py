"""A site's work on the tasks of one run: each ends uploaded, or declined by a code.

`RunWork` prepares the run, and has one object for each kind of task: `FirstModel`, `PlainFit` or `SecureFit`,
`Refinement`, and the scores. `NoisyFit` stands around the training of a fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from protofed.client.agent.computation import Computation, RemoteExecutor, fit
from protofed.client.agent.heartbeat import idle_heartbeat_s
from protofed.client.agent.scores import OwnScoreKeeper, PlainScores, Scorer, SecureScores
from protofed.client.agent.task_tools import DpBudget, Spending, TaskTools
from protofed.client.base_checks.judge import base_refusal
from protofed.client.method import RefiningClientMethod, refining
from protofed.client.models.catalogue import first_model
from protofed.client.policy.policy import Released
from protofed.client.secure_aggregation.partners import Membership
from protofed.client.secure_aggregation.steps import SumSteps
from protofed.client.site import (
    FORESEEN,
    DaemonStatus,
    PreparedRun,
    Site,
    TaskAbortedError,
    classify_error,
    is_aggregated,
    prepare,
)
from protofed.client.state.store import COUNTED, FitOutcome, SiteState
from protofed.client.training.context import Checkpoints, FitProgress
from protofed.client.training.dp import share_std
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
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Activity, Assignment, Progress, Role, Task, TaskKind

log = structlog.get_logger()


class TaskWork(Protocol):
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
        remote: computes for the site in other processes.
        membership: of secure aggregation; None: this site takes part in no run with it.
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
        remote: RemoteExecutor,
        membership: Membership | None,
    ) -> None:
        self._site, self._link, self._status, self._remote = site, link, status, remote
        self._run: PreparedRun | TaskFailedError = TaskFailedError(FailureReason.REFUSED, "no run was prepared")
        self.tools = TaskTools(site, link, status, accept, on_refusal, on_withheld)
        self.sums = SumSteps(site, link.fetch, membership)
        self._budget = DpBudget(site, status, on_spending)
        self._own_scores = OwnScoreKeeper(site, status)
        self._scorer = Scorer(site, status, self.tools.bases, remote)
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
                log.info("sending what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, partial(self._hand_in, task, update))

    def work_on(self, task: Task) -> None:
        """Do a task to its end, whatever that is.

        Raises:
            ProtocolError: about the daemon, not the task: it has to enroll again, or was replaced or revoked.
        """
        log.info("task started", run=task.run, round=task.round, kind=task.kind.value)
        self._status.task_id, self._status.fit_progress = task.task_id, FitProgress()
        self._attempt(task, partial(self._do, task))

    def prefetch(self, task: Task) -> list[Computation]:
        """What the site would compute for a task now: another process may begin with it; nothing is done here."""
        if not isinstance(run := self._run, PreparedRun):
            return []
        match task.kind:
            case TaskKind.FIT:
                return [Computation.for_fit(self._site, run, task)]
            case TaskKind.SCORE | TaskKind.SCORE_SUM:
                return self._scorer.prefetch(run, task)
            case _:
                return []

    def decline(self, task: Task, reason: FailureReason, text: str) -> None:
        """Tell the server that a task is not done, by a code; `text` goes into this site's log."""
        log.error("task declined", run=task.run, round=task.round, reason=reason.value, why=text)
        self._link.beat(task.run, Progress(task.task_id, Activity.FAILED, failure=reason))

    def over(self, run: str) -> None:
        """Drop what secure aggregation of a run that has ended has left."""
        self.sums.over(run)

    def abandon(self, run: str) -> None:
        """Remove what waits to be sent of a run that the site has left."""
        try:
            self._site.store.abandon(run)
            self.sums.over(run)
        except StateError as error:  # it stays, and the link sends none of it
            log.warning("what was computed for a run that this site has left is not sent", run=run, why=str(error))

    def _do(self, task: Task) -> None:
        self.tools.write_receipts(task.run)
        run = self._prepared(task)
        self._work_for(run, task.kind).work(run, task)

    def _hand_in(self, task: Task, update: Update) -> None:
        run = self._prepared(task)
        self._fit(run).hand_in(run, task, update)

    def _work_for(self, run: PreparedRun, kind: TaskKind) -> TaskWork:
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
        fit: Fit = ComputedFit(self.tools, self._remote)
        if run.noisy:
            fit = NoisyFit(self.tools, fit, self._budget)
        if is_aggregated(self._site, run.recipe):
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
            log.warning(
                "the server accepts no update for this task any more", run=task.run, round=task.round, why=str(error)
            )
        except FORESEEN as error:
            self.decline(task, classify_error(error), str(error))
        except ProtofedError:
            raise
        except Exception as error:  # from a driver, or a site's own model: decline this task, keep the daemon alive
            log.exception("task failed unforeseen", run=task.run, round=task.round)
            self.decline(task, classify_error(error), f"{type(error).__name__}: {error}")
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


class Fit(Protocol):
    """Trains: what both kinds of FIT tasks have in their middle."""

    def __call__(self, work: Computation, base: Payload, checkpoints: Checkpoints) -> FitOutcome:
        """What a fit from `base` leaves; see `computation.fit`."""


class ComputedFit:
    """Trains here, or in one of the other processes."""

    def __init__(self, tools: TaskTools, remote: RemoteExecutor) -> None:
        self._tools, self._remote = tools, remote

    def __call__(self, work: Computation, base: Payload, checkpoints: Checkpoints) -> FitOutcome:
        """As of `Fit`."""
        tools = self._tools
        return self._remote.fit(work) or fit(work, base, tools.status, checkpoints, tools.site.fit)


class NoisyFit:
    """A fit with noise around one without: counted before it begins, and with its share of a noise that sites share.

    The noise of the fit's own steps is in the training loop. Under masks a daemon adds its share in the sum.
    """

    def __init__(self, tools: TaskTools, fit: Fit, budget: DpBudget) -> None:
        self._tools, self._fit, self._budget = tools, fit, budget

    def __call__(self, work: Computation, base: Payload, checkpoints: Checkpoints) -> FitOutcome:
        """As of `Fit`.

        Raises:
            PolicyRefusedError, StateError: as of `DpBudget.spend`; nothing was trained.
            TaskFailedError: as of `PreparedRun.noise_share`.
        """
        run, task = work.run, work.task
        noise = run.noise(work.site, task, work.state)
        self._tools.passed(task, lambda: self._budget.spend(run, task, noise))
        outcome = self._fit(work, base, checkpoints)
        if not run.shares_noise or is_aggregated(self._tools.site, run.recipe):
            return outcome
        std = share_std(run.recipe.plan, task.round, run.recipe.rounds, base)
        share = run.noise_share(work.site, task, work.state, std)
        return replace(outcome, update=replace(outcome.update, payload=share.on_update(outcome.update.payload)))


class PlainFit:
    """Trains, stages, and pushes what the policy releases."""

    def __init__(self, tools: TaskTools, fit: Fit, own_scores: OwnScoreKeeper) -> None:
        self._tools, self._fit, self._own_scores = tools, fit, own_scores

    def work(self, run: PreparedRun, task: Task) -> None:
        """Train and push; an update of this task that is staged already is pushed without training again."""
        tools = self._tools
        if (staged := tools.staged(task)) is not None:
            self.hand_in(run, *staged)
            return
        tools.begin(task)
        tools.passed(task, lambda: tools.guard.check_fit(task))
        base = tools.bases.get(run, task)
        tools.passed(task, lambda: tools.judge.judge_by_images(run, task, base))
        with tools.site.checkpoints(task) as checkpoints:
            work = Computation.for_fit(tools.site, run, task)
            tools.status.activity = Activity.TRAINING
            outcome = self._fit(work, base, checkpoints)
            withheld = outcome.trained.withheld and tools.keep_back_diverged(task)
            # Before staging: an update that the policy refuses must not wait on disk to be pushed later.
            released = self._release(run, task, outcome.update)
            tools.stage(run, task, outcome, withheld=withheld)
            self._own_scores.keep(task, outcome.update.metrics)
        # Outside of the block: the update is staged, so a crash while it is pushed needs no checkpoints any more.
        self._push(task, released)

    def hand_in(self, run: PreparedRun, task: Task, update: Update) -> None:
        """Push what is staged for a task.

        Raises:
            TaskFailedError: it was trained by another recipe, or to leave in a secure aggregation.
        """
        self._tools.check_trained_by(run, task)
        if task.sum_of is not None and not self._tools.site.simulated:
            text = (
                "this update was trained for a secure aggregation, and the run, as the server offers it now, has none"
            )
            raise TaskFailedError(FailureReason.REFUSED, text)
        self._push(task, self._release(run, task, update))

    def _release(self, run: PreparedRun, task: Task, update: Update) -> Released:
        """Pass the update through the site's policy: the last function before the link."""
        return self._tools.passed(task, lambda: self._tools.site.policy.release(update, run.gate_context()))

    def _push(self, task: Task, released: Released) -> None:
        receipt = self._tools.push(task, released)
        self._tools.settle(task, receipt)
        self._tools.check_taken(receipt)


class SecureFit:
    """A FIT task: trains, stages, and pushes the site's keys for the sum."""

    def __init__(self, tools: TaskTools, fit: Fit, sums: SumSteps, own_scores: OwnScoreKeeper) -> None:
        self._tools, self._fit, self._sums, self._own_scores = tools, fit, sums, own_scores

    def work(self, run: PreparedRun, task: Task) -> None:
        """Train and push keys; an update of this task that is staged already is not trained again."""
        tools = self._tools
        if (staged := tools.staged(task)) is not None:
            self.hand_in(run, *staged)
            return
        tools.begin(task)
        tools.passed(task, lambda: tools.guard.check_fit(task))
        tools.passed(task, lambda: self._sums.check_open(run, task))
        base = tools.bases.get(run, task)
        withheld = self._withheld(run, task, base)
        with tools.site.checkpoints(task) as checkpoints:
            work = Computation.for_fit(tools.site, run, task)
            tools.status.activity = Activity.TRAINING
            outcome = self._fit(work, base, checkpoints)
            if outcome.trained.withheld:
                withheld = tools.keep_back_diverged(task)
            # Before staging: an update that the policy refuses must not wait on disk to be pushed later.
            tools.passed(task, lambda: self._sums.vector(run, outcome.update, base))
            tools.stage(run, task, outcome, withheld=withheld)
            self._own_scores.keep(task, outcome.update.metrics)
        # Outside of the block: the update is staged, so a crash while it is pushed needs no checkpoints any more.
        self.hand_in(run, task, outcome.update)

    def hand_in(self, run: PreparedRun, task: Task, update: Update) -> None:
        """Push the keys for the sum of what is staged for a task.

        Raises:
            TaskFailedError: it was trained by another recipe.
        """
        tools = self._tools
        tools.check_trained_by(run, task)
        base = partial(tools.bases.get, run, task)
        receipt = tools.push(task, tools.passed(task, lambda: self._sums.begin(run, task, update, base)))
        if receipt.verdict not in COUNTED:  # keys that are taken count only with the numbers that follow
            tools.settle(task, receipt)
        tools.check_taken(receipt)

    def _withheld(self, run: PreparedRun, task: Task, base: Payload) -> bool:
        """Whether the site's images decide that nothing of a fit leaves; only the site learns that it is this one.

        A server that saw it would learn of the images, one question at a time. The fit takes its time as every other.
        """
        problem = self._tools.passed(task, lambda: self._tools.judge.judge_by_images(run, task, base))
        refusal = run.withheld if problem is None else base_refusal(task, problem)
        return refusal is not None and self._tools.keep_back(task, refusal)


class SecureStep:
    """A later task of a sum, of updates or of scores: what the protocol's next step takes of this site."""

    def __init__(self, tools: TaskTools, sums: SumSteps) -> None:
        self._tools, self._sums = tools, sums

    def work(self, run: PreparedRun, task: Task) -> None:
        """Push what the site sends for the step; the numbers' receipt settles the fit."""
        tools = self._tools
        released = tools.passed(task, lambda: self._sums.step(run, task))
        fitted = self._sums.settles(task)
        receipt = tools.push(task, released)
        if fitted is not None:
            tools.settle(fitted, receipt)
        self._sums.settled(task)  # last: what is staged for a sum that is over is dropped
        tools.check_taken(receipt)


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
            "this evaluator scores models, and declines to refine one: it has no auxiliary images",
            run=run.recipe.name,
            missing="data.auxiliary_per_class",
        )


def _for_refining(site: Site, run: PreparedRun) -> tuple[RefiningClientMethod, PreparedRun]:
    """The method that refines, and the run with the evaluator's auxiliary images as its only data.

    Raises:
        TaskFailedError: this site is no evaluator, or the run's method refines nothing.
        DataError: it has no auxiliary images.
    """
    if Role.EVALUATOR not in site.roles or (method := refining(run.method)) is None:
        text = (
            "the server asked this site to refine a model. Only an evaluator does this, in a run whose method "
            "refines models"
        )
        raise TaskFailedError(FailureReason.REFUSED, text)
    return method, replace(run, data=run.data.for_refining())
