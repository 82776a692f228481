"""What an attack came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One attack under one policy.

    Attributes:
        recovered: how many of the things that the attack is after it found.
        of: how many there were.
        declined: the site sent nothing that the attack could use, as its policy declined the task or the run.
    """

    recovered: int
    of: int
    declined: bool = False

    def __str__(self) -> str:
        return "declined" if self.declined else f"{self.recovered} of {self.of}"
