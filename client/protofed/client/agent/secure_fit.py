"""The tasks of a securely aggregated fit: the update leaves in a sum alone, in the steps of `SumSteps`."""

from __future__ import annotations

from functools import partial

from protofed.client.agent.computation import Computation
from protofed.client.agent.plain_fit import Fit
from protofed.client.agent.scores import OwnScoreKeeper
from protofed.client.agent.task_tools import TaskTools
from protofed.client.base_checks.judge import base_refusal
from protofed.client.secure_aggregation.steps import SumSteps
from protofed.client.site import PreparedRun
from protofed.client.state.store import COUNTED
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Activity, Task


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
        """Push what the site hands in for the step; the numbers' receipt settles the fit."""
        tools = self._tools
        released = tools.passed(task, lambda: self._sums.step(run, task))
        fitted = self._sums.settles(task)
        receipt = tools.push(task, released)
        if fitted is not None:
            tools.settle(fitted, receipt)
        self._sums.settled(task)  # last: what is staged for a sum that is over is dropped
        tools.check_taken(receipt)
