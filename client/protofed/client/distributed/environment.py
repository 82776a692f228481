"""Which of several processes of one site this one is, as torchrun says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protofed.common.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """One process of several.

    Attributes:
        rank: among all; 0 is the daemon.
        size: how many there are.
        local_rank: on this node.
        local_size: how many there are on this node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def device(self, name: str, gpus: int) -> str:
        """Of this process, where the settings say `name`: a GPU for each, if there are any.

        Raises:
            ConfigError: there are not so many, or all would be on one.
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
    """What torchrun says of this process; None: it has not started it, or there is no other one."""
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    rank, size, local_rank, local_size = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return Launch(rank, size, local_rank, local_size)
