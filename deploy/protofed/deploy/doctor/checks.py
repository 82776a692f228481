"""`doctor`: looks at everything that a daemon needs, starts none, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from protofed.common.errors import ProtofedError
from protofed.common.pki.identity import IdentityError
from protofed.deploy.console.tables import count
from protofed.deploy.doctor.diagnoses import INTERNAL, Diagnosis, diagnosis


class State(StrEnum):
    """How a check went."""

    FINE = "fine"
    WARNING = "warning"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckRow:
    """A check that was made, or was not."""

    check: str
    state: State
    seen: str
    diagnosis: Diagnosis | None = None


class CheckFailedError(Exception):
    """Ends a check: something is wrong.

    Args:
        name: of the diagnosis.
    """

    def __init__(self, name: str, seen: str) -> None:
        super().__init__(seen)
        self.name = name


class CheckSkippedError(Exception):
    """Ends a check: there is nothing to look at, and why."""


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        look: says what it saw, or raises `CheckFailedError` or `CheckSkippedError`.
        otherwise: the diagnosis of our own errors.
        needs: checks without which there is nothing to look at.
    """

    name: str
    look: Callable[[], str]
    otherwise: str = INTERNAL.name
    needs: tuple[str, ...] = ()


def examine(checks: Sequence[Check], begin: Callable[[str], None] = lambda _name: None) -> Iterator[CheckRow]:
    """Make all checks, in their order; none ends the others.

    Args:
        begin: called with each check's name before it is made.
    """
    lacking: set[str] = set()
    for check in checks:
        begin(check.name)
        missing = next((need for need in check.needs if need in lacking), None)
        row = _looked(check) if missing is None else CheckRow(check.name, State.SKIPPED, f"needs `{missing}`")
        if row.state is State.FINDING or missing is not None:
            lacking.add(check.name)
        yield row


def first(rows: Sequence[CheckRow], *, strict: bool) -> Diagnosis | None:
    """The finding whose code the process ends with; warnings count if it is `strict`."""
    counted = (State.FINDING, State.WARNING) if strict else (State.FINDING,)
    return next((row.diagnosis for row in rows if row.state in counted), None)


def verdict(rows: Sequence[CheckRow], *, strict: bool) -> str:
    """The last line."""
    findings, warnings, skipped = (
        [row for row in rows if row.state is state] for state in (State.FINDING, State.WARNING, State.SKIPPED)
    )
    worst = first(rows, strict=strict)
    counts = [count(len(findings), "finding")] if findings else []
    counts += [count(len(warnings), "warning")] if warnings else []
    if worst is not None:
        which = "the first is " if len(findings) + len(warnings) > 1 else ""
        return f"{', '.join(counts)}; {which}{worst.name}: exit code {worst.code}"
    told = f" but for {', '.join(counts)}" if counts else ""
    return f"all well{told}: {len(rows) - len(skipped)} checks, {len(skipped)} did not apply"


def _looked(check: Check) -> CheckRow:
    try:
        return CheckRow(check.name, State.FINE, check.look())
    except CheckSkippedError as why:
        return CheckRow(check.name, State.SKIPPED, str(why))
    except CheckFailedError as found:
        return _row(check, found.name, str(found))
    except IdentityError as error:
        return _row(check, error.flaw, str(error))
    except ProtofedError as error:
        return _row(check, check.otherwise, str(error))
    except Exception as error:  # what nobody foresaw must not hide what else there is to find
        return _row(check, INTERNAL.name, f"{type(error).__name__}: {error}")


def _row(check: Check, name: str, seen: str) -> CheckRow:
    known = diagnosis(name)
    return CheckRow(check.name, State.WARNING if known.warns else State.FINDING, seen, known)
