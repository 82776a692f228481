"""The ledger's database: durable, one server's, checked and of the newest version before anything is read from it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from protofed.common.errors import ConfigError, DiskFailureError, OutOfSpaceError, StateError
from protofed.common.storage import files
from protofed.common.version import install_hint
from protofed.server.storage import migrate, postgres
from protofed.server.storage.filesystem import network_type_of

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


LEDGER_FILE = "ledger.sqlite"  # of a state folder
BUSY_MS = 5000  # how long a write waits for another one
_WRITES = "protofed_writes"  # execution option of connections


def open_ledger(url: str) -> Engine:
    """For the one server that writes: SQLite in memory (`sqlite://`) or in a file, or PostgreSQL.

    An empty database gets a ledger, an older ledger becomes the newest; of a file, a copy is kept beside it.

    Raises:
        ConfigError: the URL cannot be used.
        StateError: the database is damaged, another process's, newer than this software or on a network file system.
    """
    engine = _engine(url)
    try:
        if engine.dialect.name == "postgresql":
            postgres.hold(engine, _writes)
        elif file := _file(engine.url):
            _refuse_network(file)
            event.listen(engine, "connect", _durable)
            event.listen(engine, "begin", _begin)
        with writing(engine) as connection:  # all or nothing: a ledger that is refused stays as it was
            check(connection)
            _renew(connection, engine.url)
    except SQLAlchemyError as error:
        engine.dispose()
        raise state_error(error) from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def writing(engine: Engine) -> AbstractContextManager[Connection]:
    """A transaction of the engine of `open_ledger` that writes: what it reads, no other one changes before it ends.

    One that only reads is `engine.connect()`: it waits for no writer and none waits for it, however long it takes.
    """
    return engine.execution_options(**{_WRITES: True}).begin()


def open_engine(url: str, *, still: bool = False) -> Engine:
    """For a process that looks on: it can write nothing, and is not kept out by the server.

    Args:
        still: nobody writes to the file meanwhile, and SQLite makes not even its own files beside it.
    """
    engine = _engine(url, looking=True, still=still)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", postgres.look)
    return engine


def check(connection: Connection) -> None:
    """A damaged file is found at the start, not in the middle of a round."""
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
        if found != "ok":
            raise StateError(f"the ledger is damaged: {found}; restore the state folder from a backup")


def backup_of(file: Path) -> Path:
    """Where the ledger is kept as it was before this software made a newer version of it."""
    return file.with_name(f"{file.name}.before-{migrate.NEWEST}")


def _engine(url: str, *, looking: bool = False, still: bool = False) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            return create_engine(parsed, connect_args={"connect_timeout": 10})
        if parsed.get_backend_name() != "sqlite":
            raise ConfigError(f"a ledger is kept in SQLite or PostgreSQL, not in {parsed.get_backend_name()}")
        file = _file(parsed)
        if file is None:
            return create_engine(parsed, poolclass=StaticPool, connect_args={"check_same_thread": False})
        return create_engine(parsed, creator=lambda: _looking(file, still)) if looking else create_engine(parsed)
    except ImportError as error:
        raise ConfigError(f"the database's driver is missing ({error}): {install_hint('postgres')}") from error
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(
            "the ledger's database cannot be used; expected sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"
        ) from error


def _file(url: URL) -> Path | None:
    return Path(url.database) if url.database not in (None, "", ":memory:") else None


def _looking(file: Path, still: bool = False) -> sqlite3.Connection:
    how = "?mode=ro&immutable=1" if still else "?mode=ro"
    return sqlite3.connect(f"{file.absolute().as_uri()}{how}", uri=True, check_same_thread=False)


def _durable(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin` opens transactions, not the driver
    for pragma in (f"busy_timeout={BUSY_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A write must lock first: one that turns from reading to writing fails where another one wrote meanwhile.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_WRITES))


def _refuse_network(file: Path) -> None:
    if kind := network_type_of(file.parent):
        raise StateError(
            f"{file.parent} is on a network file system ({kind}), where SQLite loses writes; "
            "keep the state folder on a local disk, or the ledger in PostgreSQL"
        )


def _renew(connection: Connection, url: URL) -> None:
    version = migrate.found(connection)
    if version is None:
        migrate.create(connection)
    elif version != migrate.NEWEST:
        if connection.dialect.name == "sqlite" and (file := _file(url)):
            _back_up(file)
        migrate.upgrade(connection)


def _back_up(file: Path) -> None:
    """Copy what is committed; our own transaction is open meanwhile, so that nobody else writes."""
    target = backup_of(file)
    temporary = target.with_name(f"{files.TEMPORARY}{target.name}")
    try:
        temporary.unlink(missing_ok=True)
        with closing(_looking(file)) as source, closing(sqlite3.connect(temporary)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
        files.sync_folder(target.parent)
    except OSError as error:
        raise files.write_error(target, error) from error
    except sqlite3.Error as error:
        raise StateError(f"cannot copy the ledger to {target}: {error}; free space, or check the disk") from error
