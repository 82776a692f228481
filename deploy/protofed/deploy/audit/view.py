"""Audit logs as tables and JSON, for those who answer for the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.common.protocol.messages import TaskKind
from protofed.common.storage.journal import SEGMENT_BYTES
from protofed.deploy.audit.archive import Moved
from protofed.deploy.audit.log import AuditStatus
from protofed.deploy.audit.reader import AuditSummary, Message, RoundSummary, TasksGiven
from protofed.deploy.tables import Column, TableStyle, terminal

R = TypeVar("R")
K = TypeVar("K", bound=tuple[Any, ...])
V = TypeVar("V")
NONE = "–"
MODELS = (TaskKind.FIT, TaskKind.REFINE, TaskKind.SCORE, TaskKind.SCORE_SUM)  # tasks whose base is a model


def status_lines(status: AuditStatus, expected: Iterable[str]) -> Iterable[str]:
    """The lines that `audit verify` prints for a good log."""
    if not status.count:
        yield f"{status.path}: good, but there are no records"
    else:
        yield f"{status.path}: good, {status.count} records from {status.first} to {status.last}"
        yield f"  newest hash {status.newest}"
    if status.before:
        moved = status.last_number - status.count
        yield f"  records 1 to {moved} are not here, of {_segments(status.missing_segments)}:"
        yield f"  where they are, the last of them has the hash {status.before}; --expect it there"
    for digest in expected:
        if digest in status.numbers:
            yield f"  {digest[:16]}… is record {status.numbers[digest]}: nothing up to it was changed since"
    if status.torn:
        yield f"  {status.torn} half lines of killed processes were cut off, as records say"
    if status.half_line:
        yield f"  {status.half_line}"


def moved_lines(moved: Sequence[Moved], state: Path, archive: Path) -> Iterable[str]:
    """The lines that `audit archive` prints."""
    for one in moved:
        yield f"{one.file}: {_size(one.size)} as {_size(one.compressed)}"
    if not moved:
        yield f"{state}: nothing to move; the newest file stays, and a new one begins at {SEGMENT_BYTES >> 20} MiB"
    yield f"The whole log is checked by: protofed audit verify {state} --archive {archive}"


def _segments(count: int) -> str:
    return "segment 1" if count == 1 else f"segments 1 to {count}"


def summary_parts(summary: AuditSummary, *, messages: bool) -> Iterable[RenderableType]:
    """Tables of the rounds, of the tasks given, of the messages if requested, and of the notes."""
    if not summary.rounds:
        yield Text("No messages.")
    else:
        yield _table(_round_columns(summary), _once_a_run(sorted(summary.rounds.items())))
    if summary.tasks:
        yield Text()
        yield _table(TASKS, _once_a_run(sorted(summary.tasks.items())))
    if messages and summary.messages:
        yield Text()
        has_who = any(message.who for message in summary.messages)
        yield _table([column for column in MESSAGES if has_who or column.head != "who"], summary.messages)
    if summary.notes:
        yield Text()
        yield _table(NOTES, summary.notes)


def plain(summary: AuditSummary, *, messages: bool) -> dict[str, Any]:
    """The same as plain data, for JSON."""
    content: dict[str, Any] = {
        "rounds": [_plain_round(*key, round_summary) for key, round_summary in sorted(summary.rounds.items())],
        "tasks": [
            {
                "run": run,
                "round": number,
                "kind": kind,
                "base_digest": base,
                "given": tasks.count,
                "fields": tasks.fields,
            }
            for (run, number, kind, base), tasks in sorted(summary.tasks.items())
        ],
        "notes": [{"at": at, "what": text} for at, text in summary.notes],
    }
    return {**content, "messages": [vars(message) for message in summary.messages]} if messages else content


def _plain_round(run: str, number: int, summary: RoundSummary) -> dict[str, Any]:
    return {
        "run": run,
        "round": number,
        "who": sorted(summary.callers),
        "messages": summary.messages,
        "bytes": summary.size,
        "answer_bytes": summary.answer_size,
        "parts": [
            {"part": part, "tensors": count, "bytes": size} for part, (count, size) in sorted(summary.parts.items())
        ],
        "verdicts": dict(summary.verdicts),
        "errors": dict(summary.errors),
    }


def _table(columns: Iterable[Column[R]], rows: Iterable[R]) -> Table:
    """Text of columns that do not wrap stays whole, digits above all; no header is cut."""
    terminal_columns = [replace(one, cell=_escaped(one.cell), width=len(one.head)) for one in columns]
    return terminal(terminal_columns, rows, TableStyle(heads="dim"))


def _once_a_run(items: Iterable[tuple[K, V]]) -> Iterator[tuple[str, K, V]]:
    """Each row with its run, whose name only the first of its rows has."""
    previous = ""
    for key, value in items:
        yield "" if key[0] == previous and previous else key[0] or NONE, key, value
        previous = key[0]


def _round_columns(summary: AuditSummary) -> Iterator[Column[tuple[str, tuple[str, int], RoundSummary]]]:
    """Of a row for each round; the messages of a run that belong to no round come before its rounds."""
    # Only a server's log has answers' sizes.
    is_server = any(round_summary.answer_size is not None for round_summary in summary.rounds.values())
    yield Column("run", lambda row: row[0], wraps=True)
    yield Column("round", lambda row: str(row[1][1] or NONE), right=True)
    if is_server:
        yield Column("callers", lambda row: str(len(row[2].callers)), right=True)
    yield Column("messages", lambda row: str(row[2].messages), right=True)
    yield Column("received" if is_server else "sent", lambda row: _size(row[2].size), right=True)
    if is_server:
        yield Column("answered", lambda row: _size(row[2].answer_size or 0), right=True)
    yield Column("tensors", lambda row: _parts(row[2]))
    yield Column("outcome", lambda row: _counted(row[2].verdicts + row[2].errors), wraps=True)


def base_lines(summary: AuditSummary) -> Iterable[str]:
    """`run round kind digest` of each model that the server gave: equal lines at sites that were given the same.

    What later steps of a secure aggregation begin from is no model, and another message for each site.
    """
    for run, number, kind, base in sorted(summary.tasks):
        if base and kind in MODELS:
            yield printable(f"{run} {number} {kind} {base}")


def _values(message: Message) -> Iterable[str]:
    """`loss 0.51` of each number that was disclosed; an older log has the names alone."""
    for name in ("metrics", "scores", "telemetry"):
        values = message.fields.get(name)
        if isinstance(values, Mapping):
            yield from (
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
            )
        elif isinstance(values, list):
            yield from map(str, values)
    if isinstance(weight := message.fields.get("weight"), float):
        yield f"weight {weight:g}"


def _escaped(cell: Callable[[R], str | Text]) -> Callable[[R], Text]:
    """Cells as plain text: peers chose some of the text, and rich would take brackets for markup."""
    return lambda row: Text("\n".join(map(printable, str(cell(row)).split("\n"))))


def printable(text: str) -> str:
    """The text without what a terminal would take for commands."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _size(count: int) -> str:
    return decimal(count).replace("bytes", "B")


def _time(at: str) -> str:
    return at.replace("T", " ").removesuffix("Z")


def _parts(summary: RoundSummary) -> str:
    return "\n".join(f"{count} {part}, {_size(size)}" for part, (count, size) in sorted(summary.parts.items()))


def _counted(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{number} {word.lower().replace('_', ' ')}" for word, number in sorted(counts.items()))


def _answer(message: Message) -> str:
    return "\n".join([message.verdict or message.error.lower().replace("_", " "), *_values(message)])


TASKS: Sequence[Column[tuple[str, tuple[str, int, str, str], TasksGiven]]] = (
    Column("run", lambda row: row[0], wraps=True),
    Column("round", lambda row: str(row[1][1]), right=True),
    Column("task", lambda row: row[1][2]),
    Column("given", lambda row: str(row[2].count), right=True),
    Column("base", lambda row: row[1][3] or NONE, wraps=True),
)
MESSAGES: Sequence[Column[Message]] = (
    Column("time (UTC)", lambda message: _time(message.at)),
    Column("who", lambda message: message.who, wraps=True),
    Column("call", lambda one: one.call if one.calls == 1 else f"{one.calls} × {one.call}", wraps=True),
    Column("run", lambda message: message.run or NONE, wraps=True),
    Column("round", lambda message: str(message.round or NONE), right=True),
    Column("bytes", lambda message: str(message.size), right=True),
    Column("digest", lambda message: message.digest[:8]),
    Column("answer", _answer),
)
NOTES: Sequence[Column[tuple[str, str]]] = (
    Column("time (UTC)", lambda note: _time(note[0])),
    Column("what", lambda note: note[1], wraps=True),
)
