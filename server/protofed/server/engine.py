"""The ledger's database: durable, checked at the start, its errors as ours."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from protofed.common.errors import StateError

LEDGER_FILE = "ledger.sqlite"  # of a state folder


def open_engine(url: str) -> Engine:
    """SQLite in memory (`sqlite://`), SQLite in a file so that a commit is durable, or another database."""
    if url == "sqlite://":
        return create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _durable)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _durable(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy's own BEGIN IMMEDIATE opens transactions, not the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def check(connection: Connection) -> None:
    """A damaged file is found at the start, not in the middle of a round."""
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
        if found != "ok":
            raise StateError(f"the ledger is damaged: {found}; restore the state folder from a backup")


def state_error(error: SQLAlchemyError) -> StateError:
    """A database's error as ours."""
    cause = getattr(error, "orig", None) or error
    return StateError(f"the ledger cannot be used: {cause}; check the disk, or restore the state folder from a backup")
