"""A clock that a test moves."""

from __future__ import annotations

from datetime import UTC, datetime


class Clock:
    """Monday, noon."""

    def __init__(self) -> None:
        self.now = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def at(self, hour: int) -> None:
        self.now = self.now.replace(hour=hour)
