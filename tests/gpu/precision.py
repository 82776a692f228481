"""`plan.amp`: bfloat16 in the forward pass and float32 weights on a GPU, float32 throughout without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tests.gpu.fits import TOLERANCE, difference, exact, examples, fit_context, update_of
from tests.gpu.plan import Proof, at_most, judged
from tests.gpu.report import Found
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.data.site_data import CPU
from protofed.client.models.split import SplitModel
from protofed.client.training.loop import train


@dataclass
class _Watched:
    """Cross-entropy that notes what it is given and makes."""

    model: SplitModel
    logits: set[str] = field(default_factory=set)
    channels_last: set[bool] = field(default_factory=set)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        made = self.model(images)
        self.logits.add(str(made.dtype).removeprefix("torch."))
        self.channels_last.add(images.is_contiguous(memory_format=torch.channels_last))
        return cross_entropy(made, labels)


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    yield at_most("float32, update of two steps, relative difference from the CPU's", _apart(proof), TOLERANCE)
    train_set = examples(128 if proof.rehearsal else 2048)
    losses = {}
    for amp in (True, False):
        local = fit_context(proof.device, train_set, batch_size=64, amp=amp)
        watched = _Watched(local.model)
        losses[amp] = train(local, watched).loss
        named = f"amp = {str(amp).lower()}"
        expected = {"bfloat16"} if amp and not proof.rehearsal else {"float32"}
        yield judged(f"{named}: logits are", ", ".join(sorted(watched.logits)), ", ".join(expected))
        weights = {str(p.dtype).removeprefix("torch.") for p in local.model.parameters()}
        yield judged(f"{named}: weights are", ", ".join(sorted(weights)), "float32")
        if amp and not proof.rehearsal:
            yield judged(f"{named}: images are channels_last", watched.channels_last, {True}, "{True}")
    gap = abs(losses[True] - losses[False]) / losses[False]
    yield at_most("mean training loss, amp against float32, relative difference", gap, 0.1)


def _apart(proof: Proof) -> float:
    train_set, updates = examples(64), []
    with exact():
        for device in (CPU, proof.device):
            _, update = update_of(fit_context(device, train_set, batch_size=32, amp=False))
            updates.append(update)
    return difference(updates[1], updates[0])
