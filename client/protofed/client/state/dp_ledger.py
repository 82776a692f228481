"""What a site has spent of its privacy: a JSON line for each fit, durable before the fit begins.

It is one file in the state folder, for all runs on the site's data. A crash between the line and the fit leaves a spend
that gave nothing: the ledger may count too much, and never too little.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from protofed.client.policy.dp_accountant import Events, NoisySums, merged
from protofed.common.clock import stamp, utc_now
from protofed.common.codec import digest
from protofed.common.errors import StateError
from protofed.common.failpoint import reach
from protofed.common.protocol.messages import Task
from protofed.common.storage import files

FILE = ".privacy-spent.jsonl"  # in the state folder; run names cannot begin with a dot
TORN = b"#torn"  # written behind half a line that a killed process left; no whole line ends like that


@checked(frozen=True)
class Spend:
    """A fit that was started, or may have been.

    Attributes:
        seq: from 1; a line that is missing leaves a gap.
        at: UTC, RFC 3339.
        base: digest of the model that the fit starts from.
        noise: what its noise is drawn from, as `DpNoise.identity`.
        events: its noisy mechanisms, as (sampling_rate, noise_multiplier, count).
    """

    seq: Annotated[int, Field(ge=1)]
    at: str
    run: str
    round: int
    task: str
    base: str
    noise: str
    events: tuple[
        tuple[
            Annotated[float, Field(gt=0, le=1)],
            Annotated[float, Field(gt=0, allow_inf_nan=False)],
            Annotated[int, Field(ge=1)],
        ],
        ...,
    ]
    version: Literal[1] = 1

    def noisy(self) -> Events:
        """Its mechanisms."""
        return tuple(NoisySums(*event) for event in self.events)

    def line(self) -> bytes:
        """Its bytes in the file: the record and the BLAKE3-256 of it, with a newline."""
        record = json.dumps(_SPEND.dump_python(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f'{{"hash":"{digest(record.encode())}","spend":{record}}}\n'.encode()


_SPEND = TypeAdapter(Spend)


@dataclass(frozen=True)
class Spent:
    """All that a ledger has.

    Attributes:
        spends: in the order in which they were written.
        torn: torn lines; nobody knows what they said.
    """

    spends: tuple[Spend, ...] = ()
    torn: int = 0

    def events(self, more: Iterable[NoisySums] = ()) -> Events:
        """The mechanisms of all fits, and `more`; each torn line counts as the most that any fit had of each.

        Args:
            more: those of the next fit.
        """
        next_fit = merged(more)
        each = [*(spend.noisy() for spend in self.spends), next_fit]
        known = [event for events in each for event in events]
        return merged([*known, *_largest(each) * self.torn])

    def has(self, task: Task, noise: str, events: Events) -> bool:
        """Whether this very fit was counted before: of the same task, with the same noise, it gives the same again."""
        key = (task.run, task.round, task.task_id, task.base_digest or "", noise, merged(events))
        return any((s.run, s.round, s.task, s.base, s.noise, merged(s.noisy())) == key for s in self.spends)

    def drawn_for(self, noise: str) -> frozenset[str]:
        """The tasks for whose fits this noise was drawn."""
        return frozenset(spend.task for spend in self.spends if spend.noise == noise)

    def runs(self) -> dict[str, tuple[Spend, ...]]:
        """The spends by run, in the order in which the runs began."""
        return {run: tuple(s for s in self.spends if s.run == run) for run in dict.fromkeys(s.run for s in self.spends)}


class DpLedger:
    """The ledger of one site: its agent alone writes it, and anybody on the machine may `read` it.

    Args:
        path: of `FILE`.
        now: the current time, UTC.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._path, self._now = path, now
        self._spent: Spent | None = None  # as of the file, which nobody else writes
        self._joint = b""  # what must stand between the end of the file and a new line

    def spent(self) -> Spent:
        """All that is spent.

        Raises:
            StateError: the file cannot be read, or a line is not what was written.
        """
        if self._spent is None:
            self._spent, self._joint = _parsed(self._path, _bytes(self._path))
        return self._spent

    def spend(self, task: Task, noise: str, events: Iterable[NoisySums]) -> None:
        """Count a fit that is about to begin, durably; one that was counted before is not counted again.

        Args:
            noise: what its noise is drawn from, as `DpNoise.identity`.

        Raises:
            StateError: it cannot be written, or `spent` raises it: the fit must not begin.
        """
        before, mechanisms = self.spent(), merged(events)
        if before.has(task, noise, mechanisms):
            return
        seq = before.spends[-1].seq + 1 if before.spends else 1
        numbers = tuple((event.sampling_rate, event.noise_multiplier, event.count) for event in mechanisms)
        base = task.base_digest or ""
        spend = Spend(seq, stamp(self._now()), task.run, task.round, task.task_id, base, noise, numbers)
        reach("budget-asked")
        self._append(self._joint + spend.line())
        reach("budget-spent")
        self._spent, self._joint = Spent((*before.spends, spend), before.torn), b""

    def _append(self, data: bytes) -> None:
        """Add bytes, durably; a disk that refuses them leaves the file as it was, or ends in a torn line."""
        existed = self._path.exists()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, files.PRIVATE)
        except OSError as error:
            raise files.write_error(self._path, error) from error
        try:
            end = os.fstat(file).st_size
            try:
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[os.write(file, remaining) :]
                os.fsync(file)
            except BaseException:
                self._spent = None  # read again: what is on the disk is uncertain
                os.ftruncate(file, end)  # the fit does not begin: a full disk must not use the budget up
                os.fsync(file)
                raise
            if not existed:
                files.sync_folder(self._path.parent)
        except OSError as error:
            raise files.write_error(self._path, error) from error
        finally:
            os.close(file)


def read(path: Path) -> Spent:
    """What a site has spent, for its people; the daemon may be running. No file: nothing.

    Raises:
        StateError: as of `DpLedger.spent`.
    """
    return _parsed(path, _bytes(path))[0]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; make it readable for the daemon") from error


def _parsed(path: Path, data: bytes) -> tuple[Spent, bytes]:
    """What the lines say, and what must be written behind the last one before another.

    Half a line was being written when its process died: its fit never began. Any other damaged line may be of a fit
    whose update was sent, and nothing tells what that fit cost.
    """
    *lines, tail = data.split(b"\n")
    spends: list[Spend] = []
    torn = 0
    for number, line in enumerate(lines, 1):
        spend = _read_line(line)
        if spend is not None and spend.seq == len(spends) + 1:
            spends.append(spend)
        elif line.endswith(TORN):
            torn += 1
        else:
            raise _damaged(path, number)
    if (whole := _read_line(tail)) is not None and whole.seq == len(spends) + 1:  # but for its newline
        return Spent((*spends, whole), torn), b"\n"
    return Spent(tuple(spends), torn + bool(tail)), TORN + b"\n" if tail else b""


def _read_line(line: bytes) -> Spend | None:
    """A spend, checked against its hash; None: it is not what was written."""
    try:
        spend = _SPEND.validate_python(json.loads(line)["spend"])
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError):
        return None
    return spend if spend.line() == line + b"\n" else None


def _largest(each: Sequence[Events]) -> Events:
    """The most that any of these has of each mechanism: no single one costs more."""
    most: Counter[tuple[float, float]] = Counter()
    for events in each:
        most |= Counter({(event.sampling_rate, event.noise_multiplier): event.count for event in merged(events)})
    return merged(NoisySums(*key, count) for key, count in most.items())


def _damaged(path: Path, line: int) -> StateError:
    return StateError(
        f"{path}: line {line} was changed or damaged, so nobody knows what this site has spent. Restore the file "
        "from a backup that is newer than the last fit. Without such a backup, move the file away, and lower "
        "epsilon in the policy by all that may have been spent"
    )
