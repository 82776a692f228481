"""Audit logs as tables and JSON, for those who answer for the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.common.protocol.messages import TaskKind
from protofed.common.storage.journal import SEGMENT_BYTES
from protofed.deploy.audit.archive import Moved
from protofed.deploy.audit.log import AuditStatus
from protofed.deploy.audit.reader import AuditSummary, Message, RoundSummary

NONE = "–"
MODELS = (TaskKind.FIT, TaskKind.REFINE, TaskKind.SCORE, TaskKind.SCORE_SUM)  # tasks whose base is a model
WRAPPED = ("run", "who", "outcome", "call", "what", "base")  # columns that may break lines; digits must not


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
        yield _rounds(summary)
    if summary.tasks:
        yield Text()
        yield _tasks(summary)
    if messages and summary.messages:
        yield Text()
        yield _messages(summary.messages)
    if summary.notes:
        yield Text()
        yield _notes(summary.notes)


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


def _rounds(summary: AuditSummary) -> Table:
    """A row for each round; the messages of a run that belong to no round come before its rounds."""
    # Only a server's log has answers' sizes.
    is_server = any(round_summary.answer_size is not None for round_summary in summary.rounds.values())
    columns = ("callers", "messages", "received", "answered") if is_server else ("messages", "sent")
    table = _table("run", "round", *columns, "tensors", "outcome")
    previous = ""
    for (run, number), round_summary in sorted(summary.rounds.items()):
        sizes = (
            str(len(round_summary.callers)),
            str(round_summary.messages),
            _size(round_summary.size),
            _size(round_summary.answer_size or 0),
        )
        outcome = _counted(round_summary.verdicts + round_summary.errors)
        row = (*(sizes if is_server else sizes[1:3]), _parts(round_summary), outcome)
        table.add_row(*map(_text, ("" if run == previous and run else run or NONE, str(number or NONE), *row)))
        previous = run
    return table


def base_lines(summary: AuditSummary) -> Iterable[str]:
    """`run round kind digest` of each model that the server gave: equal lines at sites that were given the same.

    What later steps of a secure sum begin from is no model, and another message for each site.
    """
    for run, number, kind, base in sorted(summary.tasks):
        if base and kind in MODELS:
            yield printable(f"{run} {number} {kind} {base}")


def _tasks(summary: AuditSummary) -> Table:
    table = _table("run", "round", "task", "given", "base")
    previous = ""
    for (run, number, kind, base), tasks in sorted(summary.tasks.items()):
        row = ("" if run == previous and run else run or NONE, str(number), kind, str(tasks.count), base or NONE)
        table.add_row(*map(_text, row))
        previous = run
    return table


def _messages(messages: Sequence[Message]) -> Table:
    named = any(message.who for message in messages)
    table = _table("time (UTC)", *(["who"] if named else []), "call", "run", "round", "bytes", "digest", "answer")
    for message in messages:
        answer = "\n".join([message.verdict or message.error.lower().replace("_", " "), *_values(message)])
        call = message.call if message.calls == 1 else f"{message.calls} × {message.call}"
        cells = (call, message.run or NONE, str(message.round or NONE), str(message.size), message.digest[:8])
        table.add_row(*map(_text, (_time(message.at), *([message.who] if named else []), *cells, answer)))
    return table


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


def _notes(notes: Iterable[tuple[str, str]]) -> Table:
    table = _table("time (UTC)", "what")
    for at, text in notes:
        table.add_row(*map(_text, (_time(at), text)))
    return table


def _text(cell: str) -> Text:
    """A cell as plain text: peers chose some of it, and rich would take brackets for markup."""
    return Text("\n".join(map(printable, cell.split("\n"))))


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


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name in ("round", "callers", "messages", "received", "answered", "sent", "bytes", "given")
        table.add_column(
            name,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=name not in WRAPPED,
            min_width=len(name),
        )
    return table
