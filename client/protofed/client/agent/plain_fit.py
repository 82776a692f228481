"""A FIT task whose update leaves by itself, as the site's policy releases it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from protofed.client.agent.computation import Computation, Elsewhere, fit
from protofed.client.agent.dp_budget import DpBudget
from protofed.client.agent.scores import OwnScoreKeeper
from protofed.client.agent.task_tools import TaskTools
from protofed.client.policy.policy import Released
from protofed.client.site import PreparedRun, is_summed
from protofed.client.state.store import FitOutcome
from protofed.client.training.context import Checkpoints
from protofed.client.training.dp import share_std
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Activity, Task


class Fit(Protocol):
    """Trains: what both kinds of FIT tasks have in their middle."""

    def __call__(self, work: Computation, base: Payload, checkpoints: Checkpoints) -> FitOutcome:
        """What a fit from `base` leaves; see `computation.fit`."""


class ComputedFit:
    """Trains here, or in one of the other processes."""

    def __init__(self, tools: TaskTools, elsewhere: Elsewhere) -> None:
        self._tools, self._elsewhere = tools, elsewhere

    def __call__(self, work: Computation, base: Payload, checkpoints: Checkpoints) -> FitOutcome:
        """As of `Fit`."""
        tools = self._tools
        return self._elsewhere.fit(work) or fit(work, base, tools.status, checkpoints, tools.site.fit)


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
        if not run.shares_noise or is_summed(self._tools.site, run.recipe):
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
            TaskFailedError: it was trained by another recipe, or to leave in a secure sum.
        """
        self._tools.check_trained_by(run, task)
        if task.subject is not None and not self._tools.site.simulated:
            text = "this update was trained to leave in a secure sum, and the run, as it is offered now, has none"
            raise TaskFailedError(FailureReason.REFUSED, text)
        self._push(task, self._release(run, task, update))

    def _release(self, run: PreparedRun, task: Task, update: Update) -> Released:
        """Pass the update through the site's policy: the last function before the link."""
        return self._tools.passed(task, lambda: self._tools.site.policy.release(update, run.gate_context()))

    def _push(self, task: Task, released: Released) -> None:
        receipt = self._tools.push(task, released)
        self._tools.settle(task, receipt)
        self._tools.check_taken(receipt)
