"""What the site has sent, from its audit log: each update, scores and step of a secure aggregation as one line."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from protofed.client.transport.audit import FILE
from protofed.common.payload import Part
from protofed.common.protocol.messages import TaskKind
from protofed.common.storage.journal import Record
from protofed.deploy.audit.log import FollowedLog, LogFollower
from protofed.deploy.audit.reader import (
    AuditSummary,
    GivenTask,
    HandedIn,
    LogReader,
    Message,
    Note,
    archived_text,
    handed_in,
)

MAX_LINES: Final = 20_000  # lines kept, the newest; the totals are of all
DROPPED_AT_ONCE: Final = MAX_LINES // 10
UPLOADS: Final = ("BeginUpload", "PutChunk", "CommitUpload")
SCORES: Final = "ReportScores"
ASKS: Final = ("Enroll", "NextTask")  # what a daemon without a task sends, again and again


@dataclass(frozen=True)
class PolicyInForce:
    """The policy that allowed it; empty: the log does not say."""

    name: str = ""
    digest: str = ""


@dataclass
class Leaving:
    """Something that was sent, or that the policy refused.

    Attributes:
        at: when the first of its messages was sent, UTC, RFC 3339.
        what: a task's kind, `scores`, or `refused`.
        parts: part, number of tensors, bytes as announced.
        size: bytes of its messages, all attempts.
        numbers: that were disclosed, by name; None: an older log has the name alone.
        why: of what was refused: the policy's own words.
        answers: its messages to which the server answers with a verdict.
        server: to which it was sent last, as host:port.
        records: numbers of the audit log's records that it is made from.
        noisy: the fit had noise, by a record of its round.
    """

    at: str
    what: str
    run: str
    round: int
    policy: PolicyInForce
    task_id: str = ""
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    size: int = 0
    digest: str = ""
    numbers: dict[str, float | str | None] = field(default_factory=dict)
    weight: float | None = None
    why: str = ""
    answers: deque[Message] = field(default_factory=lambda: deque(maxlen=4))
    server: str = ""
    records: list[int] = field(default_factory=list)
    noisy: bool = False

    @property
    def outcome(self) -> str:
        """`refused`, the verdict on it, an error, or `sent`."""
        if self.why:
            return "refused"
        verdicts = (message.verdict or message.error.lower().replace("_", " ") for message in reversed(self.answers))
        return next(filter(None, verdicts), "sent")

    @property
    def in_a_sum(self) -> bool:
        """Whether it is a message of a secure aggregation: keys, shares, or a masked vector."""
        return bool(self.parts) and all(part == Part.SECURE_AGGREGATION for part, _, _ in self.parts)

    @property
    def rules(self) -> list[str]:
        """The keys of the policy that allowed it: what no key names stays."""
        if self.why:
            return []
        keys = ["secure"] if self.in_a_sum else ["methods", "parts"] if self.parts else []
        keys += ["metrics"] if self.numbers else []
        return keys + (["example_count"] if self.weight is not None else [])


@dataclass(frozen=True)
class LoggedActivity:
    """The newest sign of what the daemon does.

    Attributes:
        at: UTC, RFC 3339; empty: none.
        doing: `training`, `idle`, …; or a task's kind.
    """

    at: str = ""
    run: str = ""
    round: int = 0
    doing: str = ""
    epoch: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class LeftTotals:
    """Sums over the whole log.

    Attributes:
        parts: tensors and bytes, by run and part, of updates that were announced.
        calls: messages and bytes, by call.
        numbers: names of the numbers of the machine that heartbeats had.
    """

    parts: Mapping[tuple[str, str], tuple[int, int]]
    calls: Mapping[str, tuple[int, int]]
    numbers: Sequence[str]


class SiteLog:
    """A site's audit log as its page shows it. Threads share it.

    Args:
        state: the site's state folder.
    """

    def __init__(self, state: Path) -> None:
        self._lock = Lock()
        self._begin()
        self._file = state / FILE
        self._follower = LogFollower(self._file, self._begin, self._take)

    def look(self, *, whole: bool = False) -> FollowedLog:
        """Read new records, or the whole log again."""
        with self._lock:
            return self._follower.recheck() if whole else self._follower.look()

    def leavings(self, run: str | None = None) -> list[Leaving]:
        """What was sent and what was refused, the newest first."""
        with self._lock:
            return [one for one in reversed(self._leavings.values()) if run in (None, one.run)]

    def gaps(self) -> list[str]:
        """What `leavings` lacks, in sentences."""
        with self._lock:
            archived, dropped = self._follower.look().missing, self._dropped
        older = f"older items are not listed here (`protofed audit show`): {dropped:,}"
        return [archived_text(archived)] * bool(archived) + [older] * bool(dropped)

    def notes(self, run: str | None = None) -> list[tuple[str, str]]:
        """(time, text) of policies, refusals, sums that were opened and decisions, the newest first."""
        with self._lock:
            return [note for note in reversed(self._summary.notes) if run is None or f"run {run}" in note[1]]

    def handed_in(self, run: str) -> HandedIn:
        """What of a run stays with the server; of a log with a broken chain, too.

        Raises:
            StateError: a segment cannot be read.
        """
        with self._lock:
            log = self._follower.look()
            if log.problem:
                return handed_in(self._file, run)
            known = copy.deepcopy(self._handed_in.get(run, HandedIn()))
            known.archived = log.missing
            return known

    def activity(self) -> LoggedActivity:
        """The newest sign of what the daemon does."""
        with self._lock:
            return self._activity

    def totals(self) -> LeftTotals:
        """Sums over the whole log."""
        with self._lock:
            parts: dict[tuple[str, str], tuple[int, int]] = {}
            for (run, _), summary in sorted(self._summary.rounds.items()):
                for part, (tensors, size) in sorted(summary.parts.items()):
                    before = parts.get((run, part), (0, 0))
                    parts[run, part] = before[0] + tensors, before[1] + size
            calls = {call: (number, self._bytes[call]) for call, number in sorted(self._calls.items())}
            return LeftTotals(parts, calls, sorted(self._telemetry))

    def by_round(self, run: str) -> dict[int, dict[str, int]]:
        """Bytes by part of a run's updates, as announced, by round."""
        with self._lock:
            rounds = sorted((number, of) for (name, number), of in self._summary.rounds.items() if name == run)
            return {number: {part: size for part, (_, size) in of.parts.items()} for number, of in rounds if of.parts}

    def _begin(self) -> None:
        self._summary, self._reader = AuditSummary(), LogReader()
        self._handed_in: dict[str, HandedIn] = {}  # by run
        self._leavings: dict[object, Leaving] = {}
        self._dropped = 0  # of them, to stay below `MAX_LINES`
        self._policy, self._activity = PolicyInForce(), LoggedActivity()
        self._kinds: dict[str, str] = {}  # of tasks, by task_id
        self._noisy: set[str] = set()  # tasks, by task_id
        self._calls, self._bytes, self._telemetry = Counter[str](), Counter[str](), set[str]()

    def _take(self, record: Record) -> None:
        entry = self._reader.read(record)
        if entry is None:
            return
        self._summary.add(entry)
        if entry.run:
            self._handed_in.setdefault(entry.run, HandedIn()).add(entry)
        match entry:
            case Message():
                if (leaving := self._sent(entry)) is not None:
                    leaving.records.append(record.seq)
                    leaving.server = str(record.facts.get("server", "")) or leaving.server
            case GivenTask():
                self._kinds[entry.task_id] = entry.kind
                self._activity = LoggedActivity(entry.at, entry.run, entry.round, entry.kind)
            case Note():
                self._note(record, entry)

    def _note(self, record: Record, note: Note) -> None:
        values = {name: str(note.fields.get(name, "")) for name in ("policy", "digest", "task_id", "why")}
        if note.event == "policy":
            self._policy = PolicyInForce(values["policy"], values["digest"])
        elif note.event == "privacy":
            self._noisy.add(values["task_id"])
        elif note.event == "refused":
            why, about = values["why"] or "by the policy", (note.run or "", note.round or 0)
            self._keep(record.hash, Leaving(note.at, "refused", *about, self._policy, why=why, records=[record.seq]))

    def _sent(self, message: Message) -> Leaving | None:
        """Take a message in, and say of what it is a part."""
        self._calls[message.call] += message.calls
        self._bytes[message.call] += message.size
        if message.call == "Heartbeat":
            fields = message.fields
            self._telemetry.update(fields.get("telemetry", ()))
            doing, epoch, epochs = fields.get("activity", "idle"), fields.get("epoch", 0), fields.get("epochs", 0)
            self._activity = LoggedActivity(message.at, message.run, message.round, doing, epoch, epochs)
        elif message.call in ASKS:
            self._activity = LoggedActivity(message.at, doing="idle")
        elif message.call in UPLOADS:
            return self._upload(message)
        elif message.call == SCORES:
            leaving = self._leaving(("scores", message.task_id or message.digest), message, "scores")
            _add_numbers(leaving, message.fields.get("scores"))
            leaving.answers.append(message)
            return leaving
        return None

    def _upload(self, message: Message) -> Leaving:
        task_id = message.task_id
        what = self._kinds.get(task_id, TaskKind.FIT if message.round else TaskKind.INITIALISE)
        leaving = self._leaving(("upload", task_id or message.digest), message, what)
        if isinstance(parts := message.fields.get("parts"), list):
            leaving.parts = [(str(part), int(tensors), int(size)) for part, tensors, size in parts]
            leaving.digest = str(message.fields.get("digest", ""))
            tensors = message.fields.get("tensors")
            leaving.tensors = list(map(str, tensors)) if isinstance(tensors, list) else [str(tensors)]
        if message.call == "CommitUpload":
            _add_numbers(leaving, message.fields.get("metrics"))
            leaving.weight = message.fields.get("weight", leaving.weight)
        if message.call != "PutChunk":
            leaving.answers.append(message)
        leaving.noisy |= task_id in self._noisy
        return leaving

    def _leaving(self, key: object, message: Message, what: str) -> Leaving:
        """The line that a message belongs to; a new one if it is the first of its task."""
        leaving = self._leavings.get(key)
        if leaving is None:
            line = Leaving(message.at, what, message.run, message.round, self._policy, message.task_id)
            leaving = self._keep(key, line)
        leaving.size += message.size
        return leaving

    def _keep(self, key: object, leaving: Leaving) -> Leaving:
        self._leavings[key] = leaving
        if len(self._leavings) > MAX_LINES:
            for oldest in list(itertools.islice(self._leavings, DROPPED_AT_ONCE)):
                del self._leavings[oldest]
                self._dropped += 1
        return leaving


def _add_numbers(leaving: Leaving, numbers: object) -> None:
    if isinstance(numbers, Mapping):
        leaving.numbers |= numbers
    elif numbers is not None:
        leaving.numbers[str(numbers)] = None  # more than the log lists
