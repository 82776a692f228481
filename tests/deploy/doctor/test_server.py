"""`protofed server doctor`: each failure is provoked, and named right; the ledger stays as it is."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Mount
from tests.support.doctor_rows import findings, rows, skipped
from tests.support.pki import Authority

from protofed.common.clock import utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ServerSettings
from protofed.common.pki.identity import Party
from protofed.common.storage.files import Lock
from protofed.common.storage.journal import Journal
from protofed.deploy import shipped
from protofed.deploy.daemons.server import ADDRESS_FILE
from protofed.deploy.doctor.checks import CheckRow
from protofed.deploy.doctor.server import ServerDoctor
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.context import JOURNAL_FILE
from protofed.server.rpc import memory_guard
from protofed.server.rpc import server as serving
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.ledger import Ledger

DAY, NOW = timedelta(days=1), datetime.now(UTC)
Look = Callable[..., dict[str, CheckRow]]


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A server's identity, with an operator's certificate."""
    return issued(tmp_path, Authority.make())


def issued(folder: Path, authority: Authority, **options: Any) -> Path:
    """An identity, which the operator `boss` belongs to."""
    hub = authority.issue(folder / "hub", Party.SERVER, "hub", **options)
    boss = authority.issue(folder / "boss", Party.OPERATOR, "boss")
    (hub / "operators").mkdir()
    shutil.copy(boss / "cert.pem", hub / "operators" / "boss.pem")
    return hub


@pytest.fixture
def look(hub: Path, tmp_path: Path) -> Look:
    """The examination of a server; settings may be changed."""

    def examine(clock: Any = utc_now, **changes: Any) -> dict[str, CheckRow]:
        told = {"listen": "127.0.0.1:0", "identity": hub, "state": tmp_path / "state", **changes}
        return rows(ServerDoctor(lambda: ServerSettings.model_validate(told), clock).checks())

    return examine


def ledger(folder: Path) -> Path:
    """One of this version; nobody has it."""
    folder.mkdir(exist_ok=True)
    file = folder / LEDGER_FILE
    Ledger(f"sqlite:///{file}").close()
    return file


def test_a_server_that_would_start_is_well_and_nothing_is_left_behind(look: Look, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = look()
    assert findings(found) == []
    assert skipped(found).keys() == {"recipes", "secure aggregation", "blobs", "metrics", "notify"}
    assert found["operators"].message == "boss"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_secret_and_blobs_elsewhere_are_looked_at_and_nothing_is_made(look: Look, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a2c4e6\n", encoding="ascii")
    notify = {"webhooks": [{"name": "ops", "url": "https://127.0.0.1:9/", "bearer_token": token}]}
    token.chmod(0o644)
    assert findings(look(notify=notify)) == [("notify", "notify-unusable")]
    token.chmod(0o600)
    found = look(notify=notify)
    assert findings(found) == []
    assert found["notify"].message.startswith("ops")
    found = look(blobs=tmp_path / "shared")
    assert findings(found) == [("blobs", "blobs-unusable")]
    assert not (tmp_path / "shared").exists()
    (tmp_path / "shared").mkdir()
    found = look(blobs=tmp_path / "shared")
    assert findings(found) == []
    assert "shared can be written by" in found["blobs"].message


def test_a_server_that_is_running_is_no_finding(look: Look, tmp_path: Path) -> None:
    lock = Lock(tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as ours:
        address = f"127.0.0.1:{ours.getsockname()[1]}"
        (tmp_path / "state" / ADDRESS_FILE).write_text(address, encoding="utf-8")
        found = look(listen=address)
        lock.release()
        stale = look(listen=address)  # the address of a server that has died; another has its port
    assert findings(found) == []
    assert "the server is running" in found["state folder"].message
    assert found["port"].message == f"{address} is the running server's"
    assert findings(stale) == [("port", "port-taken")]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"begins": NOW - DAY / 30, "ends": NOW - DAY / 1000}, "certificate-expired"),
        ({"begins": NOW + DAY, "ends": NOW + 9 * DAY}, "certificate-not-yet-valid"),
        ({"ends": NOW + 20 * DAY}, "certificate-ends-soon"),
    ],
)
def test_dates_of_the_certificate(options: dict[str, Any], name: str, look: Look, tmp_path: Path) -> None:
    other = issued(tmp_path / "other", Authority.make(), **options)
    assert findings(look(identity=other)) == [("certificate", name)]


def test_an_identity_that_cannot_be_used(hub: Path, look: Look, tmp_path: Path) -> None:
    (hub / "key.pem").chmod(0o640)
    found = look()
    assert findings(found) == [("identity", "key-readable-by-others")]
    assert skipped(found)["certificate"] == "needs `identity`"
    assert findings(look(identity=tmp_path / "boss")) == [("identity", "identity-of-another")]
    assert findings(look(identity=None)) == [("connection", "connection-not-chosen")]


def test_nobody_who_could_let_sites_in(hub: Path, look: Look, tmp_path: Path) -> None:
    pem = (hub / "operators" / "boss.pem").read_bytes()
    (hub / "operators" / "boss.pem").unlink()
    assert findings(look()) == [("operators", "operator-unusable")]
    writer = Ledger(f"sqlite:///{ledger(tmp_path / 'state')}")
    Certificates(writer).register(pem, roles=["operator"])
    writer.close()
    assert look()["operators"].message == "boss"
    (hub / "operators" / "hub.pem").write_bytes((hub / "cert.pem").read_bytes())
    found = look()
    assert findings(found) == [("operators", "operator-unusable")]
    assert "certificate of server 'hub'" in found["operators"].message


def test_recipes_are_taken_up_as_the_server_would(look: Look, tmp_path: Path) -> None:
    good = shipped.folder("recipes") / "digits-fednh.toml"
    assert look(recipes=[good])["recipes"].message == "digits-fednh"
    typo = tmp_path / "typo.toml"
    typo.write_text(good.read_text(encoding="utf-8").replace('"fednh"', '"fedhn"'), encoding="utf-8")
    found = look(recipes=[good, typo, tmp_path / "none.toml"])
    assert findings(found) == [("recipes", "recipe-invalid")]
    assert findings(look(recipes=[typo])) == [("recipes", "recipe-invalid")]
    assert "did you mean 'fednh'?" in look(recipes=[typo])["recipes"].message


def test_a_folder_that_is_read_only(look: Look, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "state", "ro,size=9g")
    assert findings(look()) == [("state folder", "state-not-writable")]


def test_a_ledger_on_a_network_file_system(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(f"host:/x {tmp_path} nfs4 rw 0 0\n", encoding="utf-8")
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "mounts")
    assert findings(look()) == [("state folder", "state-on-network")]


def test_a_ledger_is_left_as_it_is_and_one_of_somebody_else_named(look: Look, tmp_path: Path) -> None:
    file = ledger(tmp_path / "state")
    before = file.read_bytes()
    found = look()
    assert findings(found) == []
    assert "is whole, version 03" in found["ledger"].message
    assert [path.name for path in (tmp_path / "state").iterdir()] == [LEDGER_FILE]
    assert file.read_bytes() == before
    with sqlite3.connect(file) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    found = look()
    assert findings(found) == [("ledger", "ledger-unusable")]
    assert "use the protofed that wrote it" in found["ledger"].message
    file.write_bytes(b"no database" * 999)
    assert findings(look()) == [("ledger", "ledger-unusable")]


def test_a_ledger_that_is_older_than_its_journal_is_named_as_the_server_does(look: Look, tmp_path: Path) -> None:
    file = ledger(tmp_path / "state")
    journal = Journal(file.with_name(JOURNAL_FILE))
    journal.append("published", run="lung", round=7, state="0" * 64)
    journal.close()
    with file.with_name(JOURNAL_FILE).open("a", encoding="utf-8") as killed:
        killed.write('{"half a line')
    found = look()
    assert findings(found) == [("ledger", "ledger-unusable")]
    assert "lost 1 of the promises in journal.jsonl: the state of round 7 of run lung" in found["ledger"].message
    lock = Lock(tmp_path / "state")
    try:
        assert findings(look()) == []  # the running server has compared them, and writes both
    finally:
        lock.release()


def test_what_a_killed_server_left_in_the_log_of_its_ledger_is_seen(look: Look, tmp_path: Path) -> None:
    file = ledger(tmp_path / "state")
    writer = sqlite3.connect(file)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("UPDATE alembic_version SET version_num = '9999'")
    writer.commit()
    found = look()
    writer.close()
    assert findings(found) == [("ledger", "ledger-unusable")]


def test_a_database_that_does_not_answer(look: Look, tmp_path: Path, unused_port: int) -> None:
    pytest.importorskip("psycopg")
    found = look(ledger=f"postgresql+psycopg://ann:hunter2@127.0.0.1:{unused_port}/x")
    assert findings(found) == [("ledger", "database-unreachable")]
    assert "connection" in found["ledger"].message.lower()
    assert "hunter2" not in str(found)


def test_a_clock_that_went_back(look: Look, tmp_path: Path) -> None:
    file = ledger(tmp_path / "state")
    later = time.time() + 86_400
    os.utime(file, (later, later))
    assert findings(look()) == [("clock", "clock-wrong")]
    os.utime(file, (later - 86_390, later - 86_390))
    assert findings(look()) == []


def test_a_port_that_is_taken_or_cannot_be_had(look: Look) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert findings(look(listen=address)) == [("port", "port-taken")]
    assert findings(look(listen=address)) == []
    found = look(listen="192.0.2.7:7443")
    assert findings(found) == [("port", "address-not-here")]
    assert findings(look(listen="nowhere.invalid:7443")) == [("port", "address-not-here")]
    assert findings(look(listen="7443")) == [("connection", "connection-not-chosen")]


def test_limits_that_are_small(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(look(memory_limit_mb=100)) == [("memory", "memory-small")]
    assert findings(look(memory_limit_mb=1000)) == []
    monkeypatch.setattr(serving, "room", lambda wanted: wanted - 1)
    found = look(max_connections=1000)
    assert findings(found) == [("descriptors", "descriptors-few")]
    assert "enough for 999 connections" in found["descriptors"].message


def test_a_memory_limit_that_nobody_can_watch(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard, "_STATM", tmp_path / "none")
    assert findings(look(memory_limit_mb=1000)) == [("memory", "settings-invalid")]


def test_a_live_server_beside_it_is_not_disturbed(
    live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], look: Look, hub: Path, tmp_path: Path
) -> None:
    server = live_server(recipe_of("fedavg"), tmp_path / "state", identity=hub)
    found = look()
    assert findings(found) == []
    assert found["ledger"].message.endswith(".sqlite is whole, version " + found["ledger"].message[-4:])
    assert server.runs.current is not None


def test_sites_that_may_train_are_those_that_are_registered_so(hub: Path, tmp_path: Path) -> None:
    file, authority = ledger(tmp_path / "state"), Authority.make()
    writer = Ledger(f"sqlite:///{file}")
    for name, roles in (("north", ["trainer"]), ("south", ["trainer", "evaluator"]), ("judge", ["evaluator"])):
        pem = (authority.issue(tmp_path / name, Party.SITE, name) / "cert.pem").read_bytes()
        Certificates(writer).register(pem, roles=roles)
    writer.close()
    told = {"listen": "127.0.0.1:0", "identity": hub, "state": tmp_path / "state"}
    doctor = ServerDoctor(lambda: ServerSettings.model_validate(told))
    assert doctor._registered(Party.SITE, NOW.timestamp()) == {"north", "south"}
    assert doctor._registered(Party.SITE, (NOW + 9999 * DAY).timestamp()) == set()


def test_a_run_with_secure_aggregation_needs_three_sites_that_are_registered(look: Look, tmp_path: Path) -> None:
    recipe = tmp_path / "secure.toml"
    told = "[federation]\nmin_sites = 3\nquorum = 3\n"
    recipe.write_text(f'extends = "{shipped.folder("recipes") / "digits-fednh-secure.toml"}"\nname = "s"\n{told}')
    found = look(recipes=[recipe])
    assert findings(found) == [("secure aggregation", "sites-few")]
    writer, authority = Ledger(f"sqlite:///{ledger(tmp_path / 'state')}"), Authority.make()
    for name in ("north", "south", "west"):
        pem = (authority.issue(tmp_path / name, Party.SITE, name) / "cert.pem").read_bytes()
        Certificates(writer).register(pem, roles=["trainer"])
    writer.close()
    found = look(recipes=[recipe])
    assert findings(found) == []
    assert "needs all of them" in found["secure aggregation"].message
    writer = Ledger(f"sqlite:///{ledger(tmp_path / 'state')}")
    writer.enroll("west", ["trainer"])
    writer.exclude("west", "scanner moved")
    writer.close()
    assert findings(look(recipes=[recipe])) == [("secure aggregation", "sites-few")]
