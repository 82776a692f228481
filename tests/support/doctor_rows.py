"""What `doctor` says, by check."""

from __future__ import annotations

from collections.abc import Sequence

from protofed.deploy.doctor.checks import Check, CheckRow, State, run_checks


def rows(checks: Sequence[Check]) -> dict[str, CheckRow]:
    return {row.check: row for row in run_checks(checks)}


def findings(found: dict[str, CheckRow]) -> list[tuple[str, str]]:
    """Checks that found something, and what; warnings too."""
    return [(row.check, row.diagnosis.name) for row in found.values() if row.diagnosis is not None]


def skipped(found: dict[str, CheckRow]) -> dict[str, str]:
    """Checks that were not made, and why."""
    return {row.check: row.message for row in found.values() if row.state is State.SKIPPED}
