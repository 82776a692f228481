"""The ledger's database is another process's, or where it must not be: the server says so at the start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protofed.common.errors import StateError
from protofed.server.storage.database import open_ledger


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    """Another process is in the middle of a write."""
    script = (
        "import sqlite3, sys\n"
        "file = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "file.execute('BEGIN IMMEDIATE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield
    finally:
        other.communicate("", timeout=20)


def test_row_85_a_ledger_that_another_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    open_ledger(f"sqlite:///{path}").dispose()
    monkeypatch.setattr("protofed.server.storage.database.BUSY_MS", 50)
    with locked_elsewhere(path), pytest.raises(StateError, match="locked; another process has it; stop that process"):
        open_ledger(f"sqlite:///{path}")
    open_ledger(f"sqlite:///{path}").dispose()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3"])
def test_row_85_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nhost:/x {tmp_path}/state {kind} rw 0 0\n", "utf-8")
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "mounts")
    (tmp_path / "state").mkdir()
    with pytest.raises(StateError, match=f"{kind}"):
        open_ledger(f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite'}")
    assert list((tmp_path / "state").iterdir()) == []
    open_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}").dispose()
