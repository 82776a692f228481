"""The ledger's versions: what a new one is, and which are refused."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, insert, inspect, select, text

from protofed.common.errors import StateError
from protofed.server.storage import database as versions
from protofed.server.storage import schema as db
from protofed.server.storage.database import open_engine, open_ledger
from protofed.server.storage.ledger import Ledger

KEPT = (Path(__file__).parents[2] / "golden" / "v0_3_0" / "server" / "ledger.sql").read_text(encoding="utf-8")


def dump(path: Path) -> str:
    with closing(sqlite3.connect(path)) as file:
        return "\n".join(line.rstrip() for statement in file.iterdump() for line in statement.splitlines()) + "\n"


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    engine = open_ledger(url)
    try:
        yield engine
    finally:
        engine.dispose()


def rows(engine: Engine, table: str, *order: str) -> list[dict[str, Any]]:
    query = select(db.metadata.tables[table]).order_by(*(db.metadata.tables[table].c[name] for name in order))
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def differences(engine: Engine) -> Any:
    with engine.connect() as connection:
        exact = engine.dialect.name == "postgresql"  # of SQLite, Alembic takes '' for another default than ''
        context = MigrationContext.configure(connection, opts={"compare_server_default": exact})
        return compare_metadata(context, db.metadata)


def shape(engine: Engine) -> Any:
    seen, names = inspect(engine), sorted(db.metadata.tables)
    columns = {name: sorted(map(str, seen.get_columns(name))) for name in names}
    return columns, {name: seen.get_pk_constraint(name) for name in names}


# What the newest version is


def test_the_newest_version_is_that_of_the_last_step() -> None:
    script = ScriptDirectory(str(versions.STEPS))
    assert script.get_current_head() == versions.NEWEST
    assert sorted(step.revision for step in script.walk_revisions()) == list(versions.KNOWN)


def test_a_new_ledger_is_what_the_schema_says(ledger_url: str) -> None:
    with opened(ledger_url) as engine:
        assert differences(engine) == []
        with engine.connect() as connection:
            assert versions.read_version(connection) == versions.NEWEST


def test_a_kept_ledger_is_what_the_schema_says(tmp_path: Path) -> None:
    """Of whoever changes the schema without a step."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(KEPT)
    with opened(f"sqlite:///{path}") as engine:
        assert differences(engine) == []


def test_a_database_sorts_sites_by_their_bytes(postgres_url: str) -> None:
    with opened(postgres_url) as engine:
        for table in ("sites", "tasks", "updates", "scores"):
            (site,) = [column for column in inspect(engine).get_columns(table) if column["name"] == "site"]
            assert getattr(site["type"], "collation", None) == "C", table
        with engine.begin() as connection:
            connection.execute(insert(db.sites), [{"site": site, "roles": []} for site in ("ab", "a-c", "aa", "a0")])
        assert [row["site"] for row in rows(engine, "sites", "site")] == ["a-c", "a0", "aa", "ab"]


def test_a_ledger_of_the_newest_version_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for _ in range(2):
        with opened(f"sqlite:///{path}"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]


# Older versions


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A software whose ledger has one more column."""
    steps = tmp_path / "steps"
    shutil.copytree(versions.STEPS, steps)
    (steps / "versions" / "v0301_more.py").write_text(
        "from alembic import op\nfrom sqlalchemy import Column, Integer\n"
        "revision, down_revision = '0301', '0300'\n"
        "def upgrade(): op.add_column('runs', Column('more', Integer))\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(versions, "STEPS", steps)
    monkeypatch.setattr(versions, "KNOWN", ("0300", "0301"))
    monkeypatch.setattr(versions, "NEWEST", "0301")
    return "0301"


def test_an_older_ledger_becomes_the_newest_and_a_file_is_kept_as_it_was(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(KEPT)
        file.execute("PRAGMA journal_mode=WAL")
    before = dump(path)
    newest = request.getfixturevalue("next_version")
    with opened(f"sqlite:///{path}") as engine, engine.connect() as connection:
        assert versions.read_version(connection) == newest
        assert [row["more"] for row in connection.execute(text("SELECT more FROM runs")).mappings()] == [None]
    assert dump(path.with_name(f"{path.name}.before-{newest}")) == before


# What is refused


@pytest.mark.parametrize("version", ["0200", "9999", "0000"])
def test_a_ledger_of_an_unknown_version_is_refused_and_not_touched(kept_url: str, version: str) -> None:
    with opened(kept_url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
        connection.execute(text("DROP TABLE scores"))
    with pytest.raises(StateError, match=f"version {version}, .* from 0300 to"):
        open_ledger(kept_url)
    onlooker = open_engine(kept_url)
    assert "scores" not in inspect(onlooker).get_table_names()
    onlooker.dispose()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE runs (distance REAL)")
    before = dump(path)
    with pytest.raises(StateError, match="a database of its own"):
        open_ledger(f"sqlite:///{path}")
    assert dump(path) == before


def test_groups_that_are_formed_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(f"sqlite:///{path}")
    assert ledger.groups() == ()
    ledger.keep_groups((("a", "b", "c"), ("d",)))
    ledger.keep_groups((("a", "b", "d"),))
    assert ledger.groups() == (("a", "b", "c"),), "nobody is in two, and who is alone is in none"
    ledger.dissolve(("a", "b", "c"))
    between = time.time()
    ledger.keep_groups((("a", "b", "d"),))
    assert (ledger.groups(), ledger.groups(between)) == ((("a", "b", "d"),), ())
    ledger.close()
    again = Ledger(f"sqlite:///{path}")
    assert again.groups() == (("a", "b", "d"),)
    again.close()
