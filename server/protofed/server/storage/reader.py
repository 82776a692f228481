"""What the ledger says: its rows, read-only. A second process may look on while the server writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    exists,
    func,
    literal,
    or_,
    select,
    union,
)
from sqlalchemy.exc import SQLAlchemyError

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TRAININGS, SumOf, TaskKind, Verdict
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation.groups import Groups, in_order
from protofed.server.storage import schema as db
from protofed.server.storage.database import Transaction, open_engine, state_error
from protofed.server.storage.rows import CertificateRow, InterventionRow, RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import BLOB_KEPT, RoundOutcome

OF_ATTEMPT = ("run", "round", "attempt")
MAX_INTEGER = 2**31 - 1  # that an integer of the database holds


def here(table: Table, *columns: str) -> ColumnElement[bool]:
    """Whether these columns have the values of the parameters `of_<column>`."""
    return and_(*(table.c[name] == bindparam(f"of_{name}") for name in columns))


def _in_rounds(table: Table) -> ColumnElement[bool]:
    return table.c.round.between(bindparam("first"), bindparam("last"))


def _in_attempts(table: Table) -> ColumnElement[bool]:
    attempts = table.c.attempt.between(bindparam("first_attempt"), bindparam("last_attempt"))
    return here(table, "run") & _in_rounds(table) & attempts


# What is asked in every round is built once: SQLAlchemy takes four times as long to build a query as to run it.
_STANDS = db.rounds.c.state.is_not(None) & ~db.rounds.c.rolled_back
_ACCEPTED = db.updates.c.verdict == Verdict.ACCEPTED
_RUN = select(db.runs).where(here(db.runs, "run"))
_ROUNDS = (
    select(db.rounds)
    .where(here(db.rounds, "run"), db.rounds.c.round >= bindparam("since"))
    .order_by(db.rounds.c.round, db.rounds.c.attempt)
)
_KEPT_ROUNDS = _ROUNDS.where(~db.rounds.c.rolled_back)
_STATE = (
    select(db.rounds.c.state)
    .where(here(db.rounds, "run", "round"), _STANDS)
    .order_by(db.rounds.c.attempt.desc())
    .limit(1)
)
_NEWEST_ATTEMPT = select(func.max(db.rounds.c.attempt)).where(here(db.rounds, "run", "round"))
_TASK = select(db.tasks).where(here(db.tasks, "task_id"))
_TASKS = (
    select(db.tasks)
    .where(_in_attempts(db.tasks))
    .order_by(db.tasks.c.round, db.tasks.c.attempt, db.tasks.c.site, db.tasks.c.kind)
)
_UPDATE = [db.updates.c[field.name] for field in fields(UpdateRow) if field.name != "task"]
_UPDATES = (
    select(*db.tasks.c, *_UPDATE)
    .join(db.updates, db.updates.c.task_id == db.tasks.c.task_id)
    .where(_in_attempts(db.updates))
    .order_by(db.updates.c.round, db.updates.c.attempt, db.updates.c.site, db.updates.c.id)
)
_KIND, _SUM_OF = (db.tasks.c.keys().index(name) for name in ("kind", "sum_of"))
_OF_TASKS, _OF_UPDATE = slice(len(db.tasks.c)), slice(len(db.tasks.c), None)
_OF_TASK = select(*_UPDATE).where(here(db.updates, "task_id"))
_ACCEPTED_OF_TASK = _OF_TASK.where(_ACCEPTED)
_JUDGED = _OF_TASK.where(here(db.updates, "digest")).order_by(db.updates.c.id.desc()).limit(1)
_REFUSALS = (
    select(db.updates.c.task_id, func.count().label("refused"))
    .where(here(db.updates, *OF_ATTEMPT), ~_ACCEPTED)
    .group_by(db.updates.c.task_id)
)
_LAST_WEIGHT = (
    select(db.updates.c.weight)
    .where(here(db.updates, "run", "site"), _ACCEPTED, db.updates.c.weight.is_not(None))
    .order_by(db.updates.c.id.desc())
    .limit(1)
)
# Which digests name blobs, and where. Of an update that came too late there is no blob.
_DIGESTS: Sequence[tuple[Any, ColumnElement[bool]]] = (
    (db.rounds.c.state, db.rounds.c.state.is_not(None)),
    (db.rounds.c.aggregate, db.rounds.c.aggregate.is_not(None)),
    (db.tasks.c.base_digest, db.tasks.c.base_digest.is_not(None)),
    (db.updates.c.digest, db.updates.c.verdict.in_(BLOB_KEPT)),
)


def _named_by_rounds(column: Any, named: ColumnElement[bool]) -> Select[Any]:
    table, is_state = column.table, literal(column is db.rounds.c.state).label("is_state")
    rounds = (table.c.round >= bindparam("since")) | table.c.round.in_(bindparam("longer", expanding=True))
    return select(column.label("digest"), table.c.round, is_state).where(here(table, "run"), named, rounds)


_NAMED_BY_ROUNDS = union(*(_named_by_rounds(*each) for each in _DIGESTS))
_MADE_OF = union(
    select(db.rounds.c.state.label("digest")).where(
        here(db.rounds, "run"),
        db.rounds.c.state.is_not(None),
        db.rounds.c.round.between(bindparam("of_round", type_=Integer) - 1, bindparam("of_round", type_=Integer)),
    ),
    select(db.updates.c.digest).where(here(db.updates, "run", "round"), _ACCEPTED),
)
# What other runs are restored from.
_OF_OTHERS = (db.rounds.c.run != bindparam("of_run")) & _STANDS
_NEWEST = select(db.rounds.c.run, func.max(db.rounds.c.round).label("round")).where(_OF_OTHERS)
_NEWEST_BY_RUN = _NEWEST.group_by(db.rounds.c.run).subquery()
_NEWEST_OF_OTHERS = (
    select(db.rounds.c.state)
    .join(_NEWEST_BY_RUN, and_(*(db.rounds.c[name] == _NEWEST_BY_RUN.c[name] for name in ("run", "round"))))
    .where(_OF_OTHERS)
)
_SHARING = (
    select(db.rounds.c.run)
    .where(db.rounds.c.run != bindparam("run"), db.rounds.c.state.in_(bindparam("states", expanding=True)))
    .distinct()
)
_IN_ATTEMPT = and_(*(db.rounds.c[name] == db.updates.c[name] for name in ("run", "round", "attempt")))
_TRAINED = or_(
    (db.tasks.c.kind == TaskKind.FIT) & db.tasks.c.sum_of.is_(None),
    (db.tasks.c.kind == TaskKind.MASK) & (db.tasks.c.sum_of == SumOf.UPDATE),
)
# By site, as the first that is found is the newest: a long run has many.
_SITES = select(db.updates.c.site).where(here(db.updates, "run")).distinct().subquery()
_NEWEST_STANDING = (
    select(db.updates.c.round)
    .select_from(db.updates.join(db.tasks, db.tasks.c.task_id == db.updates.c.task_id).join(db.rounds, _IN_ATTEMPT))
    .where(here(db.updates, "run"), db.updates.c.site == _SITES.c.site, _ACCEPTED, _TRAINED, _STANDS)
    .order_by(db.updates.c.round.desc())
    .limit(1)
    .scalar_subquery()
)
_STANDING = select(_SITES.c.site, _NEWEST_STANDING.label("newest"))
SEALED: Sequence[Select[Any]] = (  # what must never be lost; of each, one column
    select(db.updates.c.record_hash).where(db.updates.c.verdict == Verdict.ACCEPTED),
    select(db.rounds.c.state).where(db.rounds.c.state.is_not(None)),
    select(db.certificates.c.fingerprint).where(db.certificates.c.revoked_at.is_not(None)),
)


def _of_kept_rounds(table: Table, *columns: Any) -> Select[Any]:
    """Of a table of scores, what a run has that was not rolled back."""
    same = [db.rounds.c[name] == table.c[name] for name in OF_ATTEMPT]
    return (
        select(*columns)
        .select_from(table.outerjoin(db.rounds, and_(*same)))
        .where(here(table, "run"), db.rounds.c.rolled_back.is_not(True))
    )


def _scores(table: Table, *columns: str) -> tuple[Select[Any], Select[Any]]:
    """All scores of some rounds, in order, and those of some names."""
    query = _of_kept_rounds(table, *(table.c[name] for name in columns)).where(_in_rounds(table))
    every = query.order_by(*(table.c[name] for name in columns if name in ("round", "site", "name")))
    return every, every.where(table.c.name.in_(bindparam("names", expanding=True)))


_SCORES = _scores(db.scores, "round", "site", "name", "value")
_SCORE_SUMS = _scores(db.score_sums, "round", "name", "mean", "sites")
_SCORED_ROUND = [_of_kept_rounds(table, func.max(table.c.round)) for table in (db.scores, db.score_sums)]


def query_of_groups(at: float | None = None) -> Select[Any]:
    """For the rows of groups as they were at a time, in Unix time; None: as they are now."""
    formed, dissolved = db.sum_groups.c.formed_at, db.sum_groups.c.dissolved_at
    then = dissolved.is_(None) if at is None else (formed <= at) & (dissolved.is_(None) | (dissolved > at))
    return select(db.sum_groups.c.site, db.sum_groups.c.first).where(then)


def read_groups(rows: Sequence[Row[Any]]) -> Groups:
    """What such rows say."""
    return in_order([row.site for row in rows if row.first == first] for first in {row.first for row in rows})


class LedgerReader:
    """A ledger's rows; times are seconds of the Unix epoch.

    Raises:
        StateError: from every method: the database is damaged, locked or not there.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._reading: Transaction = self._engine.connect

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()

    def sites(self) -> dict[SiteId, list[str]]:
        """Every site that ever enrolled, with its roles."""
        return {row.site: row.roles for row in self._read(select(db.sites).order_by(db.sites.c.site))}

    def excluded(self) -> dict[SiteId, str]:
        """The sites that the operator has excluded, and why."""
        query = select(db.sites).where(db.sites.c.excluded.is_not(None))
        return {row.site: row.excluded for row in self._read(query)}

    def certificates(self) -> list[CertificateRow]:
        """Every certificate that was ever registered."""
        rows = self._read(select(db.certificates))
        return [CertificateRow(**{**row._mapping, "roles": tuple(row.roles)}) for row in rows]

    def revoked(self) -> dict[SiteId, tuple[float, str]]:
        """Sites that have no certificate left but revoked ones: when the last was revoked, and why."""
        certificates = db.certificates.c
        query = select(certificates.name, certificates.revoked_at, certificates.reason)
        rows = self._read(query.where(certificates.party == "site").order_by(certificates.revoked_at))
        valid = {row.name for row in rows if row.revoked_at is None}
        return {row.name: (row.revoked_at, row.reason or "") for row in rows if row.name not in valid}

    def interventions(self) -> list[InterventionRow]:
        """What operators did, in order."""
        rows = self._read(select(db.interventions).order_by(db.interventions.c.id))
        return [InterventionRow(**{k: v for k, v in row._mapping.items() if k != "id"}) for row in rows]

    def run(self, run: str) -> RunRow | None:
        """A run, if the ledger knows it."""
        rows = self._read(_RUN, of_run=run)
        return _run(rows[0]) if rows else None

    def runs(self) -> list[RunRow]:
        """All runs in the order of the queue."""
        return [_run(row) for row in self._read(select(db.runs).order_by(db.runs.c.position))]

    def rounds(self, run: str, *, rolled_back: bool = False, since: int = 0) -> list[RoundRow]:
        """The attempts of a run, in order, from a round on; on demand also those that were rolled back."""
        query = _ROUNDS if rolled_back else _KEPT_ROUNDS
        return [round_row(row) for row in self._read(query, of_run=run, since=since)]

    def newest(self, run: str, *, published: bool = False, scored: bool = False) -> RoundRow | None:
        """The newest attempt of a run that was not rolled back; the newest that published, or was scored, on demand."""
        query = select(db.rounds).where(db.rounds.c.run == run, ~db.rounds.c.rolled_back)
        if published or scored:
            query = query.where(db.rounds.c.state.is_not(None))
        if scored:
            query = query.where(db.rounds.c.scored)
        rows = self._read(query.order_by(db.rounds.c.round.desc(), db.rounds.c.attempt.desc()).limit(1))
        return round_row(rows[0]) if rows else None

    def state(self, run: str, round: int) -> Digest | None:
        """The state that a round published, unless it was rolled back."""
        rows = self._read(_STATE, of_run=run, of_round=round)
        return Digest(rows[0].state) if rows else None

    def newest_attempt(self, run: str, round: int) -> int:
        """Number of the last attempt at a round, rolled back or not; 0: there was none."""
        return int(self._read(_NEWEST_ATTEMPT, of_run=run, of_round=round)[0][0] or 0)

    def task(self, task_id: str) -> TaskRow | None:
        """The invitation of that task_id, if there was one."""
        rows = self._read(_TASK, of_task_id=task_id)
        return _task(rows[0]) if rows else None

    def tasks(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[TaskRow]:
        """The invitations of a run (of a round or some, of one attempt), in the order of rounds and sites."""
        return [_task(row) for row in self._read(_TASKS, of_run=run, **_span(round), **_attempts(attempt))]

    def groups(self, at: float | None = None) -> Groups:
        """The groups that the secure aggregations of all runs are over.

        Args:
            at: as they were then, in Unix time; None: as they are now.
        """
        return read_groups(self._read(query_of_groups(at)))

    def consortium(self, at: float | None = None) -> str | None:
        """The newest list of partners that was offered to sites, as JSON; None: none was.

        Args:
            at: until then, in Unix time; None: until now.
        """
        before = [] if at is None else [db.consortia.c.offered_at <= at]
        query = select(db.consortia.c.document).where(*before).order_by(db.consortia.c.number.desc()).limit(1)
        rows = self._read(query)
        return rows[0].document if rows else None

    def accepted(self, task: TaskRow) -> UpdateRow | None:
        """The accepted update of an invitation, if there is one."""
        rows = self._read(_ACCEPTED_OF_TASK, of_task_id=task.task_id)
        return _update(rows[0], task) if rows else None

    def judged(self, task: TaskRow, digest: Digest) -> UpdateRow | None:
        """The newest verdict on an update with such bytes for an invitation, if there is one."""
        rows = self._read(_JUDGED, of_task_id=task.task_id, of_digest=digest)
        return _update(rows[0], task) if rows else None

    def updates(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[UpdateRow]:
        """All commits of a run (of a round or some, of one attempt) by rounds and sites, the refused ones too."""
        rows = self._read(_UPDATES, of_run=run, **_span(round), **_attempts(attempt))
        return [_update(row[_OF_UPDATE], _task(row[_OF_TASKS])) for row in rows]

    def refusals(self, run: str, round: int, attempt: int) -> Mapping[str, int]:
        """By task id, how many updates were refused for an attempt's invitations; those without one are left out."""
        return {
            row.task_id: row.refused for row in self._read(_REFUSALS, of_run=run, of_round=round, of_attempt=attempt)
        }

    def last_weight(self, run: str, site: SiteId) -> float | None:
        """The example count that a site told with its newest accepted update of a run."""
        rows = self._read(_LAST_WEIGHT, of_run=run, of_site=site)
        return rows[0].weight if rows else None

    def standing_rounds(self, run: str) -> dict[SiteId, int]:
        """By site, the newest round in which its update stands.

        I.e. it was accepted for an attempt that published a state, and the run did not go back behind that.
        """
        rows = self._read(_STANDING, of_run=run)
        return {row.site: row.newest for row in rows if row.newest is not None}

    def moved(self, run: str) -> tuple[int, int]:
        """Bytes of a run's accepted updates, and of what sites were asked to fetch to train, sum and refine."""
        received_bytes = select(func.sum(db.updates.c.bytes)).where(db.updates.c.run == run)
        of_updates = db.tasks.c.kind.in_(sorted(TRAININGS)) | (db.tasks.c.sum_of == SumOf.UPDATE)
        sent = select(func.sum(db.tasks.c.base_bytes)).where(db.tasks.c.run == run, of_updates)
        queries = (self._read(received_bytes.where(db.updates.c.verdict == Verdict.ACCEPTED)), self._read(sent))
        received, sent_bytes = (int(rows[0][0] or 0) for rows in queries)
        return received, sent_bytes

    def scored_round(self, run: str) -> int:
        """The newest round with scores that was not rolled back; 0: none."""
        return int(max(self._read(query, of_run=run)[0][0] or 0 for query in _SCORED_ROUND))

    def scored_rounds(self, run: str) -> list[int]:
        """All rounds with scores, but those that were rolled back, in order."""
        # Looked up attempt by attempt: a long run of many sites has millions of scores, which need not be walked.
        scored = or_(
            *(
                exists().where(*(table.c[name] == db.rounds.c[name] for name in ("run", "round", "attempt")))
                for table in (db.scores, db.score_sums)
            )
        )
        query = select(db.rounds.c.round).where(db.rounds.c.run == run, ~db.rounds.c.rolled_back, scored).distinct()
        return [row.round for row in self._read(query.order_by(db.rounds.c.round))]

    def scores(
        self, run: str, round: int | range | None = None, names: Collection[str] | None = None
    ) -> dict[int, dict[SiteId, dict[str, float]]]:
        """Scores by round (or of one, or some), site and name (or some); not of rounds that were rolled back."""
        scores: dict[int, dict[SiteId, dict[str, float]]] = {}
        for number, site, name, value in self._read_scores(_SCORES, run, round, names):
            scores.setdefault(number, {}).setdefault(site, {})[name] = value
        return scores

    def score_sums(
        self, run: str, round: int | range | None = None, names: Collection[str] | None = None
    ) -> dict[int, dict[str, Spread]]:
        """What secure aggregation says of own scores, by round (or one, or some) and name (or some); as `scores`."""
        sums: dict[int, dict[str, Spread]] = {}
        for number, name, mean, sites in self._read_scores(_SCORE_SUMS, run, round, names):
            sums.setdefault(number, {})[name] = Spread(mean, None, None, sites)
        return sums

    def _read_scores(
        self, queries: Sequence[Select[Any]], run: str, round: int | range | None, names: Collection[str] | None
    ) -> Sequence[Any]:
        every, named = queries
        if names is None:
            return self._read(every, of_run=run, **_span(round))
        return self._read(named, of_run=run, **_span(round), names=sorted(names))

    def contributors(self, run: str, rounds: range) -> frozenset[SiteId]:
        """The sites whose update was accepted in one of the rounds."""
        updates = db.updates.c
        query = select(updates.site).where(updates.run == run, updates.verdict == Verdict.ACCEPTED).distinct()
        rows = self._read(query.where(updates.round >= rounds.start, updates.round < rounds.stop))
        return frozenset(row.site for row in rows)

    def sealed(self) -> set[str]:
        """What must never be lost: seals of accepted updates, digests of published states, revoked certificates."""
        return {row[0] for query in SEALED for row in self._read(query)}

    def named(self, among: Collection[Digest] | None = None) -> set[Digest]:
        """Digests of blobs that any row names.

        Args:
            among: look for these only.
        """
        queries = [select(column).where(named).distinct() for column, named in _DIGESTS]
        if among is not None:
            columns = [column.in_(sorted(among)) for column, _ in _DIGESTS]
            queries = [query.where(here) for query, here in zip(queries, columns, strict=True)]
        return {Digest(row[0]) for query in queries for row in self._read(query)}

    def referenced(self, run: str, since: int, former: Collection[int] = ()) -> tuple[dict[Digest, bool], set[Digest]]:
        """Digests that rounds before `since` name, each with whether it is a state, and the needed digests.

        Needed are digests that later rounds name, and the state that round `since` was made from, because its
        verification needs this state. The newest state of every other run is needed, too: runs of one seed begin with
        the same bytes.

        Args:
            former: rounds before `since` that were kept longer than others, as `find_made` says.
        """
        longer = sorted({*former, *(number - 1 for number in former)})
        before = dict[Digest, bool]()
        needed = set[Digest]()
        for row in self._read(_NAMED_BY_ROUNDS, of_run=run, since=since - 2, longer=longer):
            if row.round >= since or (row.is_state and row.round == since - 1):
                needed.add(Digest(row.digest))
            else:
                before[row.digest] = row.is_state or before.get(row.digest, False)
        return before, needed | {Digest(row.state) for row in self._read(_NEWEST_OF_OTHERS, of_run=run)}

    def find_made(self, run: str, round: int) -> set[Digest]:
        """A round's states, and what is needed to compute them again: its updates and the states before it."""
        return {Digest(row.digest) for row in self._read(_MADE_OF, of_run=run, of_round=round)}

    def sharing(self, run: str, states: Collection[Digest]) -> list[str]:
        """The other runs that published one of the states, too."""
        return sorted({row.run for row in self._read(_SHARING, run=run, states=sorted(states))})

    def _read(self, query: Any, **values: Any) -> Sequence[Row[Any]]:
        try:
            with self._reading() as connection:
                return connection.execute(query, values).all()
        except SQLAlchemyError as error:
            raise state_error(error) from error


def _span(round: int | range | None) -> dict[str, int]:
    match round:
        case None:
            return {"first": 0, "last": MAX_INTEGER}
        case range():
            return {"first": round.start, "last": round.stop - 1}
    return {"first": round, "last": round}


def _attempts(attempt: int | None) -> dict[str, int]:
    first, last = (0, MAX_INTEGER) if attempt is None else (attempt, attempt)
    return {"first_attempt": first, "last_attempt": last}


def _run(row: Row[Any]) -> RunRow:
    return RunRow(**{**row._mapping, "outcome": None if row.outcome is None else RoundOutcome(row.outcome)})


def round_row(row: Row[Any]) -> RoundRow:
    """An attempt, of all columns of its table."""
    return RoundRow(**{**row._mapping, "statistics": row.statistics or {}})


def _task(columns: Sequence[Any]) -> TaskRow:
    """Of the columns of the table, which are in the order of the row's fields."""
    values = list(columns)
    values[_KIND] = TaskKind(values[_KIND])
    values[_SUM_OF] = None if values[_SUM_OF] is None else SumOf(values[_SUM_OF])
    return TaskRow(*values)


def _update(columns: Sequence[Any], task: TaskRow) -> UpdateRow:
    verdict, *rest = columns
    return UpdateRow(task, Verdict(verdict), *rest)
