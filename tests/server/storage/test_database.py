"""The ledger's database: one server's, durable, refused when it cannot be trusted; onlookers change nothing."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, insert, make_url, select, text
from sqlalchemy.exc import DBAPIError

from protofed.common.errors import ConfigError, OutOfSpaceError, StateError
from protofed.server.storage import schema
from protofed.server.storage.database import open_engine, open_ledger, state_error, writer


@pytest.fixture
def server(kept_url: str) -> Iterator[Engine]:
    engine = open_ledger(kept_url)
    with engine.begin() as connection:
        connection.execute(insert(schema.sites).values(site="ann", roles=["trainer"]))
    yield engine
    engine.dispose()


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(schema.sites.c.site)).scalars())


def test_an_onlooker_reads_beside_the_server_and_cannot_write(server: Engine, kept_url: str) -> None:
    onlooker = open_engine(kept_url)
    with server.begin() as connection:
        connection.execute(insert(schema.sites).values(site="bob", roles=[]))
        assert names(onlooker) == ["ann"]
    assert sorted(names(onlooker)) == ["ann", "bob"]
    with pytest.raises(DBAPIError, match=r"read-?only"), onlooker.begin() as connection:
        connection.execute(insert(schema.sites).values(site="eve", roles=[]))
    assert sorted(names(server)) == ["ann", "bob"]
    onlooker.dispose()


def test_an_onlooker_makes_no_ledger(kept_url: str, tmp_path: Path) -> None:
    onlooker = open_engine(kept_url)
    with pytest.raises(DBAPIError) as caught:
        names(onlooker)
    assert "the ledger cannot be used" in str(state_error(caught.value))
    assert list(tmp_path.iterdir()) == []
    onlooker.dispose()


def test_writers_take_turns(server: Engine) -> None:
    """What one reads and then writes, no other one changes in between."""

    def add() -> None:
        for _ in range(10):
            with writer(server).begin() as connection:
                number = len(connection.execute(select(schema.sites)).all())
                connection.execute(insert(schema.sites).values(site=f"site-{number}", roles=[]))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(server)) == 41


def test_a_long_read_and_a_write_do_not_wait_for_each_other(server: Engine) -> None:
    with server.connect() as long:
        rows = long.execute(select(schema.sites.c.site))
        with writer(server).begin() as connection:
            connection.execute(insert(schema.sites).values(site="bob", roles=[]))
            assert names(server) == ["ann"]
        assert list(rows.scalars()) == ["ann"]
    assert sorted(names(server)) == ["ann", "bob"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.sqlite", "expected sqlite:///PATH"),
        ("oracle://host/name", "SQLite or PostgreSQL, not in oracle"),
        ("postgresql+nothing://host/name", "expected sqlite:///PATH"),
        ("postgresql+pg8000://host/name", r"protofed\S*\[postgres\]"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_ledger(url)


def test_a_disk_that_is_full_while_the_ledger_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode=WAL")

    def no_room(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA max_page_count=4")

    monkeypatch.setattr("protofed.server.storage.database._durable", no_room)
    with pytest.raises(OutOfSpaceError):
        open_ledger(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


# PostgreSQL


def test_a_ledger_has_one_server_at_a_time(postgres_url: str) -> None:
    first = open_ledger(postgres_url)
    with pytest.raises(StateError, match="in use by another server"):
        open_ledger(postgres_url)
    first.dispose()
    open_ledger(postgres_url).dispose()


def test_a_refused_server_leaves_no_session(postgres_url: str) -> None:
    first = open_ledger(postgres_url)
    before = sessions(first)
    with pytest.raises(StateError):
        open_ledger(postgres_url)
    assert sessions(first) == before
    first.dispose()


def sessions(engine: Engine) -> int:
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state IS NOT NULL")
        return int(connection.execute(query).scalar_one())


def test_a_server_whose_session_was_cut_writes_no_more(postgres_url: str) -> None:
    first, administrator = open_ledger(postgres_url), create_engine(postgres_url)
    cut = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
    with administrator.begin() as connection:
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert connection.execute(text(held)).scalar() == 1
        connection.execute(text(cut))
    second = open_ledger(postgres_url)
    with pytest.raises(StateError, match="was cut; start the server again"), writer(first).begin():
        pass
    with pytest.raises(StateError, match="was cut"):
        names(first)  # nor does it go on as if it were the one
    assert names(second) == []
    for engine in (first, second, administrator):
        engine.dispose()


def test_a_server_that_does_not_answer_is_a_state_error(unused_port: int) -> None:
    with pytest.raises(StateError, match="check that the database runs") as caught:
        open_ledger(f"postgresql+psycopg://user:secret@127.0.0.1:{unused_port}/ledgers")
    assert "secret" not in str(caught.value)


def test_a_commit_waits_for_the_disk_whatever_the_database_is_set_to(postgres_url: str) -> None:
    url = make_url(postgres_url)
    options = f"{url.query['options']} -csynchronous_commit=off"
    engine = open_ledger(url.update_query_dict({"options": options}).render_as_string(hide_password=False))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    engine.dispose()
