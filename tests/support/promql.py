"""Which metrics and labels an expression of PromQL names: enough of its grammar for the rules and dashboards here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DURATION = re.compile(r"\[[^\]]*\]|\boffset\s+\w+|\b\d[\w.]*")
_MATCHERS = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)?\{(?P<inside>[^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()")
_MADE = re.compile(r'label_replace\(.*?,\s*"(\w+)",\s*"[^"]*",\s*"\w*",\s*"[^"]*"\s*\)', re.DOTALL)
_WORDS = {"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "group_left", "group_right", "offset"}


@dataclass(frozen=True)
class Named:
    """What an expression names.

    Attributes:
        selectors: metric and label of every matcher.
        grouped: labels of all groupings.
        made: labels that `label_replace` makes.
    """

    metrics: frozenset[str]
    selectors: frozenset[tuple[str, str]]
    grouped: frozenset[str]
    made: frozenset[str]


def named(expression: str) -> Named:
    """The metrics and labels of an expression without variables of Grafana's."""
    made = frozenset(_made(expression))
    bare = _STRING.sub('""', re.sub(r"#.*", "", expression))
    groupings = _GROUPING.findall(bare)
    grouped = frozenset(label.strip() for inside in groupings for label in inside.split(",") if label.strip())
    selectors = frozenset(_selectors(bare))
    rest = _DURATION.sub(" ", _GROUPING.sub(" ", _MATCHERS.sub(lambda found: f" {found['name'] or ''} ", bare)))
    return Named(frozenset(_NAME.findall(_STRING.sub(" ", rest))) - _WORDS, selectors, grouped, made)


def distribution(name: str, distributions: Set[str]) -> str:
    """The histogram or summary of a series `NAME_bucket`, `NAME_sum` or `NAME_count`; other names stay as they are."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in distributions else name


def _selectors(bare: str) -> Iterator[tuple[str, str]]:
    for found in _MATCHERS.finditer(bare):
        for matcher in found["inside"].split(","):
            if matcher.strip():
                yield found["name"] or "", re.split(r"[=!~]", matcher)[0].strip()


def _made(expression: str) -> Iterator[str]:
    """From the inside out: one may stand in another."""
    while (found := _MADE.search(expression, expression.rfind("label_replace("))) is not None:
        yield found[1]
        expression = expression[: found.start()] + "made" + expression[found.end() :]
