"""Verdicts on updates in the ledger's tables, and what is promised of each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from protofed.common.errors import StateError
from protofed.common.protocol.messages import Receipt, Verdict
from protofed.server.storage import schema as db
from protofed.server.storage.rows import UpdateRow


def write(connection: Connection, rows: Sequence[UpdateRow]) -> tuple[list[UpdateRow], list[Receipt]]:
    """Write those that do not stand here yet: which these are, and the receipts of all.

    Raises:
        StateError: another update for the same invitation counts already.
    """
    accepted = [row.task.task_id for row in rows if row.verdict is Verdict.ACCEPTED]
    counted = _accepted(connection, accepted) if accepted else {}
    new, receipts = [], []
    for row in rows:
        known = counted.get(row.task.task_id) if row.verdict is Verdict.ACCEPTED else None
        if known is None:
            new.append(row)
        elif known.digest != row.digest:
            raise StateError(f"two updates for one invitation of {row.task.site} in round {row.task.round}")
        receipts.append(known or row.receipt())
    if new:
        connection.execute(insert(db.updates), [{**promised(row), **_taken(row)} for row in new])
    if done := [task_id for task_id in accepted if task_id not in counted]:
        theirs = db.tasks.c.task_id.in_(done)
        connection.execute(update(db.tasks).where(theirs).values(task_status="reported"))
    return new, receipts


def promised(row: UpdateRow) -> Mapping[str, Any]:
    """What the journal repeats of a verdict."""
    task = row.task
    of_task = {name: getattr(task, name) for name in ("run", "round", "attempt", "site", "task_id")}
    found = {"verdict": row.verdict, "code": row.code, "reason": row.reason}
    return of_task | found | {"digest": row.digest, "bytes": row.bytes, "record_hash": row.receipt().record_hash}


def _accepted(connection: Connection, task_ids: Sequence[str]) -> dict[str, Receipt]:
    """The receipts of the updates that count, by invitation."""
    of = db.updates.c
    query = select(of.task_id, of.reason, of.digest, of.record_hash).where(of.verdict == Verdict.ACCEPTED)
    found = connection.execute(query.where(of.task_id.in_(task_ids)))
    return {row.task_id: Receipt(Verdict.ACCEPTED, row.reason, row.digest, row.record_hash) for row in found}


def _taken(row: UpdateRow) -> Mapping[str, Any]:
    return {"metrics": dict(row.metrics), "weight": row.weight, "norm": row.norm, "at": time.time()}
