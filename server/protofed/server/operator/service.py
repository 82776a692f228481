"""The operator's queries and commands, without gRPC: runs with their rounds and tasks, sites and certificates."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protofed.common.config.recipe import Federation, Recipe, parse_json
from protofed.common.errors import ConfigError, ConflictError, short, unknown
from protofed.common.ids import check_id
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.protocol.consortium import Consortium
from protofed.common.protocol.messages import Activity, PauseReason, Progress, Verdict
from protofed.common.secure_aggregation.groups import Group, find_group, members
from protofed.server.access.certificates import Certificates
from protofed.server.operator.downloads import Downloads
from protofed.server.operator.run_record import Overview, find_best, outcome, overview
from protofed.server.operator.verification import Verified, verify_round
from protofed.server.rounds.context import ServerContext, read_recipe
from protofed.server.rounds.machine.rules import check_model, unmet
from protofed.server.rounds.machine.waiting import Waiting
from protofed.server.rounds.presence import possible_trainers
from protofed.server.rounds.queue import RunQueue
from protofed.server.rounds.scores.model_warnings import ModelWarning
from protofed.server.rounds.scores.scoring import find_warnings
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import CertificateRow, InterventionRow, RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import REVOKED

LONGEST_REASON = 300  # characters
SILENT_S = 80.0  # without a run a daemon calls every 20 s, and one that is held every 60 s at least


@dataclass(frozen=True)
class RunReport:
    """A run as the operator sees it.

    Attributes:
        status: running, queued, paused, completed, failed or aborted.
        waiting: why it does not go on; None: it does, or has ended.
        unmet: what it needs and the sites that may take part cannot give; none once it has ended.
    """

    row: RunRow
    recipe: Recipe | None  # None: this version of protofed cannot read it
    status: str
    overview: Overview
    waiting: Waiting | None = None
    unmet: Sequence[str] = ()


@dataclass(frozen=True)
class PartnersReport:
    """The list of partners as the operator sees it.

    Attributes:
        offered: what sites are asked to confirm; None: nothing.
        proposed: the next list; None: for this `problem` there is none.
        confirmed, waiting: the partners of the offered one at which it is confirmed, and the others.
    """

    offered: Consortium | None
    proposed: Consortium | None
    problem: str
    confirmed: Sequence[SiteId]
    waiting: Sequence[SiteId]


@dataclass(frozen=True)
class TaskHistory:
    """One site's task in an attempt, and its updates that were refused."""

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
    """A site as the operator sees it.

    Attributes:
        status: working, idle, held, silent, away or excluded; the certificate's status if the site has no valid one.
        activity_text: what its daemon does, in words; or why its certificate was revoked.
        progress_age_s: seconds since its last progress; None: no daemon is enrolled.
        excluded: why the operator excluded it; empty: it is not.
        certificate_until: when its last valid certificate ends, in Unix time; 0: it has none.
        progress: of its daemon's last heartbeat; None: there was none since it enrolled.
        group: the sites that secure aggregation is over together with it, itself among them; empty: none yet.
    """

    site: SiteId
    roles: Sequence[str]
    status: str
    activity_text: str
    progress_age_s: float | None
    excluded: str
    certificate_until: float = 0.0
    progress: Progress | None = None
    group: Group = ()


class OperatorApi:
    """The operator's queries and commands.

    All methods but `verify` run on the coordinator's thread, which owns runs and presence and so needs no locks.

    Attributes:
        downloads: run records and states, on any thread.

    Raises:
        ConfigError: from every method: there is no such run, round or site.
    """

    def __init__(self, runs: RunQueue, context: ServerContext) -> None:
        self._runs, self._context = runs, context
        self._records: LedgerReader = context.ledger
        self._blobs: Blobs = context.blobs
        self.metrics, self.certificates = context.metrics, Certificates(context.ledger)
        # Both read for long on other threads: never through the connections with which the coordinator writes.
        self._reader: LedgerReader = context.reader or context.ledger
        self.downloads = Downloads(self._reader, context.blobs)

    # Runs

    def start(self, recipe: str, *, force: bool = False) -> RunReport:
        """Queue a run; `recipe` is JSON.

        Args:
            force: queue it although its model is not known here, or it needs sites that are not registered.

        Raises:
            ConfigError: the recipe is invalid, or needs what `force` would allow. In plain text, where no site is
                registered, it is only warned of sites.
            ConflictError: a run of its name exists.
        """
        parsed = parse_json(recipe, Recipe, "the recipe")
        if not force:
            check_model(parsed)
            if (problems := self._unmet(parsed)) and self.certificates.all():
                raise ConfigError(
                    f"run '{parsed.name}' cannot start: {'; '.join(problems)}; or --force queues it as it is"
                )
        self._runs.start(parsed)
        return self.run(parsed.name)

    def _unmet(self, recipe: Recipe) -> list[str]:
        trainers = possible_trainers(self._context.presence, self.certificates)
        return unmet(recipe, trainers, self._records.groups())

    def runs(self) -> list[RunReport]:
        """All runs, in the queue's order."""
        return [self._report(row) for row in self._records.runs()]

    def run(self, run: str) -> RunReport:
        """The run of this name."""
        return self._report(self._row(run))

    def best(self, run: str) -> dict[str, Any] | None:
        """The best round as `find_best` tells it; None: no round of the run has a score that judges it."""
        return find_best(self._records, self._blobs, self._row(run).run)

    def rounds(self, run: str, first: int = 0, count: int | None = None) -> list[RoundReport]:
        """`count` attempts (None: all) with every site's task, starting at index `first` (negative: from the end)."""
        rows = self._records.rounds(self._row(run).run, rolled_back=True)
        start = first if first >= 0 else max(0, len(rows) + first)
        page = rows[start:] if count is None else rows[start : start + count]
        tasks = self._site_tasks(run, range(page[0].round, page[-1].round + 1)) if page else {}
        return [RoundReport(row, outcome(row), tasks.get((row.round, row.attempt), [])) for row in page]

    def model_warnings(self, run: str) -> list[ModelWarning]:
        """What speaks against the run's models now."""
        return find_warnings(self._records, self._row(run).run)

    def _site_tasks(self, run: str, rounds: range) -> dict[tuple[int, int], list[TaskHistory]]:
        """Tasks of some rounds, by round and attempt."""
        refused: dict[str, list[UpdateRow]] = {}
        for update in self._records.updates(run, rounds):
            if update.verdict is not Verdict.ACCEPTED:
                refused.setdefault(update.task.task_id, []).append(update)
        tasks: dict[tuple[int, int], list[TaskHistory]] = {}
        for task in self._records.tasks(run, rounds):
            tasks.setdefault((task.round, task.attempt), []).append(TaskHistory(task, refused.get(task.task_id, [])))
        return tasks

    def pause(self, run: str, *, paused: bool, by: str = "") -> RunReport:
        """Open no further round of a run (the open one goes on), or resume it; `by` is the operator's name."""
        self._row(run)
        self._runs.of(run).pause(paused=paused)
        self._note("paused" if paused else "resumed", by, run)
        return self.run(run)

    def abort(self, run: str, reason: str, by: str = "") -> RunReport:
        """End a run for good; `reason` is one line that sites are sent."""
        self._row(run)
        self._runs.of(run).stop(_checked(reason) or "aborted by the operator")
        self._note("aborted", by, run, reason=reason)
        return self.run(run)

    def roll_back(self, run: str, to: int, by: str = "") -> RunReport:
        """Continue from the state that round `to` published; later rounds are marked as rolled back."""
        self._row(run)
        self._runs.roll_back(run, to)
        self._note("rolled-back", by, run, reason=f"to round {to}")
        return self.run(run)

    def verify(self, run: str, round: int, attempt: int) -> Verified:
        """Compute a published state again; reads only, takes as long as an aggregation, may run on any thread."""
        return verify_round(self._reader, self._blobs, run, round, attempt)

    # Sites

    def sites(self) -> list[SiteReport]:
        """All sites that ever enrolled or were excluded."""
        groups = self._records.groups()
        return [
            replace(self._site(site, roles), group=find_group(groups, site))
            for site, roles in self._records.sites().items()
        ]

    def _site(self, site: SiteId, roles: Sequence[str]) -> SiteReport:
        until, progress = self.certificates.until(Party.SITE, site), self._context.presence.progress(site)
        return replace(self._presence(site, roles), certificate_until=until, progress=progress)

    def exclude(self, site: str, reason: str, by: str = "") -> SiteReport:
        """Refuse all calls of a site until it is admitted again; one that is registered need not have enrolled yet."""
        named = self._known_site(site, self._site_names())
        during = self._going_on()
        self._runs.exclude(named, _checked(reason) or "by the operator")
        self._note("excluded", by, during, named, reason)
        return self._site(named, self._records.sites()[named])

    def admit(self, site: str, by: str = "") -> SiteReport:
        """Undo `exclude`."""
        named = self._known_site(site, self._site_names())
        if named not in self._records.excluded():
            raise ConfigError(f"site '{named}' is not excluded")
        self._runs.admit(named)
        self._note("admitted", by, self._going_on(), named)
        return self._site(named, self._records.sites()[named])

    def forget(self, site: str, by: str = "") -> SiteReport:
        """Remove a site that is gone from the list, with its exclusion; what it did in runs stays.

        Returns:
            What it was.

        Raises:
            ConflictError: its daemon is alive, or it has a valid certificate.
        """
        roles = self._records.sites()
        named = self._known_site(site, roles)
        if self.certificates.until(Party.SITE, named):
            raise ConflictError(
                f"site '{named}' has a valid certificate and may come back; revoke that first: "
                f"protofed certs revoke {named}"
            )
        report, age_s = self._site(named, roles[named]), self._context.presence.ages().get(named)
        # Without a run no timeout applies, and a daemon enrolls again every few seconds.
        alive_s = min(self._runs.stall_timeout_s, Federation().stall_timeout_s)
        if age_s is not None and age_s <= alive_s:
            raise ConflictError(
                f"site '{named}' was heard of {age_s:.0f} s ago; stop its daemon, and try again {alive_s:.0f} s later"
            )
        during = self._going_on()
        self._runs.forget(named)
        self._note("forgotten", by, during, named)
        return report

    def regroup(self, site: str, by: str = "") -> SiteReport:
        """Dissolve the group of secure aggregation that a site is in; the next sum forms others of its sites.

        Returns:
            What the site was.

        Raises:
            ConflictError: a secure aggregation is open.
        """
        if not (groups := self._records.groups()):
            raise ConfigError(f"site '{short(site)}' is in no group: no secure aggregation was opened yet")
        named = self._known_site(site, members(groups))
        group, during = find_group(groups, named), self._going_on()
        report = replace(self._site(named, self._records.sites().get(named, [])), group=group)
        self._runs.regroup(group)
        self._note("regrouped", by, during, named, ", ".join(group))
        return report

    def consortium(self, coordinator: str = "") -> PartnersReport:
        """The offered list of partners, who has confirmed it, and the next one.

        Args:
            coordinator: the institution that runs the server, in the next one; empty: as in the offered one.
        """
        partners, problem, proposed = self._runs.partners, "", None
        try:
            proposed = partners.proposed(possible_trainers(self._context.presence, self.certificates), coordinator)
        except ConfigError as error:
            problem = str(error)
        return PartnersReport(partners.offered, proposed, problem, *partners.confirmations())

    def offer_consortium(self, document: str, by: str = "") -> PartnersReport:
        """Offer a list of partners to all sites.

        Raises:
            ConfigError, ConflictError: it is none, or not newer than those before, or a secure aggregation is open.
        """
        during = self._going_on()
        listed = self._runs.offer_partners(document)
        self._note("offered", by, during, reason=f"list {listed.number} of partners, {len(listed.partners)} sites")
        return self.consortium()

    def _site_names(self) -> set[SiteId]:
        """All sites that ever enrolled, were excluded, or have been registered."""
        registered = {SiteId(row.name) for row in self.certificates.all() if row.party == Party.SITE}
        return registered | self._records.sites().keys()

    def _known_site(self, site: str, sites: Collection[SiteId]) -> SiteId:
        if check_id("site", site) in sites:
            return SiteId(site)
        if not sites:
            raise ConfigError(f"unknown site '{site}': none has enrolled or is registered yet")
        raise unknown("site", site, sites)

    def _presence(self, site: SiteId, roles: Sequence[str]) -> SiteReport:
        presence = self._context.presence
        if (reason := presence.exclusion(site)) is not None:
            return SiteReport(site, roles, "excluded", "", None, reason)
        if (invalid := self._invalid_certificate(site)) is not None:
            return SiteReport(site, roles, self.certificates.status(invalid), invalid.reason or "", None, "")
        if (daemon := presence.look(site)) is None:
            return SiteReport(site, roles, "away", "", None, "")
        age_s, activity = daemon
        if age_s > (SILENT_S if self._runs.current is None else self._runs.stall_timeout_s):
            return SiteReport(site, roles, "silent", f"no sign for {age_s:.0f} s", age_s, "")
        if presence.pause_reason(site) is not PauseReason.NONE:
            return SiteReport(site, roles, "held", activity, age_s, "")
        status = "idle" if activity in ("idle", Activity.FAILED) else "working"
        return SiteReport(site, roles, status, activity, age_s, "")

    # Certificates

    def register(self, pem: str, roles: Sequence[str] = (), *, renewal: bool = False) -> CertificateRow:
        """Let a certificate (PEM text) call from now on. A daemon in a role that this takes away must enroll again."""
        row = self.certificates.register(pem, roles=roles, renewal=renewal)
        site = SiteId(row.name)
        if row.party == Party.SITE and self._context.presence.roles(site) - self.certificates.roles(Party.SITE, site):
            self._dismiss(site, f"registered as {' and '.join(row.roles)}")
        return row

    def revoke(self, which: str, reason: str, by: str = "") -> list[CertificateRow]:
        """Revoke a certificate, or all of a name. The open round stops waiting for a site that has no other."""
        revoked = self.certificates.revoke(which, _checked(reason) or "by the operator")
        for site in {SiteId(row.name) for row in revoked if row.party == Party.SITE}:
            if not self.certificates.until(Party.SITE, site):
                during = self._going_on()
                self._dismiss(site, f"{REVOKED}{reason}")
                self._note("revoked", by, during, site, reason)
        return revoked

    def _going_on(self) -> str | None:
        """The run that a deed to a site belongs to; asked before it, since the run may end by it."""
        current = self._runs.current
        return None if current is None else current.name

    def _note(self, action: str, by: str, run: str | None, site: SiteId | None = None, reason: str = "") -> None:
        """Remember who did it: a report names the hand behind an abort or an exclusion."""
        self._context.ledger.intervene(InterventionRow(time.time(), action, by, run, site, reason))

    def _dismiss(self, site: SiteId, reason: str) -> None:
        self._context.presence.forget(site)  # or the next round would invite it and wait for it
        if (current := self._runs.current) is not None:
            current.dismiss(site, reason)

    def _invalid_certificate(self, site: SiteId) -> CertificateRow | None:
        """The newest certificate of a site that has no valid one; None: it has one, or none was ever registered."""
        if self.certificates.until(Party.SITE, site):
            return None
        rows = [row for row in self.certificates.all() if (row.party, row.name) == (Party.SITE, site)]
        return rows[-1] if rows else None

    def _row(self, run: str) -> RunRow:
        row = self._records.run(run)
        if row is None:
            names = ", ".join(existing.run for existing in self._records.runs())
            raise ConfigError(f"there is no run '{run[:80]}'; expected one of: {names or 'none yet'}")
        return row

    def _report(self, row: RunRow) -> RunReport:
        summary = overview(self._records, row.run)
        assert summary is not None  # noqa: S101  (the row exists)
        try:
            recipe = read_recipe(row)
        except ConfigError:
            recipe = None
        current = self._runs.current
        in_queue = "running" if current is not None and current.name == row.run else "queued"
        status = row.outcome or ("paused" if row.paused else in_queue)
        lacking = self._unmet(recipe) if recipe is not None and row.outcome is None else ()
        return RunReport(row, recipe, status, summary, self._runs.waiting(row.run, self.certificates), lacking)


def _checked(reason: str) -> str:
    """A reason that fits into a gRPC status, in which sites receive it."""
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise ConfigError(f"a reason is one line of at most {LONGEST_REASON} characters")
    return reason
