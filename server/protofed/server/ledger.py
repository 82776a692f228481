"""The ledger: what the server has promised and decided, durable before anyone is told. State is a function of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from protofed.common.codec import Digest
from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.common.task import Receipt, Scores, TaskKind, Verdict
from protofed.server import schema as db
from protofed.server.engine import check, open_engine, state_error
from protofed.server.rows import RoundRow, RunRow, TaskRow, UpdateRow


class Ledger:
    """SQLite (or another database by URL) through SQLAlchemy Core. One writer; times are seconds of the Unix epoch.

    Raises:
        StateError: from every method: the database is damaged, locked, of another version or out of space.
    """

    def __init__(self, url: str = "sqlite://", *, read_only: bool = False) -> None:
        self._engine = open_engine(url)
        if read_only:  # a second process that looks on
            return
        with self._write() as connection:  # all or nothing: a ledger that is refused stays as it was
            check(connection)
            db.metadata.create_all(connection)
            found = connection.execute(select(db.meta.c.schema)).scalar()
            if found is None:
                connection.execute(insert(db.meta).values(schema=db.SCHEMA))
            if found not in (None, db.SCHEMA):
                raise StateError(
                    f"the ledger has schema {found}, this server reads {db.SCHEMA}; use the version that wrote it"
                )

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()

    # Sites

    def enroll(self, site: SiteId, roles: Sequence[str]) -> None:
        """Remember a site and what it offers."""
        with self._write() as connection:
            known = connection.execute(update(db.sites).where(db.sites.c.site == site).values(roles=list(roles)))
            if known.rowcount == 0:
                connection.execute(insert(db.sites).values(site=site, roles=list(roles)))

    def sites(self) -> dict[SiteId, list[str]]:
        """Every site that ever enrolled, with its roles."""
        return {row.site: row.roles for row in self._read(select(db.sites).order_by(db.sites.c.site))}

    # Runs

    def begin_run(self, run: str, fingerprint: Digest, recipe: str) -> None:
        """Write down a run before its first round."""
        with self._write() as connection:
            values = {"run": run, "fingerprint": fingerprint, "recipe": recipe, "began_at": time.time()}
            connection.execute(insert(db.runs).values(**values))

    def run(self, run: str) -> RunRow | None:
        """A run, if the ledger knows it."""
        rows = self._read(select(db.runs).where(db.runs.c.run == run))
        return RunRow(**rows[0]._mapping) if rows else None

    def end_run(self, run: str, reason: str, *, failed: bool) -> None:
        """Write down how a run ended."""
        with self._write() as connection:
            values = {"ended_at": time.time(), "failed": failed, "reason": reason}
            connection.execute(update(db.runs).where(db.runs.c.run == run).values(**values))

    # Rounds

    def open_round(self, row: RoundRow, tasks: Sequence[TaskRow]) -> None:
        """Write down an attempt and its invitations, all or nothing."""
        with self._write() as connection:
            values = {"run": row.run, "round": row.round, "attempt": row.attempt, "size": row.size}
            connection.execute(insert(db.rounds).values(**values, quorum=row.quorum, opened_at=time.time()))
            connection.execute(insert(db.tasks), [_columns(task) for task in tasks])

    def publish(self, run: str, round: int, attempt: int, state: Digest, *, complete: bool) -> None:
        """Close an attempt with the state that it gave."""
        fate = "not-needed" if complete else "late"
        self._close(run, round, attempt, fate, state=state, complete=complete)

    def abandon(self, run: str, round: int, attempt: int, reason: str) -> None:
        """Close an attempt that gave none."""
        self._close(run, round, attempt, "late", abandoned=reason)

    def _close(self, run: str, round: int, attempt: int, fate: str, **values: Any) -> None:
        here, theirs = (
            (table.c.run == run) & (table.c.round == round) & (table.c.attempt == attempt)
            for table in (db.rounds, db.tasks)
        )
        silent = theirs & db.tasks.c.fate.in_(("invited", "started"))
        with self._write() as connection:
            connection.execute(update(db.rounds).where(here).values(closed_at=time.time(), **values))
            connection.execute(update(db.tasks).where(silent).values(fate=fate))

    def invite(self, tasks: Sequence[TaskRow]) -> None:
        """Write down invitations outside a round's opening (to score)."""
        with self._write() as connection:
            connection.execute(insert(db.tasks), [_columns(task) for task in tasks])

    def rounds(self, run: str) -> list[RoundRow]:
        """All attempts of a run, in order."""
        query = select(db.rounds).where(db.rounds.c.run == run).order_by(db.rounds.c.round, db.rounds.c.attempt)
        return [RoundRow(**row._mapping) for row in self._read(query)]

    def mark_scored(self, run: str, round: int) -> None:
        """Nobody is asked for this round's scores any more."""
        here = (db.rounds.c.run == run) & (db.rounds.c.round == round) & db.rounds.c.state.is_not(None)
        theirs = (db.tasks.c.run == run) & (db.tasks.c.round == round) & (db.tasks.c.kind == TaskKind.SCORE)
        with self._write() as connection:
            connection.execute(update(db.rounds).where(here).values(scored=True))
            silent = theirs & db.tasks.c.fate.in_(("invited", "started"))
            connection.execute(update(db.tasks).where(silent).values(fate="late"))

    # Tasks

    def task(self, nonce: str) -> TaskRow | None:
        """The invitation of that nonce, if there was one."""
        rows = self._read(select(db.tasks).where(db.tasks.c.nonce == nonce))
        return _task(rows[0]) if rows else None

    def tasks(self, run: str, round: int, attempt: int | None = None) -> list[TaskRow]:
        """The invitations of a round (of one attempt), in site order."""
        query = select(db.tasks).where(db.tasks.c.run == run, db.tasks.c.round == round)
        if attempt is not None:
            query = query.where(db.tasks.c.attempt == attempt)
        return [_task(row) for row in self._read(query.order_by(db.tasks.c.site, db.tasks.c.kind))]

    def set_fate(self, nonce: str, fate: str, reason: str = "") -> None:
        """What became of an invitation."""
        with self._write() as connection:
            connection.execute(update(db.tasks).where(db.tasks.c.nonce == nonce).values(fate=fate, reason=reason))

    # Updates and scores

    def judge(self, row: UpdateRow) -> Receipt:
        """Write down a verdict; the update counts from here on."""
        receipt, task = row.receipt(), row.task
        values = {"run": task.run, "round": task.round, "attempt": task.attempt, "site": task.site, "nonce": task.nonce}
        values |= {"verdict": row.verdict, "reason": row.reason, "digest": row.digest, "bytes": row.bytes}
        values |= {"metrics": dict(row.metrics), "weight": row.weight, "seal": receipt.seal, "at": time.time()}
        with self._write() as connection:
            connection.execute(insert(db.updates).values(**values))
            if row.verdict is Verdict.ACCEPTED:
                connection.execute(update(db.tasks).where(db.tasks.c.nonce == task.nonce).values(fate="reported"))
        return receipt

    def accepted(self, task: TaskRow) -> UpdateRow | None:
        """The update that counts for an invitation, if there is one."""
        query = select(db.updates).where(db.updates.c.nonce == task.nonce, db.updates.c.verdict == Verdict.ACCEPTED)
        rows = self._read(query)
        return _update(rows[0], task) if rows else None

    def updates(self, run: str, round: int, attempt: int | None = None) -> list[UpdateRow]:
        """All commits of a round (of one attempt) in site order, the refused ones too."""
        query = select(db.updates).where(db.updates.c.run == run, db.updates.c.round == round)
        if attempt is not None:
            query = query.where(db.updates.c.attempt == attempt)
        tasks = {task.nonce: task for task in self.tasks(run, round, attempt)}
        return [
            _update(row, tasks[row.nonce]) for row in self._read(query.order_by(db.updates.c.site, db.updates.c.id))
        ]

    def add_scores(self, task: TaskRow, scores: Scores) -> None:
        """Write down a site's scores of a round."""
        rows = [
            {"run": task.run, "round": task.round, "site": task.site, "name": n, "value": v} for n, v in scores.items()
        ]
        with self._write() as connection:
            if rows:
                connection.execute(insert(db.scores), rows)
            connection.execute(update(db.tasks).where(db.tasks.c.nonce == task.nonce).values(fate="reported"))

    def scores(self, run: str, round: int | None = None) -> dict[int, dict[SiteId, dict[str, float]]]:
        """Scores by round (or of one round), site and name."""
        query = select(db.scores).where(db.scores.c.run == run)
        if round is not None:
            query = query.where(db.scores.c.round == round)
        table: dict[int, dict[SiteId, dict[str, float]]] = {}
        for row in self._read(query.order_by(db.scores.c.round, db.scores.c.site)):
            table.setdefault(row.round, {}).setdefault(row.site, {})[row.name] = row.value
        return table

    def referenced(self, run: str, since: int) -> tuple[set[Digest], set[Digest]]:
        """Digests that rounds before `since` name, and those that later ones do (states, bases, updates).

        The newest state of every other run is among the latter: runs of one seed begin with the same bytes.
        """
        before: set[Digest] = set()
        after: set[Digest] = set()
        for column, at in (
            (db.rounds.c.state, db.rounds),
            (db.tasks.c.base, db.tasks),
            (db.updates.c.digest, db.updates),
        ):
            query = select(column.label("digest"), at.c.round).where(at.c.run == run, column.is_not(None))
            for row in self._read(query.where(at.c.round >= since - 2).distinct()):
                (before if row.round < since else after).add(Digest(row.digest))
        return before, after | self._newest_states(run)

    def _newest_states(self, besides: str) -> set[Digest]:
        """What other runs are restored from."""
        published = (db.rounds.c.run != besides) & db.rounds.c.state.is_not(None)
        last = select(db.rounds.c.run, func.max(db.rounds.c.round).label("round")).where(published)
        newest = last.group_by(db.rounds.c.run).subquery()
        same = (db.rounds.c.run == newest.c.run) & (db.rounds.c.round == newest.c.round)
        query = select(db.rounds.c.state).join(newest, same).where(published)
        return {Digest(row.state) for row in self._read(query)}

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise state_error(error) from error

    def _read(self, query: Any) -> Sequence[Row[Any]]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).all()
        except SQLAlchemyError as error:
            raise state_error(error) from error


def _columns(task: TaskRow) -> dict[str, Any]:
    return {name: getattr(task, name) for name in [field.name for field in fields(TaskRow)]}


def _task(row: Row[Any]) -> TaskRow:
    task = TaskRow(**row._mapping)
    return replace(task, kind=TaskKind(task.kind))


def _update(row: Row[Any], task: TaskRow) -> UpdateRow:
    return UpdateRow(task, Verdict(row.verdict), row.reason, row.digest, row.bytes, row.metrics, row.weight)
