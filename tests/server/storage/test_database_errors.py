"""What a database's error means, and what the user is told to do."""

from __future__ import annotations

import sqlite3

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError, OperationalError

from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError
from protofed.server.storage.database import state_error


def of_sqlite(code: int, message: str) -> StateError:
    cause = sqlite3.OperationalError(message)
    cause.sqlite_errorcode = code
    return state_error(OperationalError("COMMIT", {}, cause))


@pytest.mark.parametrize(
    ("code", "message", "kind", "advice"),
    [
        (sqlite3.SQLITE_FULL, "database or disk is full", OutOfSpaceError, "free space"),
        (sqlite3.SQLITE_IOERR_FSYNC, "disk I/O error", DiskFailureError, "check the disk"),
        (sqlite3.SQLITE_READONLY, "attempt to write a readonly database", DiskFailureError, "writable"),
        (sqlite3.SQLITE_BUSY, "database is locked", StateError, "another process has it"),
        (sqlite3.SQLITE_CORRUPT, "database disk image is malformed", StateError, "from a backup"),
        (sqlite3.SQLITE_CANTOPEN, "unable to open database file", StateError, "a folder that can be written"),
        (sqlite3.SQLITE_ERROR, "no such column: runs.position", StateError, "start the server once"),
        (sqlite3.SQLITE_ERROR, "near SELCT: syntax error", StateError, "from a backup"),
    ],
)
def test_of_sqlite(code: int, message: str, kind: type[StateError], advice: str) -> None:
    found = of_sqlite(code, message)
    assert type(found) is kind
    assert str(found).startswith(f"the ledger cannot be used: {message}; ")
    assert advice in str(found)


@pytest.mark.parametrize(
    ("cause", "kind", "advice"),
    [
        (errors.DiskFull("could not extend file"), OutOfSpaceError, "free space"),
        (errors.IoError("could not fsync"), DiskFailureError, "check the database's disk"),
        (errors.ReadOnlySqlTransaction("read-only"), DiskFailureError, "writable"),
        (errors.LockNotAvailable("lock timeout"), StateError, "another process has it"),
        (errors.UndefinedTable("relation"), StateError, "start the server once"),
        (errors.UndefinedColumn("column"), StateError, "start the server once"),
        (errors.DataCorrupted("page"), StateError, "from a backup"),
        (errors.TooManyConnections("sorry"), StateError, "that the database runs"),
        (psycopg.OperationalError("connection refused\nIs the server running?"), StateError, "that the database runs"),
    ],
)
def test_of_postgres(cause: psycopg.Error, kind: type[StateError], advice: str) -> None:
    found = state_error(OperationalError("COMMIT", {}, cause))
    assert type(found) is kind
    assert advice in str(found)
    assert "\n" not in str(found)


def test_a_contradiction_is_no_fault_of_the_disk() -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE once (name TEXT PRIMARY KEY)"))
        connection.execute(text("INSERT INTO once VALUES ('x')"))
        with pytest.raises(IntegrityError) as caught:
            connection.execute(text("INSERT INTO once VALUES ('x')"))
    assert "contradicts what stands there" in str(state_error(caught.value))
    engine.dispose()
