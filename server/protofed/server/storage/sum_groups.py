"""The groups of secure sums in the ledger's tables: those that sites have, and those that were dissolved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from protofed.common.secure_aggregation.groups import Group, Groups, in_order
from protofed.server.storage import schema as db


def query(at: float | None = None) -> Select[Any]:
    """For the rows of groups as they were at a time, in Unix time; None: as they are now."""
    formed, dissolved = db.sum_groups.c.formed_at, db.sum_groups.c.dissolved_at
    here = dissolved.is_(None) if at is None else (formed <= at) & (dissolved.is_(None) | (dissolved > at))
    return select(db.sum_groups.c.site, db.sum_groups.c.first).where(here)


def groups_of(rows: Sequence[Row[Any]]) -> Groups:
    """What such rows say."""
    return in_order([row.site for row in rows if row.first == first] for first in {row.first for row in rows})


def keep(connection: Connection, groups: Groups) -> None:
    """Write down those that are not known yet, of sites alone excepted."""
    current = select(db.sum_groups.c.site).where(db.sum_groups.c.dissolved_at.is_(None))
    known, at = set(connection.execute(current).scalars()), time.time()
    new = [group for group in groups if len(group) > 1 and known.isdisjoint(group)]
    if rows := [{"site": site, "first": group[0], "formed_at": at} for group in new for site in group]:
        connection.execute(insert(db.sum_groups), rows)


def dissolve(connection: Connection, group: Group) -> None:
    """See `Ledger.dissolve`."""
    here = db.sum_groups.c.site.in_(group) & db.sum_groups.c.dissolved_at.is_(None)
    connection.execute(update(db.sum_groups).where(here).values(dissolved_at=time.time()))
