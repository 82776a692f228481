"""The client daemon's loop: enroll, take a task, do it, hand it in; the same over gRPC and in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch

import protofed.client.methods  # noqa: F401  (registers the client halves)
from protofed.client.data.examples import SiteData
from protofed.client.link import Link
from protofed.client.local import Local, Steps, seeded
from protofed.client.memory import Held, Outcome, Store
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import build
from protofed.client.models.split import SplitModel, dump, load
from protofed.client.now import CalledOffError, Now
from protofed.client.policy import Policy, Released
from protofed.client.scoring import of_personal, on_local_test, on_test
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import (
    CodecError,
    ConfigError,
    DataError,
    Failure,
    Fenced,
    NotEnrolled,
    PolicyViolation,
    ProtocolError,
    ProtofedError,
    StateError,
    TaskFailure,
)
from protofed.common.payload import Part, Payload, SiteId, Update
from protofed.common.recipe import Recipe, parse_json
from protofed.common.task import Activity, Assignment, Finished, Progress, Role, Scores, Task, TaskKind, Wait

log = structlog.get_logger()
_FAILURES: list[tuple[type[Exception], Failure]] = [
    (PolicyViolation, Failure.POLICY),
    (ConfigError, Failure.REFUSED),
    (CodecError, Failure.REFUSED),
    (DataError, Failure.DATA),
    (StateError, Failure.DISK),
    (torch.OutOfMemoryError, Failure.OUT_OF_MEMORY),
]


@dataclass(frozen=True)
class Site:
    """Who this agent is and what it has.

    Attributes:
        load_data: the site's data, brought to the recipe's input; raises DataError.
        build_model: a model on the device; a simulation shares one among its sites.
    """

    name: SiteId
    roles: frozenset[Role]
    policy: Policy
    store: Store
    load_data: Callable[[Recipe], SiteData]
    build_model: Callable[[Recipe], SplitModel]


@dataclass
class _Run:
    """One run, as far as this site has prepared for it."""

    recipe: Recipe
    method: ClientMethod
    model: SplitModel
    data: SiteData


class Agent:
    """One site's agent.

    Args:
        now: shared with the heartbeat; a simulation has none.
    """

    def __init__(self, site: Site, link: Link, now: Now | None = None) -> None:
        self._site, self._link, self._now = site, link, now or Now()
        self._assignment: Assignment | None = None
        self._enrolled = False
        self._run: _Run | None = None
        self._refusal: TaskFailure | None = None
        self._base: tuple[Digest, Payload] | None = None
        self._personal_scores: tuple[tuple[str, int, Digest | None], Scores] | None = None  # of which model, and which

    def step(self, wait_s: float) -> Task | Wait | Finished:
        """Ask for a task and do it; what the server said.

        Raises:
            DataError: the site's data cannot be used for this run.
            Fenced: a newer daemon of this site has taken over.
        """
        try:
            if not self._enrolled and (over := self._enroll()) is not None:
                return over
            assert self._assignment is not None  # noqa: S101  (enrolled)
            answer = self._link.next_task(self._assignment.run, wait_s)
            if isinstance(answer, Task):
                self._do(answer)
        except NotEnrolled:
            log.info("the server has restarted; enrolling again", site=self._site.name)
            self._enrolled = False
            return Wait(0.0)
        if isinstance(answer, Finished):
            log.info("run finished", run=self._assignment.run, reason=answer.reason)
            self._enrolled = False
        return answer

    def _enroll(self) -> Finished | None:
        answer = self._link.enroll()
        if isinstance(answer, Finished):
            return answer
        if answer != self._assignment:
            self._prepare(answer)
        self._assignment, self._enrolled, self._now.run = answer, True, answer.run
        if self._run is not None:
            for task, update in self._site.store.unsettled(answer.run):
                log.info("handing in what has no receipt yet", run=task.run, round=task.round)
                self._attempt(task, lambda task=task, update=update: self._hand_in(task, update))  # type: ignore[misc]
        return None

    def _prepare(self, assignment: Assignment) -> None:
        """Check all that the server says before any of it is used; a run that is refused is declined task by task."""
        self._run, self._refusal, self._base = None, None, None
        policy = self._site.policy
        try:
            recipe = parse_json(assignment.recipe, Recipe, f"the recipe of run {assignment.run}")
            method = client_methods.build(recipe.method.name, recipe.method.options)
            policy.admit(recipe.method.name, method.sends)
            model = self._site.build_model(recipe)
        except (ConfigError, PolicyViolation) as error:
            reason = Failure.POLICY if isinstance(error, PolicyViolation) else Failure.REFUSED
            self._refusal = TaskFailure(reason, str(error))
            log.error("this site refuses the run", run=assignment.run, why=str(error))
            return
        self._run = _Run(recipe, method, model, self._site.load_data(recipe))
        self._now.heartbeat_s = recipe.federation.heartbeat_s
        log.info("ready", run=assignment.run, site=self._site.name, device=str(self._run.data.device))

    def _do(self, task: Task) -> None:
        self._now.nonce, self._now.steps = task.nonce, Steps()
        if self._refusal is not None:
            self._decline(task, self._refusal.reason, str(self._refusal))
            return
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
        except (NotEnrolled, Fenced):
            raise
        except ProtocolError as error:
            log.warning("the server does not take this task any more", run=task.run, round=task.round, why=str(error))
        except tuple(kind for kind, _ in _FAILURES) as error:
            reason = next(reason for kind, reason in _FAILURES if isinstance(error, kind))
            self._decline(task, reason, str(error))
        except ProtofedError:
            raise
        except Exception as error:  # a driver, or a site's own model: this task is declined, the daemon lives
            log.exception("task failed unforeseen", run=task.run, round=task.round)
            reason = Failure.DEVICE if isinstance(error, torch.AcceleratorError) else Failure.INTERNAL
            self._decline(task, reason, f"{type(error).__name__}: {error}")
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
        run, received = self._prepared(), self._receive(task)
        held = self._site.store.held(task.run, task.round)
        local = self._local(run, task, held)
        self._now.activity = Activity.TRAINING
        update = run.method.fit(local, received)
        released = self._site.policy.release(update)  # what may not leave is not kept to be handed in, either
        personal = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        self._site.store.stage(task, Outcome(update, local.memory, personal))
        self._push(task, released)

    def _hand_in(self, task: Task, update: Update) -> None:
        self._push(task, self._site.policy.release(update))

    def _push(self, task: Task, released: Released) -> None:
        self._now.activity = Activity.UPLOADING
        receipt = self._link.push(task, released)
        why = {"reason": receipt.reason} if receipt.reason else {}
        log.info("handed in", run=task.run, round=task.round, verdict=receipt.verdict.value, **why)
        if task.kind is TaskKind.FIT:
            self._site.store.settle(task, receipt)
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

    def _score_personal(self, run: _Run, task: Task, held: Held) -> Scores:
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

    def _of_personal(self, run: _Run, task: Task, held: Held, *, installed: bool) -> Scores:
        if not installed and held.personal is None:
            return {}
        self._install(run, task, held)  # puts the method's own head in place
        if not installed and held.personal is not None:
            load(run.model.body, held.personal[Part.BODY])
            load(run.model.head, held.personal[Part.HEAD])
        return of_personal(run.model, run.data, run.recipe)

    def _install(self, run: _Run, task: Task, held: Held) -> None:
        received = self._receive(task)
        self._now.activity = Activity.SCORING
        run.method.install(self._local(run, task, held), received)

    def _receive(self, task: Task) -> Payload:
        """The task's base, fetched once; looking for something that is not in it raises CodecError."""
        if task.base is None:
            raise ProtocolError(f"a {task.kind} task without a model to start from")
        if self._base is None or self._base[0] != task.base:
            self._now.activity = Activity.DOWNLOADING
            parts = codec.decode(self._link.fetch(task)).items()
            self._base = (task.base, _Received({part: _Received(tensors) for part, tensors in parts}))
        return self._base[1]

    def _local(self, run: _Run, task: Task, held: Held) -> Local:
        recipe = run.recipe
        return Local(
            site=self._site.name,
            round=task.round,
            rounds=recipe.rounds,
            model=run.model,
            data=run.data,
            classes=recipe.classes,
            plan=recipe.plan,
            rng=seeded(recipe.seed, task.round, self._site.name, run.data.device),
            memory=dict(held.memory),
            steps=self._now.steps,
            check=self._now.check,
        )

    def _prepared(self) -> _Run:
        if self._run is None:
            raise ProtocolError("no run was prepared")
        return self._run


class _Received(dict[Any, Any]):
    """A payload, or a part of one, of which a method takes what it needs: a task without it is declined."""

    def __missing__(self, name: Any) -> Any:
        raise CodecError(f"the model that was received has no '{name}'")
