"""Checkpoints on the site's disk: an interrupted fit goes on after its newest epoch. One fit's are kept at a time.

A fit that starts again instead, for want of an undamaged checkpoint, ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from protofed.client.training.context import Checkpoints
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage import files
from protofed.common.version import VERSION

log = structlog.get_logger()
FOLDER = ".fit"  # of the site's state folder, among those of its runs: no run can have this name
_SEAL_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{16}-\d{3}\.safetensors")  # only files of such a name are ever removed


@contextmanager
def on_disk(state: Path, task: Task) -> Iterator[Checkpoints]:
    """One task's checkpoints in a site's state folder; those of other tasks are removed.

    These are removed when the task is done, fails or is called off; a process that is killed leaves them for the next.
    """
    checkpoints = DiskCheckpoints(state / FOLDER, task)
    checkpoints.clear(others=True)
    try:
        yield checkpoints
    except Exception:  # not BaseException: what ends the process must leave them for the next one
        checkpoints.clear()
        raise
    checkpoints.clear()


class DiskCheckpoints:
    """A file for each call of `train`, with a MAC under a key of this task and software.

    A file of another task, another version or a damaged disk fails the MAC, and is not read.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        # The versions belong to the key: another PyTorch may compute other bytes from the same checkpoint.
        identity = (VERSION, torch.__version__, task.run, task.round, task.task_id, task.base_digest)
        self._folder, self._key = folder, blake3("/".join(map(str, identity)).encode())

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """This call's checkpoint: tensors of any shapes [...] by name, on the CPU."""
        try:
            data = self._path(call).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a checkpoint cannot be read; training begins anew", why=str(error.strerror))
            return None
        content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if seal != self._seal(call, content):
            log.warning("a checkpoint is damaged; training begins anew", path=str(self._path(call)))
            return None
        return load(content)

    def keep(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Write this call's tensors, of any shapes [...] and on any device, durably."""
        content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        try:
            files.write(self._path(call), content + self._seal(call, content))
        except StateError as error:
            log.warning("an epoch cannot be kept; training goes on", why=str(error))

    def clear(self, *, others: bool = False) -> None:
        """Remove this task's checkpoints, or with `others` those of all other tasks."""
        if others:
            files.sweep([self._folder])
        for path in self._folder.glob("*.safetensors"):
            if _NAME.fullmatch(path.name) and path.name.startswith(self._name) is not others:
                with contextlib.suppress(OSError):
                    path.unlink()

    @property
    def _name(self) -> str:
        return self._key.hexdigest()[:16]

    def _path(self, call: int) -> Path:
        return self._folder / f"{self._name}-{call:03d}.safetensors"

    def _seal(self, call: int, content: bytes) -> bytes:
        return blake3(content, key=self._key.digest()).update(str(call).encode()).digest()
