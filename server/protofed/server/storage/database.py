"""The ledger's database: durable, one server's, checked and of the newest version before anything is read from it.

SQLite in a file or in memory, or PostgreSQL. The steps from version to version are in `migrations/`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, create_engine, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from protofed.common.errors import ConfigError, DiskFailureError, OutOfSpaceError, StateError
from protofed.common.storage import files
from protofed.common.version import VERSION, install_hint
from protofed.server.storage.schema import metadata

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
IN_MEMORY = "sqlite://"
BUSY_MS = 5000  # how long a write waits for another one
_WRITES = "protofed_writes"  # execution option of connections
KNOWN = ("0300",)
NEWEST = KNOWN[-1]
STEPS = Path(__file__).with_name("migrations")
_marks = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))  # Alembic's own
# Advisory locks have numbers, not names; a schema has one ledger.
_HOLDER = "SELECT pg_try_advisory_lock(hashtextextended('protofed holder ' || current_schema(), 0)), pg_backend_pid()"
_WRITER = "SELECT pg_advisory_xact_lock(hashtextextended('protofed writer ' || current_schema(), 0))"
_HELD = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = %(pid)s)"


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
            _hold(engine)
        elif file := _file(engine.url):
            _refuse_network(file)
            event.listen(engine, "connect", _durable)
            event.listen(engine, "begin", _begin)
        with writer(engine).begin() as connection:  # all or nothing: a ledger that is refused stays as it was
            check(connection)
            _renew(connection, engine.url)
    except SQLAlchemyError as error:
        engine.dispose()
        raise state_error(error) from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def writer(engine: Engine) -> Engine:
    """The engine of `open_ledger` for transactions that write: what one reads, no other one changes before it ends.

    One that only reads is `engine.connect()`: it waits for no writer and none waits for it, however long it takes.
    """
    return engine.execution_options(**{_WRITES: True})


Transaction = Callable[[], AbstractContextManager[Connection]]


class _Shared:
    """The one connection of a ledger in memory: a thread waits until another one has ended its transaction."""

    def __init__(self, engine: Engine) -> None:
        self._connection, self._turn = engine.connect(), Lock()

    def __enter__(self) -> Connection:
        self._turn.acquire()
        return self._connection

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self._connection.commit()
            else:
                self._connection.rollback()
        finally:
            self._turn.release()


def transactions(engine: Engine) -> tuple[Transaction, Transaction]:
    """What begins a transaction that reads, and one that writes, on the engine of `open_ledger`."""
    if engine.dialect.name == "sqlite" and _file(engine.url) is None:
        shared = _Shared(engine)
        return (lambda: shared), (lambda: shared)
    return engine.connect, writer(engine).begin


def open_engine(url: str, *, still: bool = False) -> Engine:
    """For a process that looks on: it can write nothing, and is not kept out by the server.

    Args:
        still: nobody writes to the file meanwhile, and SQLite makes not even its own files beside it.
    """
    engine = _engine(url, looking=True, still=still)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _look)
    return engine


def check(connection: Connection) -> None:
    """A damaged file is found at the start, not in the middle of a round."""
    if connection.dialect.name == "sqlite":
        result = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
        if result != "ok":
            raise StateError(f"the ledger is damaged: {result}; restore the state folder from a backup")


def backup_path(file: Path) -> Path:
    """Where the old ledger is kept after this software converted it to a newer version."""
    return file.with_name(f"{file.name}.before-{NEWEST}")


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
    if kind := files.find_network_type(file.parent):
        raise StateError(
            f"{file.parent} is on a network file system ({kind}), where SQLite loses writes; "
            "keep the state folder on a local disk, or the ledger in PostgreSQL"
        )


def _renew(connection: Connection, url: URL) -> None:
    version = read_version(connection)
    if version is None:
        _create(connection)
    elif version != NEWEST:
        if connection.dialect.name == "sqlite" and (file := _file(url)):
            _back_up(file)
        _upgrade(connection)


def _back_up(file: Path) -> None:
    """Copy what is committed; our own transaction is open meanwhile, so that nobody else writes."""
    target = backup_path(file)
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


# Versions


def read_version(connection: Connection) -> str | None:
    """The version of a database; None: there is no ledger in it.

    Raises:
        StateError: it has one that this software does not know, or tables that are not a ledger's.
    """
    names = set(inspect(connection).get_table_names())
    if not names & {*metadata.tables, _marks.name}:
        return None
    version = connection.execute(_marks.select()).scalar() if _marks.name in names else None
    if version is None:
        raise StateError("the database has tables but no ledger's version; give the ledger a database of its own")
    if version not in KNOWN:
        raise StateError(
            f"the ledger has version {version}, protofed {VERSION} reads versions from {KNOWN[0]} to {NEWEST}; "
            "use the protofed that wrote it, or an empty state folder"
        )
    return str(version)


def _create(connection: Connection) -> None:
    """A ledger in an empty database; everything or, if the transaction is not committed, nothing."""
    metadata.create_all(connection)
    _mark(connection, NEWEST)


def _upgrade(connection: Connection) -> None:
    """Make the newest version of an older ledger, in the transaction of the connection."""
    from alembic import command  # half a second, once in a ledger's life
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(STEPS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, NEWEST)


def _mark(connection: Connection, version: str) -> None:
    _marks.create(connection)
    connection.execute(_marks.insert().values(version_num=version))


# PostgreSQL


def _hold(engine: Engine) -> None:
    """Keep the ledger for this process, until the engine is disposed or the process dies.

    The lock belongs to a session of its own. Each transaction makes sure that the session still has it. A server whose
    session was cut must not write beside another server that has taken over, nor answer for long.

    Transactions that write take turns.

    Raises:
        StateError: another server has it.
        DiskFailureError: later, from the beginning of a transaction: the session was cut.
    """
    event.listen(engine, "connect", _durable_in_postgres)
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
    event.listen(engine, "begin", lambda connection: _begin_in_postgres(connection, pid))


def _look(connection: Any, _record: Any) -> None:
    """A connection that cannot write."""
    _set(connection, "default_transaction_read_only = on")


def _begin_in_postgres(connection: Connection, holder: int) -> None:
    if _writes(connection):
        connection.exec_driver_sql(_WRITER)
    if not connection.exec_driver_sql(_HELD, {"pid": holder}).scalar():
        raise DiskFailureError("the session that kept the ledger for this server was cut; start the server again")


def _durable_in_postgres(connection: Any, _record: Any) -> None:
    _set(connection, "synchronous_commit = on")
    _set(connection, "lock_timeout = '5s'")


def _set(connection: Any, setting: str) -> None:
    connection.execute(f"SET {setting}")
    connection.commit()
