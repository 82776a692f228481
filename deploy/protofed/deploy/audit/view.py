"""Audit logs as whoever answers for the data reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.deploy.audit.reader import AuditSummary, Message, Sum
from protofed.deploy.audit.verify import AuditStatus

NONE = "–"
WRAPPED = ("run", "who", "outcome", "call", "what")  # all others are as wide as what is in them


def status_lines(found: AuditStatus, expected: Iterable[str]) -> Iterable[str]:
    """What `verify` says of a good log."""
    if not found.count:
        yield f"{found.path}: good, but there are no records"
    else:
        yield f"{found.path}: good, {found.count} records from {found.first} to {found.last}"
        yield f"  newest hash {found.newest}"
    for wanted in expected:
        if wanted in found.found:
            yield f"  {wanted[:16]}… is record {found.found[wanted]}: nothing up to it was changed since"
    if found.cut:
        yield f"  {found.cut} half lines of killed processes were cut off, as records say"
    if found.half:
        yield f"  {found.half}"


def told_parts(told: AuditSummary, *, messages: bool) -> Iterable[RenderableType]:
    """What a log tells: rounds, messages if they were asked for, notes."""
    if not told.sums:
        yield Text("No messages.")
    else:
        yield _rounds(told)
    if messages and told.messages:
        yield Text()
        yield _messages(told.messages)
    if told.notes:
        yield Text()
        yield _notes(told.notes)


def plain(told: AuditSummary, *, messages: bool) -> dict[str, Any]:
    """The same as plain data."""
    listed: dict[str, Any] = {
        "rounds": [_plain_sum(*where, found) for where, found in sorted(told.sums.items())],
        "notes": [{"at": at, "what": what} for at, what in told.notes],
    }
    return {**listed, "messages": [vars(message) for message in told.messages]} if messages else listed


def _plain_sum(run: str, round: int, found: Sum) -> dict[str, Any]:
    parts = [{"part": part, "tensors": count, "bytes": size} for part, (count, size) in sorted(found.parts.items())]
    counted = {"messages": found.messages, "bytes": found.size, "answer_bytes": found.answer_size}
    told = {"parts": parts, "verdicts": dict(found.verdicts), "errors": dict(found.errors)}
    return {"run": run, "round": round, "who": sorted(found.who), **counted, **told}


def _rounds(told: AuditSummary) -> Table:
    """A row a round; before the rounds of a run, one for what is of none."""
    received = any(found.answer_size is not None for found in told.sums.values())
    columns = ("callers", "messages", "received", "answered") if received else ("messages", "sent")
    table = _table("run", "round", *columns, "tensors", "outcome")
    shown = ""
    for (run, number), found in sorted(told.sums.items()):
        sizes = (str(len(found.who)), str(found.messages), _size(found.size), _size(found.answer_size or 0))
        row = (*(sizes if received else sizes[1:3]), _parts(found), _counted(found.verdicts + found.errors))
        table.add_row(*map(_text, ("" if run == shown and run else run or NONE, str(number or NONE), *row)))
        shown = run
    return table


def _messages(messages: Sequence[Message]) -> Table:
    named = any(message.who for message in messages)
    table = _table("time (UTC)", *(["who"] if named else []), "call", "run", "round", "bytes", "digest", "answer")
    for message in messages:
        answer = message.verdict or message.error.lower().replace("_", " ")
        what = (message.call, message.run or NONE, str(message.round or NONE), str(message.size), message.digest[:8])
        table.add_row(*map(_text, (_time(message.at), *([message.who] if named else []), *what, answer)))
    return table


def _notes(notes: Iterable[tuple[str, str]]) -> Table:
    table = _table("time (UTC)", "what")
    for at, what in notes:
        table.add_row(*map(_text, (_time(at), what)))
    return table


def _text(cell: str) -> Text:
    """What peers wrote is neither markup nor a terminal's commands."""
    return Text("".join(one if one.isprintable() or one == "\n" else f"\\x{ord(one):02x}" for one in cell))


def _size(count: int) -> str:
    return decimal(count).replace("bytes", "B")


def _time(at: str) -> str:
    return at.replace("T", " ").removesuffix("Z")


def _parts(found: Sum) -> str:
    return "\n".join(f"{count} {part}, {_size(size)}" for part, (count, size) in sorted(found.parts.items()))


def _counted(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{number} {word.lower().replace('_', ' ')}" for word, number in sorted(counts.items()))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name in ("round", "callers", "messages", "received", "answered", "sent", "bytes")
        table.add_column(
            name,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=name not in WRAPPED,
            min_width=len(name),
        )
    return table
