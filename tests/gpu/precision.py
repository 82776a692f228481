"""`plan.amp`: bfloat16 in the forward pass and float32 weights on a GPU, float32 throughout without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tests.gpu.fits import examples, fit_context
from tests.gpu.plan import Proof, at_most, judged
from tests.gpu.report import Finding, Found, Status
from torch import Tensor
from torch.nn.functional import cross_entropy

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
    train_set, epochs = examples(128 if proof.rehearsal else 2048), 1 if proof.rehearsal else 4
    losses = {}
    for amp in (True, False):
        local = fit_context(proof.device, train_set, batch_size=64, amp=amp, epochs=epochs)
        watched = _Watched(local.model)
        losses[amp] = train(local, watched)
        named = f"amp = {str(amp).lower()}"
        expected = {"bfloat16"} if amp and not proof.rehearsal else {"float32"}
        yield judged(f"{named}: logits are", ", ".join(sorted(watched.logits)), ", ".join(expected))
        weights = {str(p.dtype).removeprefix("torch.") for p in local.model.parameters()}
        yield judged(f"{named}: weights are", ", ".join(sorted(weights)), "float32")
        if amp and not proof.rehearsal:
            yield judged(f"{named}: images are channels_last", watched.channels_last, {True}, "{True}")
        if not proof.rehearsal:
            yield _learns(named, losses[amp], epochs)
    gap = abs(losses[True] - losses[False]) / losses[False]
    yield at_most("mean training loss, amp against float32, relative difference", gap, 0.1)


def _learns(named: str, loss: float, epochs: int) -> Finding:
    """Chance is ln 10 = 2.3; patterns under little noise are learnt at once."""
    status = Status.PASSED if loss < 1.5 else Status.FAILED
    return Finding(f"{named}: mean loss over {epochs} epochs", f"{loss:.3f}", "< 1.5", status, {"loss": loss})
