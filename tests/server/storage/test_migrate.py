"""The ledger's versions: what a new one is, and which are refused."""

from __future__ import annotations

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
from sqlalchemy import Engine, create_engine, insert, inspect, select, text

from protofed.common.errors import StateError
from protofed.server.storage import migrate as versions
from protofed.server.storage import schema as db
from protofed.server.storage.database import open_engine, open_ledger
from protofed.server.storage.ledger import Ledger

OLD = (Path(__file__).parents[2] / "golden" / "ledger_0001.sql").read_text(encoding="utf-8")
MIGRATIONS = Path(versions.__file__).with_name("migrations")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger with rows of every table, as protofed 0.1 wrote it."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(OLD)
        file.execute("PRAGMA journal_mode=WAL")
    return path


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
    script = ScriptDirectory(str(MIGRATIONS))
    assert script.get_current_head() == versions.NEWEST
    assert sorted(step.revision for step in script.walk_revisions()) == list(versions.KNOWN)


def test_a_new_ledger_is_what_the_schema_says(ledger_url: str) -> None:
    with opened(ledger_url) as engine:
        assert differences(engine) == []
        with engine.connect() as connection:
            assert versions.found(connection) == versions.NEWEST


def test_the_steps_make_what_the_schema_says(kept_url: str) -> None:
    engine = create_engine(kept_url)
    with engine.begin() as connection:
        versions.upgrade(connection)
    assert differences(engine) == []
    engine.dispose()


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

OF_0_2_0 = (Path(__file__).parents[2] / "golden" / "v0_2_0" / "server" / "ledger.sql").read_text(encoding="utf-8")


def test_certificates_of_0_2_0_keep_the_roles_that_they_could_claim(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(OF_0_2_0)
        known = [("a" * 64, "site", "ann", None), ("b" * 64, "site", "bob", 3.0), ("c" * 64, "operator", "olga", None)]
        for fingerprint, party, name, revoked in known:
            row = (fingerprint, party, name, 0.0, 9e9, 1.0, revoked, None)
            file.execute("INSERT INTO certificates VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        file.commit()
    ledger = Ledger(f"sqlite:///{path}")
    both = ("trainer", "evaluator")
    assert {row.name: (row.roles, row.revoked_at) for row in ledger.certificates()} == {
        "ann": (both, None),
        "bob": (both, 3.0),
        "olga": (("operator",), None),
    }
    ledger.close()
    assert path.with_name(f"{path.name}.before-{versions.NEWEST}").exists()


def test_the_sizes_of_a_ledger_of_before_become_wide_enough(kept_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {
        "task_id": "t",
        "run": "r",
        "round": 1,
        "attempt": 1,
        "site": "ann",
        "kind": "fit",
        "task_status": "invited",
    }
    before = create_engine(kept_url)
    with monkeypatch.context() as patch, before.begin() as connection:
        patch.setattr(versions, "NEWEST", "0207")
        versions.upgrade(connection)
        connection.execute(insert(db.tasks).values(**task, base_bytes=5))
    before.dispose()
    with opened(kept_url) as engine:
        assert differences(engine) == []
        with engine.begin() as connection:
            connection.execute(insert(db.tasks).values(**task | {"task_id": "u"}, base_bytes=4 << 30))
        assert [row["base_bytes"] for row in rows(engine, "tasks", "task_id")] == [5, 4 << 30]


# What is refused


@pytest.mark.parametrize("version", ["0005", "9999", "0000"])
def test_a_ledger_of_an_unknown_version_is_refused_and_not_touched(kept_url: str, version: str) -> None:
    with opened(kept_url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
        connection.execute(text("DROP TABLE scores"))
    with pytest.raises(StateError, match=f"version {version}, .* up to"):
        open_ledger(kept_url)
    onlooker = open_engine(kept_url)
    assert "scores" not in inspect(onlooker).get_table_names()
    onlooker.dispose()


def test_a_ledger_of_protofed_0_1_is_refused_and_not_touched(old: Path) -> None:
    before = dump(old)
    with pytest.raises(StateError, match=r"protofed 0\.1, which .* does not read; .* empty state folder"):
        open_ledger(f"sqlite:///{old}")
    with closing(sqlite3.connect(old)) as file:  # as the last 0.1 left it
        file.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        file.execute("INSERT INTO alembic_version VALUES ('0004')")
        file.commit()
    with pytest.raises(StateError, match=r"protofed 0\.1, which"):
        open_ledger(f"sqlite:///{old}")
    assert before.splitlines()[1:-1] == [line for line in dump(old).splitlines()[1:-1] if "alembic" not in line]


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE runs (distance REAL)")
    before = dump(path)
    with pytest.raises(StateError, match="a database of its own"):
        open_ledger(f"sqlite:///{path}")
    assert dump(path) == before


def test_a_ledger_of_0_2_0_has_no_groups_and_keeps_those_that_are_formed(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "golden" / "v0_2_0" / "server" / "ledger.sql"
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(kept.read_text(encoding="utf-8"))
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
