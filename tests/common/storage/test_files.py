"""Files are old or new, never half; a folder belongs to one process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protofed.common.errors import StateError
from protofed.common.storage import files
from protofed.common.storage.files import LOCK_WAIT_S, Lock


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    files.write(tmp_path / "x", b"old")
    files.write(tmp_path / "x", b"new and longer")
    files.write(tmp_path / "empty", b"")
    assert contents(tmp_path) == {"x": b"new and longer", "empty": b""}


def test_missing_folders_are_made(tmp_path: Path) -> None:
    files.write(tmp_path / "a" / "b" / "x", b"1")
    assert contents(tmp_path / "a" / "b") == {"x": b"1"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    files.write(tmp_path / "x", b"old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(StateError, match="No space left on device; free space"):
        files.write(tmp_path / "x", b"new")
    assert contents(tmp_path) == {"x": b"old"}


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    files.write(tmp_path / "x", b"old")
    killed = (
        "import os, signal, sys; from pathlib import Path; from protofed.common.storage import files\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write(Path(sys.argv[1]), b'new')"
    )
    assert subprocess.run([sys.executable, "-c", killed, tmp_path / "x"], check=False).returncode == -9
    assert (tmp_path / "x").read_bytes() == b"old"
    assert len(contents(tmp_path)) == 2
    assert files.sweep([tmp_path]) == 1
    assert contents(tmp_path) == {"x": b"old"}


def test_the_order_is_write_then_fsync_then_rename_then_fsync_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched(handle: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        calls.append(f"rename {source.read_bytes().decode()}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", renamed)
    files.write(tmp_path / "x", b"data")
    assert calls == ["file", "rename data", "folder"]


def test_a_folder_that_cannot_be_had_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(StateError, match="cannot write"):
        files.write(tmp_path / "file" / "x", b"new")
    with pytest.raises(StateError, match="cannot write"):
        files.write(tmp_path / "file" / "deeper" / "x", b"new")
    assert contents(tmp_path) == {"file": b"kept"}


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(StateError):
        files.write(tmp_path / "x", b"new")
    assert (tmp_path / "x").is_dir()
    assert len(list(tmp_path.iterdir())) == 1


def test_sweeping_takes_temporaries_and_nothing_else(tmp_path: Path) -> None:
    for name in (".tmp-x-0123abcd", ".tmp-y-76543210", ".tmp-mine", "x.tmp-1", "x", ".hidden"):
        (tmp_path / name).touch()
    assert files.sweep([tmp_path, tmp_path / "missing"]) == 2
    assert sorted(contents(tmp_path)) == [".hidden", ".tmp-mine", "x", "x.tmp-1"]
    assert files.sweep([tmp_path]) == 0


# Lock


def test_a_second_handle_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "state")
    with pytest.raises(StateError, match="in use by another process"):
        Lock(tmp_path / "state")
    lock.release()
    Lock(tmp_path / "state").release()


def look(folder: Path) -> int:
    """Take the lock as whoever looks whether a daemon runs; closing the handle gives it back."""
    handle = os.open(folder / "lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return handle


def test_whoever_only_looks_refuses_no_daemon_that_starts(tmp_path: Path) -> None:
    Lock(tmp_path).release()
    looking, refused, gone, locks = look(tmp_path), threading.Event(), threading.Event(), list[Lock]()

    def sleep(_seconds: float) -> None:
        refused.set()
        assert gone.wait(60)

    starting = threading.Thread(target=lambda: locks.append(Lock(tmp_path, clock=lambda: 0.0, sleep=sleep)))
    starting.start()
    assert refused.wait(60)
    assert not locks
    os.close(looking)
    gone.set()
    starting.join(60)
    (lock,) = locks
    with pytest.raises(BlockingIOError):  # it is an exclusive one
        look(tmp_path)
    lock.release()


def test_a_lock_that_is_kept_is_refused_soon_and_at_once_for_whoever_does_not_wait(tmp_path: Path) -> None:
    lock, slept = Lock(tmp_path), list[float]()
    with pytest.raises(StateError, match="in use by another process; stop it or take another folder"):
        Lock(tmp_path, clock=lambda: sum(slept), sleep=slept.append)
    assert LOCK_WAIT_S <= sum(slept) < 1.1 * LOCK_WAIT_S
    slept.clear()
    with pytest.raises(StateError, match="in use by another process"):
        Lock(tmp_path, 0, clock=lambda: sum(slept), sleep=slept.append)
    assert slept == []
    lock.release()


def test_a_disk_without_locks_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def sleep(_seconds: float) -> None:
        pytest.fail("it is tried again")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StateError):
        Lock(tmp_path, sleep=sleep)
    assert set(os.listdir("/proc/self/fd")) == before


def test_folders_are_locked_one_by_one(tmp_path: Path) -> None:
    locks = [Lock(tmp_path / "a"), Lock(tmp_path / "b")]
    for lock in locks:
        lock.release()


def test_another_process_is_refused(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    taking = (
        "import sys; from pathlib import Path; from protofed.common.storage.files import Lock; Lock(Path(sys.argv[1]))"
    )
    refused = subprocess.run([sys.executable, "-c", taking, tmp_path], capture_output=True, text=True, check=False)
    lock.release()
    assert refused.returncode == 1
    assert "in use by another process" in refused.stderr
    assert subprocess.run([sys.executable, "-c", taking, tmp_path], check=False).returncode == 0
    Lock(tmp_path).release()  # the process that had it is gone


def test_a_lock_where_no_folder_can_be_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="expected a folder that can be written"):
        Lock(tmp_path / "file")
    with pytest.raises(StateError, match="expected a folder that can be written"):
        Lock(tmp_path / "file" / "below")


# Whose files they are


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("open_umask")
def test_a_file_is_its_owners_alone_unless_it_is_made_to_be_shown(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"as an older version left it")
    files.write(tmp_path / "x", b"1")
    files.write(tmp_path / "shown", b"1", files.PUBLIC)
    assert mode(tmp_path / "x") == 0o600
    assert mode(tmp_path / "shown") == 0o644


@pytest.mark.usefixtures("open_umask")
def test_a_new_state_folder_is_private_without_a_word(tmp_path: Path) -> None:
    with capture_logs() as logs:
        files.make_private(tmp_path / "a" / "state")
        files.make_private(tmp_path / "a" / "state")
    assert mode(tmp_path / "a" / "state") == 0o700
    assert logs == []


@pytest.mark.parametrize("before", [0o755, 0o750, 0o777, 0o701])
def test_an_existing_state_folder_is_closed_to_others_and_told_once(tmp_path: Path, before: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(before)
    with capture_logs() as logs:
        files.make_private(tmp_path / "state")
        files.make_private(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700
    assert [line["mode"] for line in logs] == [f"{before:04o}"]


def test_a_state_folder_of_another_account_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "state").chmod(0o755)

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", denied)
    with capture_logs() as logs:
        files.make_private(tmp_path / "state")
    assert [line["why"] for line in logs] == ["Operation not permitted"]


def test_a_state_folder_that_cannot_be_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="expected a folder that can be written"):
        files.make_private(tmp_path / "file" / "below")
