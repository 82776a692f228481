"""The command's work, once protofed can be imported: chosen parts, their report, and a line for each finding."""

from __future__ import annotations

import argparse
import importlib
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog
import torch
from rich.console import Console
from tests.gpu import cifar, machine
from tests.gpu.plan import Part, Proof, carry_out
from tests.gpu.report import MARKDOWN, PartResult, Report, Status

from protofed.common.config.data import data_folder
from protofed.common.errors import unknown

# In their order, with the seconds without which one is not started. The last one takes all that is left.
NEEDS_S = {
    "choice": 20.0,
    "precision": 20.0,
    "memory": 20.0,
    "methods": 30.0,
    "checkpoints": 40.0,
    "telemetry": 10.0,
    "nccl": 40.0,
    "bench": 60.0,
    "learning": 60.0,
}


def run(asked: argparse.Namespace, scratch: Path) -> int:
    """Do what was asked for; the exit code."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = chosen(asked.parts.split(",") if asked.parts else list(NEEDS_S))
    began = time.monotonic()
    proof = Proof(
        torch.device("cpu" if asked.rehearse else "cuda"),  # not what `pick` says, which is judged by it
        scratch,
        cifar.found(asked.data or data_folder()),
        [int(seed) for seed in asked.seeds.split(",")],
        began + 60 * asked.minutes,
    )
    kind, at = ("CPU rehearsal" if proof.rehearsal else "GPU"), datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(kind, machine.facts(proof.device), at, [PartResult(part.name) for part in parts])
    report.write(asked.out)  # whatever stops this: every part that was not reached says so
    screen = _Screen(report, asked.out)
    carry_out(parts, proof, report, screen.show)
    screen.end()
    return int(report.failed)


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts of these names, in the command's order.

    Raises:
        ConfigError: there is no part of a name.
    """
    for name in names:
        if name not in NEEDS_S:
            raise unknown("part", name, NEEDS_S)
    return [
        Part(name, needs_s, importlib.import_module(f"tests.gpu.{name}").work)
        for name, needs_s in NEEDS_S.items()
        if name in names
    ]


class _Screen:
    """Writes the report at every change, and a line for each new finding."""

    def __init__(self, report: Report, out: Path) -> None:
        self._report, self._out, self._console = report, out, Console(highlight=False, soft_wrap=True)
        self._shown: set[tuple[str, str, str]] = set()

    def show(self, part: PartResult) -> None:
        self._report.write(self._out)
        for finding in part.findings.values():
            line = (part.name, finding.what, finding.found)
            if line not in self._shown:
                self._shown.add(line)
                self._print(f"{part.seconds:6.1f} s  {part.name}: {finding.what}: {finding.found} [{finding.status}]")

    def end(self) -> None:
        counts = {status: sum(part.status is status for part in self._report.parts) for status in Status}
        counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        self._print(f"{self._report.kind}: parts {counted}; {self._out / MARKDOWN}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)
