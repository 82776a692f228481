"""The ledger: what the server has promised and decided, durable before anyone is told. State follows from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, Protocol

from sqlalchemy import Connection, Update, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from protofed.common.codec import Digest, digest
from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Receipt, Scores, SumOf, TaskKind, Verdict
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation.groups import Group, Groups
from protofed.server.storage import schema as db
from protofed.server.storage.database import IN_MEMORY, open_ledger, state_error, transactions
from protofed.server.storage.reader import OF_ATTEMPT, LedgerReader, here, round_row
from protofed.server.storage.rows import OPEN, CertificateRow, InterventionRow, RoundRow, TaskRow, UpdateRow
from protofed.server.verdicts import ROLLED_BACK, RUN_ENDED, Rejection, RoundOutcome

TASK_COLUMNS = [field.name for field in fields(TaskRow)]
# What is written in every round is built once, like the queries of `reader`; columns without a value here are set
# from the parameters of their names.
_STILL_OPEN = or_(*(db.tasks.c.task_status == status for status in OPEN))  # many sites at once take no IN
_NEW_ROUND, _NEW_TASK, _NEW_UPDATE = insert(db.rounds), insert(db.tasks), insert(db.updates)
_NEW_SCORE, _NEW_SCORE_SUM = insert(db.scores), insert(db.score_sums)
_COUNT_AGGREGATION = (
    update(db.rounds)
    .where(here(db.rounds, *OF_ATTEMPT))
    .values(aggregations=db.rounds.c.aggregations + bindparam("by"))
)
_THE_ATTEMPT = select(db.rounds).where(here(db.rounds, *OF_ATTEMPT))  # SQLite before 3.35 knows no RETURNING
_ATTEMPT = update(db.rounds).where(here(db.rounds, *OF_ATTEMPT))
_OPEN_OF_ATTEMPT = update(db.tasks).where(here(db.tasks, *OF_ATTEMPT), _STILL_OPEN)
_OPEN_OF_SITE = update(db.tasks).where(here(db.tasks, *OF_ATTEMPT, "site"), _STILL_OPEN)
_OPEN_OF_SUM = update(db.tasks).where(here(db.tasks, *OF_ATTEMPT, "sum_of"), _STILL_OPEN)
_OPEN_OF_SITE_AND_SUM = update(db.tasks).where(here(db.tasks, *OF_ATTEMPT, "site", "sum_of"), _STILL_OPEN)
_OPEN_TASK = update(db.tasks).where(here(db.tasks, "task_id"), _STILL_OPEN)
_TASK = update(db.tasks).where(here(db.tasks, "task_id"))
# Those of which no update counts yet: one that counts, or was rejected after it had, keeps its status.
_REPORTED = _TASK.where(*(db.tasks.c.task_status != status for status in ("reported", "rejected"))).values(
    task_status="reported"
)
_SCORED = update(db.rounds).where(here(db.rounds, "run", "round"), db.rounds.c.state.is_not(None)).values(scored=True)
_OPEN_OF_SCORES = (
    update(db.tasks)
    .where(here(db.tasks, "run", "round"), _STILL_OPEN)
    .where(or_(db.tasks.c.kind == TaskKind.SCORE, db.tasks.c.sum_of == SumOf.SCORES))
    .values(task_status="late")
)
_RECEIPTS = select(db.updates.c.task_id, db.updates.c.reason, db.updates.c.digest, db.updates.c.record_hash).where(
    db.updates.c.verdict == Verdict.ACCEPTED, db.updates.c.task_id.in_(bindparam("task_ids", expanding=True))
)
AUDIT = "audit"  # event of the journal: how far the audit log was when a server began or ended


class Chain(Protocol):
    """Where the ledger repeats what it promised: a hash-chained journal (`common/storage/journal.py`)."""

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Keep records, (event, facts) each, durably: all of them or, when it raises, none."""


class Ledger(LedgerReader):
    """SQLite (or another database by URL) through SQLAlchemy Core, for writing.

    Raises:
        StateError: from every method: the database is damaged, locked, of another version or out of space.
    """

    _journal: Chain | None = None
    _behind = False  # the journal could not be written when it was last tried

    def __init__(self, url: str = IN_MEMORY) -> None:
        self._engine = open_ledger(url)
        self._reading, self._writing = transactions(self._engine)
        self._unwritten: list[tuple[str, Mapping[str, Any]]] = []

    def check(self) -> None:
        """Ask the database, and whether it still is this server's.

        Raises:
            StateError: it does not answer.
            DiskFailureError: the session that kept it for this server was cut.
        """
        self._read(select(1))

    def attach(self, journal: Chain) -> None:
        """Repeat every promise in a journal, which shows later that the database has lost none.

        A promise counts only when it stands in both: while the journal cannot be written, nothing else is.
        """
        self._journal = journal

    @property
    def is_settled(self) -> bool:
        """Whether the journal lacks nothing but what is being written; asked from any thread."""
        return not self._behind

    def settle_promises(self) -> None:
        """Write what the journal lacks, before anybody is told again.

        Raises:
            StateError: the journal cannot be written.
        """
        try:
            if self._journal is not None and self._unwritten:
                self._journal.append_all(self._unwritten)
                self._unwritten = []
        except StateError:
            self._behind = True
            raise
        self._behind = False

    def note_audit(self, records: int, newest: str) -> None:
        """Remember in the journal how far the audit log is, which shows later whether it was cut.

        Args:
            newest: hash of its last record.
        """
        self._promise(AUDIT, records=records, newest=newest)

    # Sites

    def enroll(self, site: SiteId, roles: Sequence[str]) -> None:
        """Remember a site and what it offers."""
        with self._write() as connection:
            known = connection.execute(update(db.sites).where(db.sites.c.site == site).values(roles=list(roles)))
            if known.rowcount == 0:
                connection.execute(insert(db.sites).values(site=site, roles=list(roles)))

    def exclude(self, site: SiteId, reason: str | None) -> None:
        """Keep a site out; None: let it in again."""
        with self._write() as connection:
            connection.execute(update(db.sites).where(db.sites.c.site == site).values(excluded=reason))
        self._promise("excluded" if reason is not None else "admitted", site=site, reason=reason)

    def forget_site(self, site: SiteId) -> None:
        """Remove a site's row; its tasks, updates and scores in runs stay."""
        with self._write() as connection:
            connection.execute(delete(db.sites).where(db.sites.c.site == site))
        self._promise("site-forgotten", site=site)

    # Certificates

    def register(self, row: CertificateRow) -> None:
        """Let a certificate call."""
        with self._write() as connection:
            connection.execute(insert(db.certificates).values(**asdict(row)))
        self._promise("certificate-registered", **_who(row), roles=list(row.roles))

    def grant(self, row: CertificateRow) -> None:
        """Replace the roles of a registered certificate."""
        here = db.certificates.c.fingerprint == row.fingerprint
        with self._write() as connection:
            connection.execute(update(db.certificates).where(here).values(roles=list(row.roles)))
        self._promise("certificate-roles", **_who(row), roles=list(row.roles))

    def revoke(self, row: CertificateRow) -> None:
        """Let a certificate call no more."""
        revocation = {"revoked_at": row.revoked_at, "reason": row.reason}
        here = db.certificates.c.fingerprint == row.fingerprint
        with self._write() as connection:
            connection.execute(update(db.certificates).where(here).values(**revocation))
        self._promise("certificate-revoked", **_who(row), reason=row.reason)

    # Operators

    def intervene(self, row: InterventionRow) -> None:
        """Remember what an operator did; the deed itself is written down where it belongs."""
        with self._write() as connection:
            connection.execute(insert(db.interventions).values(**asdict(row)))

    # Runs

    def begin_run(self, run: str, fingerprint: Digest, recipe: str) -> None:
        """Write down a run before its first round; it is the last one in the queue."""
        with self._write() as connection:
            last = connection.execute(select(func.max(db.runs.c.position))).scalar() or 0
            values = {"run": run, "fingerprint": fingerprint, "recipe": recipe, "began_at": time.time()}
            connection.execute(insert(db.runs).values(**values, position=last + 1))
        self._promise("run-began", run=run, fingerprint=fingerprint)

    def pause(self, run: str, *, paused: bool) -> None:
        """Open no round of a run, or do again."""
        with self._write() as connection:
            connection.execute(update(db.runs).where(db.runs.c.run == run).values(paused=paused))
        self._promise("paused" if paused else "resumed", run=run)

    def end_run(self, run: str, reason: str, outcome: RoundOutcome) -> None:
        """Write down how a run ended; open invitations become late."""
        values = {"ended_at": time.time(), "outcome": outcome, "reason": reason}
        silent = (db.tasks.c.run == run) & db.tasks.c.task_status.in_(OPEN)
        with self._write() as connection:
            connection.execute(update(db.runs).where(db.runs.c.run == run).values(**values))
            connection.execute(update(db.tasks).where(silent).values(task_status="late", reason=RUN_ENDED))
        self._promise("run-ended", run=run, outcome=outcome, reason=reason)

    def roll_back(self, run: str, to: int) -> None:
        """Put aside what a run did after a round; if it had ended, it goes on, as the last one in the queue."""
        later = (db.rounds.c.run == run) & (db.rounds.c.round > to)
        silent = (db.tasks.c.run == run) & db.tasks.c.task_status.in_(OPEN)
        with self._write() as connection:
            last = connection.execute(select(func.max(db.runs.c.position))).scalar_one()
            again = {"ended_at": None, "outcome": None, "reason": None, "position": last + 1}
            connection.execute(update(db.rounds).where(later).values(rolled_back=True))
            connection.execute(
                update(db.tasks).where(silent).values(task_status="late", reason=f"{ROLLED_BACK}round {to}")
            )
            ended = (db.runs.c.run == run) & db.runs.c.ended_at.is_not(None)
            connection.execute(update(db.runs).where(ended).values(**again))
        self._promise("rolled-back", run=run, round=to)

    # Rounds

    def open_round(self, row: RoundRow, tasks: Sequence[TaskRow]) -> None:
        """Write down an attempt and its invitations, all or nothing."""
        with self._write() as connection:
            values = {name: getattr(row, name) for name in ("run", "round", "attempt", "size", "quorum", "enrolled")}
            connection.execute(_NEW_ROUND, {**values, "opened_at": time.time()})
            connection.execute(_NEW_TASK, [_columns(task) for task in tasks])

    def count_aggregation(self, run: str, round: int, attempt: int, by: int = 1) -> RoundRow:
        """Note that the aggregation of an attempt is started (1), or has ended no process (-1); the attempt then."""
        with self._write() as connection:
            connection.execute(_COUNT_AGGREGATION, {**_attempt(run, round, attempt), "by": by})
            return round_row(connection.execute(_THE_ATTEMPT, _attempt(run, round, attempt)).one())

    def keep_aggregate(
        self,
        run: str,
        round: int,
        attempt: int,
        aggregate: Digest,
        *,
        complete: bool,
        task_status: str,
        silent: Mapping[SiteId, str],
        statistics: Mapping[str, float],
    ) -> None:
        """Write down what an evaluator is to refine; the sites' invitations are closed, and the attempt goes on.

        Args: as of `publish`.
        """
        values: dict[str, Any] = {"aggregate": aggregate, "complete": complete, "statistics": dict(statistics)}
        # What follows is another computation: a server that dies in it has not died in this one.
        self._advance(run, round, attempt, task_status, silent, **values, aggregations=0)

    def reject(self, update_row: UpdateRow, why: Rejection) -> None:
        """Leave an accepted update out of the aggregation; it stays where it is."""
        task_id = update_row.task.task_id
        accepted = (db.updates.c.task_id == task_id) & (db.updates.c.verdict == Verdict.ACCEPTED)
        with self._write() as connection:
            connection.execute(update(db.updates).where(accepted).values(rejected=why.text, code=why.code))
            connection.execute(_TASK, {"of_task_id": task_id, "task_status": "rejected", "reason": why.text})
        of_task = {"run": update_row.task.run, "task_id": task_id, "site": update_row.task.site}
        self._promise("rejected", **of_task, code=why.code, reason=why.text)

    def publish(
        self,
        run: str,
        round: int,
        attempt: int,
        state: Digest,
        *,
        complete: bool,
        task_status: str | None = None,
        silent: Mapping[SiteId, str] | None = None,
        statistics: Mapping[str, float] | None = None,
    ) -> None:
        """Close an attempt with the state that it gave; `silent` says of sites that did not report what they did.

        Args:
            task_status: theirs; None: not-needed if the round is complete, or else late.
        """
        task_status = task_status or ("not-needed" if complete else "late")
        values: dict[str, Any] = {"state": state, "complete": complete, "statistics": dict(statistics or {})}
        self._close(run, round, attempt, task_status, silent or {}, **values)
        self._promise("published", run=run, round=round, attempt=attempt, state=state, complete=complete)

    def abandon(
        self, run: str, round: int, attempt: int, reason: str, silent: Mapping[SiteId, str] | None = None
    ) -> None:
        """Close an attempt that gave none."""
        self._close(run, round, attempt, "late", silent or {}, abandoned=reason)
        self._promise("abandoned", run=run, round=round, attempt=attempt, reason=reason)

    def _close(
        self, run: str, round: int, attempt: int, task: str, silent: Mapping[SiteId, str], **values: Any
    ) -> None:
        self._advance(run, round, attempt, task, silent, closed_at=time.time(), **values)

    def _advance(
        self, run: str, round: int, attempt: int, task: str, silent: Mapping[SiteId, str], **values: Any
    ) -> None:
        """Change an attempt's row, and close its invitations that are still open."""
        of_attempt = _attempt(run, round, attempt)
        with self._write() as connection:
            connection.execute(_ATTEMPT, {**of_attempt, **values})
            _close_tasks(connection, _OPEN_OF_SITE, of_attempt, task, silent)
            connection.execute(_OPEN_OF_ATTEMPT, {**of_attempt, "task_status": task})

    def mark_scored(self, run: str, round: int) -> None:
        """Nobody is asked for this round's scores any more."""
        with self._write() as connection:
            connection.execute(_SCORED, {"of_run": run, "of_round": round})
            connection.execute(_OPEN_OF_SCORES, {"of_run": run, "of_round": round})

    # Tasks

    def invite(self, tasks: Sequence[TaskRow]) -> None:
        """Write down invitations outside a round's opening (to refine, to score)."""
        with self._write() as connection:
            connection.execute(_NEW_TASK, [_columns(task) for task in tasks])

    def go_on(self, tasks: Sequence[TaskRow], status: str, silent: Mapping[SiteId, str], groups: Groups = ()) -> None:
        """Write down the invitations to the next step of a sum, and that the last step's are closed: all or nothing.

        Args:
            status: of invitations that are still open.
            silent: by their sites, what is known about them.
            groups: of the sum's sites. New groups are kept, unless they have one site.
        """
        first = tasks[0]
        of_sum = {**_attempt(first.run, first.round, first.attempt), "of_sum_of": first.sum_of}
        with self._write() as connection:
            _close_tasks(connection, _OPEN_OF_SITE_AND_SUM, of_sum, status, silent)
            connection.execute(_OPEN_OF_SUM, {**of_sum, "task_status": status})
            connection.execute(_NEW_TASK, [_columns(task) for task in tasks])
            _keep_groups(connection, groups)

    def keep_groups(self, groups: Groups) -> None:
        """Write down the new groups of a simulation's sum, without groups of one site."""
        with self._write() as connection:
            _keep_groups(connection, groups)

    def dissolve(self, group: Group) -> None:
        """End a group: its sites have none. That they were in it, stays."""
        theirs = db.sum_groups.c.site.in_(group) & db.sum_groups.c.dissolved_at.is_(None)
        with self._write() as connection:
            connection.execute(update(db.sum_groups).where(theirs).values(dissolved_at=time.time()))
        self._promise("group-dissolved", sites=list(group))

    def offer_consortium(self, number: int, document: str) -> None:
        """Write down a list of partners that is offered to sites from now on."""
        with self._write() as connection:
            connection.execute(insert(db.consortia).values(number=number, offered_at=time.time(), document=document))
        self._promise("consortium-offered", number=number, digest=digest(document.encode()))

    def set_task_status(self, task_id: str, task: str, reason: str = "") -> None:
        """What became of an invitation that is open; one whose update stands here already stays reported."""
        with self._write() as connection:
            connection.execute(_OPEN_TASK, {"of_task_id": task_id, "task_status": task, "reason": reason})

    # Updates and scores

    def judge(self, row: UpdateRow) -> Receipt:
        """Write down a verdict; an accepted update counts from here on.

        The same accepted update may come again: its promise was lost with a journal that could not be written.
        """
        return self.judge_all([row])[0]

    def judge_all(self, rows: Sequence[UpdateRow]) -> list[Receipt]:
        """`judge` of updates for different invitations: all or nothing, in one transaction, promised with one sync."""
        with self._write() as connection:
            new, receipts = _write_verdicts(connection, rows)
        self._promise_all([("verdict", _promised(row)) for row in new])
        return receipts

    def add_scores(self, task: TaskRow, scores: Scores) -> None:
        """Write down a site's scores of a round."""
        of_task = {"run": task.run, "round": task.round, "attempt": task.attempt, "site": task.site}
        with self._write() as connection:
            if scores:
                connection.execute(_NEW_SCORE, [{**of_task, "name": n, "value": v} for n, v in scores.items()])
            connection.execute(_REPORTED, {"of_task_id": task.task_id})

    def sum_scores(
        self, run: str, round: int, attempt: int, names: Collection[str], sums: Mapping[str, Spread]
    ) -> None:
        """Write down what the sum of the sites' own scores says, in place of what is known of them.

        Args:
            names: scores that may be aggregated. No such score of a single site stays.
        """
        of_attempt = {"run": run, "round": round, "attempt": attempt}
        aggregated, known = (
            and_(*(table.c[key] == value for key, value in of_attempt.items())) for table in (db.scores, db.score_sums)
        )
        rows = [{**of_attempt, "name": name, "mean": each.mean, "sites": each.sites} for name, each in sums.items()]
        with self._write() as connection:
            connection.execute(delete(db.scores).where(aggregated, db.scores.c.name.in_(names)))
            connection.execute(delete(db.score_sums).where(known))
            if rows:
                connection.execute(_NEW_SCORE_SUM, rows)

    # Transactions: each whole, each promise repeated in the journal before anybody is told of it

    def _promise(self, event: str, **facts: Any) -> None:
        self._promise_all([(event, facts)])

    def _promise_all(self, promises: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        if self._journal is not None:
            self._unwritten += promises
            self.settle_promises()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self.settle_promises()
        try:
            with self._writing() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise state_error(error) from error


def _columns(task: TaskRow) -> dict[str, Any]:
    return {name: getattr(task, name) for name in TASK_COLUMNS}


def _attempt(run: str, round: int, attempt: int) -> dict[str, Any]:
    return {"of_run": run, "of_round": round, "of_attempt": attempt}


def _close_tasks(
    connection: Connection, of_site: Update, of: Mapping[str, Any], status: str, silent: Mapping[SiteId, str]
) -> None:
    """Close the open invitations of single sites, each for its own reason."""
    if rows := [{**of, "of_site": site, "task_status": status, "reason": reason} for site, reason in silent.items()]:
        connection.execute(of_site, rows)


def _keep_groups(connection: Connection, groups: Groups) -> None:
    """Write down new groups, without groups of one site."""
    current = select(db.sum_groups.c.site).where(db.sum_groups.c.dissolved_at.is_(None))
    known, at = set(connection.execute(current).scalars()), time.time()
    new = [group for group in groups if len(group) > 1 and known.isdisjoint(group)]
    if rows := [{"site": site, "first": group[0], "formed_at": at} for group in new for site in group]:
        connection.execute(insert(db.sum_groups), rows)


def _write_verdicts(connection: Connection, rows: Sequence[UpdateRow]) -> tuple[list[UpdateRow], list[Receipt]]:
    """Write those that do not stand here yet: which these are, and the receipts of all.

    Raises:
        StateError: another update for the same invitation counts already.
    """
    accepted = [row.task.task_id for row in rows if row.is_accepted]
    counted: dict[str, Any] = {}
    if accepted:
        reported = connection.execute(_REPORTED, [{"of_task_id": task_id} for task_id in accepted])
        if reported.rowcount != len(accepted):  # or the driver does not count: some of them may count already
            counted = {row.task_id: row for row in connection.execute(_RECEIPTS, {"task_ids": accepted})}
    new, receipts = [], []
    for row in rows:
        known = counted.get(row.task.task_id) if row.is_accepted else None
        if known is None:
            new.append(row)
            receipts.append(row.receipt())
        elif known.digest != row.digest:
            raise StateError(f"two updates for one invitation of {row.task.site} in round {row.task.round}")
        else:
            receipts.append(Receipt(Verdict.ACCEPTED, known.reason, known.digest, known.record_hash))
    if new:
        connection.execute(_NEW_UPDATE, [{**_promised(row), **_taken(row)} for row in new])
    return new, receipts


def _promised(row: UpdateRow) -> Mapping[str, Any]:
    """What the journal repeats of a verdict."""
    task = row.task
    of_task = {name: getattr(task, name) for name in ("run", "round", "attempt", "site", "task_id")}
    values = {"verdict": row.verdict, "code": row.code, "reason": row.reason}
    return of_task | values | {"digest": row.digest, "bytes": row.bytes, "record_hash": row.receipt().record_hash}


def _taken(row: UpdateRow) -> Mapping[str, Any]:
    return {"metrics": dict(row.metrics), "weight": row.weight, "norm": row.norm, "at": time.time()}


def _who(row: CertificateRow) -> dict[str, str]:
    """Whose certificate a promise is about."""
    return {"fingerprint": row.fingerprint, "party": row.party, "name": row.name}
