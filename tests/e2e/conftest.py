"""Real processes that know each other by certificates; none is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.pki import Authority
from tests.support.processes import Processes

from protofed.common.config.recipe import Recipe


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[[Recipe], Processes]]:
    """A folder for the server and clients of a recipe, which the test starts."""
    made: list[Processes] = []

    def make(recipe: Recipe) -> Processes:
        made.append(Processes.of(tmp_path, recipe))
        made[-1].authority = Authority.make()
        return made[-1]

    yield make
    for one in made:
        one.end()
