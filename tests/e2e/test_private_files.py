"""Whatever the umask of the shell that starts them: what the daemons keep is readable by their own account alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.processes import Processes

from protofed.common.config.recipe import Recipe


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_state_folders_and_all_that_is_in_them_are_private(tmp_path: Path, recipe_of: Callable[..., Recipe]) -> None:
    processes = Processes.of(tmp_path, recipe_of("fednh", rounds=1, federation={"min_sites": 1, "quorum": 1.0}))
    for name in ("server", "site-1"):
        (tmp_path / name).mkdir(mode=0o755)  # as an earlier version made it
    try:
        server = processes.server()
        site = processes.site("site-1", "--partition-index=0")
        assert server.wait(90) == site.wait(90) == 0, processes.logs()
    finally:
        processes.end()
    for name in ("server", "site-1"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        assert (tmp_path / f"{name}.log").read_text(encoding="utf-8").count("the state folder was open to others") == 1
        kept = [path for path in (tmp_path / name).rglob("*") if not path.is_symlink()]
        assert len(kept) > 3
        assert [path for path in kept if path.stat().st_mode & 0o077] == []
