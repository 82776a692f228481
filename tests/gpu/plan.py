"""The parts in their order, under one deadline: which are started, and what is written when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.gpu.report import Finding, Found, PartResult, Report, Status


@dataclass(frozen=True)
class Proof:
    """What every part is given.

    Attributes:
        device: where it runs; the CPU in a rehearsal.
        scratch: a folder for what is not a result.
        data: the folder or .npz of CIFAR-10; None: there is none.
        deadline: of all parts, by `clock`.
        clock: monotonic seconds.
    """

    device: torch.device
    scratch: Path
    data: Path | None = None
    seeds: Sequence[int] = (0,)
    deadline: float = math.inf
    clock: Callable[[], float] = field(default=time.monotonic)

    @property
    def rehearsal(self) -> bool:
        """Whether this is the CPU: sizes are tiny, and what only a GPU can show is left out."""
        return self.device.type == "cpu"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.clock()


@dataclass(frozen=True)
class Part:
    """One module's work.

    Attributes:
        needs_s: seconds without which it is not worth beginning; a guess on the safe side.
        work: yields what it finds as soon as it knows it.
    """

    name: str
    needs_s: float
    work: Callable[[Proof], Iterator[Found]]


def carry_out(parts: Sequence[Part], proof: Proof, report: Report, written: Callable[[PartResult], None]) -> None:
    """Do the parts one after the other; one that raises has failed, and the next one is started.

    Args:
        report: has a result for every part, which is filled in here.
        written: called whenever the report has changed.
    """
    began = proof.clock()
    for part, result in zip(parts, report.parts, strict=True):
        if proof.left < part.needs_s:
            continue  # a later one may need less
        at, result.status = proof.clock(), Status.BEGUN
        written(result)
        try:
            for found in part.work(proof):
                result.add(found)
                result.seconds, report.seconds = proof.clock() - at, proof.clock() - began
                written(result)
        except Exception as error:  # whatever a GPU, a driver or a library may raise is the finding
            text = " ".join(str(error).split())[:400]
            result.add(Finding("it runs", f"{type(error).__name__}: {text}", "no error", Status.FAILED))
        result.end()
        result.seconds, report.seconds = proof.clock() - at, proof.clock() - began
        written(result)


def judged(what: str, found: object, expected: object, text: str = "") -> Finding:
    """A finding that passed if it is what was expected.

    Args:
        text: in place of the expected value.
    """
    return Finding(what, str(found), text or str(expected), Status.PASSED if found == expected else Status.FAILED)


def at_most(what: str, found: float, most: float) -> Finding:
    """A finding that passed if a number is small enough."""
    status = Status.PASSED if found <= most else Status.FAILED  # NaN fails
    return Finding(what, f"{found:.2g}", f"≤ {most:g}", status, {"found": found})


def skipped(what: str, why: str) -> Finding:
    """A finding that this machine cannot make."""
    return Finding(what, why, "", Status.SKIPPED)
