"""What the operator sees and does, without the wire: runs with their rounds and tasks, and sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import ConfigError, short
from protofed.common.ids import check_id
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.protocol.messages import Activity, PauseReason, Progress, Role, Verdict
from protofed.server.access.certificates import Certificates
from protofed.server.operator.downloads import Downloads
from protofed.server.operator.overview import Overview, overview
from protofed.server.operator.run_record import outcome
from protofed.server.operator.verification import Verified, verify_round
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.resume import recipe_of
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import CertificateRow, RoundRow, RunRow, TaskRow, UpdateRow

LONGEST_REASON = 300


@dataclass(frozen=True)
class RunReport:
    """A run as the operator sees it; `status` is running, queued, paused, completed, failed or aborted."""

    row: RunRow
    recipe: Recipe | None  # None: this version cannot read it
    status: str
    view: Overview


@dataclass(frozen=True)
class TaskHistory:
    """What became of one invitation, and the updates that were refused on the way."""

    task: TaskRow
    refusals: Sequence[UpdateRow]


@dataclass(frozen=True)
class RoundReport:
    """One attempt at a round with every site's task; `outcome` is open, published, degraded, abandoned, rolled-back."""

    row: RoundRow
    outcome: str
    tasks: Sequence[TaskHistory]


@dataclass(frozen=True)
class SiteReport:
    """A site; `status` is working, idle, held, silent, away or excluded, or that of its certificate if none is
    valid; `progress_age_s` None without a daemon.

    `certificate_until`: when its last valid certificate ends, in seconds of the Unix epoch; 0: it has none.
    `progress`: what its daemon told last; None: nothing, or none is there.
    """

    site: SiteId
    roles: Sequence[str]
    status: str
    doing: str
    progress_age_s: float | None
    excluded: str
    certificate_until: float = 0.0
    progress: Progress | None = None


class OperatorApi:
    """The operator's questions and orders; all methods but `verify` are called on the coordinator's thread.

    Attributes:
        documents: what is fetched in pieces, on any thread.

    Raises:
        ConfigError: from every method: there is no such run, round or site.
    """

    def __init__(self, runs: RunQueue, context: ServerContext) -> None:
        self._runs, self._context = runs, context
        self._records: LedgerReader = context.ledger
        self._blobs: Blobs = context.blobs
        self.metrics, self.certificates = context.metrics, Certificates(context.ledger)
        self.documents = Downloads(context.ledger, context.blobs)

    # Runs

    def start(self, recipe: str) -> RunReport:
        """Queue a run, given as JSON.

        Raises:
            ConfigError: the recipe cannot be used.
            Conflict: there is a run of its name.
        """
        read = parse_json(recipe, Recipe, "the recipe")
        self._runs.start(read)
        return self.run(read.name)

    def runs(self) -> list[RunReport]:
        """All runs, in the order of the queue."""
        return [self._report(row) for row in self._records.runs()]

    def run(self, run: str) -> RunReport:
        """One run."""
        return self._report(self._known(run))

    def rounds(self, run: str, first: int = 0, count: int | None = None) -> list[RoundReport]:
        """`count` attempts (None: all) from the `first` (from 0; if negative, from the end), with every site's task."""
        rows = self._records.rounds(self._known(run).run, rolled_back=True)
        start = first if first >= 0 else max(0, len(rows) + first)
        told = rows[start:] if count is None else rows[start : start + count]
        tasks = self._site_tasks(run, range(told[0].round, told[-1].round + 1)) if told else {}
        return [RoundReport(row, outcome(row), tasks.get((row.round, row.attempt), [])) for row in told]

    def _site_tasks(self, run: str, rounds: range) -> dict[tuple[int, int], list[TaskHistory]]:
        """By round and attempt."""
        refused: dict[str, list[UpdateRow]] = {}
        for update in self._records.updates(run, rounds):
            if update.verdict is not Verdict.ACCEPTED:
                refused.setdefault(update.task.task_id, []).append(update)
        statuses: dict[tuple[int, int], list[TaskHistory]] = {}
        for task in self._records.tasks(run, rounds):
            statuses.setdefault((task.round, task.attempt), []).append(TaskHistory(task, refused.get(task.task_id, [])))
        return statuses

    def pause(self, run: str, *, paused: bool) -> RunReport:
        """Open no round of a run, or do again."""
        self._known(run)
        self._runs.pause(run, paused=paused)
        return self.run(run)

    def abort(self, run: str, reason: str) -> RunReport:
        """End a run."""
        self._known(run)
        self._runs.abort(run, _checked(reason) or "aborted by the operator")
        return self.run(run)

    def roll_back(self, run: str, to: int) -> RunReport:
        """Go on from the state that a round published."""
        self._known(run)
        self._runs.roll_back(run, to)
        return self.run(run)

    def verify(self, run: str, round: int, attempt: int) -> Verified:
        """Compute a published state again. Reads only; takes as long as an aggregation, on any thread."""
        return verify_round(self._records, self._blobs, run, round, attempt)

    # Sites

    def sites(self) -> list[SiteReport]:
        """All sites that ever enrolled or were excluded."""
        return [self._site(site, roles) for site, roles in self._records.sites().items()]

    def _site(self, site: SiteId, roles: Sequence[str]) -> SiteReport:
        until, told = self.certificates.until(Party.SITE, site), self._context.presence.progress(site)
        return replace(self._presence(site, roles), certificate_until=until, progress=told)

    def exclude(self, site: str, reason: str) -> SiteReport:
        """Keep a site out."""
        self._runs.exclude(check_id("site", site), _checked(reason) or "by the operator")
        return self._site(site, self._records.sites()[site])

    def admit(self, site: str) -> SiteReport:
        """Let an excluded site in again."""
        if site not in self._records.excluded():
            raise ConfigError(f"site '{short(site)}' is not excluded")
        self._runs.admit(site)
        return self._site(site, self._records.sites()[site])

    def _presence(self, site: SiteId, roles: Sequence[str]) -> SiteReport:
        presence, current = self._context.presence, self._runs.current
        if (why := presence.exclusion(site)) is not None:
            return SiteReport(site, roles, "excluded", "", None, why)
        if (barred := self._barred(site)) is not None:
            return SiteReport(site, roles, self.certificates.status(barred), barred.reason or "", None, "")
        if (found := presence.look(site)) is None:
            return SiteReport(site, roles, "away", "", None, "")
        age, doing = found
        alive = current is None or any(
            site in presence.alive(role, current.recipe.federation.stall_timeout_s) for role in Role
        )
        if presence.pause_reason(site) is not PauseReason.NONE:
            return SiteReport(site, roles, "held", doing, age, "")
        status = "silent" if not alive else "idle" if doing in ("idle", Activity.FAILED) else "working"
        return SiteReport(site, roles, status, doing, age, "")

    # Certificates

    def register(self, pem: str) -> CertificateRow:
        """Let a certificate call."""
        return self.certificates.register(pem)

    def revoke(self, which: str, reason: str) -> list[CertificateRow]:
        """Let a certificate, or all of a name, call no more; nobody waits for a site that has no other."""
        gone = self.certificates.revoke(which, _checked(reason) or "by the operator")
        current = self._runs.current
        for site in {SiteId(row.name) for row in gone if row.party == Party.SITE}:
            if self.certificates.until(Party.SITE, site):
                continue
            self._context.presence.forget(site)
            if current is not None:
                current.dismiss(site, f"certificate revoked: {reason}")
        return gone

    def _barred(self, site: SiteId) -> CertificateRow | None:
        """The newest certificate of a site that has no valid one; None: it may call, or this is plain text."""
        if self.certificates.until(Party.SITE, site):
            return None
        rows = [row for row in self.certificates.all() if (row.party, row.name) == (Party.SITE, site)]
        return rows[-1] if rows else None

    def _known(self, run: str) -> RunRow:
        row = self._records.run(run)
        if row is None:
            names = ", ".join(known.run for known in self._records.runs())
            raise ConfigError(f"there is no run '{run[:80]}'; expected one of: {names or 'none yet'}")
        return row

    def _report(self, row: RunRow) -> RunReport:
        view = overview(self._records, row.run)
        assert view is not None  # noqa: S101  (the row is there)
        try:
            recipe = recipe_of(row)
        except ConfigError:
            recipe = None
        current = self._runs.current
        going = "running" if current is not None and current.run == row.run else "queued"
        return RunReport(row, recipe, row.outcome or ("paused" if row.paused else going), view)


def _checked(reason: str) -> str:
    """One line that a call's status has room for: sites are told it there."""
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise ConfigError(f"a reason is one line of at most {LONGEST_REASON} characters")
    return reason
