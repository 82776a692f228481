"""What the ledger says: its rows, read-only. A second process may look on while the server writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Engine, Row, Select, Table, and_, exists, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TRAININGS, Subject, TaskKind, Verdict
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.storage import schema as db
from protofed.server.storage import sum_groups
from protofed.server.storage.database import open_engine, state_error
from protofed.server.storage.rows import CertificateRow, InterventionRow, RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import BLOB_KEPT, RoundOutcome

SEALED: Sequence[Select[Any]] = (  # what must never be lost; of each, one column
    select(db.updates.c.record_hash).where(db.updates.c.verdict == Verdict.ACCEPTED),
    select(db.rounds.c.state).where(db.rounds.c.state.is_not(None)),
    select(db.certificates.c.fingerprint).where(db.certificates.c.revoked_at.is_not(None)),
)


class LedgerReader:
    """A ledger's rows; times are seconds of the Unix epoch.

    Raises:
        StateError: from every method: the database is damaged, locked or not there.
    """

    def __init__(self, url: str) -> None:
        self._engine: Engine = open_engine(url)

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
        rows = self._read(select(db.runs).where(db.runs.c.run == run))
        return _run(rows[0]) if rows else None

    def runs(self) -> list[RunRow]:
        """All runs in the order of the queue."""
        return [_run(row) for row in self._read(select(db.runs).order_by(db.runs.c.position))]

    def rounds(self, run: str, *, rolled_back: bool = False, since: int = 0) -> list[RoundRow]:
        """The attempts of a run, in order, from a round on; on demand also those that were rolled back."""
        query = select(db.rounds).where(db.rounds.c.run == run, db.rounds.c.round >= since)
        query = query.order_by(db.rounds.c.round, db.rounds.c.attempt)
        if not rolled_back:
            query = query.where(~db.rounds.c.rolled_back)
        return [_round(row) for row in self._read(query)]

    def newest(self, run: str, *, published: bool = False, scored: bool = False) -> RoundRow | None:
        """The newest attempt of a run that was not rolled back; the newest that published, or was scored, on demand."""
        query = select(db.rounds).where(db.rounds.c.run == run, ~db.rounds.c.rolled_back)
        if published or scored:
            query = query.where(db.rounds.c.state.is_not(None))
        if scored:
            query = query.where(db.rounds.c.scored)
        rows = self._read(query.order_by(db.rounds.c.round.desc(), db.rounds.c.attempt.desc()).limit(1))
        return _round(rows[0]) if rows else None

    def state(self, run: str, round: int) -> Digest | None:
        """The state that a round published, unless it was rolled back."""
        query = select(db.rounds.c.state).where(db.rounds.c.run == run, db.rounds.c.round == round)
        query = query.where(~db.rounds.c.rolled_back, db.rounds.c.state.is_not(None))
        rows = self._read(query.order_by(db.rounds.c.attempt.desc()).limit(1))
        return Digest(rows[0].state) if rows else None

    def states(self, run: str, among: Collection[Digest]) -> set[Digest]:
        """Those of these digests that are states of a run's rounds, the rolled back ones too."""
        query = select(db.rounds.c.state).where(db.rounds.c.run == run, db.rounds.c.state.in_(sorted(among)))
        return {Digest(row.state) for row in self._read(query.distinct())}

    def newest_attempt(self, run: str, round: int) -> int:
        """Number of the last attempt at a round, rolled back or not; 0: there was none."""
        query = select(func.max(db.rounds.c.attempt)).where(db.rounds.c.run == run, db.rounds.c.round == round)
        return int(self._read(query)[0][0] or 0)

    def task(self, task_id: str) -> TaskRow | None:
        """The invitation of that task_id, if there was one."""
        rows = self._read(select(db.tasks).where(db.tasks.c.task_id == task_id))
        return _task(rows[0]) if rows else None

    def tasks(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[TaskRow]:
        """The invitations of a run (of a round or some, of one attempt), in the order of rounds and sites."""
        query = _narrowed(db.tasks, run, round, attempt)
        order = (db.tasks.c.round, db.tasks.c.attempt, db.tasks.c.site, db.tasks.c.kind)
        return [_task(row) for row in self._read(query.order_by(*order))]

    def groups(self, at: float | None = None) -> Groups:
        """The groups that secure sums of all runs are over.

        Args:
            at: as they were then, in Unix time; None: as they are now.
        """
        return sum_groups.groups_of(self._read(sum_groups.query(at)))

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
        query = select(db.updates).where(db.updates.c.task_id == task.task_id, db.updates.c.verdict == Verdict.ACCEPTED)
        rows = self._read(query)
        return _update(rows[0], task) if rows else None

    def judged(self, task: TaskRow, digest: Digest) -> UpdateRow | None:
        """The newest verdict on an update of these bytes for an invitation, if there is one."""
        query = select(db.updates).where(db.updates.c.task_id == task.task_id, db.updates.c.digest == digest)
        rows = self._read(query.order_by(db.updates.c.id.desc()).limit(1))
        return _update(rows[0], task) if rows else None

    def updates(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[UpdateRow]:
        """All commits of a run (of a round or some, of one attempt) by rounds and sites, the refused ones too."""
        tasks = {task.task_id: task for task in self.tasks(run, round, attempt)}
        order = (db.updates.c.round, db.updates.c.attempt, db.updates.c.site, db.updates.c.id)
        rows = self._read(_narrowed(db.updates, run, round, attempt).order_by(*order))
        return [_update(row, tasks[row.task_id]) for row in rows]

    def refused(self, task_id: str) -> int:
        """How many updates were refused for an invitation."""
        query = select(func.count()).select_from(db.updates).where(db.updates.c.task_id == task_id)
        return int(self._read(query.where(db.updates.c.verdict != Verdict.ACCEPTED))[0][0])

    def last_weight(self, run: str, site: SiteId) -> float | None:
        """The example count that a site told with its newest accepted update of a run."""
        told = select(db.updates.c.weight).where(db.updates.c.run == run, db.updates.c.site == site)
        told = told.where(db.updates.c.verdict == Verdict.ACCEPTED, db.updates.c.weight.is_not(None))
        rows = self._read(told.order_by(db.updates.c.id.desc()).limit(1))
        return rows[0].weight if rows else None

    def standing_rounds(self, run: str) -> dict[SiteId, int]:
        """By site, the newest round in which an update of it stands.

        I.e. it was accepted for an attempt that published a state, and the run did not go back behind that.
        """
        attempt = (db.rounds.c[name] == db.updates.c[name] for name in ("run", "round", "attempt"))
        joined = db.updates.join(db.tasks, db.tasks.c.task_id == db.updates.c.task_id).join(db.rounds, and_(*attempt))
        plain = (db.tasks.c.kind == TaskKind.FIT) & db.tasks.c.subject.is_(None)
        summed = (db.tasks.c.kind == TaskKind.MASK) & (db.tasks.c.subject == Subject.UPDATE)
        query = select(db.updates.c.site, func.max(db.updates.c.round).label("newest")).select_from(joined)
        query = query.where(db.updates.c.run == run, db.updates.c.verdict == Verdict.ACCEPTED, plain | summed)
        query = query.where(db.rounds.c.state.is_not(None), ~db.rounds.c.rolled_back)
        return {row.site: row.newest for row in self._read(query.group_by(db.updates.c.site))}

    def moved(self, run: str) -> tuple[int, int]:
        """Bytes of a run's accepted updates, and of what sites were asked to fetch to train, sum and refine."""
        taken = select(func.sum(db.updates.c.bytes)).where(db.updates.c.run == run)
        of_updates = db.tasks.c.kind.in_(sorted(TRAININGS)) | (db.tasks.c.subject == Subject.UPDATE)
        sent = select(func.sum(db.tasks.c.base_bytes)).where(db.tasks.c.run == run, of_updates)
        found = (self._read(taken.where(db.updates.c.verdict == Verdict.ACCEPTED)), self._read(sent))
        received, asked = (int(rows[0][0] or 0) for rows in found)
        return received, asked

    def scored_round(self, run: str) -> int:
        """The newest round with scores that was not rolled back; 0: none."""
        newest = [
            self._read(self._scores_of(run, table).with_only_columns(func.max(table.c.round)))[0][0] or 0
            for table in (db.scores, db.score_sums)
        ]
        return int(max(newest))

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
        query = _of_rounds(self._scores_of(run, db.scores), db.scores, round)
        if names is not None:
            query = query.where(db.scores.c.name.in_(names))
        table: dict[int, dict[SiteId, dict[str, float]]] = {}
        for row in self._read(query.order_by(db.scores.c.round, db.scores.c.site, db.scores.c.name)):
            table.setdefault(row.round, {}).setdefault(row.site, {})[row.name] = row.value
        return table

    def score_sums(
        self, run: str, round: int | range | None = None, names: Collection[str] | None = None
    ) -> dict[int, dict[str, Spread]]:
        """What secure sums say of sites' own scores, by round (or of one, or some) and name (or some); as `scores`."""
        query = _of_rounds(self._scores_of(run, db.score_sums), db.score_sums, round)
        if names is not None:
            query = query.where(db.score_sums.c.name.in_(names))
        found: dict[int, dict[str, Spread]] = {}
        for row in self._read(query.order_by(db.score_sums.c.round, db.score_sums.c.name)):
            found.setdefault(row.round, {})[row.name] = Spread(row.mean, None, None, row.sites)
        return found

    def contributors(self, run: str, rounds: range) -> frozenset[SiteId]:
        """The sites of which an update of these rounds was accepted."""
        updates = db.updates.c
        query = select(updates.site).where(updates.run == run, updates.verdict == Verdict.ACCEPTED).distinct()
        found = self._read(query.where(updates.round >= rounds.start, updates.round < rounds.stop))
        return frozenset(row.site for row in found)

    def _scores_of(self, run: str, table: Table) -> Any:
        """All scores of a run, or sums of them, that were not rolled back."""
        same = [db.rounds.c[name] == table.c[name] for name in ("run", "round", "attempt")]
        kept = db.rounds.c.rolled_back.is_not(True)
        return select(table).outerjoin(db.rounds, and_(*same)).where(table.c.run == run, kept)

    def sealed(self) -> set[str]:
        """What must never be lost: seals of accepted updates, digests of published states, revoked certificates."""
        return {row[0] for query in SEALED for row in self._read(query)}

    def named(self, among: Collection[Digest] | None = None) -> set[Digest]:
        """Digests of blobs that any row names.

        Args:
            among: look for these only.
        """
        columns = (db.rounds.c.state, db.rounds.c.aggregate, db.tasks.c.base_digest, db.updates.c.digest)
        queries = [select(column).where(_names_blob(column)).distinct() for column in columns]
        if among is not None:
            queries = [query.where(column.in_(sorted(among))) for query, column in zip(queries, columns, strict=True)]
        return {Digest(row[0]) for query in queries for row in self._read(query)}

    def referenced(self, run: str, since: int, former: Collection[int] = ()) -> tuple[set[Digest], set[Digest]]:
        """Digests that rounds before `since` name, and those that are needed (states, bases, updates).

        Needed are those that later rounds name, the state that round `since` was made from, without which it could not
        be verified, and the newest state of every other run: runs of one seed begin with the same bytes.

        Args:
            former: rounds before `since` that were kept longer than others, as `made_of` says.
        """
        longer = sorted({*former, *(number - 1 for number in former)})
        before: set[Digest] = set()
        needed: set[Digest] = set()
        for column, at in (
            (db.rounds.c.state, db.rounds),
            (db.rounds.c.aggregate, db.rounds),
            (db.tasks.c.base_digest, db.tasks),
            (db.updates.c.digest, db.updates),
        ):
            query = select(column.label("digest"), at.c.round).where(at.c.run == run, _names_blob(column))
            for row in self._read(query.where((at.c.round >= since - 2) | at.c.round.in_(longer)).distinct()):
                keeps = row.round >= since or (column is db.rounds.c.state and row.round == since - 1)
                (needed if keeps else before).add(Digest(row.digest))
        return before, needed | self._newest_states(run)

    def made_of(self, run: str, round: int) -> set[Digest]:
        """A round's states, and what is needed to compute them again: its updates and the states before it."""
        states = select(db.rounds.c.state).where(db.rounds.c.run == run, db.rounds.c.round.in_([round - 1, round]))
        updates = select(db.updates.c.digest).where(db.updates.c.run == run, db.updates.c.round == round)
        queries = states.where(db.rounds.c.state.is_not(None)), updates.where(db.updates.c.verdict == Verdict.ACCEPTED)
        return {Digest(row[0]) for query in queries for row in self._read(query)}

    def sharing(self, run: str, states: Collection[Digest]) -> list[str]:
        """The other runs that published one of these states, too."""
        query = select(db.rounds.c.run).where(db.rounds.c.run != run, db.rounds.c.state.in_(sorted(states)))
        return sorted({row.run for row in self._read(query.distinct())})

    def _newest_states(self, besides: str) -> set[Digest]:
        """What other runs are restored from."""
        published = (db.rounds.c.run != besides) & db.rounds.c.state.is_not(None) & ~db.rounds.c.rolled_back
        last = select(db.rounds.c.run, func.max(db.rounds.c.round).label("round")).where(published)
        newest = last.group_by(db.rounds.c.run).subquery()
        same = (db.rounds.c.run == newest.c.run) & (db.rounds.c.round == newest.c.round)
        query = select(db.rounds.c.state).join(newest, same).where(published)
        return {Digest(row.state) for row in self._read(query)}

    def _read(self, query: Any) -> Sequence[Row[Any]]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).all()
        except SQLAlchemyError as error:
            raise state_error(error) from error


def _names_blob(column: Any) -> Any:
    """Whether a digest is of a blob that stays: of an update that came too late there is none."""
    named = column.is_not(None)
    return named & db.updates.c.verdict.in_(BLOB_KEPT) if column is db.updates.c.digest else named


def _narrowed(table: Any, run: str, round: int | range | None, attempt: int | None) -> Any:
    query = _of_rounds(select(table).where(table.c.run == run), table, round)
    return query if attempt is None else query.where(table.c.attempt == attempt)


def _of_rounds(query: Any, table: Any, round: int | range | None) -> Any:
    if isinstance(round, range):
        return query.where(table.c.round >= round.start, table.c.round < round.stop)
    return query if round is None else query.where(table.c.round == round)


def _run(row: Row[Any]) -> RunRow:
    return RunRow(**{**row._mapping, "outcome": None if row.outcome is None else RoundOutcome(row.outcome)})


def _round(row: Row[Any]) -> RoundRow:
    return RoundRow(**{**row._mapping, "statistics": row.statistics or {}})


def _task(row: Row[Any]) -> TaskRow:
    subject = None if row.subject is None else Subject(row.subject)
    return TaskRow(**{**row._mapping, "kind": TaskKind(row.kind), "subject": subject})


def _update(row: Row[Any], task: TaskRow) -> UpdateRow:
    return UpdateRow(
        task,
        Verdict(row.verdict),
        row.reason,
        row.digest,
        row.bytes,
        row.metrics,
        row.weight,
        row.code,
        row.norm,
        row.set_aside,
    )
