"""Durable files: a file is old or new after a crash, never half of either."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Final

import structlog

from protofed.common.errors import DiskFailureError, OutOfSpaceError, StateError

log = structlog.get_logger()
TEMPORARY = ".tmp-"
PRIVATE, PUBLIC = 0o600, 0o666  # modes of a new file, less the umask
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # a lack of handles or of room for a map: nothing is wrong on disk
LOCK_WAIT_S: Final = 1.0  # well above what a process needs that only looks at a lock, or writes a line under it
# Their locks and shared memory do not hold between machines, and an fsync may not reach a disk.
NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
    | {"fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)
MOUNTS = Path("/proc/mounts")
_LOCK_RETRY_S: Final = 0.02
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # what file systems without hard links answer
_RANDOM = "[0-9a-f]" * 8  # ends the name of each temporary file, so that `sweep` removes no user's file


def write(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """`write_pieces` of one piece."""
    write_pieces(path, [data], mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], mode: int = PRIVATE) -> None:
    """Replace `path` by what the pieces join to, durably: temporary name, write, fsync, rename, fsync of the folder.

    Args:
        mode: `PRIVATE`, or `PUBLIC` for what is made to be shown.

    Raises:
        OutOfSpaceError, DiskFailureError: the disk is full, the folder read-only or gone; `path` is as before.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(path, error) from error


def mapped(path: Path) -> memoryview:
    """The bytes of a file that nobody changes any more, without a copy; the kernel may drop and read them again.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")  # an empty file cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def whole(path: Path) -> memoryview:
    """The bytes of a file, read: where a page that cannot be read later (`mapped`) would kill the process.

    Raises:
        OSError: it cannot be read.
    """
    return memoryview(path.read_bytes())


def forget_pages(path: Path) -> None:
    """Have the kernel use the memory of a file's cached pages for something else, such as the next file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_private(folder: Path) -> None:
    """Make a state folder that only its owner can enter; an existing one is closed to others, and the log says so.

    Raises:
        StateError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not mode & 0o077:
        return
    fields = {"folder": str(folder), "mode": f"{mode:04o}"}
    try:
        folder.chmod(mode & ~0o077)
    except OSError as error:  # another account owns it, such as of a volume in Kubernetes
        log.warning(
            "others may enter the state folder; let its owner close it with chmod", **fields, why=error.strerror
        )
    else:
        log.warning("the state folder was open to others and is closed now", **fields)


def temporary_name(name: str) -> str:
    """A fresh name for a temporary file that becomes `name`; `sweep` removes files of such names."""
    return f"{TEMPORARY}{name}-{secrets.token_hex(4)}"


def write_error(path: Path, error: OSError) -> StateError:
    """The error that a failed write of `path` is for its caller: repeat it later, or stop."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *PASSING):
        return OutOfSpaceError(f"cannot write {path}: {error.strerror}; free space or inodes, or raise the quota")
    return DiskFailureError(f"cannot write {path}: {error.strerror}; check the disk, make the folder writable")


def check_same(path: Path, handle: int) -> None:
    """Check that a path leads to the file that this process has open under it.

    Raises:
        DiskFailureError: it was moved, removed or replaced: what is written now would be missed there.
    """
    try:
        if os.path.samestat(path.stat(), os.fstat(handle)):
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        raise write_error(path, error) from error
    raise DiskFailureError(
        f"{path} was moved, removed or replaced while this process used it; put its folder back, then start again"
    )


def network_type(path: PurePath, mounts: str) -> str | None:
    """The network file system that `path` (absolute, links resolved) is on, if it is on one.

    Args:
        mounts: as in /proc/mounts: device, folder, type and options of one mount a line.
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        _device, folder, fs_type, *_ = line.split(" ")
        at = PurePath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), folder))
        if path.is_relative_to(at) and len(at.parts) >= longest:  # the later one covers the earlier
            longest, kind = len(at.parts), fs_type
    return kind if kind in NETWORK else None


def find_network_type(path: Path) -> str | None:
    """`network_type` on this machine; None where mounts cannot be read."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return network_type(path.resolve(), mounts)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file alone does not cover its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(path: Path, target: Path) -> bool:
    """Give a file a second name on the same disk, in place of a file that has it; not durable until `sync_folder`.

    Returns:
        False: the file system has no hard links, and nothing was done.

    Raises:
        OSError: it cannot be done.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        other = target.with_name(temporary_name(target.name))
        os.link(path, other)
        os.replace(other, target)
        other.unlink(missing_ok=True)  # it is still there if both were names of one file: then rename does nothing
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def sweep(folders: Iterable[Path], name: str = "*") -> int:
    """Remove the temporary files that a killed process left in these folders; returns their number.

    Args:
        name: a pattern: only those of files that are called so.
    """
    leftovers = [path for folder in folders if folder.is_dir() for path in folder.glob(f"{TEMPORARY}{name}-{_RANDOM}")]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def _unusable(folder: Path, error: OSError) -> StateError:
    return StateError(f"cannot use {folder}: {error.strerror}; expected a folder that can be written")


class Lock:
    """An exclusive lock of a state folder for one process; creates the folder if it is missing.

    A refusal alone does not say that a daemon is running. A check whether one runs has the lock for a moment, too, and
    so has a command that writes a line to the audit log.

    Args:
        wait_s: seconds for which it is tried; 0: once.
        clock: monotonic seconds.

    Raises:
        StateError: another process keeps the lock, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        wait_s: float = LOCK_WAIT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / "lock"
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from error
        until = clock() + wait_s
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if not isinstance(error, BlockingIOError) or clock() >= until:
                    os.close(self._handle)
                    text = f"{folder} is in use by another process; stop it or take another folder"
                    raise StateError(text) from error
            sleep(_LOCK_RETRY_S)

    def check(self) -> None:
        """Check that the folder's lock is this one.

        Raises:
            DiskFailureError: the folder, or the file in it, was moved, removed or replaced.
        """
        check_same(self._path, self._handle)

    def release(self) -> None:
        """Release the folder for another process; the kernel does so when this one dies."""
        os.close(self._handle)
