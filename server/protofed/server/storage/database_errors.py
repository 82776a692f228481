"""A database's errors as ours, each with what to do."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError

_RESTORE = "check the disk, or restore the state folder from a backup"


def state_error(error: SQLAlchemyError) -> StateError:
    """What a database's error means."""
    cause = getattr(error, "orig", None) or error
    kind, advice = _meaning(cause)
    if isinstance(error, IntegrityError):
        advice = "what is written contradicts what stands there"
    return kind(f"the ledger cannot be used: {_first_line(cause)}; {advice}")


def _meaning(cause: BaseException) -> tuple[type[StateError], str]:
    if isinstance(cause, sqlite3.Error):
        return _of_sqlite(getattr(cause, "sqlite_errorcode", 0) & 0xFF, str(cause))  # the rest only tells details
    return _of_postgres(getattr(cause, "sqlstate", None) or "")


def _of_sqlite(code: int, text: str) -> tuple[type[StateError], str]:
    match code:
        case sqlite3.SQLITE_FULL:
            return OutOfSpaceError, "free space, then the same again succeeds"
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_READONLY:
            return DiskFailureError, "check the disk, make the folder writable"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StateError, "another process has it; stop that process"
        case sqlite3.SQLITE_CANTOPEN:
            return StateError, "expected a file in a folder that can be written"
        case sqlite3.SQLITE_ERROR if text.startswith("no such"):
            return StateError, "there is no ledger yet, or an older one: start the server once"
    return StateError, _RESTORE


def _of_postgres(state: str) -> tuple[type[StateError], str]:
    match state[:2], state:
        case "53", "53100":
            return OutOfSpaceError, "free space in the database, then the same again succeeds"
        case _, "58030" | "25006":
            return DiskFailureError, "check the database's disk, make it writable"
        case "55", "55P03":
            return StateError, "another process has it; stop that process"
        case "42", "42P01" | "42703":
            return StateError, "there is no ledger yet, or an older one: start the server once"
        case "XX", _:
            return StateError, "check the database's disk, or restore the ledger from a backup"
    return StateError, "check that the database runs, its address and its rights"


def _first_line(cause: BaseException) -> str:
    return str(cause).strip().split("\n", 1)[0]
