"""The client daemon's loop: enroll, take a task, do it, hand it in; the same over gRPC and in a simulation."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import torch

from protofed.client.agent.base_models import BaseModelCache
from protofed.client.agent.enrollment import Enrollment, TaskGate
from protofed.client.agent.failure_codes import FORESEEN, reason_of
from protofed.client.agent.heartbeat import CalledOffError, DaemonStatus
from protofed.client.agent.score_report import Scorer
from protofed.client.agent.site import PreparedRun, prepare
from protofed.client.agent.site import Site as Site
from protofed.client.models.catalogue import build
from protofed.client.models.split import dump
from protofed.client.privacy.policy import Released
from protofed.client.privacy.update_checks import LOOKED_AT
from protofed.client.state.store import FitOutcome
from protofed.client.training.context import FitProgress
from protofed.client.transport.link import Link
from protofed.common.errors import (
    ExcludedError,
    FailureReason,
    FencedError,
    IncidentError,
    NotEnrolledError,
    PolicyViolationError,
    ProtocolError,
    ProtofedError,
    TaskFailedError,
)
from protofed.common.failpoint import reach
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Activity, Assignment, Finished, Progress, Task, TaskKind, Wait

log = structlog.get_logger()
REJECTED_PAUSE_S = 1.0  # before the server is asked again for a task that can be worked on
EXCLUDED_PAUSE_S = 30.0
INCIDENT_PAUSE_S = 2.0
# The server has restarted, the operator wants this site to wait, or a call failed there: the site enrolls again.
_AGAIN_AFTER_S: dict[type[ProtocolError], float] = {
    NotEnrolledError: 0.0,
    ExcludedError: EXCLUDED_PAUSE_S,
    IncidentError: INCIDENT_PAUSE_S,
}


class Agent:
    """One site's agent.

    Args:
        now: shared with the heartbeat; a simulation has none.
        pause: sleeps that many seconds.
        door: whether the site takes tasks; else as its policy and its approvals say.
        refused: told what the gate did not let out.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        now: DaemonStatus | None = None,
        pause: Callable[[float], None] = time.sleep,
        door: TaskGate | None = None,
        refused: Callable[[Task, PolicyViolationError], None] = lambda _task, _why: None,
    ) -> None:
        self._site, self._link, self._now, self._pause, self._refused = (
            site,
            link,
            now or DaemonStatus(),
            pause,
            refused,
        )
        self._entrance = Enrollment(link, door or TaskGate(site.policy.rules, site.store.approvals))
        self._assignment: Assignment | None = None
        self._enrolled = False
        self._run: PreparedRun | TaskFailedError = TaskFailedError(FailureReason.REFUSED, "no run was prepared")
        self._settled: set[str] = set()  # task_ids of this run whose receipt is there
        self._bases = BaseModelCache(link, self._now)
        self._scorer = Scorer(site, self._now, self._bases)

    def step(self, wait_s: float) -> Task | Wait | Finished:
        """Ask for a task and do it; what the server said.

        Raises:
            Fenced: a newer daemon of this site has taken over.
        """
        try:
            if not self._may_go_on() and (instead := self._enroll()) is not None:
                return instead
            assert self._assignment is not None  # noqa: S101  (enrolled)
            answer = self._link.next_task(self._assignment.run, wait_s)
            if isinstance(answer, Task):
                if not self._is_new(answer, self._assignment.run):
                    return self._again(REJECTED_PAUSE_S)
                if not self._may_go_on():
                    return self._again(0.0)
                self._do(answer)
        except tuple(_AGAIN_AFTER_S) as error:
            tell = log.info if isinstance(error, NotEnrolledError) else log.warning  # the others are somebody's to mend
            tell("enrolling again", site=self._site.name, why=str(error))
            self._enrolled = False
            return self._again(_AGAIN_AFTER_S[type(error)])
        if isinstance(answer, Finished):
            log.info("run finished", run=self._assignment.run, reason=answer.reason)
            self._enrolled = False
            self._entrance.leave()
        return answer

    def _may_go_on(self) -> bool:
        """Whether it is enrolled, and still takes tasks of its run."""
        self._enrolled = self._enrolled and self._entrance.may_stay()
        return self._enrolled

    def _is_new(self, task: Task, run: str) -> bool:
        """Whether it is work to do: an old answer, sent again, is not, unless a server that was restored insists."""
        new = task.run == run and task.task_id not in self._settled
        if not new:
            why = "it was handed in before" if task.run == run else f"this daemon works for run {run}"
            log.error("task rejected", run=task.run, round=task.round, task_id=task.task_id, why=why)
            self._settled.discard(task.task_id)
        return new

    def _again(self, pause_s: float) -> Wait:
        self._pause(pause_s)
        return Wait(0.0)

    def _enroll(self) -> Finished | Wait | None:
        answer = self._entrance.enroll()
        if not isinstance(answer, Assignment):
            return self._again(answer.retry_after_s) if isinstance(answer, Wait) else answer
        if answer != self._assignment:
            self._prepare(answer)
        self._assignment, self._enrolled, self._now.run = answer, True, answer.run
        if isinstance(self._run, PreparedRun):
            for task, update in self._site.store.unsettled(answer.run):
                log.info("handing in what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, lambda task=task, update=update: self._hand_in(task, update))  # type: ignore[misc]
        return None

    def _prepare(self, assignment: Assignment) -> None:
        """A run that is refused is declined task by task."""
        self._bases.forget()
        try:
            self._run = prepare(self._site, assignment)
        except TaskFailedError as failure:
            self._run = failure
            log.error("this site cannot take part in the run", run=assignment.run, why=str(failure))
            return
        self._settled = set(self._site.store.settled(assignment.run))
        self._site.store.retain(assignment.keep_rounds)
        self._now.heartbeat_s = self._run.recipe.federation.heartbeat_s
        log.info("ready", run=assignment.run, site=self._site.name, device=str(self._run.data.device))

    def _do(self, task: Task) -> None:
        log.info("task begun", run=task.run, round=task.round, kind=task.kind.value)
        self._now.task_id, self._now.steps = task.task_id, FitProgress()
        work = {TaskKind.INITIALISE: self._initialise, TaskKind.FIT: self._fit, TaskKind.SCORE: self._score}
        self._attempt(task, lambda: work[task.kind](task))

    def _attempt(self, task: Task, work: Callable[[], None]) -> None:
        """Do it, or tell the server by a reason code that it cannot be done; details stay in this site's log."""
        self._now.task_id, self._now.round = task.task_id, task.round
        try:
            work()
        except CalledOffError:
            log.info("task called off", run=task.run, round=task.round)
        except TaskFailedError as failure:
            self._decline(task, failure.reason, str(failure))
        except (NotEnrolledError, FencedError, IncidentError):
            raise
        except ProtocolError as error:
            log.warning("the server does not take this task any more", run=task.run, round=task.round, why=str(error))
        except FORESEEN as error:
            self._decline(task, reason_of(error), str(error))
        except ProtofedError:
            raise
        except Exception as error:  # a driver, or a site's own model: this task is declined, the daemon lives
            log.exception("task failed unforeseen", run=task.run, round=task.round)
            self._decline(task, reason_of(error), f"{type(error).__name__}: {error}")
        finally:
            self._now.task_id, self._now.activity = "", Activity.IDLE

    def _decline(self, task: Task, reason: FailureReason, why: str) -> None:
        log.error("task declined", run=task.run, round=task.round, reason=reason.value, why=why)
        self._link.beat(task.run, Progress(task.task_id, Activity.FAILED, failure=reason))

    def _initialise(self, task: Task) -> None:
        """Make the run's first model from its seed; it holds nothing of this site."""
        run = self._prepared(task)
        with torch.random.fork_rng():
            torch.manual_seed(run.recipe.seed)
            model = build(run.recipe.model, run.recipe.input, run.recipe.classes, self._site.policy.rules.plugins)
        first = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        self._push(task, self._release(task, Update(self._site.name, first), {}))

    def _fit(self, task: Task) -> None:
        """Train, unless that was done before: the server did not take the update then, and now asks for it again."""
        run = self._prepared(task)
        for staged, update in self._site.store.unsettled(task.run):
            if staged.task_id == task.task_id:
                self._hand_in(task, update)
                return
        base = self._bases.of(task)
        with self._site.checkpoints(task) as kept:
            held = self._site.store.last_counted(task.run, task.round)
            local = run.local(self._site.name, task, held, self._now, kept)
            self._now.activity = Activity.TRAINING
            update = self._site.fit(run, task, local, base)
            reach("fit-done")
            looked_at = {part: tensors for part, tensors in base.items() if part in LOOKED_AT}
            released = self._release(task, update, looked_at)  # what may not leave is not kept to be handed in, either
            personal = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
            self._site.store.stage(task, FitOutcome(update, local.memory, personal, looked_at))
            reach("staged")
        self._push(task, released)

    def _hand_in(self, task: Task, update: Update) -> None:
        self._push(task, self._release(task, update, self._site.store.received(task)))

    def _release(self, task: Task, update: Update, received: Payload) -> Released:
        """Through the site's gate: the last function before the wire."""
        background = self._prepared(task).background(self._site, task, received)
        try:
            return self._site.policy.release(update, background)
        except PolicyViolationError as violation:
            self._refused(task, violation)
            raise

    def _push(self, task: Task, released: Released) -> None:
        self._now.activity = Activity.UPLOADING
        receipt = self._link.push(task, released)
        reach("pushed")
        why = {"reason": receipt.reason} if receipt.reason else {}
        log.info("handed in", run=task.run, round=task.round, verdict=receipt.verdict.value, **why)
        self._settled.add(task.task_id)
        if task.kind is TaskKind.FIT:
            self._site.store.settle(task, receipt)
            reach("settled")
            self._scorer.forget()

    def _score(self, task: Task) -> None:
        scores = self._scorer.scores(self._prepared(task), task)
        self._link.report(task, self._site.policy.release_scores(scores))

    def _prepared(self, task: Task) -> PreparedRun:
        if isinstance(self._run, TaskFailedError):
            if isinstance(
                why := self._run.__cause__, PolicyViolationError
            ):  # of the whole run, before anything was trained
                self._refused(task, why)
            raise TaskFailedError(self._run.reason, str(self._run))
        self._run.check(task)
        return self._run
