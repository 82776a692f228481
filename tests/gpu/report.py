"""What `python -m tests.gpu` found: one JSON and one table in markdown, written anew after every finding.

A part that was never reached says so from the beginning, so whatever stops the command leaves a truthful report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

JSON, MARKDOWN = "results.json", "results.md"


class Status(StrEnum):
    """How a finding, or a whole part, ended."""

    PASSED = "passed"
    MISSED = "goal missed"  # slower than the goal; nothing is wrong
    FAILED = "failed"
    SKIPPED = "skipped"  # this machine lacks something
    BEGUN = "started, not ended"
    NOT_REACHED = "not reached"


_WORST = (Status.FAILED, Status.BEGUN, Status.MISSED)  # of a part's findings, the first that there is decides


@dataclass(frozen=True)
class Finding:
    """One thing that was checked or measured. Of two with the same `what` in a part, the later one counts.

    Attributes:
        expected: what `found` is judged by; empty: nothing, it is there to be read.
        numbers: exact ones, for programs.
    """

    what: str
    found: str
    expected: str = ""
    status: Status = Status.PASSED
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of its own below the findings. Of two with the same title in a part, the later one counts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Found: TypeAlias = Finding | Table


@dataclass
class PartResult:
    """One part, as far as it has come."""

    name: str
    status: Status = Status.NOT_REACHED
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)

    def add(self, found: Found) -> None:
        """Take a finding or a table."""
        if isinstance(found, Table):
            self.tables[found.title] = found
        else:
            self.findings[found.what] = found

    def end(self) -> None:
        """Judge the part by its findings; one that found nothing has shown nothing."""
        seen = [finding.status for finding in self.findings.values()] or [Status.FAILED]
        worst = next((status for status in _WORST if status in seen), Status.PASSED)
        self.status = Status.SKIPPED if seen and set(seen) == {Status.SKIPPED} else worst


@dataclass
class Report:
    """The whole run.

    Attributes:
        kind: "GPU", or "CPU rehearsal", which proves nothing about a GPU.
        machine: names and versions.
        began: ISO 8601, UTC.
    """

    kind: str
    machine: Mapping[str, str]
    began: str
    parts: Sequence[PartResult]
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether something is wrong; a missed goal, or a part that was not reached, is not."""
        return any(part.status is Status.FAILED for part in self.parts)

    def write(self, folder: Path) -> None:
        """Write both files; each is replaced at once, so that a stopped command leaves whole ones."""
        _replace(folder / JSON, json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        _replace(folder / MARKDOWN, self.as_markdown())

    def as_json(self) -> dict[str, Any]:
        """Plain data; a part's findings and tables as lists."""
        parts = [
            {
                "name": part.name,
                "status": part.status,
                "seconds": round(part.seconds, 1),
                "findings": [asdict(finding) for finding in part.findings.values()],
                "tables": [asdict(table) for table in part.tables.values()],
            }
            for part in self.parts
        ]
        own = {"kind": self.kind, "machine": dict(self.machine), "began": self.began, "seconds": round(self.seconds, 1)}
        return {**own, "parts": parts}

    def as_markdown(self) -> str:
        """The same for people."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [f"**{self.kind}**: {machine}. {self.began}, {self.seconds:.0f} s.", ""]
        if self.kind != "GPU":
            lines += ["It proves nothing about a GPU: every part ran on the CPU, with tiny sizes.", ""]
        lines += _rows(("part", "what", "found", "expected", "status"), self._cells())
        for part in self.parts:
            for table in part.tables.values():
                lines += ["", f"{table.title}:", "", *_rows(table.columns, table.rows)]
        return "\n".join(lines) + "\n"

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for part in self.parts:
            if not part.findings:
                cells.append((part.name, "", "", "", part.status))
            cells += [(part.name, f.what, f.found, f.expected, f.status) for f in part.findings.values()]
            if part.findings and part.status is Status.BEGUN:
                cells.append((part.name, "", "", "", part.status))
        return cells


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in table]


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
