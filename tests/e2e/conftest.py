"""Real processes that know each other by certificates; none is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.processes import Processes, certified

from protofed.common.config.recipe import Recipe


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[[Recipe], Processes]]:
    """A folder for the server and clients of a recipe, which the test starts."""
    yield from certified(tmp_path)
