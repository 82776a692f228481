"""The sections of CHANGELOG.md, one for each version."""

from __future__ import annotations

import re
from datetime import date

PENDING = "not released yet"


def read_section(text: str, version: str) -> str | None:
    """What a version's section says, without its heading; None: there is no such section."""
    found = re.search(rf"{_heading(version)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return None if found is None else found[1].strip()


def count_items(section: str) -> int:
    """The number of list items of a section."""
    return len(re.findall(r"^[*-] ", section, re.MULTILINE))


def write_date(text: str, version: str, day: date) -> str:
    """The text with the date of a version in its heading."""
    return re.sub(_heading(version), f"## {version} – {day}", text, count=1, flags=re.MULTILINE)


def add_section(text: str, version: str) -> str:
    """The text with an empty section of the next version before all others."""
    return re.sub("^## ", f"## {version} ({PENDING})\n\n## ", text, count=1, flags=re.MULTILINE)


def _heading(version: str) -> str:
    return rf"^## {re.escape(version)}(?![.\w])[^\n]*"
