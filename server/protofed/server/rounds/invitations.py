"""A run's open invitations: which site has which task, until it answers or the round closes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from protofed.common.codec import Digest
from protofed.common.failpoint import reach
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Subject, TaskKind
from protofed.server.rounds.context import ServerContext
from protofed.server.storage.rows import TaskRow


class Invitations:
    """At most one invitation is open for a site."""

    def __init__(self, run: str, context: ServerContext) -> None:
        self._run, self._context = run, context
        self._open: dict[SiteId, TaskRow] = {}
        self._silent: dict[SiteId, str] = {}  # of those sent last: who did not answer before they were closed

    def of(self, site: SiteId) -> TaskRow | None:
        """The site's open invitation."""
        return self._open.get(site)

    def may_fetch(self, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob. May be called from any thread."""
        row = self._open.get(site)
        return row is not None and row.base_digest == address

    def open_rows(self) -> list[TaskRow]:
        """All open invitations, in site order."""
        return [self._open[site] for site in sorted(self._open)]

    def has(self, row: TaskRow) -> bool:
        """Whether this very invitation is still open."""
        current = self._open.get(row.site)
        return current is not None and current.task_id == row.task_id

    def take_up(self, tasks: Iterable[TaskRow]) -> None:
        """After a restart: restore those that the ledger has as open."""
        self._open = {task.site: task for task in tasks if task.is_open}

    def started(self, row: TaskRow) -> None:
        """Record, once, that a site works on its task."""
        if row.task_status == "invited":
            self._open[row.site] = replace(row, task_status="started")
            self._context.ledger.set_task_status(row.task_id, "started")

    def answered(self, row: TaskRow) -> None:
        """Close an invitation; the ledger has its outcome already."""
        del self._open[row.site]

    def clear(self) -> dict[SiteId, str]:
        """Close all; by site that has not answered, what is known of it in words.

        Called again before others are sent, it says the same: a full disk may have kept the first answer from the
        ledger.
        """
        self._silent |= {site: self._context.presence.last_seen(site) for site in self._open}
        self._open.clear()
        return dict(self._silent)

    def send(
        self,
        kind: TaskKind,
        round: int,
        attempt: int,
        sites: Sequence[SiteId],
        bases: Mapping[SiteId, tuple[Digest, int]],
        write: Callable[[Sequence[TaskRow]], None],
        subject: Subject | None = None,
    ) -> None:
        """Record the tasks (by `write`), wake the sites: in this order, and the bases' blobs are stored before.

        Args:
            bases: what each site is to fetch, digest and bytes; nothing for a site that is not in it.

        A crash in between leaves blobs that no task names (swept at the next start), or tasks that sites find when they
        ask; never a task whose model is missing.
        """
        reach("broadcast-stored")
        rows = []
        for site in sites:
            base, nbytes = bases.get(site, (None, 0))
            # 128 random bits: a site cannot guess another site's task id, and no restart can repeat one.
            task = TaskRow(secrets.token_hex(16), self._run, round, attempt, site, kind, base, nbytes, subject=subject)
            rows.append(task)
        write(rows)
        reach("round-opened")
        self._open, self._silent = {row.site: row for row in rows}, {}
        self._context.notify(sites)
