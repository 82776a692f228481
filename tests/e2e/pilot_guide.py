"""The pilot guide as it is read: whose machine each block is typed at, and what goes by mail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
COORDINATOR, EXAMPLE = "coordinator", "north"
GUIDE = ROOT / "docs" / "how-to" / "pilot.md"
_STEP = re.compile(r"^## Step (?P<step>\d+)\.")
_IMAGES = re.compile(r"`(cd ~/protofed && [^`]*pilot_images[^`]*)`")
REHEARSAL = range(1, 8)  # steps from nothing to its report
HOSPITALS = 3
_BLOCK = re.compile(r"^```\w*\n(?P<head>#[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_MAIL = re.compile(r"^\*By mail\* from (?P<sender>.+?) to (?P<to>[^:`]+?(?: \(here: \w+\))?): (?P<files>`.+`)\.$")
_AGAIN = re.compile(r"\*again\* steps? (?P<steps>\d(?:[\d, and]*\d)?)(?: for the hospital (?P<joining>\w+))?")
_AT = r"(?:every machine|the coordinator(?:, for each hospital \(here: north\))?|each hospital \(here: north\))"
_HEAD = re.compile(
    rf"# (?:at (?P<at>{_AT})|file (?P<file>[\w.]+), at (?P<keeper>{_AT}))"
    r"(?:, after Ctrl-C in the terminal of the (?P<ended>\w+)|, in a terminal of its own: the (?P<daemon>\w+)"
    r"|, (?P<install>to install)|, (?P<first>first in each terminal))?"
)


@dataclass(frozen=True)
class Block:
    """What is typed at some machines, or a file that is written there.

    Attributes:
        step: of the guide.
        at: as the guide says it.
        file: its name; commands have none.
        ended: the daemon that is ended by Ctrl-C before.
        daemon: the daemon that these commands are, for a terminal of its own.
        install: it asks a package index, which these networks do not have.
        first: it is typed first in each terminal.
    """

    step: int
    at: str
    body: str
    file: str | None
    ended: str | None
    daemon: str | None
    install: bool
    first: bool


@dataclass(frozen=True)
class Mail:
    """Files that are sent from one machine to another one."""

    step: int
    sender: str
    to: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Again:
    """Steps that are done once more, by a hospital that joins or by those that were meant before."""

    step: int
    steps: frozenset[int]
    joining: str | None


def read() -> list[Block | Mail | Again]:
    """Everything that the guide says to do, in its order; text that cannot be understood is an error."""
    return list(_parts(GUIDE.read_text(encoding="utf-8")))


def images_commands() -> list[str]:
    """The commands by which those without images of their own get some, as the guide writes them: the evaluator's, and
    a hospital's.
    """
    found = _IMAGES.findall(" ".join(GUIDE.read_text(encoding="utf-8").split()))
    if len(found) != len({"evaluator", "hospital"}):
        raise SystemExit("the guide does not say how to try it without images")
    return found


@dataclass(frozen=True)
class Effort:
    """What people do until they have a report of the rehearsal, with images of their own.

    Attributes:
        coordinator, hospital: lines that are typed at the coordinator, and at each hospital, again in each terminal and
            for each hospital where the guide says so.
        files: that the coordinator writes.
        mails: between the coordinator and the three hospitals.
    """

    coordinator: int
    hospital: int
    files: int
    mails: int


def effort(text: str) -> Effort:
    """Count a guide."""
    parts = [part for part in _parts(text) if part.step in REHEARSAL and not isinstance(part, Again)]
    blocks = [part for part in parts if isinstance(part, Block)]
    return Effort(
        coordinator=_typed([block for block in blocks if not block.at.startswith("each hospital")]),
        hospital=_typed([block for block in blocks if not block.at.startswith("the coordinator")]),
        files=sum(block.file is not None for block in blocks),
        mails=HOSPITALS * sum(isinstance(part, Mail) for part in parts),
    )


def _typed(blocks: list[Block]) -> int:
    """How many lines are typed at a machine."""
    terminals = 1 + sum(block.daemon is not None for block in blocks)
    return sum(
        (terminals if block.first else HOSPITALS if "for each hospital" in block.at else 1) * len(_lines(block))
        for block in blocks
        if block.file is None
    )


def _lines(block: Block) -> list[str]:
    lines = block.body.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def named(text: str, hospital: str) -> str:
    """What is written for the example, as another hospital types it."""
    return re.sub(rf"\b{EXAMPLE}\b", hospital, text)


def of_hospital(part: Block | Mail, hospital: str) -> Block | Mail:
    """The part, as it is done for one hospital."""
    if isinstance(part, Mail):
        return replace(part, files=tuple(named(name, hospital) for name in part.files))
    return replace(part, body=named(part.body, hospital))


def _parts(text: str) -> Iterator[Block | Mail | Again]:
    step, pieces = 0, re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for piece in pieces:
        if piece.startswith("```"):
            if (block := _block(step, piece)) is not None:
                yield block
            continue
        for paragraph in piece.split("\n\n"):
            line = " ".join(paragraph.split())
            if found := _STEP.match(line):
                step = int(found["step"])
            if "*By mail*" in line:
                yield _mail(step, line)
            if found := _AGAIN.search(line):
                yield Again(step, frozenset(map(int, re.findall(r"\d+", found["steps"]))), found["joining"])


def _block(step: int, fenced: str) -> Block | None:
    """None: something to be looked at, in another language."""
    if not fenced.startswith(("```\n", "```toml\n")):
        return None
    found = _BLOCK.fullmatch(fenced)
    head = _HEAD.fullmatch(found["head"]) if found else None
    if found is None or head is None:
        raise SystemExit(f"whose block is this? {fenced}")
    at = head["at"] or head["keeper"]
    return Block(
        step, at, found["body"], head["file"], head["ended"], head["daemon"], bool(head["install"]), bool(head["first"])
    )


def _mail(step: int, line: str) -> Mail:
    found = _MAIL.match(line)
    if found is None:
        raise SystemExit(f"who sends what to whom? {line}")
    return Mail(step, found["sender"], found["to"], tuple(re.findall(r"`([^`]+)`", found["files"])))
