"""A site's ledger of spent privacy: whatever happens to the process or the file, never too little is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from protofed.client.policy.dp_accountant import NoisySums, merged
from protofed.client.state.dp_ledger import FILE, DpLedger, read
from protofed.common import failpoint
from protofed.common.codec import Digest
from protofed.common.errors import OutOfSpaceError, StateError
from protofed.common.protocol.messages import Task, TaskKind

NOISE = "d" * 64
SMALL, LARGE = (NoisySums(0.1, 2.0, 10),), (NoisySums(0.1, 2.0, 15), NoisySums(1.0, 10.0, 1))


def fit(round: int = 1, run: str = "run", task_id: str = "", base: str = "a") -> Task:
    return Task(TaskKind.FIT, run, round, task_id or f"task-{round}", Digest(base * 64), 1, 60.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


def test_spends_of_all_runs_are_added_and_read_again(path: Path) -> None:
    assert read(path).events() == DpLedger(path).spent().events() == ()
    ledger = DpLedger(path, lambda: datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC))
    ledger.spend(fit(1), NOISE, SMALL)
    ledger.spend(fit(2), NOISE, SMALL)
    ledger.spend(fit(1, run="other"), NOISE, LARGE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ledger.spent() == DpLedger(path).spent() == read(path)
    assert read(path).events() == (NoisySums(0.1, 2.0, 35), NoisySums(1.0, 10.0, 1))
    assert read(path).events(SMALL) == (NoisySums(0.1, 2.0, 45), NoisySums(1.0, 10.0, 1))
    assert {run: len(spends) for run, spends in read(path).runs().items()} == {"run": 2, "other": 1}
    assert [(s.seq, s.round, s.task, s.at) for s in read(path).spends][2] == (3, 1, "task-1", "2026-03-04T05:06:07Z")


@pytest.mark.parametrize(
    ("again", "noise", "sums", "counted"),
    [
        (fit(1), NOISE, SMALL, 1),
        (fit(1, base="b"), NOISE, SMALL, 2),  # another model: the noise is another, and a second look at the data
        (fit(1, task_id="again"), NOISE, SMALL, 2),
        (fit(2, task_id="task-1"), NOISE, SMALL, 2),
        (fit(1, run="other"), NOISE, SMALL, 2),
        (fit(1), "e" * 64, SMALL, 2),
        (fit(1), NOISE, LARGE, 2),
    ],
)
def test_the_same_fit_is_one(path: Path, again: Task, noise: str, sums: tuple[NoisySums, ...], counted: int) -> None:
    DpLedger(path).spend(fit(1), NOISE, SMALL)
    DpLedger(path).spend(again, noise, sums)
    assert len(read(path).spends) == counted
    assert read(path).events() == merged([*SMALL, *sums][2 - counted :])


def test_a_torn_line_stays_and_counts_as_the_largest_spend(path: Path) -> None:
    ledger = DpLedger(path)
    ledger.spend(fit(1), NOISE, SMALL)
    ledger.spend(fit(2), NOISE, LARGE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:40])
    assert read(path).torn == 1
    assert read(path).events() == merged([*SMALL, *LARGE, *LARGE])
    DpLedger(path).spend(fit(3), NOISE, SMALL)
    assert path.read_bytes().startswith(whole + whole.splitlines()[0][:40])
    assert read(path).events() == merged([*SMALL, *SMALL, *LARGE, *LARGE])
    DpLedger(path).spend(fit(4), NOISE, SMALL)
    assert (read(path).torn, len(read(path).spends)) == (1, 4)


@pytest.mark.parametrize("kept", [1, 40])
def test_a_torn_line_counts_as_the_largest_of_all_with_the_next(path: Path, kept: int) -> None:
    DpLedger(path).spend(fit(1), NOISE, SMALL)
    path.write_bytes(path.read_bytes()[:kept])
    assert read(path).events() == ()  # that fit never began
    assert read(path).events(LARGE) == merged([*LARGE, *LARGE])


def test_every_way_to_be_cut_off_is_read_and_written_on(path: Path) -> None:
    ledger = DpLedger(path)
    ledger.spend(fit(1), NOISE, SMALL)
    first = len(path.read_bytes())
    ledger.spend(fit(2), NOISE, LARGE)
    whole = path.read_bytes()
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        began = end == len(whole) - 1  # only the newline is missing
        assert len(read(path).spends) == 1 + began
        DpLedger(path).spend(fit(3), NOISE, SMALL)
        after = path.read_bytes()
        found = read(path)
        assert [spend.round for spend in found.spends] == ([1, 2, 3] if began else [1, 3])
        assert found.torn == (first < end < len(whole) - 1)
        path.write_bytes(after[:-10])  # and torn again
        assert read(path).torn == (first < end < len(whole) - 1) + 1
        DpLedger(path).spend(fit(4), NOISE, SMALL)
        assert read(path).spends[-1].round == 4


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("damage", ["changed", "removed", "garbage"])
def test_a_damaged_line_refuses_all_spending(path: Path, line: int, damage: str) -> None:
    for number in range(1, 4):
        DpLedger(path).spend(fit(number), NOISE, SMALL)
    lines = path.read_bytes().splitlines(keepends=True)
    match damage:
        case "changed":
            lines[line] = lines[line].replace(b",10]", b",1]")
        case "removed" if line < 2:  # the last one cannot be missed: its file may have been restored
            del lines[line]
        case _:
            lines[line] = b"\0" * 20 + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(StateError):
        read(path)
    with pytest.raises(StateError):
        DpLedger(path).spend(fit(9), NOISE, SMALL)
    assert path.read_bytes() == b"".join(lines)


def test_what_cannot_be_written_is_an_error_and_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = DpLedger(path)
    ledger.spend(fit(1), NOISE, SMALL)
    before = path.read_bytes()
    real = os.write

    def half(file: int, data: bytes) -> int:
        real(file, bytes(data)[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OutOfSpaceError):
        ledger.spend(fit(2), NOISE, SMALL)
    monkeypatch.undo()
    assert path.read_bytes() == before
    ledger.spend(fit(2), NOISE, SMALL)
    assert len(read(path).spends) == 2


CRASHING = """
import sys
from pathlib import Path
from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.state.dp_ledger import DpLedger
from protofed.common import failpoint
from protofed.common.codec import Digest
from protofed.common.protocol.messages import Task, TaskKind
failpoint.arm(sys.argv[2])
task = Task(TaskKind.FIT, "run", 2, "task-2", Digest("a" * 64), 1, 60.0)
DpLedger(Path(sys.argv[1])).spend(task, "d" * 64, [NoisySums(0.1, 2.0, 10)])
print("the fit begins")
"""


@pytest.mark.parametrize("point", failpoint.BUDGET)
def test_a_crash_at_any_point_never_counts_too_little(path: Path, point: str) -> None:
    DpLedger(path).spend(fit(1), NOISE, SMALL)
    command = [sys.executable, "-c", CRASHING, str(path), f"{point}=kill"]
    crashed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (crashed.returncode, crashed.stdout) == (-signal.SIGKILL, "")  # no fit has started
    started = len(read(path).spends)
    assert started == {"budget-asked": 1, "budget-spent": 2}[point]
    again = subprocess.run([*command[:-1], ""], capture_output=True, text=True, check=True)
    assert again.stdout == "the fit begins\n"
    assert read(path).events() == (NoisySums(0.1, 2.0, 20),)
