"""Which tasks of a run a site does, and does again: so many a day; a roll-back goes a few rounds back, and a round is
scored once.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from protofed.client.policy.policy import PolicyRefusedError
from protofed.client.site import Site
from protofed.client.state.daily_counts import Counted
from protofed.common.protocol.messages import SCORINGS, Role, Task

log = structlog.get_logger()


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
            reason = "it was handed in before" if task.run == run else f"this daemon works for run {run}"
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
                f"a task of round {task.round} goes {back} rounds back: round {newest} has counted here, and "
                f"limits.max_rollback_rounds is {most}; if the coordinator rolled the run back, raise it until the "
                "run has caught up"
            )
            raise PolicyRefusedError("limits.max_rollback_rounds", text)
        passed = [number for number in self._site.store.counted(task.run) if task.memory_before <= number < task.round]
        if len(passed) > most:
            text = (
                f"a task of round {task.round} is to start from memory of round {task.memory_before - 1} or before: "
                f"{len(passed)} rounds that have counted here do not stand, and limits.max_rollback_rounds "
                f"is {most}; if the coordinator rolled the run back, raise it until the run has caught up"
            )
            raise PolicyRefusedError("limits.max_rollback_rounds", text)
        if passed:
            log.info("memory of rounds that do not stand is passed over", run=task.run, round=task.round, rounds=passed)

    def check_today(self, task: Task) -> None:
        """Count a task among today's; one that was counted before is not counted again.

        Raises:
            PolicyRefusedError: the policy allows no more of them today.
        """
        counts, limits = self._site.store.daily_counts, self._site.policy.rules.limits
        kind = Counted.SCORINGS if task.kind in SCORINGS else Counted.TASKS
        most = limits.scorings_per_day if kind is Counted.SCORINGS else limits.tasks_per_day
        if counts is not None and (none := counts.begin(kind, _asked(task), most)) is not None:
            text = f"{most} were begun today; none is until {none.until:%Y-%m-%d %H:%M} UTC (limits.{kind})"
            if none.tomorrow:
                text += (
                    "; they were counted on tomorrow's date: this machine's clock was ahead, or is behind now; set it "
                    "right, as by NTP"
                )
            raise PolicyRefusedError(f"limits.{kind}", text)

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
        if store.scored(task.run).get(task.round, asked := _asked(task)) != asked:
            text = (
                f"the scores of round {task.round} were given before, for another task or model: a round is scored once"
            )
            raise PolicyRefusedError("limits.check_base", text)
        took_part = store.newest_counted(task.run) or store.last_base(task.run) is not None
        if self._site.policy.rules.limits.check_base and not took_part:
            text = (
                f"scores of round {task.round} are asked for before this site was sent a model to train: has it joined "
                "late? From its first round on it gives them"
            )
            raise PolicyRefusedError("limits.check_base", text)
        store.mark_scored(task.run, task.round, asked)


def _asked(task: Task) -> str:
    """The same for the same task of the same model: under one id a server could name one model after another."""
    return f"{task.task_id} {task.base_digest}"
