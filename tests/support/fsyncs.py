"""What is synced, as it happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def watch_fsyncs(monkeypatch: pytest.MonkeyPatch, note: Callable[[int], T]) -> list[T]:
    """What `note` gives for the handle of each fsync from now on, just before it."""
    seen: list[T] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        seen.append(note(handle))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen
