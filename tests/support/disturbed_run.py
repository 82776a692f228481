"""A run over the wire in which several things go wrong, for those that show it; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.support.raw_client import MODEL, RawClient

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload
from protofed.protos.v1 import federation_pb2 as pb

RUN = "small-fedavg"
SITES = [f"site-{number}" for number in range(1, 7)]
RULES: dict[str, object] = {
    "min_sites": 6,
    "quorum": 3,
    "required_sites": ["site-3"],
    "grace": 0.0,  # a round is closed with the last update that it cannot do without
    "score_every": 0,
    "max_relative_norm": 1e9,  # or the update that is rejected would be refused
}


def update_of(by: float) -> Payload:
    """An update that far from the first model, in every number of its body."""
    return {**MODEL, Part.BODY: {"w": MODEL[Part.BODY]["w"] + np.float32(by)}}


def connect(address: str, sites: Sequence[str] = SITES) -> list[RawClient]:
    """Their daemons, enrolled; the model that all begin with is there."""
    daemons = [RawClient(address, RUN, site).enroll() for site in sites]
    for maker in daemons[:2]:  # round 0 opens with the first two
        assert maker.push(maker.task()).verdict == pb.VERDICT_ACCEPTED
    return daemons


def disturbed_run(start: Callable[..., Any], recipe_of: Callable[..., Recipe]) -> tuple[Any, list[RawClient]]:
    """A server whose round 1 used three updates: one was rejected, one site failed and one was late; one update was
    refused before it was right. Round 2 is open.
    """
    server = start(recipe_of("fedavg", federation=RULES))
    one, two, three, four, five, six = daemons = connect(server.address)
    tasks = {daemon.site: daemon.task() for daemon in daemons}
    task_ids = {site: task.task_id for site, task in tasks.items()}
    beats: list[tuple[RawClient, dict[str, Any]]] = [
        (six, {"activity": pb.ACTIVITY_TRAINING, "epoch": 1, "epochs": 3, "making_progress": True}),
        (five, {"activity": pb.ACTIVITY_FAILED, "failure": pb.FAILURE_REASON_OUT_OF_MEMORY}),
    ]
    for daemon, beat in beats:
        daemon.say(
            "Heartbeat", pb.HeartbeatRequest(caller=daemon.caller, run=RUN, task_id=task_ids[daemon.site], **beat)
        )
    poisoned = {**MODEL, Part.BODY: {"w": np.full((2, 3), np.nan, np.float32)}}
    assert one.push(tasks[one.site], poisoned).verdict == pb.VERDICT_REFUSED
    for daemon, by in ((one, 1.0), (two, 2.0), (four, 1e6), (three, 3.0)):
        assert daemon.push(tasks[daemon.site], update_of(by)).verdict == pb.VERDICT_ACCEPTED
    assert one.task().round == 2
    return server, daemons


def close_channels(daemons: Sequence[RawClient]) -> None:
    for daemon in daemons:
        daemon.channel.close()
