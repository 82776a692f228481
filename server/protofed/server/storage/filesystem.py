"""Which file system a path is on: a ledger of SQLite needs a local disk."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

# Their locks and shared memory do not hold between machines, and an fsync may not reach a disk.
NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
    | {"fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)
MOUNTS = Path("/proc/mounts")


def network_type(path: PurePath, mounts: str) -> str | None:
    """The network file system that `path` (absolute, links resolved) is on, if it is on one.

    Args:
        mounts: as in /proc/mounts: device, folder, type and options of one mount a line.
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        _device, folder, found, *_ = line.split(" ")
        at = PurePath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), folder))
        if path.is_relative_to(at) and len(at.parts) >= longest:  # the later one covers the earlier
            longest, kind = len(at.parts), found
    return kind if kind in NETWORK else None


def network_type_of(path: Path) -> str | None:
    """`network_type` on this machine; None where mounts cannot be read."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return network_type(path.resolve(), mounts)
