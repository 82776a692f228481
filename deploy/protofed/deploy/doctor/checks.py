"""The checks of `doctor`: what a check is, how checks are run, and the verdict. No daemon is started, no file left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from protofed.common.errors import ProtofedError, count
from protofed.common.pki.identity import IdentityError
from protofed.deploy.doctor.diagnoses import INTERNAL, Diagnosis, diagnosis
from protofed.deploy.tables import LIST, Column, terminal


class State(StrEnum):
    """A check's result; the values stand in the JSON output."""

    FINE = "fine"
    WARNING = "warning"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckRow:
    """One check's result.

    Attributes:
        message: what the check saw; of a skipped check, the reason.
        diagnosis: None unless the state is FINDING or WARNING.
    """

    check: str
    state: State
    message: str
    diagnosis: Diagnosis | None = None


class CheckFailedError(Exception):
    """A check found a problem.

    Args:
        name: of the diagnosis, as in `diagnoses.DIAGNOSES`.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class CheckSkippedError(Exception):
    """A check does not apply; the text is the reason."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        run: returns what it saw, in words; raises `CheckFailedError` or `CheckSkippedError`.
        otherwise: name of the diagnosis for a `ProtofedError` that `run` raises.
        needs: names of checks that must have passed before this one makes sense.
    """

    name: str
    run: Callable[[], str]
    otherwise: str = INTERNAL.name
    needs: tuple[str, ...] = ()


def run_checks(checks: Sequence[Check], begin: Callable[[str], None] = lambda _name: None) -> Iterator[CheckRow]:
    """Run all checks in order; a failed one skips those that need it and no other.

    Args:
        begin: called with each check's name before it runs.
    """
    unmet: set[str] = set()  # skipped checks too, so that what depends on them is skipped in turn
    for check in checks:
        begin(check.name)
        unmet_need = next((need for need in check.needs if need in unmet), None)
        row = _run_check(check) if unmet_need is None else CheckRow(check.name, State.SKIPPED, f"needs `{unmet_need}`")
        if row.state is State.FINDING or unmet_need is not None:
            unmet.add(check.name)
        yield row


def first_finding(rows: Sequence[CheckRow], *, strict: bool) -> Diagnosis | None:
    """The diagnosis whose code is the process's exit code; warnings count if `strict`. None: exit code 0."""
    counting = (State.FINDING, State.WARNING) if strict else (State.FINDING,)
    return next((row.diagnosis for row in rows if row.state in counting), None)


def verdict(rows: Sequence[CheckRow], *, strict: bool) -> str:
    """The last line of the output: how many findings and warnings, and the exit code."""
    findings, warnings, skipped = (
        [row for row in rows if row.state is state] for state in (State.FINDING, State.WARNING, State.SKIPPED)
    )
    worst = first_finding(rows, strict=strict)
    counts = [count(len(findings), "finding")] if findings else []
    counts += [count(len(warnings), "warning")] if warnings else []
    if worst is not None:
        which = "the first is " if len(findings) + len(warnings) > 1 else ""
        return f"{', '.join(counts)}; {which}{worst.name}: exit code {worst.code}"
    exceptions = f" but for {', '.join(counts)}" if counts else ""
    return f"all well{exceptions}: {count(len(rows) - len(skipped), 'check')}, {len(skipped)} did not apply"


def _run_check(check: Check) -> CheckRow:
    try:
        return CheckRow(check.name, State.FINE, check.run())
    except CheckSkippedError as skipped:
        return CheckRow(check.name, State.SKIPPED, str(skipped))
    except CheckFailedError as failed:
        return _row(check, failed.name, str(failed))
    except IdentityError as error:  # a ProtofedError: it must be caught first, for it names its own diagnosis
        return _row(check, error.problem, str(error))
    except ProtofedError as error:
        return _row(check, check.otherwise, str(error))
    except Exception as error:  # an unforeseen error in one check must not hide the findings of the others
        return _row(check, INTERNAL.name, f"{type(error).__name__}: {error}")


def _row(check: Check, name: str, message: str) -> CheckRow:
    known_diagnosis = diagnosis(name)
    return CheckRow(check.name, State.WARNING if known_diagnosis.warns else State.FINDING, message, known_diagnosis)


MARKS = {State.FINE: "✓", State.WARNING: "!", State.FINDING: "✗", State.SKIPPED: "–"}
STYLES = {State.FINE: "green", State.WARNING: "yellow", State.FINDING: "bold red", State.SKIPPED: "dim"}


def table(rows: Sequence[CheckRow]) -> RenderableType:
    """One row a check: mark, name, message; a finding also has its diagnosis and the remedy."""
    mark = Column[CheckRow]("", lambda row: Text(MARKS[row.state], style=STYLES[row.state]))
    return terminal((mark, Column("", lambda row: row.check), Column("", _message, wraps=True)), rows, LIST)


def plain(rows: Sequence[CheckRow], *, strict: bool) -> dict[str, Any]:
    """The output of `--json`: `verdict`, `exit_code` and `checks`."""
    worst = first_finding(rows, strict=strict)
    return {
        "verdict": verdict(rows, strict=strict),
        "exit_code": 0 if worst is None else worst.code,
        "checks": [_plain(row) for row in rows],
    }


def _message(row: CheckRow) -> Text:
    # `Text`, not markup: messages contain paths and library errors, in which rich would read [x] as a style.
    if row.diagnosis is None:
        return Text(row.message, style="dim" if row.state is State.SKIPPED else "")
    text = Text.assemble((row.diagnosis.name, STYLES[row.state]), f": {row.message}")
    return text.append(f"\n→ {row.diagnosis.remedy}", style="bold")


def _plain(row: CheckRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"check": row.check, "state": row.state.value, "seen": row.message}
    if row.diagnosis is not None:
        fields |= {"finding": row.diagnosis.name, "code": row.diagnosis.code, "remedy": row.diagnosis.remedy}
    return fields
