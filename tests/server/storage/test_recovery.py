"""A ledger that has lost what was promised is not served from; blobs that nobody names are removed."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protofed.common.errors import OutOfSpaceError, StateError
from protofed.common.protocol.messages import Verdict
from protofed.common.storage.journal import Journal, records
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.recovery import ADOPTED, GIVEN_UP, open_journal, sweep_orphans
from protofed.server.storage.rows import UpdateRow

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab


class Kept:
    """A server's folder with a run that has published round 1."""

    def __init__(self, folder: Path, make: MakeLab) -> None:
        self.folder, self._make = folder, make
        self.url, self.path = f"sqlite:///{folder / 'ledger.sqlite'}", folder / "journal.jsonl"

    def open(self, *, give_up: bool = False) -> tuple[Ledger, Journal]:
        ledger = Ledger(self.url)
        try:
            journal = open_journal(self.path, ledger, give_up=give_up)
        except StateError:
            ledger.close()
            raise
        ledger.attach(journal)
        return ledger, journal

    def close(self, ledger: Ledger, journal: Journal) -> None:
        ledger.close()
        journal.close()

    def play(self, *values: float) -> None:
        """Some rounds of a run on this folder."""
        ledger, journal = self.open()
        lab = self._make(blobs=FolderBlobs(self.folder / "blobs"), ledger=ledger, rounds=9)
        lab.begin() if lab.run.published is None else lab.enroll("eva", "ann", "bob", "cyd")
        lab.later(0.0)
        for value in values:
            lab.round(ann=value, bob=value, cyd=value)
        self.close(ledger, journal)

    def events(self) -> list[str]:
        return [record.event for record in records(self.path)]


@pytest.fixture
def kept(tmp_path: Path, make: MakeLab) -> Kept:
    return Kept(tmp_path, make)


def test_what_is_promised_stands_in_the_ledger_and_in_the_journal(kept: Kept) -> None:
    kept.play(1.0)
    ledger, journal = kept.open()
    told = {str(record.facts["record_hash"]) for record in records(kept.path) if record.event == "verdict"}
    states = {str(record.facts["state"]) for record in records(kept.path) if record.event == "published"}
    assert ledger.sealed() == told | states
    assert len(told) == 5  # two first models, three updates
    kept.close(ledger, journal)
    assert ADOPTED not in kept.events()


def test_a_ledger_of_yesterday_is_refused_by_what_it_lacks_and_going_on_without_it_is_asked_for_once(
    kept: Kept,
) -> None:
    kept.play(1.0)
    shutil.copy(kept.folder / "ledger.sqlite", kept.folder / "yesterday")
    kept.play(2.0)
    shutil.copy(kept.folder / "yesterday", kept.folder / "ledger.sqlite")
    with pytest.raises(StateError, match=r"lost 4 of the promises .* round 2 of run test.*--recover") as error:
        kept.open()
    assert "the update of ann in round 2 of run test" in str(error.value)
    kept.close(*kept.open(give_up=True))
    assert kept.events().count(GIVEN_UP) == 1
    kept.close(*kept.open())
    kept.play(2.5)
    kept.close(*kept.open())


def test_lost_writes_of_the_wal_are_noticed(kept: Kept) -> None:
    kept.play(1.0)
    ledger, journal = kept.open()
    with sqlite3.connect(kept.folder / "ledger.sqlite") as other:  # keeps the WAL from being written back
        other.execute("SELECT count(*) FROM updates").fetchone()
        lab = kept._make(blobs=FolderBlobs(kept.folder / "blobs"), ledger=ledger, rounds=9)
        lab.enroll("eva", "ann", "bob", "cyd")
        lab.later(0.0)
        lab.push("ann", lab.model(2.0))
        stolen = kept.folder / "copy"
        stolen.mkdir()
        shutil.copy(kept.folder / "ledger.sqlite", stolen)  # without its WAL
        shutil.copy(kept.path, stolen)
    kept.close(ledger, journal)
    again = Kept(stolen, kept._make)
    with pytest.raises(StateError, match="the update of ann in round 2 of run test"):
        again.open()


def test_promises_that_only_the_ledger_has_are_adopted(kept: Kept) -> None:
    kept.play(1.0)
    kept.path.unlink()  # a ledger of a version without a journal
    kept.close(*kept.open())
    assert kept.events() == [ADOPTED]
    kept.close(*kept.open())
    assert kept.events() == [ADOPTED]


def test_a_journal_that_was_edited_is_refused(kept: Kept) -> None:
    kept.play(1.0)
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(StateError, match="record 4"):
        kept.open()


class Full:
    """A journal on a full disk."""

    def __init__(self) -> None:
        self.full, self.events = False, list[str]()

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        if self.full:
            raise OutOfSpaceError("no space left on device")
        self.events += [event for event, _ in entries]


def test_an_update_whose_promise_cannot_be_journalled_is_not_acknowledged_until_it_can(lab: Lab) -> None:
    journal = Full()
    lab.ledger.attach(journal)
    task, payload = lab.task("ann"), lab.model(1.0)
    journal.full = True
    with pytest.raises(OutOfSpaceError):
        lab.push("ann", payload, task)
    with pytest.raises(OutOfSpaceError):  # nor is it the second time, although its row stands
        lab.push("ann", payload, task)
    with pytest.raises(OutOfSpaceError):  # and nothing else is promised meanwhile
        lab.push("bob", payload)
    journal.full = False
    assert lab.push("ann", payload, task).verdict is Verdict.ACCEPTED
    assert lab.push("ann", payload, task).verdict is Verdict.DUPLICATE
    assert [row.verdict for row in lab.ledger.updates("test", 1)] == [Verdict.ACCEPTED]
    assert journal.events == ["verdict"]


def test_blobs_that_no_row_needs_are_removed_and_all_others_stay(kept: Kept) -> None:
    kept.play(1.0)
    blobs = FolderBlobs(kept.folder / "blobs")
    before = set(blobs.addresses())
    ledger, journal = kept.open()
    blobs.put(b"of a process that died before its row")
    task = next(row for row in ledger.tasks("test", 1) if row.site == "bob")
    for verdict in (Verdict.LATE, Verdict.NOT_NEEDED, Verdict.REFUSED):
        address = blobs.put(verdict.encode())
        ledger.judge(UpdateRow(task, verdict, "why", address, 1, {}, None))
        before |= {address} if verdict is Verdict.REFUSED else set()
    assert sweep_orphans(blobs, ledger) == 3
    assert set(blobs.addresses()) == before
    assert sweep_orphans(blobs, ledger) == 0
    kept.close(ledger, journal)
