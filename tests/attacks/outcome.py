"""What an attack came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One attack under one policy."""

    recovered: int  # of the things that the attack is after
    of: int
    silent: bool = False  # the site sent nothing that it could use: its policy declined the task or run, or kept it

    def __str__(self) -> str:
        return "nothing sent" if self.silent else f"{self.recovered} of {self.of}"
