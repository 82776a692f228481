"""A site's work on the tasks of one run: each ends handed in, or declined by a code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import structlog

from protofed.client.agent.base_guard import BaseGuard, base_refusal
from protofed.client.agent.base_models import BaseModelCache
from protofed.client.agent.computation import Computation, Elsewhere, fit
from protofed.client.agent.dp_budget import DpBudget, Spending
from protofed.client.agent.failure_codes import FORESEEN, reason_of
from protofed.client.agent.first_model import first_model
from protofed.client.agent.heartbeat import DaemonStatus, TaskAbortedError, idle_heartbeat_s
from protofed.client.agent.refinement import for_refining, refined, warn_if_it_cannot
from protofed.client.agent.score_report import OwnScoreKeeper, Scorer
from protofed.client.agent.site import PreparedRun, Site, is_summed, prepare, trains_to_its_end
from protofed.client.agent.sum_steps import SumSteps, check_member, with_share
from protofed.client.agent.task_guard import TaskGuard
from protofed.client.privacy.policy import PolicyRefusedError, Released
from protofed.client.state.store import COUNTED, SiteState, TrainedBy
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
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Activity, Assignment, Progress, Receipt, Task, TaskKind, Verdict

log = structlog.get_logger()
T = TypeVar("T")


class TaskWork:
    """Prepares a run and works on its tasks; single-threaded.

    Args:
        accept: called when the site begins with a task.
        on_refusal: called with each update, or run, that the site's policy refused.
        on_withheld: called with each update that stays here without the server's knowing.
        on_spending: called with each fit with noise that is about to begin.
        elsewhere: computes for the site in other processes.
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
    ) -> None:
        self._site, self._link, self._status = site, link, status
        self._accept, self._elsewhere = accept, elsewhere
        self._on_refusal, self._on_withheld = on_refusal, on_withheld
        self._budget = DpBudget(site, status, on_spending)
        self._run: PreparedRun | TaskFailedError = TaskFailedError(FailureReason.REFUSED, "no run was prepared")
        self._base_guard, self._task_guard = BaseGuard(site), TaskGuard(site)
        self._bases = BaseModelCache(link, status, self._check_base)
        self._scorer = Scorer(site, status, self._bases, elsewhere)
        self._sums = SumSteps(site, link.fetch)
        self._own_scores = OwnScoreKeeper(site, status)
        self._unwritten: dict[str, tuple[Task, Receipt]] = {}  # by task_id: counted, and the disk took no receipt yet

    def prepare(self, assignment: Assignment) -> None:
        """Prepare the run; of one that is refused, `_prepared` then declines every task by the same reason."""
        self._bases.clear()
        try:
            self._run = prepare(self._site, assignment)
            check_member(self._site, self._run)
        except TaskFailedError as failure:
            self._run = failure
            log.error("this site cannot take part in the run", run=assignment.run, why=str(failure))
            return
        self._sums.only(assignment.run)
        self._task_guard.take_up(assignment.run)
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
        return self._task_guard.is_new(task, run)

    def hand_in_staged(self, run: str) -> None:
        """Push what fits of the prepared run have left without a receipt."""
        if isinstance(self._run, PreparedRun):
            self._sums.drop_over(run)
            for task, update in self._site.store.unsettled(run):
                log.info("handing in what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, lambda task=task, update=update: self._push_staged(task, update))  # type: ignore[misc]

    def work_on(self, task: Task) -> None:
        """Do a task to its end, whatever that is.

        Raises:
            ProtocolError: about the daemon, not the task: it has to enroll again, or was replaced or revoked.
        """
        log.info("task begun", run=task.run, round=task.round, kind=task.kind.value)
        self._status.task_id, self._status.fit_progress = task.task_id, FitProgress()
        work = {
            TaskKind.INITIALISE: self._initialise,
            TaskKind.FIT: self._fit,
            TaskKind.REFINE: self._refine,
            TaskKind.SCORE: self._score,
            TaskKind.SCORE_SUM: self._score_sum,
        }

        def do() -> None:
            self._write_receipts(task.run)
            work.get(task.kind, self._sum_step)(task)

        self._attempt(task, do)

    def ahead(self, task: Task) -> list[Computation]:
        """What the site would compute for a task now: another process may begin with it; nothing is done here."""
        if not isinstance(run := self._run, PreparedRun):
            return []
        match task.kind:
            case TaskKind.FIT:
                return [self._fit_from(run, task, self._site.store.last_counted(task.run, task.memory_before))]
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
        self._sums.over(run)

    def abandon(self, run: str) -> None:
        """Remove what waits to be sent of a run that the site has left."""
        try:
            self._site.store.abandon(run)
            self._sums.over(run)
        except StateError as error:  # it stays, and the link sends none of it
            log.warning("what was computed for a run that this site has left stays", run=run, why=str(error))

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

    def _initialise(self, task: Task) -> None:
        """Make the run's first model from its seed; it contains nothing of this site's data."""
        run = self._begun(task)
        first = first_model(run.recipe, self._site.policy.rules.plugins)
        update, context = Update(self._site.name, first), run.gate_context()
        self._push(task, self._passed(task, lambda: self._site.policy.release_public(update, context)))

    def _fit(self, task: Task) -> None:
        """Train and push; an update of this task that is staged already is pushed without training again."""
        run = self._prepared(task)
        for staged, update in self._site.store.unsettled(task.run):
            if staged.task_id == task.task_id:
                self._push_staged(staged, update)  # with the model and the attempt that it was trained for
                return
        self._begun(task)
        self._passed(task, lambda: self._task_guard.check_fit(task))
        if summed := is_summed(self._site, run.recipe):
            self._passed(task, lambda: self._sums.check_open(run, task))
        base = self._bases.get(task)
        withheld = self._withheld(run, task, base)
        with self._site.checkpoints(task) as checkpoints:
            state = self._site.store.last_counted(task.run, task.memory_before)
            self._status.activity = Activity.TRAINING
            work = self._fit_from(run, task, state)
            # Last: a fit that fails before costs nothing.
            self._passed(task, lambda: self._budget.spend(run, task, run.noise(self._site.name, task, state)))
            outcome = self._elsewhere.fit(work) or fit(work, base, self._status, checkpoints, self._site.fit)
            if outcome.trained.withheld:
                withheld = self._keep_back(task, PolicyRefusedError("finite", "it diverged: lower plan.lr"))
            # Before staging: an update that the policy refuses must not wait on disk to be pushed later.
            if summed:
                self._passed(task, lambda: self._sums.vector(run, outcome.update, base))
            else:
                released = self._release(task, outcome.update)
            self._site.store.stage(task, replace(outcome, trained=TrainedBy(run.recipe.fingerprint(), withheld)))
            reach("staged")
            self._own_scores.keep(task, outcome.update.metrics)
        # Outside of the block: the update is staged, so a crash while it is pushed needs no checkpoints any more.
        if summed:
            self._push_staged(task, outcome.update)
        else:
            self._push(task, released)

    def _refine(self, task: Task) -> None:
        """Refine the round's aggregate on this evaluator's auxiliary images, and push."""
        run = for_refining(self._site, self._begun(task))
        base = self._bases.get(task)
        self._passed(task, lambda: self._base_guard.answered(run, task, base))
        with self._site.checkpoints(task) as checkpoints:
            self._status.activity = Activity.TRAINING
            update = refined(self._site, run, task, base, self._status, checkpoints)
            released = self._passed(task, lambda: self._site.policy.release_public(update, run.gate_context()))
            self._push(task, released)  # within the block: nothing is staged, so a restart goes on behind its epochs

    def _fit_from(self, run: PreparedRun, task: Task, state: SiteState) -> Computation:
        fewest, to_its_end = self._site.policy.rules.min_images_per_unit, trains_to_its_end(self._site, run)
        return Computation(self._site.name, run, task, state, fewest, to_its_end=to_its_end)

    def _withheld(self, run: PreparedRun, task: Task, base: Payload) -> bool:
        """Whether the site's images decide that nothing of a fit leaves; only the site learns that it is this one.

        A server that saw it would learn of the images, one question at a time. The fit takes its time as every other.
        """
        problem = self._passed(task, lambda: self._base_guard.answered(run, task, base))
        refusal = run.withheld if problem is None else base_refusal(task, problem)
        return refusal is not None and self._keep_back(task, refusal)

    def _keep_back(self, task: Task, refusal: PolicyViolationError) -> Literal[True]:
        """Tell the site, and nobody else, that nothing of a fit leaves."""
        self._on_withheld(task, refusal)
        log.error(
            "nothing of this fit leaves: random numbers take its place in a sum, so that nobody can read the sum, and "
            "the server does not learn which site they are of",
            run=task.run,
            round=task.round,
            why=str(refusal),
        )
        return True

    def _check_base(self, task: Task, base: Payload) -> None:
        self._passed(task, lambda: self._base_guard.check(self._prepared(task), task, base))

    def _push_staged(self, task: Task, update: Update) -> None:
        run = self._prepared(task)
        if (recipe := self._site.store.trained_by(task).recipe) and recipe != run.recipe.fingerprint():
            # It was trained, and its noise was counted, by other rules than those by which it would leave now.
            text = "the run was offered again with another recipe than this update was trained by"
            raise TaskFailedError(FailureReason.REFUSED, text)
        if is_summed(self._site, run.recipe):
            base = partial(self._bases.get, task)
            self._push(task, self._passed(task, lambda: self._sums.begin(run, task, update, base)))
        elif task.subject is None or self._site.simulated:
            self._push(task, self._release(task, update))
        else:
            text = "this update was trained to leave in a secure sum, and the run, as it is offered now, has none"
            raise TaskFailedError(FailureReason.REFUSED, text)

    def _sum_step(self, task: Task) -> None:
        run = self._prepared(task)
        released = self._passed(task, lambda: self._sums.step(run, task))
        self._push(task, released, self._sums.settles(task))

    def _release(self, task: Task, update: Update) -> Released:
        """Pass the update through the site's policy: the last function before the link."""
        run = self._prepared(task)
        if run.shares_noise:  # of a simulated site: a daemon's leaves in a sum, and has its noise there
            update = with_share(self._site, run, task, update, self._bases.get(task))
        return self._passed(task, lambda: self._site.policy.release(update, run.gate_context()))

    def _passed(self, task: Task, gate: Callable[[], T]) -> T:
        """What the gate releases; what it refuses is counted and audited."""
        try:
            return gate()
        except PolicyViolationError as violation:
            self._on_refusal(task, violation)
            raise

    def _push(self, task: Task, released: Released, settles: Task | None = None) -> None:
        """Push what was released; the receipt settles what was staged for `settles`, or for the task itself."""
        self._status.activity = Activity.UPLOADING
        receipt = self._link.push(task, released)
        reach("pushed")
        why = {"reason": receipt.reason} if receipt.reason else {}
        log.info("handed in", run=task.run, round=task.round, verdict=receipt.verdict.value, **why)
        self._task_guard.settled(task)
        if task.kind is TaskKind.FIT and not (
            receipt.verdict in COUNTED and is_summed(self._site, self._prepared(task).recipe)
        ):
            settles = task  # the keys of a secure sum count only with the numbers that follow
        if settles is not None:
            self._settle(settles, receipt)
            reach("settled")
        self._sums.settled(task)  # last: what is staged for a sum that is over is dropped
        if receipt.verdict is Verdict.INVALID:
            # The same training gives the same update: without a refusal of ours the server would ask again until the
            # deadline, and a simulation, whose clock stands still, for ever.
            raise TaskFailedError(FailureReason.REFUSED, f"the server refuses the update: {receipt.reason}")

    def _settle(self, task: Task, receipt: Receipt) -> None:
        if receipt.verdict in COUNTED:
            self._unwritten[task.task_id] = task, receipt
        self._site.store.settle(task, receipt)
        self._unwritten.pop(task.task_id, None)
        self._scorer.clear()

    def _write_receipts(self, run: str) -> None:
        """Write the receipts that a full disk did not take: without them a fit begins as if the round had not counted.

        Raises:
            StateError: it still takes none.
        """
        if not any(task.run == run for task, _ in self._unwritten.values()):
            return
        staged = {task.task_id for task, _ in self._site.store.unsettled(run)}
        for task, receipt in [entry for entry in self._unwritten.values() if entry[0].run == run]:
            if task.task_id in staged:
                self._settle(task, receipt)
            else:  # the site has left the run meanwhile
                del self._unwritten[task.task_id]

    def _score(self, task: Task) -> None:
        run = self._scored(task)
        answers = self._scorer.answers(run, task)
        # A policy that releases none keeps them from the server, not from the site.
        self._own_scores.keep(task, answers.scores)
        self._link.report(task, self._site.policy.release_scores(answers.told, noisy=run.noisy))

    def _score_sum(self, task: Task) -> None:
        """Take the scores that are summed and say that they are there; taken once, whatever happens to the daemon."""
        run = self._prepared(task)
        if (released := self._passed(task, lambda: self._sums.scored(run, task))) is None:
            answers = self._scorer.answers(self._scored(task), task)
            self._own_scores.keep(task, answers.scores)
            all_own = replace(answers, summed={**self._own_scores.trained(task), **answers.summed})
            released = self._passed(task, lambda: self._sums.begin_scores(run, task, all_own))
        self._push(task, released)

    def _scored(self, task: Task) -> PreparedRun:
        """`_begun` of a task that asks for scores, which the site gives once."""
        run = self._begun(task)
        self._passed(task, lambda: self._task_guard.check_score(task, self._scorer.roles(run, task)))
        return run

    def _begun(self, task: Task) -> PreparedRun:
        """The run, once the task is counted among today's.

        Raises:
            TaskFailedError: as of `_prepared`.
            PolicyRefusedError: the policy allows no more of them today.
        """
        run = self._prepared(task)
        self._passed(task, lambda: self._task_guard.check_today(task))
        self._accept()
        return run

    def _prepared(self, task: Task) -> PreparedRun:
        """The run, if the task is one of it.

        Raises:
            TaskFailedError: the run could not be prepared, or the task is not one of this run.
        """
        if isinstance(self._run, TaskFailedError):
            if isinstance(violation := self._run.__cause__, PolicyViolationError):  # the policy refused the whole run
                self._on_refusal(task, violation)
            raise TaskFailedError(self._run.reason, str(self._run))
        self._run.check_task(task)
        return self._run
