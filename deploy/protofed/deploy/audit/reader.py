"""Reads an audit log: messages one by one, and summed up by run and round.

A site's log has the events sent, answered, task, run, policy, refused, server, pinned, summed and those of `Act`, what
people there decided; a server's has call, counted and resumed. Both record a message's fields (`audit_fields`). A
chunk names only its upload, whose id contains the task_id; the round comes from the message that announced the upload,
which has the same task_id.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.client.state.decisions import Act
from protofed.common.errors import ConfigError, ProtocolError, unknown
from protofed.common.ids import read_id
from protofed.common.storage.journal import HalfLineError, Record, TamperedError
from protofed.deploy.audit.verify import AuditError, read

RECENT = 1000  # messages of a site's log that may still be answered; a daemon has a handful in flight
POLICY = "policy"  # in place of gRPC's code


@dataclass
class Message:
    """One message of a log: sent by the site, or received by the server. Its attributes are keys of `--json`.

    Attributes:
        at: UTC in RFC 3339.
        who: in a server's log, the site or operator that called; empty in a site's.
        run, round: empty and 0 if the message belongs to none.
        size: bytes.
        answer_size: bytes; None in a site's log.
        digest: BLAKE3-256 of its bytes; of chunks that share a record, of the whole blob.
        fields: of the message, by name.
        verdict: of a receipt.
        error: gRPC's code; empty if the call succeeded.
        calls: how many the record stands for: the chunks of a transfer share one.
    """

    at: str
    call: str
    who: str
    run: str
    round: int
    size: int
    answer_size: int | None
    digest: str
    fields: dict[str, Any]
    verdict: str = ""
    error: str = ""
    calls: int = 1

    @property
    def task_id(self) -> str:
        """Of its task; a chunk's is within its upload's id. Empty: it belongs to none."""
        given: str = self.fields.get("task_id", "")
        upload: str = self.fields.get("upload", "")
        return given or upload.rpartition(".")[0].rpartition(".")[2]


@dataclass
class RoundSummary:
    """The messages of one round or, as round 0, of a run outside of rounds.

    Attributes:
        size, answer_size: bytes.
        callers: in a server's log, the sites and operators that called.
        parts: number of tensors and bytes by part, as announced; an update counts once, however often it was sent.
        verdicts: of receipts.
        errors: failed calls by code; `policy` counts updates that the site's own policy refused.
    """

    messages: int = 0
    size: int = 0
    answer_size: int | None = None
    callers: set[str] = field(default_factory=set)
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass
class TasksGiven:
    """The tasks of one kind with one base that the server gave to the site in one round.

    Attributes:
        count: each time that a task was given counts.
        fields: of the newest one, by name.
    """

    count: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class AuditSummary:
    """A log's content.

    Attributes:
        rounds: by run and round.
        tasks: by run, round, kind and the digest of the base ("" for a task without one); of a site's log.
        messages: one by one, if they were requested.
        notes: (time, text) of records other than messages: the policy that counts, whose certificate the server showed,
            calls that could not be recorded.
        runs: every run that a record names, whichever were requested.
    """

    rounds: dict[tuple[str, int], RoundSummary] = field(default_factory=dict)
    tasks: dict[tuple[str, int, str, str], TasksGiven] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    runs: set[str] = field(default_factory=set)


def summarize(
    path: Path,
    archive: Path | None = None,
    *,
    run: str | None = None,
    round: int | None = None,
    messages: bool = False,
    shown: bool = True,
) -> AuditSummary:
    """Read a log, check it, and sum up its messages.

    Args:
        archive: a folder with the log's oldest segments.
        run, round: only messages of these.
        messages: keep each message, too.
        shown: show a progress bar on a terminal.

    Raises:
        AuditError: the log was changed; names the first bad record and its line.
        ConfigError: no record names the run.
    """
    summary = AuditSummary()
    reader = SummaryReader(summary, run, round, messages)
    try:
        for record in read(path, archive, shown=shown):
            reader.read(record)
    except HalfLineError as end:  # the daemon may be writing it just now
        summary.notes.append(("", str(end)))
    except TamperedError as error:
        raise AuditError(str(error)) from error
    if run is not None and run not in summary.runs:
        none = ConfigError(f"{path} has no records of run {run}, or any other")
        raise unknown("run", run, summary.runs) if summary.runs else none
    return summary


class SummaryReader:
    """Adds records, in their order, to a summary.

    Args:
        run, round, messages: as of `summarize`.
    """

    def __init__(self, summary: AuditSummary, run: str | None, round: int | None, messages: bool) -> None:
        self._summary, self._run, self._round, self._messages = summary, run, round, messages
        self._rounds: dict[str, tuple[str, int]] = {}  # run and round, by task_id
        # By digest, the oldest first: an `answered` record names its message so. Bounded, since logs can be huge.
        self._recent: dict[str, Message] = {}
        self._announced: set[tuple[str, ...]] = set()

    def read(self, record: Record) -> None:
        """Add a record."""
        fields: Mapping[str, Any] = record.facts
        named = fields.get("run") or fields.get("facts", {}).get("run", "")
        if isinstance(named, str) and (run := _run(named)):
            self._summary.runs.add(run)
        match record.event:
            case "sent" | "call":
                self._message(self._with_round(_message(record.at, fields)))
            case "answered" if fields.get("digest") in self._recent:
                self._answered(self._recent[fields["digest"]], fields)
            case "task":
                self._task(fields)
            case "refused" if self._selected(*(key := (fields.get("run", ""), fields.get("round", 0)))):
                self._of(*key).errors[POLICY] += 1
                self._summary.notes.append((record.at, _note(record.event, fields)))
            case "masked" | "summed" if self._selected(fields.get("run", ""), fields.get("round", 0)):
                self._summary.notes.append((record.at, _note(record.event, fields)))
            case "privacy" if self._selected(fields.get("run", ""), fields.get("round", 0)):
                self._summary.notes.append((record.at, _note(record.event, fields)))
            case "run" if self._run in (None, fields.get("run")):
                self._summary.notes.append((record.at, _note(record.event, fields)))
            case decided if decided in set(Act) and self._run in (None, fields.get("run", self._run)):
                self._summary.notes.append((record.at, _decision(decided, fields)))
            case "policy" | "server" | "met" | "resumed" | "torn" | "counted":
                self._summary.notes.append((record.at, _note(record.event, fields)))

    def _task(self, fields: Mapping[str, Any]) -> None:
        run, number = _run(fields.get("run", "")), fields.get("round", 0)
        self._rounds[fields.get("task_id", "")] = run, number
        if self._selected(run, number):
            key = run, number, fields.get("kind", ""), fields.get("base_digest", "")
            given = self._summary.tasks.setdefault(key, TasksGiven())
            given.count, given.fields = given.count + 1, dict(fields)

    def _message(self, message: Message) -> None:
        self._recent[message.digest] = message
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        if not self._selected(message.run, message.round):
            return
        if self._messages:
            self._summary.messages.append(message)
        summary = self._of(message.run, message.round)
        summary.messages += message.calls
        summary.size += message.size
        if message.answer_size is not None:
            summary.answer_size = (summary.answer_size or 0) + message.answer_size
        summary.callers |= {message.who} - {""}
        self._count(summary, message)
        self._announce(summary, message)

    def _answered(self, message: Message, fields: Mapping[str, Any]) -> None:
        message.verdict, message.error = fields.get("verdict", ""), fields.get("code", "")
        if self._selected(message.run, message.round):
            self._count(self._of(message.run, message.round), message)

    def _count(self, summary: RoundSummary, message: Message) -> None:
        if message.verdict:
            summary.verdicts[message.verdict] += 1
        if message.error:
            summary.errors[message.error] += 1

    def _announce(self, summary: RoundSummary, message: Message) -> None:
        """Add an update's tensors when it is announced for the first time; a resumed upload is announced again."""
        fields = message.fields
        update = (message.who, fields.get("task_id", ""), fields.get("digest", ""))
        if not isinstance(fields.get("parts"), list) or update in self._announced:
            return
        self._announced.add(update)
        for part, tensors, size in fields["parts"]:
            before = summary.parts.get(part, (0, 0))
            summary.parts[part] = (before[0] + tensors, before[1] + size)

    def _with_round(self, message: Message) -> Message:
        """The message with its run and round, if it or an earlier one of its task names them."""
        task_id = message.task_id
        if task_id and message.round:
            self._rounds[task_id] = message.run, message.round
        elif task_id:
            message.run, message.round = self._rounds.get(task_id, (message.run, message.round))
        return message

    def _selected(self, run: str, round: int) -> bool:
        return self._run in (None, run) and self._round in (None, round)

    def _of(self, run: str, round: int) -> RoundSummary:
        return self._summary.rounds.setdefault((run, round), RoundSummary())


def _message(at: str, fields: Mapping[str, Any]) -> Message:
    """The message of a record `sent` (whose fields are the message's) or `call` (which has them under "facts")."""
    content, peer = fields.get("facts", fields), fields.get("peer", {})
    return Message(
        at,
        fields["call"],
        (peer.get("name") or content.get("site", "")) if peer else "",
        _run(content.get("run", "")),
        content.get("round", 0),
        fields["bytes"],
        fields.get("answer_bytes"),
        fields["digest"],
        content,
        fields.get("verdict", ""),
        "" if fields.get("code", "OK") == "OK" else fields["code"],
        fields.get("calls", 1),
    )


def _run(name: str) -> str:
    """The run's name; empty if it cannot be one: refused calls are recorded too, with whatever a peer sent."""
    with contextlib.suppress(ProtocolError):
        return read_id(name)
    return ""


def _note(event: str, fields: Mapping[str, Any]) -> str:
    match event:
        case "refused":
            return f"refused by the policy, round {fields.get('round')} of run {fields.get('run')}: {fields.get('why')}"
        case "run":
            offered = f"run {fields.get('run')} was offered, recipe {fields.get('recipe')}"
            return f"{offered}; the server aggregates {fields.get('min_cohort', 1)} sites or more in a round"
        case "policy":
            return f"policy {fields.get('policy')} counts from now on, digest {fields.get('digest')}"
        case "server":
            server = f"server {fields.get('server')}: {fields.get('finding')}"
            return f"{server} {fields.get('certificate')} {fields.get('why')}"
        case "met":
            return f"identity of {fields.get('site')} believed on first use, code {fields.get('code')}"
        case "masked":
            return f"left under masks, {_sum(fields)}: {', '.join(fields.get('scores', ())) or 'no score'}"
        case "summed":
            of = f"the {fields.get('subject')} of {', '.join(fields.get('sites', ()))}"
            return f"secure sum opened, {_sum(fields)}: {of}"
        case "privacy":
            of_all = f"epsilon of all fits {_number(fields.get('epsilon'))} at delta {_number(fields.get('delta'))}"
            budget = "" if fields.get("budget") is None else f", of {_number(fields.get('budget'))}"
            at = f"round {fields.get('round')} of run {fields.get('run')}"
            return f"privacy spent, {at}: {of_all}{budget}; {fields.get('withheld')}"
        case "resumed":
            lost = f"not recorded, nor answered: {_calls(fields['unrecorded'])}"
            return f"there was no room for records: {lost}; refused before they acted: {_calls(fields['refused'])}"
        case "counted":
            peer = f"{fields['peer'].get('party')} '{fields['peer'].get('name')}'"
            return f"{peer} without lines of their own: {_calls(fields['calls'])}; {fields.get('bytes')} bytes"
        case _:
            return f"half a line of {fields.get('bytes')} bytes, left by a killed process, was cut off"


def _sum(fields: Mapping[str, Any]) -> str:
    return f"round {fields.get('round')} of run {fields.get('run')}, attempt {fields.get('attempt')}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _decision(event: str, fields: Mapping[str, Any]) -> str:
    who = f" by {fields['by']}" if fields.get("by") else ""
    if event == Act.CONFIRM:
        ended = f"; the group with {fields['group']} ended" if fields.get("group") else ""
        listed = f"partners {fields.get('partners')} confirmed{who}, code {fields.get('code')}"
        return f"{listed}, {fields.get('decided_at', '')}{ended}"
    if event == Act.FORGET_GROUP:
        return f"group {fields.get('group')} forgotten{who}, {fields.get('decided_at', '')}"
    about = f"run {fields['run']}" if fields.get("run") else "this site"
    until = f", until {fields['until']}" if fields.get("until") else ""
    reason = f": {fields['reason']}" if fields.get("reason") else ""
    word = "resumed" if event == Act.RESUME else event
    return f"{about} was {word}{who}, {fields.get('decided_at', '')}{until}{reason}"


def _calls(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} × {call}" for call, number in sorted(counts.items())) or "none"
