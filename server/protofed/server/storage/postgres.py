"""A ledger in PostgreSQL: one server's for as long as it is open, each write alone and durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, event

from protofed.common.errors import DiskFailureError, StateError

# Advisory locks have numbers, not names; a schema has one ledger.
_HOLDER = "SELECT pg_try_advisory_lock(hashtextextended('protofed holder ' || current_schema(), 0)), pg_backend_pid()"
_WRITER = "SELECT pg_advisory_xact_lock(hashtextextended('protofed writer ' || current_schema(), 0))"
_HELD = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = %(pid)s)"


def hold(engine: Engine, writes: Callable[[Connection], bool]) -> None:
    """Keep the ledger for this process, until the engine is disposed or the process dies.

    The lock belongs to a session of its own. Each transaction makes sure that the session still has it: a server whose
    session was cut must not write beside another one that has taken over, nor answer for long.

    Args:
        writes: whether a connection's transaction writes; those that do, take turns.

    Raises:
        StateError: another server has it.
        DiskFailureError: later, from the beginning of a transaction: the session was cut.
    """
    event.listen(engine, "connect", _durable)
    session = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    session.detach()
    session.exec_driver_sql(
        "SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 4"
    )
    free, pid = session.exec_driver_sql(_HOLDER).one()
    if not free:
        session.close()
        raise StateError("the ledger is in use by another server; stop it, or give this one a schema of its own")
    event.listen(engine, "engine_disposed", lambda _engine: session.close())
    event.listen(engine, "begin", lambda connection: _begin(connection, pid, writes=writes(connection)))


def look(connection: Any, _record: Any) -> None:
    """A connection that cannot write."""
    _set(connection, "default_transaction_read_only = on")


def _begin(connection: Connection, holder: int, *, writes: bool) -> None:
    if writes:
        connection.exec_driver_sql(_WRITER)
    if not connection.exec_driver_sql(_HELD, {"pid": holder}).scalar():
        raise DiskFailureError("the session that kept the ledger for this server was cut; start the server again")


def _durable(connection: Any, _record: Any) -> None:
    _set(connection, "synchronous_commit = on")
    _set(connection, "lock_timeout = '5s'")


def _set(connection: Any, setting: str) -> None:
    connection.execute(f"SET {setting}")
    connection.commit()
