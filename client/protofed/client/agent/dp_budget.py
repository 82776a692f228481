"""The privacy budget of a site: a fit with noise is counted before it begins, and none begins that would exceed it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from protofed.client.policy.dp_accountant import DELTA, Events, epsilon, round_events
from protofed.client.policy.policy import PolicyRefusedError
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.site import PreparedRun, Site
from protofed.client.state.dp_ledger import DpLedger, Spent
from protofed.client.status import DaemonStatus
from protofed.client.training.dp import DpNoise
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
WITHHELD = "the loss, the site's own scores and its number of examples stay: they have no noise (plan.dp)"


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
        self._asked: tuple[Spent, Events, PrivacyBudget | None, str] | None = None  # the last question, and its answer

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
        if self._asked is None or self._asked[:3] != (spent, events, budget):
            self._asked = spent, events, budget, _problem(spent, events, budget)
            self._show(spent, budget)
        problem = self._asked[3]
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
        if others := spent.drawn_for(noise.identity()) - {task.task_id}:
            # A device need not compute the same bits twice, and the difference of two such fits would be without noise.
            raise PolicyRefusedError(
                "dp",
                f"this fit would have the noise of task {min(others)}: the server asks for the same fit as another "
                "task, in place of another attempt of the round",
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
        f"with another round of this run epsilon would be {after:.3g} at delta {budget.delta:g}; this site's budget is "
        f"{budget.epsilon:g}, of which {now:.3g} is spent"
    )
