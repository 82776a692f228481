"""Which of several processes of one site this one is, as torchrun says it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from protofed.client.distributed.leader import LOOK_EVERY_S, CallBoard
from protofed.client.distributed.team import LostError, Team
from protofed.common.errors import ConfigError
from protofed.common.version import VERSION


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


LONGEST_WAIT = timedelta(hours=1)  # of one rank for another, while all are at work: one that hangs ends them all
_DEVICES = ("cpu", "cuda")


@contextmanager
def joined(launch: Launch, device: torch.device, longest: timedelta = LONGEST_WAIT) -> Iterator[tuple[Team, CallBoard]]:
    """All ranks, once they are there: over gloo, and NCCL for what is on GPUs.

    Raises:
        ConfigError: they are not alike.
        LostError: they cannot reach each other.
    """
    try:
        store, rank, size = next(iter(rendezvous("env://", launch.rank, launch.size, timeout=longest)))
        store = PrefixStore(name := met(store, rank, size), store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=longest)
        check_alike(device)
        board = CallBoard(store, name)
        team = Team(device, _numbers(device, longest))
    except RuntimeError as error:
        raise LostError(f"the processes of this site do not reach each other: {error}") from error
    yield team, board
    dist.destroy_process_group()  # not where a rank was lost: nobody is left to say goodbye to


def _numbers(device: torch.device, longest: timedelta) -> dist.ProcessGroup | None:
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", timeout=longest)
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  (every rank is in it)
    return group


def met(store: Store, rank: int, size: int) -> str:
    """A name for this start of all ranks, when all of them live.

    torchrun's store outlives them: addresses of ranks that have died are still in it, and are no answer to anybody.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", own)
        while (start := json.loads(_read(store, "start") or "{}")).get(str(rank)) != own:
            time.sleep(LOOK_EVERY_S)
        store.set(f"here/{rank}", f"{start['name']}/{own}")
        return str(start["name"])
    others, told = range(1, size), dict[str, str]()
    while not told or any(_read(store, f"here/{one}") != f"{own}/{told[str(one)]}" for one in others):
        if (said := {str(one): _read(store, f"hello/{one}") for one in others}) != told:
            store.set("start", json.dumps({"name": own, **said}))
            told = said
        time.sleep(LOOK_EVERY_S)
    return own


def _read(store: Store, key: str) -> str:
    """Nothing, if nobody has written it."""
    return store.get(key).decode() if store.check([key]) else ""


def check_alike(device: torch.device) -> None:
    """That all ranks have the same software and kind of device.

    Raises:
        ConfigError: naming one that has not.
    """
    software = int.from_bytes(blake3(f"{VERSION}/{torch.__version__}".encode()).digest(7), "big")
    own = torch.tensor([_DEVICES.index(device.type), software])
    others = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    for number, other in enumerate(others):
        if other[1] != others[0][1]:
            raise ConfigError(f"rank {number} has another version of protofed or PyTorch than rank 0; install the same")
        if other[0] != others[0][0]:
            theirs, first = (_DEVICES[int(one[0])] for one in (other, others[0]))
            raise ConfigError(f"rank {number} trains on {theirs}, rank 0 on {first}; set `device` alike")
