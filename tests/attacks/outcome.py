"""What an attack came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One attack under one policy.

    Attributes:
        recovered: how many of the things that the attack is after it found.
        of: how many there were.
        silent: the site sent nothing that the attack could use: its policy declined the task or run, or kept it.
    """

    recovered: int
    of: int
    silent: bool = False

    def __str__(self) -> str:
        return "nothing sent" if self.silent else f"{self.recovered} of {self.of}"
