"""Quick tries, and calls on another thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tries."""
    monkeypatch.setattr(random, "uniform", lambda _, high: min(high, 0.02))


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function on another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit
