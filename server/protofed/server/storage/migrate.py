"""The ledger's versions: which one a database has, and how it gets the newest. The steps are in `migrations/`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect

from protofed.common.errors import StateError
from protofed.common.version import VERSION
from protofed.server.storage.schema import metadata

KNOWN = ("0300",)
NEWEST = KNOWN[-1]
STEPS = Path(__file__).with_name("migrations")
_marks = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))  # Alembic's own


def found(connection: Connection) -> str | None:
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


def create(connection: Connection) -> None:
    """A ledger in an empty database; everything or, if the transaction is not committed, nothing."""
    metadata.create_all(connection)
    _mark(connection, NEWEST)


def upgrade(connection: Connection) -> None:
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
