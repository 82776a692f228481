"""A root file system of its own, as small and as closed as a container's: read-only but for one folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USR, REPOSITORY = Path("/usr"), Path(__file__).parents[2]
PYTHON = {REPOSITORY, *(p for p in map(Path, (sys.base_prefix, sys.prefix)) if not {USR, REPOSITORY} & set(p.parents))}
USER = 10001
DEVICES = ("null", "urandom", "zero")
# Root's way down to a user that nobody knows: no group, no capability, now or by any program it may start.
DROP = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
# Importing torchvision makes the last one, where nothing is put as long as nothing is compiled; else it is in /tmp.
ENVIRONMENT = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": "/state"}


class Sandbox:
    """Commands in it see the system's programs, Python and protofed, and what is bound; no /tmp and nobody's home.

    Args:
        root: an empty folder that the file system is mounted on, seen by its commands only.
        writable: the one folder that can be written, as /state; it becomes the user's.
        bound: folders that can be read, by their places; the whole of /etc is among them.
    """

    def __init__(self, root: Path, writable: Path, bound: Mapping[str, Path]) -> None:
        self._root = root
        os.chown(writable, USER, USER)
        read = {**{str(path): path for path in (USR, *PYTHON)}, **bound}
        self._steps = [f"mount -t tmpfs -o mode=755 none {root}", f"cd {root}"]
        self._steps += [
            f"ln -s usr/{name} {name}" for name in ("bin", "sbin", "lib", "lib64") if Path("/", name).is_symlink()
        ]
        self._steps += [f"mkdir -p .{place} && mount --bind {path} .{place}" for place, path in read.items()]
        self._steps += [f"mount -o remount,bind,ro .{place}" for place in read]
        self._steps += [f"mkdir state && mount --bind {writable} state", "mkdir proc && mount --bind /proc proc"]
        self._steps += ["mkdir dev", *(f"touch dev/{one} && mount --bind /dev/{one} dev/{one}" for one in DEVICES)]
        self._steps += [f"mount -o remount,ro {root}"]

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process; its id is that of the command itself."""
        variables = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        script = " && ".join(
            [*self._steps, f"exec chroot {self._root} {DROP} env -i {variables} {shlex.join(command)}"]
        )
        with log.open("ab") as out:
            unshared = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
            return subprocess.Popen(unshared, stdout=out, stderr=out)


def missing() -> str:
    """Why nothing can be confined here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can confine a process"
    lacking = [tool for tool in ("unshare", "setpriv", "chroot") if shutil.which(tool) is None]
    return f"there is no {' and no '.join(lacking)}" if lacking else ""
