"""Reads an audit log: what each record is, and what the records say together, by run and round or of one run.

A site's log has the events sent, answered, task, run, policy, refused, server, met, masked, summed and privacy. It also
has the events of `Act`: what people there decided. A server's log has call, counted and resumed. Both record a
message's fields (`audit_fields`). A chunk names only its upload, whose id contains the task_id. The message that
announced the upload has the same task_id, and names the round.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from protofed.client.state.decisions import Act
from protofed.common.errors import ConfigError, ProtocolError, StateError, unknown
from protofed.common.ids import read_id
from protofed.common.storage.journal import HalfLineError, Record, TamperedError, segments
from protofed.deploy.audit.log import AuditError, read

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
        own_id: str = self.fields.get("task_id", "")
        upload: str = self.fields.get("upload", "")
        return own_id or upload.rpartition(".")[0].rpartition(".")[2]


@dataclass(frozen=True)
class Answer:
    """The server's answer to a message of a site; the message has its verdict or error now."""

    message: Message

    @property
    def run(self) -> str:
        """The message's."""
        return self.message.run

    @property
    def round(self) -> int:
        """The message's."""
        return self.message.round


@dataclass(frozen=True)
class GivenTask:
    """A task that the server gave to the site.

    Attributes:
        base: digest of the model to start from; empty: it has none.
        fields: by name.
    """

    at: str
    run: str
    round: int
    kind: str
    base: str
    fields: dict[str, Any]

    @property
    def task_id(self) -> str:
        """Which task it is; given again, it has the same one."""
        return str(self.fields.get("task_id", ""))


@dataclass(frozen=True)
class Note:
    """A record that is neither a message nor a task: the policy that counts, a decision, whose certificate was shown, …

    Attributes:
        run, round: None: it belongs to all of them.
        fields: by name.
    """

    at: str
    event: str
    fields: Mapping[str, Any]
    run: str | None = None
    round: int | None = None

    @property
    def text(self) -> str:
        """In words."""
        return _decision(self.event, self.fields) if self.event in set(Act) else _note(self.event, self.fields)


Entry: TypeAlias = Message | Answer | GivenTask | Note


class LogReader:
    """Says of records, in their order, what each is.

    Attributes:
        runs: every run that a record names.
    """

    def __init__(self) -> None:
        self.runs: set[str] = set()
        self._rounds: dict[str, tuple[str, int]] = {}  # run and round, by task_id
        # By digest, the oldest first: an `answered` record names its message so. Bounded, since logs can be huge.
        self._recent: dict[str, Message] = {}

    def read(self, record: Record) -> Entry | None:
        """What a record is; None: nothing that is shown."""
        fields: Mapping[str, Any] = record.facts
        run_name = fields.get("run") or fields.get("facts", {}).get("run", "")
        if isinstance(run_name, str) and (run := _run(run_name)):
            self.runs.add(run)
        match record.event:
            case "sent" | "call":
                return self._sent(_message(record.at, fields))
            case "answered" if fields.get("digest") in self._recent:
                message = self._recent[fields["digest"]]
                message.verdict, message.error = fields.get("verdict", ""), fields.get("code", "")
                return Answer(message)
            case "task":
                return self._task(record.at, fields)
            case "refused" | "masked" | "aggregated" | "privacy":
                return Note(record.at, record.event, fields, fields.get("run", ""), fields.get("round", 0))
            case event if event == "run" or event in set(Act):
                return Note(record.at, event, fields, fields.get("run"))
            case "policy" | "server" | "met" | "resumed" | "torn" | "counted":
                return Note(record.at, record.event, fields)
        return None

    def _task(self, at: str, fields: Mapping[str, Any]) -> GivenTask:
        run, number = _run(fields.get("run", "")), fields.get("round", 0)
        task = GivenTask(at, run, number, fields.get("kind", ""), fields.get("base_digest", ""), dict(fields))
        self._rounds[task.task_id] = run, number
        return task

    def _sent(self, message: Message) -> Message:
        """The message with its run and round, if it or an earlier one of its task names them."""
        task_id = message.task_id
        if task_id and message.round:
            self._rounds[task_id] = message.run, message.round
        elif task_id:
            message.run, message.round = self._rounds.get(task_id, (message.run, message.round))
        self._recent.pop(message.digest, None)  # sent again: it is among the newest
        self._recent[message.digest] = message
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return message


def _message(at: str, fields: Mapping[str, Any]) -> Message:
    """The message of a record `sent` (whose fields are the message's) or `call` (which has them under "facts")."""
    content, peer = fields.get("facts", fields), fields.get("peer", {})
    return Message(
        at,
        fields["call"],
        (peer.get("name") or content.get("site", "")) if peer else "",
        _run(content.get("run", "")),
        content.get("round", 0),
        fields.get("bytes", 0),
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

    def count(self, message: Message) -> None:
        """Count a message's verdict or error, if it has one by now."""
        if message.verdict:
            self.verdicts[message.verdict] += 1
        if message.error:
            self.errors[message.error] += 1

    def announce(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Add an update's parts."""
        for part, tensors, size in parts:
            before = self.parts.get(part, (0, 0))
            self.parts[part] = (before[0] + tensors, before[1] + size)


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
    """

    rounds: dict[tuple[str, int], RoundSummary] = field(default_factory=dict)
    tasks: dict[tuple[str, int, str, str], TasksGiven] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    _announced: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, entry: Entry) -> None:
        """Add what a record says; `messages` are left alone."""
        match entry:
            case Message():
                self._message(entry)
            case Answer(message):
                self._of(message).count(message)
            case GivenTask():
                total = self.tasks.setdefault((entry.run, entry.round, entry.kind, entry.base), TasksGiven())
                total.count, total.fields = total.count + 1, entry.fields
            case Note():
                if entry.event == "refused":
                    self.rounds.setdefault((entry.run or "", entry.round or 0), RoundSummary()).errors[POLICY] += 1
                self.notes.append((entry.at, entry.text))

    def _message(self, message: Message) -> None:
        summary = self._of(message)
        summary.messages += message.calls
        summary.size += message.size
        if message.answer_size is not None:
            summary.answer_size = (summary.answer_size or 0) + message.answer_size
        summary.callers |= {message.who} - {""}
        summary.count(message)
        fields = message.fields
        update = (message.who, fields.get("task_id", ""), fields.get("digest", ""))
        # A resumed upload is announced again.
        if isinstance(fields.get("parts"), list) and update not in self._announced:
            self._announced.add(update)
            summary.announce(fields["parts"])

    def _of(self, message: Message) -> RoundSummary:
        return self.rounds.setdefault((message.run, message.round), RoundSummary())


def summarize(
    path: Path,
    archive: Path | None = None,
    *,
    run: str | None = None,
    round: int | None = None,
    messages: bool = False,
    visible: bool = True,
) -> AuditSummary:
    """Read a log, check it, and sum up its messages.

    Args:
        archive: a folder with the log's oldest segments.
        run, round: only messages of this run or round.
        messages: keep each message, too.
        visible: show a progress bar on a terminal.

    Raises:
        AuditError: the log was changed; names the first bad record and its line.
        ConfigError: no record names the run.
    """
    summary, reader = AuditSummary(), LogReader()
    try:
        for record in read(path, archive, visible=visible):
            if (entry := reader.read(record)) is None:
                continue
            if (run is None or entry.run in (None, run)) and (round is None or entry.round in (None, round)):
                summary.add(entry)
                if messages and isinstance(entry, Message):
                    summary.messages.append(entry)
    except HalfLineError as end:  # the daemon may be writing it just now
        summary.notes.append(("", str(end)))
    except TamperedError as error:
        raise AuditError(str(error)) from error
    if run is not None and run not in reader.runs:
        none = ConfigError(f"{path} has no records of run {run}, or any other")
        raise unknown("run", run, reader.runs) if reader.runs else none
    return summary


# Others move chunks, or nothing of the data; `BeginUpload` may be answered by the receipt of an earlier attempt.
_CALLS = ("CommitUpload", "ReportScores", "BeginUpload")
_WANTED = (*(f'"call":"{call}"'.encode() for call in _CALLS), b'"event":"masked"')  # in a record that counts
_COUNTED = ("accepted", "duplicate")
UNLISTED = "…"  # among a round's names: more scores left than the log lists by name


@dataclass
class HandedIn:
    """What the site has sent for one run, by round and by what became of it.

    Attributes:
        updates: whose update counts at the server; round 0: the first model, which has nothing of the data.
        unanswered: whose update was committed without an answer: the server may have it.
        scores: whose scores were reported and not refused.
        names: the scores that were sent alone, by round: reported, or beside an update.
        aggregated: the scores sent only in a secure aggregation, by round: the server has their mean, or nothing.
        archived: how many of the log's oldest segments are not here: what they have is not counted.
    """

    updates: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    scores: set[int] = field(default_factory=set)
    names: dict[int, set[str]] = field(default_factory=dict)
    aggregated: dict[int, set[str]] = field(default_factory=dict)
    archived: int = 0

    @property
    def gap(self) -> str:
        """What is not counted, as a sentence; empty: the whole log is here."""
        return archived_text(self.archived) if self.archived else ""

    def lines(self) -> list[str]:
        """What stays with the server, in words, by kind; empty: nothing that the log has."""
        aggregated = {number for number, names in self.aggregated.items() if names}
        kinds = (
            ("updates, rounds {}", self.updates - {0}),
            (
                "the first model, which is made from the recipe and contains nothing of this site's data",
                {0} & self.updates,
            ),
            ("perhaps the updates of rounds {}: sent, and never answered", self.unanswered),
            ("scores, rounds {}", self.scores),
            ("scores in a secure aggregation, as part of a mean over sites, rounds {}", aggregated),
        )
        return [text.format(rounds_text(rounds)) for text, rounds in kinds if rounds]

    def add(self, entry: Entry) -> None:
        """Add what a record of the run says."""
        match entry:
            case Message(call=call) if call in _CALLS:
                self._sent(entry)
            case Answer(Message(call="ReportScores")):
                self.scores.discard(entry.round)  # only an error is recorded
            case Answer(Message(call="BeginUpload" | "CommitUpload", verdict=verdict)) if verdict in _COUNTED:
                self.updates.add(entry.round)
                self.unanswered.discard(entry.round)
            case Answer(Message(call="CommitUpload", verdict=verdict)) if verdict:
                self.unanswered.discard(entry.round)
            case Note(event="masked"):
                number = entry.round or 0
                masked = set(entry.fields.get("scores", ())) - self.names.get(number, set())
                self.aggregated.setdefault(number, set()).update(masked)

    def _sent(self, message: Message) -> None:
        number, names = message.round, self.names.setdefault(message.round, set())
        for scores in (message.fields.get("scores", ()), message.fields.get("metrics", ())):
            names.update([UNLISTED] if isinstance(scores, str) else scores)
        self.aggregated.get(number, set()).difference_update(names)
        if message.call == "CommitUpload" and number not in self.updates:
            self.unanswered.add(number)
        elif message.call == "ReportScores" and message.fields.get("scores"):  # a policy may release none
            self.scores.add(number)


def archived_text(count: int) -> str:
    """What is not listed where so many of the log's oldest segments are in an archive."""
    files = "first file is" if count == 1 else f"first {count} files are"
    return f"the audit log's {files} in an archive: this list lacks what the site sent then (`protofed audit show`)"


def handed_in(path: Path, run: str) -> HandedIn:
    """Read a site's audit log for one run; the chain of hashes is left to `audit verify`.

    Args:
        path: of the log's first segment, there or not.

    Raises:
        StateError: a segment cannot be read.
    """
    oldest = next(iter(segments(path)), None)
    result = HandedIn(archived=oldest.number - 1 if oldest else 0)
    for entry in _unchecked(path):
        if entry.run == run:
            result.add(entry)
    return result


def _unchecked(path: Path) -> Iterator[Entry]:
    """What counts for `HandedIn`; half a line at the end, being written, is nothing."""
    reader = LogReader()
    for segment in segments(path):
        try:
            with segment.open() as file:
                for line in file:
                    if any(mark in line for mark in _WANTED):
                        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                            if entry := reader.read(Record(**json.loads(line))):
                                yield entry
        except OSError as error:
            raise StateError(
                f"cannot read {segment.path}: {error.strerror}; this file records what was sent"
            ) from error


def rounds_text(rounds: set[int]) -> str:
    """`1 to 4, 6` of round numbers."""
    spans: list[tuple[int, int]] = []
    for number in sorted(rounds):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


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
        case "aggregated":
            of = f"the {fields.get('sum_of')} of {', '.join(fields.get('sites', ()))}"
            return f"secure aggregation opened, {_sum(fields)}: {of}"
        case "privacy":
            of_all = f"epsilon of all fits {_number(fields.get('epsilon'))} at delta {_number(fields.get('delta'))}"
            budget = "" if fields.get("budget") is None else f", of {_number(fields.get('budget'))}"
            at = f"round {fields.get('round')} of run {fields.get('run')}"
            return f"privacy spent, {at}: {of_all}{budget}; {fields.get('withheld')}"
        case "resumed":
            unrecorded = f"not recorded, nor answered: {_calls(fields['unrecorded'])}"
            return (
                f"there was no room for records: {unrecorded}; refused before they acted: {_calls(fields['refused'])}"
            )
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
