"""The only rank of a group: `… one_rank FOLDER DEVICE` writes FOLDER/rank.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tests.gpu.fits import difference, examples, fit_context, loss_of, update_of
from tests.gpu.machine import nccl
from tests.gpu.nccl import RESULT
from tests.support.free_ports import free_port
from torch import Tensor

from protofed.client.distributed.data_parallel import shared
from protofed.client.distributed.launch import Launch
from protofed.client.distributed.rendezvous import joined_ranks
from protofed.client.distributed.team import Team
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train

LAUNCH = Launch(rank=0, size=1, local_rank=0, local_size=1)
MODEL = {"name": "resnet18", "norm": "batch"}  # whose statistics are summed over ranks, too


def main(folder: Path, device: torch.device) -> None:
    """One fit alone, the same one in a group, and what differs."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    batch = 8 if device.type == "cpu" else 64
    train_set = examples(3 * batch)
    alone, grouped = (_doubled(fit_context(device, train_set, MODEL, batch_size=batch, amp=False)) for _ in range(2))
    _, expected = update_of(alone, _fit(alone))
    on = torch.device(LAUNCH.device(device.type, torch.cuda.device_count()))
    with joined_ranks(LAUNCH, on) as (team, _):
        aggregated = team.sum(torch.arange(3.0, device=device)).tolist()
        grouped.ranks, sums = team, _count_sums(team)
        with shared(grouped.model.body, team):
            _, found = update_of(grouped, _fit(grouped))
        result = {
            "backend": dist.get_backend(team._group),
            "nccl": nccl() if device.type == "cuda" else "",
            "sum": aggregated,
            "sums": len(sums),
            "steps": grouped.throughput.steps,
            "difference": difference(found, expected),
        }
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def _doubled(local: FitContext) -> FitContext:
    """In float64: BatchNorm magnifies what rounding to float32 changes to a thousandth of an update."""
    local.model.double()
    return local


def _fit(local: FitContext) -> Callable[[], float]:
    loss = loss_of(local)
    return lambda: train(local, lambda images, labels: loss(images.double(), labels)).loss


def _count_sums(team: Team) -> list[int]:
    """A list that grows by the number of parameters whose gradients each sum is of."""
    sums, add = list[int](), team.sum_gradients

    def counted(parameters: Sequence[Tensor]) -> None:
        sums.append(len(parameters))
        add(parameters)

    team.sum_gradients = counted  # type: ignore[method-assign]
    return sums


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
