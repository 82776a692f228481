"""A ledger that lost what it promised or is another process's; a journal that cannot be written: rows 84, 85 and 89."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.server.conftest import TRAINERS, Lab, recipe
from tests.support.command_line import called
from tests.support.operator_lab import OperatorLab

from protofed.common.errors import OutOfSpaceError, StateError
from protofed.common.protocol.messages import Role
from protofed.server.rounds.aggregation.aggregation import PAUSE_S
from protofed.server.storage.blobs import FolderBlobs, MemoryBlobs
from protofed.server.storage.database import LEDGER_FILE, open_ledger
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.recovery import open_journal

JOURNAL = "journal.jsonl"


@contextmanager
def served(folder: Path) -> Iterator[OperatorLab]:
    """A server's state folder, in use."""
    ledger = Ledger(f"sqlite:///{folder / LEDGER_FILE}")
    journal = open_journal(folder / JOURNAL, ledger, give_up=False)
    ledger.attach(journal)
    yield OperatorLab(recipe(), FolderBlobs(folder / "blobs"), ledger)
    journal.close()
    ledger.close()


def play(lab: OperatorLab, run: str) -> None:
    """A run from its beginning to its end."""
    lab.start(run)
    lab.begin()
    for value in (1.0, 2.0):
        lab.round(ann=value, bob=value, cyd=value)
    assert lab.statuses()[run] == "completed"


def yesterday(folder: Path, found: Path) -> None:
    """The ledger is put back from a backup."""
    with served(folder) as lab:
        play(lab, "one")
    shutil.copytree(folder, found)
    with served(folder) as lab:
        play(lab, "two")
    shutil.copy(folder / JOURNAL, found)


def torn(keep: int) -> Callable[[Path, Path], None]:
    """The machine lost power, and of the WAL only so many bytes are left."""

    def tear(folder: Path, found: Path) -> None:
        with served(folder) as lab:
            play(lab, "one")
        with served(folder) as lab:
            play(lab, "two")
            shutil.copytree(folder, found)
        wal = found / f"{LEDGER_FILE}-wal"
        assert wal.stat().st_size > keep
        wal.write_bytes(wal.read_bytes()[:keep]) if keep else wal.unlink()

    return tear


def start(state: Path) -> tuple[str | Path, ...]:
    return ("server", "start", "--state", state, "--listen", "127.0.0.1:0", "--identity=none", "--until-finished")


LOSSES = {"backup of yesterday": yesterday, "WAL deleted": torn(0), "WAL truncated": torn(20_000)}


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command line in this process: exit code and standard error."""

    def run(*arguments: object) -> tuple[int, str]:
        code, _, said = called(capfd, *arguments)
        return code, said

    return run


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_row_84_a_ledger_that_lacks_what_was_promised_is_served_only_when_that_is_wanted(
    tmp_path: Path, lose: Callable[[Path, Path], None], protofed: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "before").mkdir()
    lose(tmp_path / "before", state := tmp_path / "found")
    server = start(state)
    for _ in range(2):
        code, said = protofed(*server)
        assert code == 74
        assert "the ledger has lost" in said
        assert "run two" in said
        assert "restore the newest backup, or start once with --recover" in said
    ledger = Ledger(f"sqlite:///{state / LEDGER_FILE}")
    for row in ledger.runs():  # so that it ends by itself
        if row.outcome is None:
            Lab(recipe(row.run), FolderBlobs(state / "blobs"), ledger).run.stop("enough")
    ledger.close()
    assert protofed(*server, "--recover")[0] == 0
    assert protofed(*server)[0] == 0


def test_row_84_a_journal_from_which_a_record_is_missing_is_not_served_from(
    tmp_path: Path, protofed: Callable[..., tuple[int, str]]
) -> None:
    with served(tmp_path) as lab:
        play(lab, "one")
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_bytes(b"".join(lines[:4] + lines[5:]))
    code, said = protofed(*start(tmp_path))
    assert code == 74
    assert "record" in said


# Row 85


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    """Another process is in the middle of a write."""
    script = (
        "import sqlite3, sys\n"
        "file = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "file.execute('BEGIN IMMEDIATE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield
    finally:
        other.communicate("", timeout=20)


def test_row_85_a_ledger_that_another_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    open_ledger(f"sqlite:///{path}").dispose()
    monkeypatch.setattr("protofed.server.storage.database.BUSY_MS", 50)
    with locked_elsewhere(path), pytest.raises(StateError, match="locked; another process has it; stop that process"):
        open_ledger(f"sqlite:///{path}")
    open_ledger(f"sqlite:///{path}").dispose()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3"])
def test_row_85_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nhost:/x {tmp_path}/state {kind} rw 0 0\n", "utf-8")
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "mounts")
    (tmp_path / "state").mkdir()
    with pytest.raises(StateError, match=f"{kind}"):
        open_ledger(f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite'}")
    assert list((tmp_path / "state").iterdir()) == []
    open_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}").dispose()


# Row 89


class Full:
    """A journal on a disk that is full from its `full_at`-th record on, until it has refused that often."""

    def __init__(self, full_at: int, refusals: int = 10_000) -> None:
        self.full_at, self.refusals, self.events = full_at, refusals, list[str]()
        self.states: set[object] = set()

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        if len(self.events) + len(entries) > self.full_at and self.refusals:
            self.refusals -= 1
            raise OutOfSpaceError("no space left for journal.jsonl")
        self.events += [event for event, _ in entries]
        self.states |= {facts["state"] for event, facts in entries if event == "published"}


NEVER = 10_000


@pytest.fixture
def lab() -> OperatorLab:
    """Round 1 of run `one` is published, of 1.0, and round 2 is open; `two` waits."""
    lab = OperatorLab(recipe(), MemoryBlobs(), Ledger(), keep_rounds=9)
    lab.start("one", rounds=9)
    lab.start("two")
    lab.begin()
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    return lab


ORDERS: dict[str, tuple[Callable[[OperatorLab], object], Callable[[OperatorLab], bool]]] = {
    "start": (lambda o: o.start("three"), lambda o: o.statuses().get("three") == "queued"),
    "pause": (lambda o: o.operation.pause("one", paused=True), lambda o: o.statuses()["one"] == "paused"),
    "abort": (lambda o: o.operation.abort("one", "enough"), lambda o: o.statuses()["one"] == "aborted"),
    "abort of one that waits": (lambda o: o.operation.abort("two", ""), lambda o: o.statuses()["two"] == "aborted"),
    "exclude": (lambda o: o.operation.exclude("cyd", "x"), lambda o: o.site("cyd").status == "excluded"),
}


@pytest.mark.parametrize(("give", "obeyed"), ORDERS.values(), ids=ORDERS)
def test_row_89_an_order_that_cannot_be_journalled_is_not_acknowledged(
    lab: OperatorLab, give: Callable[[OperatorLab], object], obeyed: Callable[[OperatorLab], bool]
) -> None:
    journal = Full(0)
    lab.ledger.attach(journal)
    with pytest.raises(OutOfSpaceError):
        give(lab)
    journal.full_at = NEVER
    if not obeyed(lab):
        give(lab)
    lab.later(0.0)
    assert obeyed(lab)
    lab.restart()
    assert obeyed(lab)


def test_row_89_what_an_order_did_in_the_ledger_alone_is_done(lab: OperatorLab) -> None:
    """The process goes the ledger's way: no round is opened of a run that has ended there, and a new one goes on."""
    journal = Full(0)
    lab.ledger.attach(journal)
    orders: list[Callable[[], object]] = [lambda: lab.start("three"), lambda: lab.operation.abort("two", "")]
    for order in orders:
        with pytest.raises(OutOfSpaceError):
            order()
        journal.full_at += 1  # room for it, but not for the next one
    journal.full_at = NEVER
    lab.operation.abort("one", "")
    lab.later(0.0)
    assert lab.statuses() == {"one": "aborted", "two": "aborted", "three": "running"}
    assert lab.task(lab.makers()[0]).run == "three"
    assert lab.operation.rounds("two") == []


def test_row_89_a_run_that_went_back_in_the_ledger_alone_goes_on_from_there(lab: OperatorLab) -> None:
    journal = Full(0)
    lab.ledger.attach(journal)
    with pytest.raises(OutOfSpaceError):
        lab.operation.roll_back("one", 0)
    journal.full_at = NEVER
    with pytest.raises(OutOfSpaceError):  # the server ends
        lab.later(0.0)
    lab.restart()
    lab.later(0.0)
    assert lab.value == 0.0
    assert lab.task("ann").round == 1


@pytest.mark.parametrize("full_at", range(12))
def test_row_89_a_run_whose_journal_is_full_at_any_record_ends_with_the_same_state(full_at: int) -> None:
    lab = OperatorLab(recipe(), MemoryBlobs(), Ledger())
    journal = Full(full_at, refusals=2)
    lab.ledger.attach(journal)
    for _ in range(3):
        try:
            go_on(lab)
        except OutOfSpaceError:
            lab.restart()
        else:
            break
    assert journal.refusals < 2
    assert lab.statuses() == {"one": "completed"}
    assert lab.value == 4.0
    counted = [row.task.site for row in lab.ledger.updates("one", 2) if row.counts]
    assert counted == ["ann", "bob", "cyd"]
    assert journal.events.count("verdict") == 2 + 6
    assert journal.states == {row.state for row in lab.ledger.rounds("one")}


def go_on(lab: OperatorLab) -> None:
    """Every site does what it is asked for, until the run is over."""
    if "one" not in lab.statuses():
        lab.start("one")
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.enroll(*TRAINERS)
    values = {"ann": 3.0, "bob": 4.0, "cyd": 5.0}
    for _ in range(20):
        lab.later(PAUSE_S, alive=tuple(lab.here))
        asked = {site: lab.asked(site) for site in lab.here}
        for site, kind in asked.items():
            if kind == "score":
                lab.score(site)
            elif kind is not None:  # all make the same first model
                lab.push(site, lab.model(values[site] if kind == "fit" else 0.0))
