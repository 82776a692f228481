"""What is said of a report of pip-audit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.vulnerabilities import NOT_ASKED, VULNERABLE, judged

GOOD = {"name": "numpy", "version": "2.0", "vulns": []}
BAD = {"name": "torch", "version": "2.8", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.9"]}]}
UNKNOWN = {"name": "blake3", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        ([GOOD], 0, "1 packages checked, 0 with known vulnerabilities"),
        ([GOOD, BAD], VULNERABLE, "torch 2.8: PYSEC-1, fixed in 2.9"),
        ([GOOD, UNKNOWN], NOT_ASKED, "NOT CHECKED: 1 of 2, which the database does not have: blake3"),
        ([BAD, UNKNOWN], VULNERABLE, "NOT CHECKED: 1 of 2, which the database does not have: blake3"),
        (
            [UNKNOWN, UNKNOWN],
            NOT_ASKED,
            "NOT CHECKED: no database of vulnerabilities could be asked from here; try elsewhere",
        ),
    ],
)
def test_what_was_not_checked_is_never_good(found: list[dict[str, Any]], code: int, line: str) -> None:
    said, lines = judged({"dependencies": found})
    assert said == code
    assert line in lines


def test_no_report_is_not_good() -> None:
    assert judged(None)[0] == NOT_ASKED
