"""Which file system a path is on, by a list of mounts."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from protofed.common.storage.files import find_network_type, network_type

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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", None),
        ("/var/lib/protofed", None),
        ("/mnt/shared", "nfs4"),
        ("/mnt/shared/state", "nfs4"),
        ("/mnt/shared2", None),  # a name that begins alike is another folder
        ("/mnt/shared/local/state", None),  # the longest prefix counts
        ("/mnt/my share/state", "cifs"),
        ("/home/ann/remote/x", "fuse.sshfs"),
        ("/lustre/x", "lustre"),
        ("/mnt/gone/x", None),  # the later mount covers the earlier one
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, expected: str | None) -> None:
    assert network_type(PurePosixPath(path), MOUNTS) == expected


def test_no_mounts_are_no_network() -> None:
    assert network_type(PurePosixPath("/x"), "") is None


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    (tmp_path / "mounts").write_text(f"host:/x {tmp_path}/there nfs rw 0 0\n", encoding="utf-8")
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "mounts")
    assert find_network_type(tmp_path / "here" / "state") == "nfs"
    assert find_network_type(tmp_path) is None


def test_a_machine_that_tells_no_mounts_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.common.storage.files.MOUNTS", tmp_path / "none")
    assert find_network_type(tmp_path) is None
