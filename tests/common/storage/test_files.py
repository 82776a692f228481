"""Files are old or new, never half; a folder belongs to one process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from structlog.testing import capture_logs

from protofed.common.errors import StateError
from protofed.common.storage import files
from protofed.common.storage.files import LOCK_WAIT_S, Lock, find_network_type, network_type


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    files.write(tmp_path / "x", b"old")
    files.write(tmp_path / "x", b"new and longer")
    files.write(tmp_path / "empty", b"")
    assert contents(tmp_path) == {"x": b"new and longer", "empty": b""}
    files.write(tmp_path / "a" / "b" / "x", b"1")
    assert contents(tmp_path / "a" / "b") == {"x": b"1"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
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


def test_the_order_is_write_fsync_rename_fsync_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (tmp_path / "folder").mkdir()
    for place in ("file/x", "file/deeper/x", "folder"):
        with pytest.raises(StateError, match="cannot write"):
            files.write(tmp_path / place, b"new")
    for take in (Lock, files.make_private):
        with pytest.raises(StateError, match="expected a folder that can be written"):
            take(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "folder"]


def test_sweeping_takes_temporaries_and_nothing_else(tmp_path: Path) -> None:
    for name in (".tmp-x-0123abcd", ".tmp-y-76543210", ".tmp-mine", "x.tmp-1", "x", ".hidden"):
        (tmp_path / name).touch()
    assert files.sweep([tmp_path, tmp_path / "missing"]) == 2
    assert sorted(contents(tmp_path)) == [".hidden", ".tmp-mine", "x", "x.tmp-1"]
    assert files.sweep([tmp_path]) == 0


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
    Lock(tmp_path / "other").release()
    lock.release()
    Lock(tmp_path).release()


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


@pytest.mark.parametrize("before", [0o755, 0o750, 0o701])
@pytest.mark.usefixtures("open_umask")
def test_an_existing_state_folder_is_closed_to_others_and_told_once(tmp_path: Path, before: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(before)
    with capture_logs() as logs:
        files.make_private(tmp_path / "new" / "state")
        assert mode(tmp_path / "new" / "state") == 0o700
        assert logs == []
        files.make_private(tmp_path / "state")
        files.make_private(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700
    assert [line["mode"] for line in logs] == [f"{before:04o}"]


def test_a_state_folder_of_another_account_is_used_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "state").chmod(0o755)

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", denied)
    with capture_logs() as logs:
        files.make_private(tmp_path / "state")
    assert [line["why"] for line in logs] == ["Operation not permitted"]


MOUNTS = """\
proc /proc proc rw 0 0
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /mnt/shared nfs4 rw,vers=4.2 0 0
/dev/sdb1 /mnt/shared/local xfs rw 0 0
//host/data /mnt/my\\040share cifs rw 0 0
user@host: /home/ann/remote fuse.sshfs rw 0 0
store /lustre lustre rw 0 0
store /mnt/gone nfs rw 0 0
/dev/sdc1 /mnt/gone ext4 rw 0 0
"""


PLACES = {"/": None, "/var/lib/protofed": None, "/mnt/shared": "nfs4", "/mnt/shared/state": "nfs4"}
PLACES |= {"/mnt/shared2": None, "/mnt/shared/local/state": None}  # another folder; the longest prefix counts
PLACES |= {"/mnt/my share/state": "cifs", "/home/ann/remote/x": "fuse.sshfs", "/lustre/x": "lustre"}
PLACES |= {"/mnt/gone/x": None}  # the later mount covers the earlier one


@pytest.mark.parametrize(("path", "expected"), PLACES.items())
def test_the_file_system_is_that_of_the_nearest_mount(path: str, expected: str | None) -> None:
    assert network_type(PurePosixPath(path), MOUNTS) == expected
    assert network_type(PurePosixPath(path), "") is None


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    (tmp_path / "mounts").write_text(f"host:/x {tmp_path}/there nfs rw 0 0\n", encoding="utf-8")
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "mounts")
    assert find_network_type(tmp_path / "here" / "state") == "nfs"
    assert find_network_type(tmp_path) is None
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "none")
    assert find_network_type(tmp_path / "here" / "state") is None, "a machine that tells no mounts is trusted"
