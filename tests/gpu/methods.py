"""Every method's client half on the GPU: what it gives is what the CPU gives, and no step waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tests.gpu.fits import CLASSES, TOLERANCE, difference, exact, examples, fit_context, update_of
from tests.gpu.plan import Proof, at_most, judged, skipped
from tests.gpu.report import Finding, Found, Status
from tests.support.method_facts import brief
from tests.support.round_contexts import round_context
from torch import Tensor

from protofed.client.data.site_data import CPU
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.split import dump
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload
from protofed.server.method import server_methods

BATCH = 32


@dataclass(frozen=True)
class SecondRound:
    """One method after a round on the CPU, so that its site has a memory and its prototypes are known.

    Attributes:
        received: by the site, in the second round.
        memory: of the site.
    """

    method: ClientMethod
    received: Payload
    memory: Payload

    @classmethod
    def of(cls, name: str) -> SecondRound:
        """After the first round of the method of this name."""
        method, server = client_methods.build(name, brief(name)), server_methods.build(name, {})
        local = _site(CPU, 1)
        state = server.init(
            {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}, round_context(CLASSES)
        )
        update = method.fit(local, server.broadcast(state, "site"))
        return cls(
            method, server.broadcast(server.aggregate(state, [update], round_context()), "site"), local.client_state
        )

    def site(self, device: torch.device, batches: int) -> FitContext:
        """The site before its second fit, with the received model loaded."""
        local = _site(device, batches)
        local.round, local.client_state = 2, dict(self.memory)
        self.method.load_global(local, self.received)
        return local

    def given(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """By how much the second fit moves the model [P], and all that it sends [Q]."""
        local, sent = self.site(device, 3), list[Tensor]()

        def fit() -> float:
            update = self.method.fit(local, self.received)
            sent.extend(
                torch.from_numpy(np.asarray(array, np.float64)).flatten()
                for _, tensors in sorted(update.payload.items())
                for _, array in sorted(tensors.items())
            )
            return update.metrics["loss"]

        _, moved = update_of(local, fit)
        return moved, torch.cat([*sent, torch.ones(1)])  # a method may send nothing


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    if not proof.rehearsal:
        counted = waits(lambda: torch.ones(1, device=proof.device).item())
        yield judged("a number that is read counts as a wait", counted > 0, True)
    for name in sorted(client_methods):
        with exact():
            second = SecondRound.of(name)
            (moved, sent), (own_moved, own_sent) = second.given(proof.device), second.given(CPU)
        apart = max(difference(moved, own_moved), difference(sent, own_sent))
        yield at_most(f"{name}: update, relative difference from the CPU's", apart, TOLERANCE)
        if not proof.rehearsal:
            yield _waits(name, second, proof.device)
    if proof.rehearsal:
        yield skipped("waits of a fit for the device", "needs a GPU")


def _waits(name: str, second: SecondRound, device: torch.device) -> Finding:
    """Whether a fit of more steps waits more often: then a step does."""
    counts = []
    for batches in (3, 9):
        local = second.site(device, batches)
        counts.append(waits(lambda local=local: second.method.fit(local, second.received)))  # type: ignore[misc]
    status = Status.PASSED if counts[0] == counts[1] else Status.MISSED
    return Finding(f"{name}: waits of a fit of 3 and of 9 steps", f"{counts[0]}, {counts[1]}", "as many", status)


def waits(work: Callable[[], object]) -> int:
    """How often the work waited for the GPU, as PyTorch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _site(device: torch.device, batches: int) -> FitContext:
    plan = {"batch_size": BATCH, "amp": False}
    return fit_context(device, examples(BATCH * batches), {"name": "conv2cifar"}, **plan)
