"""The table of steps names classes and functions that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from protofed.client.secure_aggregation import session
from protofed.common import secure_aggregation
from protofed.common.protocol.messages import SUM_STEPS, TaskKind
from protofed.common.secure_aggregation import keys, masking, messages
from protofed.server.rounds.secure_aggregation import steps, totals

SERVER = {"masking": masking, "totals": totals}  # the table names the module of what is not of `steps`


def rows() -> Iterator[list[str]]:
    """The cells of each line: step, what a site is sent, its functions, what it sends, the server's functions."""
    lines = (secure_aggregation.__doc__ or "").splitlines()
    (rule,) = (number for number, line in enumerate(lines) if set(line.strip()) == {"-", " "})
    starts = [match.start() for match in re.finditer("-+", lines[rule])]
    for line in lines[rule + 1 : lines.index("", rule)]:
        yield [line[a:b].strip(" ,()") for a, b in zip(starts, [*starts[1:], None], strict=True)]


def names(column: int) -> set[str]:
    """What a column names, without words between names."""
    cells = re.split(r",\s*|\s+and\b", ",".join(row[column] for row in rows()))
    return {name.strip() for name in cells if re.fullmatch(r"[A-Za-z_.]+", name.strip())}


def is_in(name: str, *modules: ModuleType) -> bool:
    """Whether a dotted name is found in one of the modules."""
    for module in modules:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return True
    return False


def test_every_step_has_a_row() -> None:
    assert [row[0] for row in rows() if row[0] in set(TaskKind)] == [step.value for step in SUM_STEPS]


@pytest.mark.parametrize("column", [1, 3])
def test_its_messages_exist(column: int) -> None:
    named = {name for cell in names(column) for name in [cell] if name[0].isupper()}
    assert named
    assert [name for name in named if not is_in(name, messages, keys, masking)] == []


def test_its_functions_exist() -> None:
    assert names(2)
    assert [name for name in names(2) if not is_in(name, session)] == []
    named = names(4)
    assert len(named) > 5
    for name in named:
        module, _, rest = name.partition(".")
        assert is_in(rest, SERVER[module]) if module in SERVER else is_in(name, steps), name
