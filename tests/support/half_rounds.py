"""Both halves of a method in turns, without a server, a gate and a codec between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from tests.support.round_contexts import round_context

from protofed.client.method import ClientMethod
from protofed.client.models.split import SplitModel, dump
from protofed.client.training.context import FitContext
from protofed.common import codec
from protofed.common.payload import Part, Payload, SiteId, Update, describe
from protofed.common.protocol.messages import Manifest
from protofed.server.method import ExpectedUpdate, ServerMethod, sent
from protofed.server.rounds.intake import intake

GOLDEN = Path(__file__).parents[1] / "golden"
LocalOf = Callable[..., FitContext]
Linear = Callable[..., SplitModel]


def model(bias: tuple[float, float] = (0.0, 0.0), body: float = 1.0) -> Payload:
    """Features are the image times `body`; the head has two classes and no weights but its biases."""
    head = {"weight": np.zeros((2, 1)), "bias": np.array(bias)}
    return {Part.BODY: {"0.weight": np.array([[body]])}, Part.HEAD: head}


def parts(model: SplitModel) -> Payload:
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}


def play(
    server: ServerMethod, client: ClientMethod, sites: Mapping[SiteId, FitContext], first: Payload, rounds: int
) -> list[Payload]:
    """The state that the first model makes, and those of so many rounds of all sites."""
    states = [server.init(first, round_context(round=0, sites=len(sites)))]
    for number in range(1, rounds + 1):
        updates = []
        for site, local in sorted(sites.items()):
            local.round, local.start = number, None
            updates.append(Update(site, client.fit(local, sent(server, states[-1], site)).payload))
        states.append(server.aggregate(states[-1], updates, round_context(round=number, sites=len(sites))))
    return states


def announced(payload: Payload) -> Manifest:
    data = codec.encode(payload)
    return Manifest(describe(payload), len(data), codec.digest(data))


def refusal(payload: Payload, expected: ExpectedUpdate) -> str:
    """Why the server does not take what a half sends; empty: it does."""
    return str(intake.manifest_problem(announced(payload), expected) or "")
