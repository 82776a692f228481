"""Scenes of real processes that know each other by certificates; nothing of them is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.pki import Authority
from tests.support.processes import Scene

from protofed.common.config.recipe import Recipe


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[Recipe], Scene]]:
    """Makes scenes."""
    made: list[Scene] = []

    def make(recipe: Recipe) -> Scene:
        made.append(Scene.of(tmp_path, recipe))
        made[-1].authority = Authority.make()
        return made[-1]

    yield make
    for one in made:
        one.end()
