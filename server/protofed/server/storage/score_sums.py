"""What sums of the sites' own scores say, in the ledger's tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, insert

from protofed.common.protocol.scores import Spread
from protofed.server.storage import schema as db


def replace_sums(
    connection: Connection, attempt: tuple[str, int, int], names: Collection[str], sums: Mapping[str, Spread]
) -> None:
    """See `Ledger.sum_scores`.

    Args:
        attempt: run, round and number.
    """
    of_round = dict(zip(("run", "round", "attempt"), attempt, strict=True))

    def here(table: Table) -> ColumnElement[bool]:
        return and_(*(table.c[key] == value for key, value in of_round.items()))

    connection.execute(delete(db.scores).where(here(db.scores), db.scores.c.name.in_(names)))
    connection.execute(delete(db.score_sums).where(here(db.score_sums)))
    rows = [{**of_round, "name": name, "mean": spread.mean, "sites": spread.sites} for name, spread in sums.items()]
    if rows:
        connection.execute(insert(db.score_sums), rows)
