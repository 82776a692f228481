"""The client daemon's loop: enroll, take a task, do it, hand it in; the same over gRPC and in a simulation."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import torch

from protofed.client.failures import FORESEEN, reason_of
from protofed.client.link import Link, received
from protofed.client.local import NoCheckpoints, Steps
from protofed.client.memory import Held, Outcome
from protofed.client.models.catalogue import build
from protofed.client.models.split import dump, load
from protofed.client.now import CalledOffError, Now
from protofed.client.policy import Released
from protofed.client.scoring import of_personal, on_local_test, on_test
from protofed.client.site import Prepared, prepare
from protofed.client.site import Site as Site
from protofed.common.codec import Digest
from protofed.common.errors import (
    Excluded,
    Failure,
    Fenced,
    Incident,
    NotEnrolled,
    ProtocolError,
    ProtofedError,
    TaskFailure,
)
from protofed.common.failpoint import reach
from protofed.common.payload import Part, Payload, Update
from protofed.common.task import Activity, Assignment, Finished, Progress, Role, Scores, Task, TaskKind, Wait

log = structlog.get_logger()
REJECTED_PAUSE_S = 1.0  # before the server is asked again for a task that can be worked on
EXCLUDED_PAUSE_S = 30.0
INCIDENT_PAUSE_S = 2.0
# The server has restarted, the operator wants this site to wait, or a call failed there: the site enrolls again.
_AGAIN_AFTER_S: dict[type[ProtocolError], float] = {
    NotEnrolled: 0.0,
    Excluded: EXCLUDED_PAUSE_S,
    Incident: INCIDENT_PAUSE_S,
}


class Agent:
    """One site's agent.

    Args:
        now: shared with the heartbeat; a simulation has none.
        pause: sleeps that many seconds.
    """

    def __init__(
        self, site: Site, link: Link, now: Now | None = None, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._site, self._link, self._now, self._pause = site, link, now or Now(), pause
        self._assignment: Assignment | None = None
        self._enrolled = False
        self._run: Prepared | TaskFailure = TaskFailure(Failure.REFUSED, "no run was prepared")
        self._settled: set[str] = set()  # nonces of this run whose receipt is there
        self._base: tuple[Digest, Payload] | None = None
        self._personal_scores: tuple[tuple[str, int, Digest | None], Scores] | None = None  # of which model, and which

    def step(self, wait_s: float) -> Task | Wait | Finished:
        """Ask for a task and do it; what the server said.

        Raises:
            Fenced: a newer daemon of this site has taken over.
        """
        try:
            if not self._enrolled and (over := self._enroll()) is not None:
                return over
            assert self._assignment is not None  # noqa: S101  (enrolled)
            answer = self._link.next_task(self._assignment.run, wait_s)
            if isinstance(answer, Task):
                if not self._is_new(answer, self._assignment.run):
                    return self._again(REJECTED_PAUSE_S)
                self._do(answer)
        except tuple(_AGAIN_AFTER_S) as error:
            log.info("enrolling again", site=self._site.name, why=str(error))
            self._enrolled = False
            return self._again(_AGAIN_AFTER_S[type(error)])
        if isinstance(answer, Finished):
            log.info("run finished", run=self._assignment.run, reason=answer.reason)
            self._enrolled = False
        return answer

    def _is_new(self, task: Task, run: str) -> bool:
        """Whether it is work to do: an old answer, sent again, is not."""
        new = task.run == run and task.nonce not in self._settled
        if not new:
            why = "it was handed in before" if task.run == run else f"this daemon works for run {run}"
            log.error("task rejected", run=task.run, round=task.round, nonce=task.nonce, why=why)
        return new

    def _again(self, pause_s: float) -> Wait:
        self._pause(pause_s)
        return Wait(0.0)

    def _enroll(self) -> Finished | None:
        answer = self._link.enroll()
        if isinstance(answer, Finished):
            return answer
        if answer != self._assignment:
            self._prepare(answer)
        self._assignment, self._enrolled, self._now.run = answer, True, answer.run
        if isinstance(self._run, Prepared):
            for task, update in self._site.store.unsettled(answer.run):
                log.info("handing in what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, lambda task=task, update=update: self._hand_in(task, update))  # type: ignore[misc]
        return None

    def _prepare(self, assignment: Assignment) -> None:
        """A run that is refused is declined task by task."""
        self._base = None
        try:
            self._run = prepare(self._site, assignment)
        except TaskFailure as failure:
            self._run = failure
            log.error("this site cannot take part in the run", run=assignment.run, why=str(failure))
            return
        self._settled = set(self._site.store.settled(assignment.run))
        self._site.store.retain(assignment.keep_rounds)
        self._now.heartbeat_s = self._run.recipe.federation.heartbeat_s
        log.info("ready", run=assignment.run, site=self._site.name, device=str(self._run.data.device))

    def _do(self, task: Task) -> None:
        self._now.nonce, self._now.steps = task.nonce, Steps()
        match task.kind:
            case TaskKind.INITIALISE:
                self._attempt(task, lambda: self._initialise(task))
            case TaskKind.FIT:
                self._attempt(task, lambda: self._fit(task))
            case TaskKind.SCORE:
                self._attempt(task, lambda: self._score(task))

    def _attempt(self, task: Task, work: Callable[[], None]) -> None:
        """Do it, or tell the server by a reason code that it cannot be done; details stay in this site's log."""
        self._now.nonce = task.nonce
        try:
            work()
        except CalledOffError:
            log.info("task called off", run=task.run, round=task.round)
        except TaskFailure as failure:
            self._decline(task, failure.reason, str(failure))
        except (NotEnrolled, Fenced, Incident):
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
            self._now.nonce, self._now.activity = "", Activity.IDLE

    def _decline(self, task: Task, reason: Failure, why: str) -> None:
        log.error("task declined", run=task.run, round=task.round, reason=reason.value, why=why)
        self._link.beat(task.run, Progress(task.nonce, Activity.FAILED, failure=reason))

    def _initialise(self, task: Task) -> None:
        """Make the run's first model from its seed; it holds nothing of this site."""
        run = self._prepared()
        with torch.random.fork_rng():
            torch.manual_seed(run.recipe.seed)
            model = build(run.recipe.model, run.recipe.input, run.recipe.classes, self._site.policy.rules.models)
        self._hand_in(task, Update(self._site.name, {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}))

    def _fit(self, task: Task) -> None:
        """Train, unless that was done before: the server did not take the update then, and now asks for it again."""
        run = self._prepared()
        for staged, update in self._site.store.unsettled(task.run):
            if staged.nonce == task.nonce:
                self._hand_in(task, update)
                return
        base = self._receive(task)
        with self._site.checkpoints(task) as kept:
            held = self._site.store.held(task.run, task.round)
            local = run.local(self._site.name, task, held, self._now, kept)
            self._now.activity = Activity.TRAINING
            update = run.method.fit(local, base)
            reach("fit-done")
            released = self._site.policy.release(update)  # what may not leave is not kept to be handed in, either
            personal = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
            self._site.store.stage(task, Outcome(update, local.memory, personal))
            reach("staged")
        self._push(task, released)

    def _hand_in(self, task: Task, update: Update) -> None:
        self._push(task, self._site.policy.release(update))

    def _push(self, task: Task, released: Released) -> None:
        self._now.activity = Activity.UPLOADING
        receipt = self._link.push(task, released)
        reach("pushed")
        why = {"reason": receipt.reason} if receipt.reason else {}
        log.info("handed in", run=task.run, round=task.round, verdict=receipt.verdict.value, **why)
        self._settled.add(task.nonce)
        if task.kind is TaskKind.FIT:
            self._site.store.settle(task, receipt)
            reach("settled")
            self._personal_scores = None

    def _score(self, task: Task) -> None:
        run = self._prepared()
        held = self._site.store.held(task.run, task.round + 1)
        scores: dict[str, float] = {}
        if Role.TRAINER in self._site.roles:
            scores |= self._score_personal(run, task, held)
        if Role.EVALUATOR in self._site.roles:
            self._install(run, task, Held())
            scores |= on_test(run.model, run.data, run.recipe)
        self._link.report(task, self._site.policy.release_scores(scores))

    def _score_personal(self, run: Prepared, task: Task, held: Held) -> Scores:
        """Of the site's own model, taken once for each model; and of the global one on the site's own test set."""
        installed = run.method.personal == "installed"
        model = (task.run, held.round, task.base if installed else None)
        if self._personal_scores is None or self._personal_scores[0] != model:
            self._personal_scores = model, self._of_personal(run, task, held, installed=installed)
        found = dict(self._personal_scores[1])
        if not installed and run.data.local_test is not None:
            self._install(run, task, Held())
            found |= on_local_test(run.model, run.data, run.recipe, "global")
        return found

    def _of_personal(self, run: Prepared, task: Task, held: Held, *, installed: bool) -> Scores:
        if not installed and held.personal is None:
            return {}
        self._install(run, task, held)  # puts the method's own head in place
        if not installed and held.personal is not None:
            load(run.model.body, held.personal[Part.BODY])
            load(run.model.head, held.personal[Part.HEAD])
        return of_personal(run.model, run.data, run.recipe)

    def _install(self, run: Prepared, task: Task, held: Held) -> None:
        base = self._receive(task)
        self._now.activity = Activity.SCORING
        run.method.install(run.local(self._site.name, task, held, self._now, NoCheckpoints()), base)

    def _receive(self, task: Task) -> Payload:
        """The task's base, fetched once; looking for something that is not in it raises CodecError."""
        if task.base is None:
            raise ProtocolError(f"a {task.kind} task without a model to start from")
        if self._base is None or self._base[0] != task.base:
            self._now.activity = Activity.DOWNLOADING
            self._base = (task.base, received(self._link.fetch(task)))
            reach("fetched")
        return self._base[1]

    def _prepared(self) -> Prepared:
        if isinstance(self._run, TaskFailure):
            raise TaskFailure(self._run.reason, str(self._run))
        return self._run
