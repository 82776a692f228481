"""The shared check itself: it passes over a sound state folder and finds each thing that may not be."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tests.support.invariants import JOURNAL, Baseline, Checked, check, leftovers, serves
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import StateError
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.common.storage.journal import Journal
from protofed.server.method import server_methods
from protofed.server.rounds.aggregation.publisher import Published, Publisher
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import RoundRow, TaskRow, UpdateRow

RUN, SITES, ROUNDS = "sound", ("ann", "bob"), 3


def update(number: int, site: str) -> Payload:
    values = np.full((3, 2), number + len(site) + ord(site[0]), np.float32)
    return {Part.BODY: {"conv": values}, Part.HEAD: {"weight": values}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, recipe_of: Callable[..., Recipe]) -> Path:
    """What a server and two sites leave behind after three rounds of FedAvg."""
    (server := (folder := tmp_path_factory.mktemp("sound")) / "server").mkdir()
    journal = Journal(server / JOURNAL)
    ledger, blobs = Ledger(f"sqlite:///{server / LEDGER_FILE}"), FolderBlobs(server / "blobs")
    ledger.attach(journal)
    recipe = recipe_of("fedavg", name=RUN)
    ledger.begin_run(RUN, recipe.fingerprint(), recipe.wire())
    publisher = Publisher(server_methods.build("fedavg", {}), blobs, min_contributors=2)
    published: Published | None = None
    for number in range(ROUNDS):
        kind = TaskKind.FIT if number else TaskKind.INITIALISE
        base = published.address if published else None
        cohort = SITES if number else SITES[:1]
        tasks = [TaskRow(f"task_id-{number}-{site}", RUN, number, 1, site, kind, base, 1) for site in cohort]
        ledger.open_round(RoundRow(RUN, number, 1, 2, 1), tasks)
        rows = []
        for task in tasks:
            data = codec.encode(update(number, task.site))
            rows.append(UpdateRow(task, Verdict.ACCEPTED, "", blobs.put(data), len(data), {}, None))
            receipt = ledger.judge(rows[-1])
            (here := folder / task.site / RUN / f"{number:06d}").mkdir(parents=True)
            (here / "receipt.json").write_text(json.dumps(asdict(receipt)))
            (here / "task.json").write_text(json.dumps({"task": asdict(task)}))
        state = publisher.aggregated(published.state if published else None, rows, round_context())
        published = publisher.publish(state)
        ledger.publish(RUN, number, 1, published.address, complete=True)
    ledger.close()
    journal.close()
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def checked(folder: Path, **more: object) -> Checked:
    return check(folder / "server", RUN, sites=[folder / site for site in SITES], **more)  # type: ignore[arg-type]


def newest(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "server" / LEDGER_FILE)) as database:
        found: str = database.execute("select state from rounds order by round desc").fetchone()[0]
    return found


def blob(folder: Path, number: int, site: str) -> Path:
    return folder / "server" / "blobs" / codec.digest(codec.encode(update(number, site)))


def sql(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "server" / LEDGER_FILE)) as database, database:
        assert database.execute(statement).rowcount > 0


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_a_sound_folder_passes_and_what_was_seen_is_told(folder: Path) -> None:
    final, before = newest(folder), sorted((folder / "server" / "blobs").iterdir())
    found = checked(folder, final=final, events=["verdict", "published"])
    assert found == Checked(published=3, updates=5, recomputed=3, receipts=5, recorded=9)
    assert sorted((folder / "server" / "blobs").iterdir()) == before


def test_what_retention_has_discarded_is_not_missed(folder: Path) -> None:
    blob(folder, 1, "ann").unlink()
    assert checked(folder, keep_rounds=0).recomputed == 2
    with pytest.raises(AssertionError, match="N1"):
        checked(folder, keep_rounds=1)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("delete from updates where round = 2 and site = 'bob'", "N1"),
        ("update tasks set task_status = 'late' where round = 1 and site = 'ann'", "N1"),
        ("update updates set digest = (select state from rounds where round = 0) where round = 2", "N4: round 2 gives"),
        ("update updates set bytes = 7 where round = 2 and site = 'bob'", "N3"),
        ("update updates set rejected = 'why not' where round = 2 and site = 'bob'", "N4: round 2 gives"),
        ("update rounds set state = (select state from rounds where round = 0) where round = 2", "N4: round 2 gives"),
        ("update rounds set state = 'gone' where round = 2", "N4"),
        ("update rounds set state = null, abandoned = 'so' where round = 1", "N4"),
        ("update rounds set state = null where round = 1", "N4"),
        ("update rounds set round = 4 where round = 2", "N4"),
        ("update rounds set abandoned = 'and yet' where round = 1", "N4"),
    ],
)
def test_a_ledger_that_says_otherwise_is_found(folder: Path, statement: str, told: str) -> None:
    sql(folder, statement)
    with pytest.raises(AssertionError, match=told):
        checked(folder)


def test_two_updates_of_a_site_are_found(folder: Path) -> None:
    again = (
        "id + 100, run, round, attempt, site, task_id, verdict, code, reason, digest, bytes, metrics, weight, norm, "
        "rejected, record_hash"
    )
    with closing(sqlite3.connect(folder / "server" / LEDGER_FILE)) as database, database:
        database.execute("drop index one_update_a_task")
        database.execute(f"insert into updates select {again}, at from updates where site = 'bob'")  # noqa: S608
    with pytest.raises(AssertionError, match="N2"):
        checked(folder)


def test_a_blob_that_changed_or_went_is_found(folder: Path) -> None:
    path = blob(folder, 2, "bob")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(AssertionError, match="N3"):
        checked(folder)
    path.unlink()
    with pytest.raises(AssertionError, match="N1"):
        checked(folder)


def test_a_newest_state_that_went_is_found(folder: Path) -> None:
    (folder / "server" / "blobs" / newest(folder)).unlink()
    with pytest.raises(AssertionError, match="N4"):
        checked(folder)


def test_a_receipt_that_the_ledger_does_not_know_is_found(folder: Path) -> None:
    rewrite(folder / "ann" / RUN / "000002" / "task.json", b"task_id-2-ann", b"task_id-9-ann")
    with pytest.raises(AssertionError, match="N1: the ledger lost"):
        checked(folder)


@pytest.mark.parametrize("field", [b'"digest": "', b'"record_hash": "'])
def test_a_receipt_that_says_otherwise_is_found(folder: Path, field: bytes) -> None:
    rewrite(folder / "ann" / RUN / "000002" / "receipt.json", field, field + b"x")
    with pytest.raises(AssertionError, match="says otherwise"):
        checked(folder)


def test_a_journal_that_was_edited_or_lacks_an_event_is_found(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"does not tell of .'rolled-back'"):
        checked(folder, events=["rolled-back"])
    rewrite(folder / "server" / JOURNAL, b'"bob"', b'"bab"')
    with pytest.raises(StateError, match="record 5 "):
        checked(folder)


def test_what_the_journal_promised_and_the_ledger_lost_is_found(folder: Path) -> None:
    journal = Journal(folder / "server" / JOURNAL)
    journal.append("verdict", verdict="accepted", record_hash="of an update that is nowhere")
    journal.close()
    with pytest.raises(AssertionError, match="N1: the ledger lost what the journal"):
        checked(folder)


@pytest.mark.parametrize(
    "left", ["server/.tmp-x", "server/blobs/.tmp-y", "server/blobs/uploads/z", "ann/.tmp-run/task.json"]
)
def test_leftovers_are_found(folder: Path, left: str) -> None:
    (folder / left).parent.mkdir(exist_ok=True)
    (folder / left).touch()
    assert leftovers(folder / left.split("/")[0]) == [folder / left]
    with pytest.raises(AssertionError, match="N7"):
        checked(folder)


def test_another_final_state_is_found(folder: Path) -> None:
    with pytest.raises(AssertionError, match="N8"):
        checked(folder, final="another")


def test_memory_and_descriptors_are_held_against_a_baseline() -> None:
    baseline = Baseline(os.getpid())
    baseline.check()
    files = [open(os.devnull) for _ in range(20)]  # noqa: SIM115
    with pytest.raises(AssertionError, match="descriptors more"):
        baseline.check()
    for file in files:
        file.close()
    block = bytearray(os.urandom(1 << 20) * 100)
    with pytest.raises(AssertionError, match="MiB more"):
        baseline.check()
    del block


def test_a_server_that_does_not_serve_is_found(unused_port: int) -> None:
    with pytest.raises(AssertionError, match="N5"):
        serves(f"127.0.0.1:{unused_port}", within_s=0.3)
