"""The ledger's versions: which one a database has, and how it gets the newest. The steps are in `migrations/`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect

from protofed.common.errors import StateError
from protofed.common.version import VERSION
from protofed.server.storage.schema import metadata

KNOWN = ("0200", "0201", "0202", "0203", "0204", "0205", "0206", "0207", "0208", "0209")
NEWEST = KNOWN[-1]
_marks = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))  # Alembic's own
_BEFORE = ("0001", "0002", "0003", "0004")  # of protofed 0.1, which was never released


def found(connection: Connection) -> str | None:
    """The version of a database; None: there is no ledger in it.

    Raises:
        StateError: it has one that this software does not know, or tables that are not a ledger's.
    """
    names = set(inspect(connection).get_table_names())
    if not names & {*metadata.tables, _marks.name}:
        return None
    version = connection.execute(_marks.select()).scalar() if _marks.name in names else None
    if version in _BEFORE or (version is None and "meta" in names):  # the first of 0.1 counted in a table of its own
        raise StateError(
            f"the ledger is one of protofed 0.1, which {VERSION} does not read; let 0.1 end its runs, then start with "
            "an empty state folder"
        )
    if version is None:
        raise StateError("the database has tables but no ledger's version; give the ledger a database of its own")
    if version not in KNOWN:
        raise StateError(
            f"the ledger has version {version}, protofed {VERSION} reads versions up to {NEWEST}; "
            "use the newer protofed that wrote it"
        )
    return str(version)


def create(connection: Connection) -> None:
    """A ledger in an empty database; everything or, if the transaction is not committed, nothing."""
    if connection.dialect.name != "sqlite":
        upgrade(connection)  # which knows what a database's own language would do to the order of sites
        return
    metadata.create_all(connection)
    _mark(connection, NEWEST)


def upgrade(connection: Connection) -> None:
    """Make the newest version of what is there, a ledger or nothing, in the transaction of the connection."""
    from alembic import command  # half a second, once in a ledger's life
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, NEWEST)


def _mark(connection: Connection, version: str) -> None:
    _marks.create(connection)
    connection.execute(_marks.insert().values(version_num=version))
