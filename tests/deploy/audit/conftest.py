"""A site's log of several files, and the command that reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.deploy.audit.test_rotation import ROUNDS, send
from tests.support.command_line import called

from protofed.common.storage.journal import Journal, segments


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`protofed audit …`: exit code, standard output, standard error."""
    return partial(called, capfd, "audit")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """State folder of a site with a log of four segments."""
    journal = Journal(tmp_path / "site" / "audit.jsonl", 1700)
    for number in range(1, ROUNDS + 1):
        send(journal, number)
    journal.close()
    assert len(segments(tmp_path / "site" / "audit.jsonl")) == 4
    return tmp_path / "site"
