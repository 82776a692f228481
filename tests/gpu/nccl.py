"""A group of one rank: statuses over gloo, tensors over NCCL, and a fit through both that equals one without."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.gpu.plan import Proof, at_most, judged
from tests.gpu.processes import ended, started
from tests.gpu.report import Finding, Found

RESULT = "rank.json"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # a machine without a network has no other
PATIENCE_S = 120.0  # a group that does not form must not take the time of what follows


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    folder = proof.scratch / "nccl"
    folder.mkdir(parents=True, exist_ok=True)
    with started("one_rank", folder, proof.device, environment=LOOPBACK) as rank:
        yield judged("end of the rank", ended(rank, min(PATIENCE_S, proof.left)), 0)
    found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    yield judged("tensors go over", found["backend"], "gloo" if proof.rehearsal else "nccl")
    if found["nccl"]:
        yield Finding("NCCL", found["nccl"])
    yield judged("a sum over all ranks", found["sum"], [0.0, 1.0, 2.0])
    yield judged("sums of gradients in the fit", found["sums"], found["steps"], "one a step")
    yield at_most(
        "update, relative difference from that of one process without a group, float64", found["difference"], 1e-9
    )
