"""What audit logs tell: messages one by one, and summed up by run and round.

A site's log has the events sent, answered, refused and server; a server's has call and resumed. Both have of a message
its fields (`wire.facts`). A chunk names its upload, whose id has the task's task_id; what announced the upload has the
same task_id and tells the round.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.common.errors import ProtocolError
from protofed.common.ids import read_id
from protofed.common.storage.journal import HalfLineError, Record, TamperedError
from protofed.deploy.audit.verify import AuditError, read

RECENT = 1000  # messages of a site's log that may still be answered; a daemon has a handful under way
POLICY = "policy"  # in place of gRPC's word


@dataclass
class Message:
    """One message of a log: sent by the site, or received by the server.

    Attributes:
        at: UTC.
        who: in a server's log, the site or operator that called; empty in a site's.
        run, round: empty and 0 where the message is of none.
        size: bytes.
        answer_size: bytes; None in a site's log.
        digest: BLAKE3-256 of its bytes.
        said: its fields.
        verdict: of a receipt.
        error: gRPC's word; empty if there was none.
    """

    at: str
    call: str
    who: str
    run: str
    round: int
    size: int
    answer_size: int | None
    digest: str
    said: dict[str, Any]
    verdict: str = ""
    error: str = ""


@dataclass
class Sum:
    """What a log tells of one round or, as round 0, of a run outside of rounds.

    Attributes:
        size, answer_size: bytes.
        who: in a server's log, all that called.
        parts: tensors and bytes by part, as announced; each update counts once, however often it was tried.
        verdicts: of receipts.
        errors: calls that failed; `policy` are updates that the site's own policy did not let out.
    """

    messages: int = 0
    size: int = 0
    answer_size: int | None = None
    who: set[str] = field(default_factory=set)
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass
class AuditSummary:
    """What a log tells.

    Attributes:
        sums: by run and round.
        messages: one by one, if they were asked for.
        notes: what is no message, with its time: who answered for the server, calls that could not be recorded.
    """

    sums: dict[tuple[str, int], Sum] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def tell(
    path: Path, *, run: str | None = None, round: int | None = None, messages: bool = False, shown: bool = True
) -> AuditSummary:
    """Read a log, checking it, and sum up what it tells.

    Args:
        run, round: only of these.
        messages: each of them, too.
        shown: how far it is, on a terminal.

    Raises:
        AuditError: naming the first bad record and its line.
    """
    told = AuditSummary()
    reader = _Reader(told, run, round, messages)
    try:
        for record in read(path, shown=shown):
            reader.read(record)
    except HalfLineError as end:
        told.notes.append(("", str(end)))
    except TamperedError as error:
        raise AuditError(str(error)) from error
    return told


class _Reader:
    """Sums up records, in their order."""

    def __init__(self, told: AuditSummary, run: str | None, round: int | None, messages: bool) -> None:
        self._told, self._run, self._round, self._messages = told, run, round, messages
        self._places: dict[str, tuple[str, int]] = {}  # run and round, by the task_id of a task
        self._recent: dict[str, Message] = {}  # by digest
        self._announced: set[tuple[str, ...]] = set()

    def read(self, record: Record) -> None:
        """Add a record."""
        facts: Mapping[str, Any] = record.facts
        match record.event:
            case "sent" | "call":
                self._message(self._placed(_message(record.at, facts)))
            case "answered" if facts.get("digest") in self._recent:
                self._answered(self._recent[facts["digest"]], facts)
            case "refused" if self._wanted(*(where := (facts.get("run", ""), facts.get("round", 0)))):
                self._sum(*where).errors[POLICY] += 1
                self._told.notes.append((record.at, _note(record.event, facts)))
            case "server" | "resumed" | "torn":
                self._told.notes.append((record.at, _note(record.event, facts)))

    def _message(self, message: Message) -> None:
        self._recent[message.digest] = message
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        if not self._wanted(message.run, message.round):
            return
        if self._messages:
            self._told.messages.append(message)
        found = self._sum(message.run, message.round)
        found.messages += 1
        found.size += message.size
        if message.answer_size is not None:
            found.answer_size = (found.answer_size or 0) + message.answer_size
        found.who |= {message.who} - {""}
        self._count(found, message)
        self._announce(found, message)

    def _answered(self, message: Message, facts: Mapping[str, Any]) -> None:
        message.verdict, message.error = facts.get("verdict", ""), facts.get("code", "")
        if self._wanted(message.run, message.round):
            self._count(self._sum(message.run, message.round), message)

    def _count(self, found: Sum, message: Message) -> None:
        if message.verdict:
            found.verdicts[message.verdict] += 1
        if message.error:
            found.errors[message.error] += 1

    def _announce(self, found: Sum, message: Message) -> None:
        """Add an update's tensors, the first time that it is announced."""
        said = message.said
        update = (message.who, said.get("task_id", ""), said.get("digest", ""))
        if not isinstance(said.get("parts"), list) or update in self._announced:
            return
        self._announced.add(update)
        for part, tensors, size in said["parts"]:
            before = found.parts.get(part, (0, 0))
            found.parts[part] = (before[0] + tensors, before[1] + size)

    def _placed(self, message: Message) -> Message:
        """With its run and round, if an earlier message tells them."""
        task_id = message.said.get("task_id") or message.said.get("upload", "").rpartition(".")[0].rpartition(".")[2]
        if task_id and message.round:
            self._places[task_id] = message.run, message.round
        elif task_id:
            message.run, message.round = self._places.get(task_id, (message.run, message.round))
        return message

    def _wanted(self, run: str, round: int) -> bool:
        return self._run in (None, run) and self._round in (None, round)

    def _sum(self, run: str, round: int) -> Sum:
        return self._told.sums.setdefault((run, round), Sum())


def _message(at: str, facts: Mapping[str, Any]) -> Message:
    """Of a record `sent` or `call`."""
    said, peer = facts.get("facts", facts), facts.get("peer", {})
    return Message(
        at,
        facts["call"],
        (peer.get("name") or said.get("site", "")) if peer else "",
        _run(said.get("run", "")),
        said.get("round", 0),
        facts["bytes"],
        facts.get("answer_bytes"),
        facts["digest"],
        said,
        facts.get("verdict", ""),
        "" if facts.get("code", "OK") == "OK" else facts["code"],
    )


def _run(said: str) -> str:
    """Nothing, if it cannot be a run: a peer may say what it likes."""
    with contextlib.suppress(ProtocolError):
        return read_id(said)
    return ""


def _note(event: str, facts: Mapping[str, Any]) -> str:
    match event:
        case "refused":
            return f"refused by the policy, round {facts.get('round')} of run {facts.get('run')}: {facts.get('why')}"
        case "server":
            return f"server {facts.get('server')}: {facts.get('finding')} {facts.get('certificate')} {facts.get('why')}"
        case "resumed":
            lost = f"not recorded, nor answered: {_calls(facts['unrecorded'])}"
            return f"there was no room for records: {lost}; refused before they acted: {_calls(facts['refused'])}"
        case _:
            return f"half a line of {facts.get('bytes')} bytes, left by a killed process, was cut off"


def _calls(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} × {call}" for call, number in sorted(counted.items())) or "none"
