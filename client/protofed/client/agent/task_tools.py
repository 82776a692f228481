"""What work on every kind of task takes: the model to start from, checks that count refusals, the way to the server.

`DpBudget` counts a fit with noise before it begins, and none begins that would exceed the site's privacy budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import structlog

from protofed.client.base_checks.judge import BaseJudge
from protofed.client.policy.dp_accountant import DELTA, Events, epsilon, round_events
from protofed.client.policy.policy import PolicyRefusedError, Released
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.site import DaemonStatus, PreparedRun, Site
from protofed.client.state.daily_counts import Counted
from protofed.client.state.dp_ledger import DpLedger, Spent
from protofed.client.state.store import COUNTED, FitOutcome, TrainedBy
from protofed.client.training.dp import DpNoise
from protofed.client.transport.link import Link
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import (
    CodecError,
    FailureReason,
    PolicyViolationError,
    ProtocolError,
    StateError,
    TaskFailedError,
)
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import SCORINGS, Activity, Receipt, Role, Task, Verdict
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
T = TypeVar("T")
WITHHELD = "the loss, the site's own scores and its number of examples are not sent: they have no noise (plan.dp)"


class TaskGuard:
    """Refuses tasks by what the site has done in their run, which its store remembers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settled: set[str] = set()  # task_ids of the run that have a receipt

    def take_up(self, run: str) -> None:
        """Begin, or go on, with a run."""
        self._settled = set(self._site.store.settled(run))

    def settled(self, task: Task) -> None:
        """A task has its receipt."""
        self._settled.add(task.task_id)

    def is_new(self, task: Task, run: str) -> bool:
        """Whether a task is of this run and not settled yet: a replayed answer of the server is neither."""
        new = task.run == run and task.task_id not in self._settled
        if not new:
            reason = "this daemon sent it before" if task.run == run else f"this daemon works for run {run}"
            log.error("task rejected", run=task.run, round=task.round, task_id=task.task_id, why=reason)
            # Rejected once only: a server that was restored from a backup gives the same task again, and needs it.
            self._settled.discard(task.task_id)
        return new

    def check_fit(self, task: Task) -> None:
        """Check that a FIT task goes back no further than `limits.max_rollback_rounds`, in rounds or in memory.

        A server that says of more updates that they do not stand could choose what old memory the site starts from.

        Raises:
            PolicyRefusedError: it does; nothing of the later rounds was touched.
        """
        newest, most = self._site.store.newest_counted(task.run), self._site.policy.rules.limits.max_rollback_rounds
        if (back := newest - task.round + 1) > most:
            text = (
                f"a task of round {task.round} goes {back} rounds back: this site's update of round {newest} has "
                f"counted, and limits.max_rollback_rounds is {most}. If the coordinator rolled the run back, raise "
                "this limit until the run has caught up"
            )
            raise PolicyRefusedError("limits.max_rollback_rounds", text)
        passed = [number for number in self._site.store.counted(task.run) if task.state_before <= number < task.round]
        if len(passed) > most:
            text = (
                f"a task of round {task.round} starts from the memory of round {task.state_before - 1} or earlier. "
                f"This drops {len(passed)} rounds that have counted here, and limits.max_rollback_rounds is {most}. "
                "If the coordinator rolled the run back, raise this limit until the run has caught up"
            )
            raise PolicyRefusedError("limits.max_rollback_rounds", text)
        if passed:
            log.info(
                "the memory of rounds that do not count any more is skipped",
                run=task.run,
                round=task.round,
                rounds=passed,
            )

    def check_today(self, task: Task) -> None:
        """Count a task among today's; one that was counted before is not counted again.

        Raises:
            PolicyRefusedError: the policy allows no more of them today.
        """
        counts, limits = self._site.store.daily_counts, self._site.policy.rules.limits
        kind = Counted.SCORINGS if task.kind in SCORINGS else Counted.TASKS
        most = limits.scorings_per_day if kind is Counted.SCORINGS else limits.tasks_per_day
        if counts is not None and (none := counts.begin(kind, _asked(task), most)) is not None:
            raise PolicyRefusedError(f"limits.{kind}", none.text(kind, most))

    def check_score(self, task: Task, roles: Collection[Role]) -> None:
        """Check that a trainer is asked for the scores of a round once, and of a run that it has taken part in.

        Repeated questions, with models of the server's choice, would tell the site's labels. An evaluator's test set is
        one that all may know.

        Args:
            roles: whose scores the task is for.

        Raises:
            PolicyRefusedError: its scores of this round were given for another task or model, or it took no part yet.
        """
        if Role.TRAINER not in roles:
            return
        store = self._site.store
        if store.scored(task.run).get(task.round, request := _asked(task)) != request:
            text = (
                f"this site gave its scores of round {task.round} before, for another task or model: a round is "
                "scored once"
            )
            raise PolicyRefusedError("limits.check_base", text)
        took_part = store.newest_counted(task.run) or store.last_base(task.run) is not None
        if self._site.policy.rules.limits.check_base and not took_part:
            text = (
                f"the server asks for scores of round {task.round} before it sent this site a model to train. If "
                "the site has joined late, it sends scores from its first round on"
            )
            raise PolicyRefusedError("limits.check_base", text)
        store.mark_scored(task.run, task.round, request)


def _asked(task: Task) -> str:
    """The same for the same task of the same model: under one id a server could name one model after another."""
    return f"{task.task_id} {task.base_digest}"


class TaskTools:
    """Shared by all kinds of work.

    Args:
        accept: called when the site begins with a task.

    Attributes:
        on_refusal: called with each update, or run, that the site's policy refused.
        on_withheld: called with each update that stays here without the server's knowing.
        on_settled: called when a fit has its receipt.
        bases: the models that tasks start from, each checked before it is used.
        judge: decides on such a model, by itself and by the site's own images.
        guard: which tasks the site does, and does again.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        status: DaemonStatus,
        accept: Callable[[], None],
        on_refusal: Callable[[Task, PolicyViolationError], None],
        on_withheld: Callable[[Task, PolicyViolationError], None],
    ) -> None:
        self.site, self.link, self.status = site, link, status
        self._accept = accept
        self.on_refusal, self.on_withheld = on_refusal, on_withheld
        self.on_settled: Callable[[], None] = lambda: None
        self.judge, self.guard = BaseJudge(site), TaskGuard(site)
        self.bases = BaseModelCache(link, status, self._check_base)
        self._unwritten: dict[str, tuple[Task, Receipt]] = {}  # by task_id: counted, and the disk took no receipt yet

    def begin(self, task: Task) -> None:
        """Count a task among today's.

        Raises:
            PolicyRefusedError: the policy allows no more of them today.
        """
        self.passed(task, lambda: self.guard.check_today(task))
        self._accept()

    def passed(self, task: Task, gate: Callable[[], T]) -> T:
        """What the gate releases; what it refuses is counted and audited."""
        try:
            return gate()
        except PolicyViolationError as violation:
            self.on_refusal(task, violation)
            raise

    def staged(self, task: Task) -> tuple[Task, Update] | None:
        """The update of a task that waits to be pushed, with the model and the attempt that it was trained for."""
        waiting = self.site.store.unsettled(task.run)
        return next((entry for entry in waiting if entry[0].task_id == task.task_id), None)

    def stage(self, run: PreparedRun, task: Task, outcome: FitOutcome, *, withheld: bool) -> None:
        """Store what a fit made, durably, before anything of it is pushed."""
        trained = TrainedBy(run.recipe.fingerprint(), withheld)
        self.site.store.stage(task, replace(outcome, trained=trained))
        reach("staged")

    def check_trained_by(self, run: PreparedRun, task: Task) -> None:
        """Check that what is staged was trained, and its noise counted, by the rules under which it would be sent now.

        Raises:
            TaskFailedError: it was not.
        """
        if (recipe := self.site.store.trained_by(task).recipe) and recipe != run.recipe.fingerprint():
            text = "this update was trained by another recipe than the run has now"
            raise TaskFailedError(FailureReason.REFUSED, text)

    def keep_back(self, task: Task, refusal: PolicyViolationError) -> Literal[True]:
        """Tell the site, and nobody else, that nothing of a fit leaves."""
        self.on_withheld(task, refusal)
        log.error(
            "this update is not sent: random numbers take its place, so nobody can read this aggregate",
            run=task.run,
            round=task.round,
            why=str(refusal),
        )
        return True

    def keep_back_diverged(self, task: Task) -> Literal[True]:
        """As `keep_back`, of a fit that went on to its end although it diverged."""
        return self.keep_back(task, PolicyRefusedError("finite", "it diverged: lower plan.lr"))

    def push(self, task: Task, released: Released) -> Receipt:
        """Push what was released; `settle` and `check_taken` follow."""
        self.status.activity = Activity.UPLOADING
        receipt = self.link.push(task, released)
        reach("pushed")
        why = {"reason": receipt.reason} if receipt.reason else {}
        log.info("handed in", run=task.run, round=task.round, verdict=receipt.verdict.value, **why)
        self.guard.settled(task)
        return receipt

    def settle(self, task: Task, receipt: Receipt) -> None:
        """Settle what was staged for a task."""
        self._write_receipt(task, receipt)
        reach("settled")

    def check_taken(self, receipt: Receipt) -> None:
        """Decline a task whose update the server refuses.

        The same training gives the same update: without a refusal here the server would ask again until the deadline. A
        simulation, whose clock stands still, would ask for ever.

        Raises:
            TaskFailedError: it does.
        """
        if receipt.verdict is Verdict.REFUSED:
            raise TaskFailedError(FailureReason.REFUSED, f"the server refuses the update: {receipt.reason}")

    def write_receipts(self, run: str) -> None:
        """Write the receipts that a full disk did not take: without them a fit begins as if the round had not counted.

        Raises:
            StateError: it still takes none.
        """
        if not any(task.run == run for task, _ in self._unwritten.values()):
            return
        staged = {task.task_id for task, _ in self.site.store.unsettled(run)}
        for task, receipt in [entry for entry in self._unwritten.values() if entry[0].run == run]:
            if task.task_id in staged:
                self._write_receipt(task, receipt)
            else:  # the site has left the run meanwhile
                del self._unwritten[task.task_id]

    def _write_receipt(self, task: Task, receipt: Receipt) -> None:
        if receipt.verdict in COUNTED:
            self._unwritten[task.task_id] = task, receipt
        self.site.store.settle(task, receipt)
        self._unwritten.pop(task.task_id, None)
        self.on_settled()

    def _check_base(self, run: PreparedRun, task: Task, base: Payload) -> None:
        self.passed(task, lambda: self.judge.judge(run, task, base))


class BaseModelCache:
    """Holds the newest base: the FIT and the SCORE task of a round often start from the same one.

    Args:
        check: called with each base before it is used, also with a cached one; raises what refuses it.
    """

    def __init__(self, link: Link, status: DaemonStatus, check: Callable[[PreparedRun, Task, Payload], None]) -> None:
        self._link, self._status, self._check = link, status, check
        self._newest: tuple[Digest, Payload] | None = None

    def get(self, run: PreparedRun, task: Task) -> Payload:
        """The task's base, fetched unless it is the cached one; see `decode_base` for lookups in it.

        Raises:
            ProtocolError: the task names no base.
            CodecError: the base is no payload.
            PolicyViolationError: the check refuses it.
        """
        if task.base_digest is None:
            raise ProtocolError(f"a {task.kind} task without a model to start from")
        if self._newest is None or self._newest[0] != task.base_digest:
            self._status.activity = Activity.DOWNLOADING
            self._newest = (task.base_digest, decode_base(self._link.fetch(task)))
            reach("fetched")
        self._check(run, task, self._newest[1])
        return self._newest[1]

    def clear(self) -> None:
        """Free the memory; called when the daemon turns to another run."""
        self._newest = None


def decode_base(data: bytes) -> Payload:
    """A fetched base as a payload whose lookups raise CodecError instead of KeyError.

    A method takes from it what it needs; the agent then declines a task whose base lacks a part or a tensor. Its arrays
    are read-only, since they are the bytes of `data`.

    Raises:
        CodecError: the bytes are no payload.
    """
    return _StrictDict({part: _StrictDict(tensors) for part, tensors in codec.view(data).items()})


class _StrictDict(dict[Any, Any]):
    def __missing__(self, name: Any) -> Any:
        raise CodecError(f"the received model has no '{name}'")


@dataclass(frozen=True)
class Spending:
    """A fit that was counted.

    Attributes:
        events: its mechanisms.
        epsilon: of all fits, this one included.
        budget: the policy's; None: it has none.
    """

    task: Task
    events: Events
    epsilon: float
    delta: float
    budget: float | None

    def facts(self) -> dict[str, Fact]:
        """For the audit log."""
        sums = [[event.sampling_rate, event.noise_multiplier, event.count] for event in self.events]
        return {
            "run": self.task.run,
            "round": self.task.round,
            "task_id": self.task.task_id,
            "events": [list[Fact](sum_) for sum_ in sums],
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else str(self.epsilon),
            "delta": self.delta,
            "budget": self.budget,
            "withheld": WITHHELD,
        }


class DpBudget:
    """Counts a site's fits with noise in its ledger; a site without a ledger, as in a simulation, counts none.

    Args:
        status: where the site's metrics read what is spent.
        on_spending: called with each fit that is about to begin, after its line in the ledger.
    """

    def __init__(
        self, site: Site, status: DaemonStatus, on_spending: Callable[[Spending], None] = lambda _spending: None
    ) -> None:
        self._site, self._status, self._on_spending = site, status, on_spending
        self._tried: set[str] = set()  # task_ids of fits that are paid for, and that this process need not resume
        self._last_problem: tuple[Spent, Events, PrivacyBudget | None, str] | None = None  # and its question

    def problem(self, name: str, run: PreparedRun) -> str:
        """Why no further round of a run may begin; empty: one may. Called between all tasks, and so kept cheap.

        Args:
            name: the run's.
        """
        ledger, budget = self._ledger(), self._site.policy.rules.dp
        events = _events(run)
        if ledger is None or events is None:
            return ""
        try:
            spent = ledger.spent()
        except StateError as error:
            return str(error)
        if self._last_problem is None or self._last_problem[:3] != (spent, events, budget):
            self._last_problem = spent, events, budget, _problem(spent, events, budget)
            self._show(spent, budget)
        problem = self._last_problem[3]
        return "" if problem and self._goes_on(name, spent) else problem

    def spend(self, run: PreparedRun, task: Task, noise: DpNoise | None) -> None:
        """Count a fit durably; called right before it begins.

        Args:
            noise: of the fit, as `PreparedRun.noise`.

        Raises:
            PolicyRefusedError: it would exceed the budget, or have another task's noise; nothing was counted.
            StateError: the ledger is damaged, or cannot be written.
        """
        ledger, budget = self._ledger(), self._site.policy.rules.dp
        events = _events(run)
        if ledger is None or events is None or noise is None:
            return
        spent = ledger.spent()
        if not spent.has(task, noise.identity(), events) and (problem := _problem(spent, events, budget)):
            self._tried |= {spend.task for spend in spent.spends if spend.run == task.run}
            raise PolicyRefusedError("dp", f"{problem} (dp)")
        if earlier := spent.drawn_for(noise.identity()) - {task.task_id}:
            # A device need not compute the same bits twice, and the difference of two such fits would be without noise.
            raise PolicyRefusedError(
                "dp",
                f"this fit would have the noise of task {min(earlier)}: the server asks for the same fit again as "
                "another task. Expected another attempt of the round",
            )
        ledger.spend(task, noise.identity(), events)
        self._tried.add(task.task_id)
        now, delta = self._show(ledger.spent(), budget)
        log.info("privacy spent", run=task.run, round=task.round, epsilon=round(now, 4), delta=delta)
        self._on_spending(Spending(task, events, now, delta, None if budget is None else budget.epsilon))

    def _ledger(self) -> DpLedger | None:
        # A simulation's clock stands still: a site that held would hold it for ever, and nobody's privacy is spent.
        return None if self._site.simulated else self._site.store.dp_ledger

    def _show(self, spent: Spent, budget: PrivacyBudget | None) -> tuple[float, float]:
        """Epsilon and delta of all that is spent, which the site's metrics show from now on."""
        delta = DELTA if budget is None else budget.delta
        now = epsilon(spent.events(), delta)
        self._status.privacy = now, None if budget is None else budget.epsilon
        return now, delta

    def _goes_on(self, run: str, spent: Spent) -> bool:
        """Whether a fit that is paid for goes on: after a restart, or because its update still waits to be sent."""
        last = next((spend.task for spend in reversed(spent.spends) if spend.run == run), None)
        if last is None or last in self._site.store.settled(run):
            return False
        return last not in self._tried or any(task.task_id == last for task, _ in self._site.store.unsettled(run))


def _events(run: PreparedRun) -> Events | None:
    """The noisy mechanisms of a round of a run; None: it has no noise."""
    dp = run.recipe.plan.dp
    return None if dp is None or run.dp is None else round_events(dp, run.dp.cost)


def _problem(spent: Spent, events: Events, budget: PrivacyBudget | None) -> str:
    """Why a budget does not allow these mechanisms beside what is spent; empty: it does, or there is none."""
    if budget is None:
        return ""
    after = epsilon(spent.events(events), budget.delta)
    if after <= budget.epsilon:
        return ""
    now = epsilon(spent.events(), budget.delta)
    return (
        f"with another round of this run epsilon would be {after:.3g} at delta {budget.delta:g}. This site's budget "
        f"is {budget.epsilon:g}, and {now:.3g} is spent"
    )
