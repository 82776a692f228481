"""How the processes of one site find each other, over the store of the launcher (torchrun)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from protofed.client.distributed.launch import Launch
from protofed.client.distributed.leader import POLL_S, CallBoard
from protofed.client.distributed.team import RankLostError, Team
from protofed.common.errors import ConfigError
from protofed.common.version import VERSION

LONGEST_WAIT = timedelta(hours=1)  # of one rank for another, while all are at work: one that hangs ends them all
_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def joined_ranks(
    launch: Launch, device: torch.device, longest: timedelta = LONGEST_WAIT
) -> Iterator[tuple[Team, CallBoard]]:
    """The team of all ranks, once all have started: connected over gloo, and over NCCL for tensors on GPUs.

    Args:
        longest: that one rank waits for another, here and in every later exchange.

    Raises:
        ConfigError: the ranks have other versions or other kinds of devices.
        RankLostError: the ranks cannot reach each other.
    """
    try:
        store, rank, size = next(iter(rendezvous("env://", launch.rank, launch.size, timeout=longest)))
        store = PrefixStore(name := start_name(store, rank, size), store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=longest)
        check_same(device)
        board = CallBoard(store, name)
        team = Team(device, _nccl_group(device, longest))
    except RuntimeError as error:
        raise RankLostError(f"the processes of this site do not reach each other: {error}") from error
    yield team, board
    dist.destroy_process_group()  # not after an error: it waits for the other ranks, of which one may be lost


def _nccl_group(device: torch.device, longest: timedelta) -> dist.ProcessGroup | None:
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", timeout=longest)
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  (every rank is in it)
    return group


def start_name(store: Store, rank: int, size: int) -> str:
    """A name for this start of all ranks, agreed once all of them run; called by every rank.

    torchrun's store outlives the ranks. After a restart it still has the addresses of dead ranks. Each process writes a
    random token, rank 0 publishes all tokens under a name, and every rank confirms that its own is among them.
    """
    token = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", token)
        while (start := json.loads(_read(store, "start") or "{}")).get(str(rank)) != token:
            time.sleep(POLL_S)
        store.set(f"here/{rank}", f"{start['name']}/{token}")
        return str(start["name"])
    ranks, published = range(1, size), None
    while published is None or any(_read(store, f"here/{n}") != f"{token}/{published[str(n)]}" for n in ranks):
        # Published again whenever a token changes: the first ones may be those of ranks that died.
        if (tokens := {str(other): _read(store, f"hello/{other}") for other in ranks}) != published:
            store.set("start", json.dumps({"name": token, **tokens}))
            published = tokens
        time.sleep(POLL_S)
    return token


def _read(store: Store, key: str) -> str:
    """The value of a key; empty if nobody has set it. `get` alone would block until somebody does."""
    return store.get(key).decode() if store.check([key]) else ""


def check_same(device: torch.device) -> None:
    """Check that all ranks have the same versions of protofed and PyTorch, and the same kind of device.

    Raises:
        ConfigError: naming a rank that differs from rank 0.
    """
    software = int.from_bytes(blake3(f"{VERSION}/{torch.__version__}".encode()).digest(7), "big")
    record = torch.tensor([_DEVICE_TYPES.index(device.type), software])
    records = [torch.zeros_like(record) for _ in range(dist.get_world_size())]
    dist.all_gather(records, record)
    first_device, first_software = records[0].tolist()
    for rank, (device_type, version) in enumerate(record.tolist() for record in records):
        if version != first_software:
            raise ConfigError(f"rank {rank} has another version of protofed or PyTorch than rank 0; install the same")
        if device_type != first_device:
            raise ConfigError(
                f"rank {rank} trains on {_DEVICE_TYPES[device_type]}, rank 0 on {_DEVICE_TYPES[first_device]}; "
                "set the same `device`"
            )
