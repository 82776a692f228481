"""How pages show times, spans, sizes and numbers: the filters of their templates."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.filesize import decimal

from protofed.common.errors import count
from protofed.deploy.tables import STYLES, printable, span

T = TypeVar("T")
# Rich's styles as classes of the style sheet.
_TONES: Final[Mapping[str, str]] = {
    "green": "good",
    "cyan": "live",
    "yellow": "warn",
    "red": "bad",
    "bold red": "bad",
    "dim": "soft",
}
NOTHING: Final = "–"
_STAMP: Final = re.compile(r"\b(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)")  # RFC 3339, UTC


@dataclass(frozen=True)
class Page:
    """One page of a table that is too long for one.

    Attributes:
        number: from 1, the newest.
        total: rows of all pages.
    """

    number: int
    total: int
    rows: int

    @classmethod
    def of(cls, asked: str, total: int, rows: int) -> Page:
        """The page that a query asks for; the first for anything that is no page of this table."""
        number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 1
        return cls(min(max(1, number), max(1, math.ceil(total / rows))), total, rows)

    @property
    def pages(self) -> int:
        """How many there are; at least one."""
        return max(1, math.ceil(self.total / self.rows))

    @property
    def before(self) -> int:
        """Rows of the pages before this one."""
        return (self.number - 1) * self.rows

    def cut(self, rows: Sequence[T]) -> Sequence[T]:
        """The rows of this page."""
        return rows[self.before : self.before + self.rows]


def day(seconds: float) -> str:
    """A Unix time as a day in UTC; a dash for 0."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds)) if seconds else NOTHING


def moment(seconds: float) -> str:
    """A Unix time to the second, in UTC; a dash for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds else NOTHING


def stamp(at: str) -> str:
    """A time in RFC 3339 for a cell whose header says UTC; a dash for none, any other text as it is."""
    return _STAMP.sub(r"\1 \2", at) or NOTHING


def utc(text: str) -> str:
    """A text whose times are in RFC 3339, for people."""
    return _STAMP.sub(r"\1 \2 UTC", text)


def ago(seconds: float) -> str:
    """The span since a Unix time; a dash for 0."""
    return f"{span(time.time() - seconds)} ago" if seconds else NOTHING


def number(value: float | None, digits: int = 4) -> str:
    """A score; a dash where there is none."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share, 0 to 1."""
    return NOTHING if share is None or share < 0 else f"{100 * share:.0f} %"


def size(count_of_bytes: int) -> str:
    """Bytes in a unit for people."""
    return decimal(count_of_bytes)


def tone(word: str) -> str:
    """The class of the style sheet for a status; the word itself says it, too."""
    return _TONES.get(STYLES.get(word, ""), "plain")


FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    "ago": ago,
    "counted": count,
    "day": day,
    "moment": moment,
    "number": number,
    "percent": percent,
    "plain": printable,
    "size": size,
    "span": span,
    "stamp": stamp,
    "tone": tone,
    "utc": utc,
}
