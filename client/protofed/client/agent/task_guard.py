"""Which tasks of a run a site does again: a roll-back goes a few rounds back, and a round is scored once."""

from __future__ import annotations

from protofed.client.agent.site import Site
from protofed.client.privacy.policy import PolicyRefusedError
from protofed.common.protocol.messages import Role, Task


class TaskGuard:
    """Refuses tasks by what the site has done in their run, which its store remembers."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def check_fit(self, task: Task) -> None:
        """Check that a FIT task goes back no further than `limits.max_rollback_rounds`.

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

    def check_score(self, task: Task) -> None:
        """Check that a trainer is asked for the scores of a round once, and of a run that it has taken part in.

        Repeated questions, with models of the server's choice, would tell the site's labels. An evaluator's test set is
        one that all may know.

        Raises:
            PolicyRefusedError: its scores of this round were given for another task, or it took no part yet.
        """
        if Role.TRAINER not in self._site.roles:
            return
        store = self._site.store
        if store.scored(task.run).get(task.round, task.task_id) != task.task_id:
            text = f"the scores of round {task.round} were given before, for another task: a round is scored once"
            raise PolicyRefusedError("limits.check_base", text)
        took_part = store.newest_counted(task.run) or store.last_base(task.run) is not None
        if self._site.policy.rules.limits.check_base and not took_part:
            text = f"scores of round {task.round} are asked for before this site was sent a model to train"
            raise PolicyRefusedError("limits.check_base", text)
        store.mark_scored(task.run, task.round, task.task_id)
