"""A ledger of protofed 0.1 becomes the newest: nothing that it says is lost, whatever happens meanwhile."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, column, create_engine, event, insert, inspect, select, text

from protofed.common.errors import StateError
from protofed.server.storage import migrate as versions
from protofed.server.storage import schema as db
from protofed.server.storage.database import backup_of, open_engine, open_ledger

OLD = (Path(__file__).parents[1] / "golden" / "ledger_0001.sql").read_text(encoding="utf-8")
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
        versions.upgrade(connection, None)
    assert differences(engine) == []
    engine.dispose()


def test_an_old_ledger_becomes_what_the_schema_says(old: Path) -> None:
    with opened(f"sqlite:///{old}") as engine:
        assert differences(engine) == []
        assert set(inspect(engine).get_table_names()) == {*db.metadata.tables, "alembic_version"}
        with opened("sqlite://") as new:
            assert shape(engine) == shape(new)
        (partial,) = [at for at in inspect(engine).get_indexes("updates") if at["name"] == "one_update_a_task"]
        assert str(partial["dialect_options"]["sqlite_where"]) == "verdict = 'accepted'"


def test_a_database_sorts_sites_by_their_bytes(postgres_url: str) -> None:
    with opened(postgres_url) as engine:
        for table in ("sites", "tasks", "updates", "scores"):
            (site,) = [column for column in inspect(engine).get_columns(table) if column["name"] == "site"]
            assert getattr(site["type"], "collation", None) == "C", table
        with engine.begin() as connection:
            connection.execute(insert(db.sites), [{"site": site, "roles": []} for site in ("ab", "a-c", "aa", "a0")])
        assert [row["site"] for row in rows(engine, "sites", "site")] == ["a-c", "a0", "aa", "ab"]


# What becomes of the rows


@pytest.fixture(params=["file", "postgresql"])
def upgraded(request: pytest.FixtureRequest, old: Path) -> Iterator[Engine]:
    """The old ledger after the upgrade; on PostgreSQL it is copied there first."""
    url = f"sqlite:///{old}"
    if request.param == "postgresql":
        source, url = create_engine(url), request.getfixturevalue("postgres_url")
        copy(source, url)
        source.dispose()
    with opened(url) as engine:
        yield engine


def copy(source: Engine, url: str) -> None:
    target, tables = create_engine(url), MetaData()
    with source.connect() as there, target.begin() as here:
        versions.upgrade(here, None, "0001")
        tables.reflect(here)
        for table in (table for table in db.metadata.sorted_tables if table.name in tables.tables):
            columns = tables.tables[table.name].columns
            query = select(*(table.c[c.name] if c.name in table.c else column(c.name, c.type) for c in columns))
            found = [dict(row) for row in there.execute(query.select_from(table)).mappings()]
            here.execute(insert(tables.tables[table.name]), found)
    target.dispose()


def test_sites_may_take_part(upgraded: Engine) -> None:
    assert rows(upgraded, "sites", "site") == [
        {"site": "ann", "roles": ["trainer"], "excluded": None},
        {"site": "bob", "roles": ["trainer", "evaluator"], "excluded": None},
        {"site": "eva", "roles": ["evaluator"], "excluded": None},
    ]


def test_runs_queue_in_the_order_in_which_they_began(upgraded: Engine) -> None:
    found = rows(upgraded, "runs", "position")
    assert [(row["position"], row["run"], row["outcome"], row["reason"]) for row in found] == [
        (1, "zeta", "completed", "completed"),
        (2, "alpha", "failed", "the site's model is unusable"),
        (3, "mid", "aborted", "stopped by the operator"),
        (4, "last", None, None),
    ]
    assert [row["ended_at"] is None for row in found] == [False, False, False, True]
    assert {row["paused"] for row in found} == {False}
    assert [row["recipe"] for row in found] == [f'{{"name": "{row["run"]}"}}' for row in found]


def test_rounds_and_tasks_are_kept(upgraded: Engine) -> None:
    found = rows(upgraded, "rounds", "run", "round", "attempt")
    assert [(row["round"], row["attempt"], row["complete"], row["abandoned"], row["scored"]) for row in found] == [
        (0, 1, True, None, False),
        (1, 1, None, "1 of 2 updates", False),
        (1, 2, True, None, True),
        (2, 1, None, None, False),
    ]
    assert {(row["aggregations"], row["rolled_back"], row["figures"]) for row in found} == {(0, False, None)}
    fates = {row["nonce"]: row["fate"] for row in rows(upgraded, "tasks", "nonce")}
    assert fates["last-1-1-bob-fit"] == "late"
    assert fates["last-2-1-ann-fit"] == "started"
    assert len(fates) == 9


def test_updates_are_kept_with_their_seals(upgraded: Engine, old: Path) -> None:
    found = rows(upgraded, "updates", "id")
    assert [row["verdict"] for row in found] == ["accepted", "accepted", "invalid", "accepted", "accepted", "stale"]
    assert {(row["code"], row["norm"], row["set_aside"]) for row in found} == {("", None, None)}
    assert all(f"'{row['seal']}',{row['at']});" in OLD for row in found)
    assert {row["weight"] for row in found} == {12.0}
    assert found[2]["metrics"] == {"loss": 0.5}


def test_scores_belong_to_the_attempt_that_published(upgraded: Engine) -> None:
    found = rows(upgraded, "scores", "site", "name")
    assert [(row["round"], row["attempt"], row["site"], row["name"], row["value"]) for row in found] == [
        (1, 2, "bob", "accuracy", 0.25),
        (1, 2, "bob", "loss", 1.5),
        (1, 2, "eva", "accuracy", 0.25),
        (1, 2, "eva", "loss", 1.5),
    ]


# What can happen meanwhile


def test_the_ledger_is_kept_as_it_was_beside_the_new_one(old: Path) -> None:
    with opened(f"sqlite:///{old}"):
        pass
    assert backup_of(old) == old.with_name("ledger.sqlite.before-0004")
    assert dump(backup_of(old)) == OLD
    assert sorted(path.name for path in old.parent.iterdir()) == ["ledger.sqlite", "ledger.sqlite.before-0004"]


def test_a_ledger_of_the_newest_version_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for _ in range(2):
        with opened(f"sqlite:///{path}"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_an_upgrade_that_fails_at_any_statement_changes_nothing(old: Path) -> None:
    failed = 0
    for fatal in count(1):
        with failing_at(fatal) as reached:
            try:
                open_ledger(f"sqlite:///{old}").dispose()
            except StateError:
                failed += 1
        if reached[0] < fatal:
            break
        assert dump(old) == OLD, f"statement {fatal}"
    assert failed > 20
    with opened(f"sqlite:///{old}") as engine:
        assert len(rows(engine, "updates", "id")) == 6


@contextmanager
def failing_at(fatal: int) -> Iterator[list[int]]:
    """The disk fails at the n-th statement; how many there were."""
    reached = [0]

    def fail(*_: Any) -> None:
        reached[0] += 1
        if reached[0] == fatal:
            raise StateError("injected")

    event.listen(Engine, "before_cursor_execute", fail)
    try:
        yield reached
    finally:
        event.remove(Engine, "before_cursor_execute", fail)


@pytest.mark.parametrize("statement", ["DROP TABLE old_scores", "UPDATE alembic_version"])
def test_an_upgrade_that_is_killed_changes_nothing(old: Path, statement: str) -> None:
    script = (
        "import os, sys\n"
        "from sqlalchemy import Engine, event\n"
        "from protofed.server.storage.database import open_ledger\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if statement.strip().startswith(sys.argv[2]):\n"
        "        os.kill(os.getpid(), 9)\n"
        "event.listen(Engine, 'after_cursor_execute', kill)\n"
        "open_ledger(sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, f"sqlite:///{old}", statement], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert dump(old) == OLD
    with opened(f"sqlite:///{old}") as engine:
        assert len(rows(engine, "scores", "site")) == 4


def test_a_copy_that_cannot_be_written_stops_the_upgrade(old: Path) -> None:
    backup_of(old).mkdir()
    with pytest.raises(StateError, match="before-0004"):
        open_ledger(f"sqlite:///{old}")
    assert dump(old) == OLD


# What is refused


@pytest.mark.parametrize("version", ["0005", "9999", "0000"])
def test_a_ledger_of_an_unknown_version_is_refused_and_not_touched(kept_url: str, version: str) -> None:
    with opened(kept_url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
        connection.execute(text("DROP TABLE scores"))
    with pytest.raises(StateError, match=f"version {version}, .* up to 0004; use the newer protofed"):
        open_ledger(kept_url)
    onlooker = open_engine(kept_url)
    assert "scores" not in inspect(onlooker).get_table_names()
    onlooker.dispose()


@pytest.mark.parametrize("schema", [0, 2, 99])
def test_only_one_version_counted_by_itself(old: Path, schema: int) -> None:
    with closing(sqlite3.connect(old)) as file:
        file.execute("UPDATE meta SET schema = ?", (schema,))
        file.commit()
    before = dump(old)
    with pytest.raises(StateError, match=f"version schema {schema}, "):
        open_ledger(f"sqlite:///{old}")
    assert dump(old) == before
    assert not backup_of(old).exists()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE runs (distance REAL)")
    before = dump(path)
    with pytest.raises(StateError, match="a database of its own"):
        open_ledger(f"sqlite:///{path}")
    assert dump(path) == before
