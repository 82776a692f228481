"""Which of several processes of one site this one is, read from torchrun's environment variables.

Without PyTorch, whose import takes seconds: a daemon checks its settings first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protofed.common.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """One process of several, by torchrun's numbers.

    Attributes:
        rank: among all processes; 0 is the daemon.
        size: of all processes.
        local_rank: among those on this node.
        local_size: of those on this node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def device(self, name: str, gpus: int) -> str:
        """The device of this process, where the settings name `name`: a GPU for each process, if there are any.

        Args:
            gpus: how many PyTorch sees on this node.

        Raises:
            ConfigError: there are fewer GPUs than processes on this node, or the settings put all of them on one.
        """
        if name.startswith("cuda:") and self.local_size > 1:
            raise ConfigError(f"device '{name}': under torchrun every process has a GPU of its own; set 'auto'")
        if name not in ("auto", "cuda") or not gpus:
            return name
        if self.local_rank >= gpus:
            text = f"torchrun started {self.local_size} processes on this machine, which offers {gpus} GPUs to PyTorch"
            raise ConfigError(f"{text}: give --nproc-per-node {gpus}, or device = 'cpu'")
        return f"cuda:{self.local_rank}"


def launched(environment: Mapping[str, str]) -> Launch | None:
    """This process among those that torchrun has started; None: torchrun did not start it, or started only this one."""
    # Not RANK and WORLD_SIZE alone, which other launchers set, too.
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    rank, size, local_rank, local_size = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return Launch(rank, size, local_rank, local_size)
