"""What of a run had left the site for good, by its audit log: the rounds whose updates and scores the server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.common.errors import StateError
from protofed.common.storage.journal import segments

# Others move chunks, or nothing of the data; `BeginUpload` may be answered by the receipt of an earlier attempt.
_CALLS = ("CommitUpload", "ReportScores", "BeginUpload")
_WANTED = (*(f'"call":"{call}"'.encode() for call in _CALLS), b'"event":"masked"')  # in a record that counts
_COUNTED = ("accepted", "duplicate")
UNLISTED = "…"  # among a round's names: more scores left than the log lists by name


@dataclass
class HandedIn:
    """Rounds of one run, by what became of them.

    Attributes:
        updates: whose update counts at the server; round 0: the first model, which has nothing of the data.
        unanswered: whose update was committed without an answer: the server may have it.
        scores: whose scores were reported and not refused.
        names: the scores that left by themselves, by round: reported, or beside an update.
        summed: the scores that left in a secure sum alone, by round: the server has a mean over sites, or nothing.
        archived: how many of the log's oldest segments are not here: what they have is not counted.
    """

    updates: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    scores: set[int] = field(default_factory=set)
    names: dict[int, set[str]] = field(default_factory=dict)
    summed: dict[int, set[str]] = field(default_factory=dict)
    archived: int = 0

    @property
    def gap(self) -> str:
        """What is not counted, as a sentence; empty: the whole log is here."""
        return archived_text(self.archived) if self.archived else ""


def archived_text(count: int) -> str:
    """What is not listed where so many of the log's oldest segments are in an archive."""
    files = "first file is" if count == 1 else f"first {count} files are"
    return f"the audit log's {files} in an archive: what left by them is not listed here (`protofed audit show`)"


def handed_in(path: Path, run: str) -> HandedIn:
    """Read a site's audit log for one run; the chain of hashes is left to `audit verify`.

    Args:
        path: of the log's first segment, there or not.

    Raises:
        StateError: a segment cannot be read.
    """
    oldest = next(iter(segments(path)), None)
    result = HandedIn(archived=oldest.number - 1 if oldest else 0)
    sent = dict[str, tuple[str, int]]()  # by a message's digest, its call and round
    for event, facts in _records(path):
        message, call = facts.get("digest", ""), facts.get("call", "")
        if event == "sent" and (fields := facts.get("facts", {})).get("run") == run:
            number = int(fields.get("round", 0))
            sent[message] = call, number
            for scores in (fields.get("scores", ()), fields.get("metrics", ())):
                result.names.setdefault(number, set()).update([UNLISTED] if isinstance(scores, str) else scores)
            if call == "CommitUpload":
                result.unanswered.add(number)
            elif call == "ReportScores" and fields.get("scores"):  # a policy may release none
                result.scores.add(number)
        elif event == "answered" and message in sent:
            _answered(result, *sent[message], facts)
        elif event == "masked" and facts.get("run") == run:
            result.summed.setdefault(int(facts.get("round", 0)), set()).update(facts["scores"])
    result.unanswered -= result.updates
    result.summed = {number: names - result.names.get(number, set()) for number, names in result.summed.items()}
    return result


def _answered(result: HandedIn, call: str, number: int, facts: dict[str, Any]) -> None:
    if call == "ReportScores":
        result.scores.discard(number)  # only an error is recorded
    elif facts.get("verdict") in _COUNTED:
        result.updates.add(number)
    elif call == "CommitUpload" and facts.get("verdict"):
        result.unanswered.discard(number)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Event and facts of the records that count; half a line at the end, being written, is none."""
    for segment in segments(path):
        try:
            with segment.open() as file:
                for line in file:
                    if any(wanted in line for wanted in _WANTED):
                        with suppress(ValueError, KeyError, TypeError):
                            record = json.loads(line)
                            yield record["event"], record["facts"]
        except OSError as error:
            raise StateError(f"cannot read {segment.path}: {error.strerror}; it says what was handed in") from error


def rounds_text(rounds: set[int]) -> str:
    """`1 to 4, 6` of round numbers."""
    spans: list[tuple[int, int]] = []
    for number in sorted(rounds):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
