"""Out of memory: a batch that does not fit is trained in micro-batches, and moves the weights as the whole one would.

The shortage is real: PyTorch's allocator is given less memory than the batch was seen to need. If no error came of it,
the part fails, because then nothing was shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tests.gpu.fits import TOLERANCE, difference, exact, examples, fit_context, loss_of, update_of
from tests.gpu.plan import Proof, at_most, judged
from tests.gpu.report import Finding, Found, Status
from torch import Tensor

from protofed.client.data.examples import Examples
from protofed.client.training.context import FitContext, SingleProcess
from protofed.client.training.loop import Loss, train

SHARE = 0.5  # of the memory that the batch needed beyond what was there before it: two halvings, or three


@dataclass
class _Listening(SingleProcess):
    """Notes each time that the training loop ran out of memory."""

    errors: list[str] = field(default_factory=list)

    def ran_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        self.errors.append(" ".join(str(error).split()))


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    batch = 16 if proof.rehearsal else 1024
    train_set = examples(2 * batch)  # two steps: the second begins with the size that the first one found
    with exact():
        (_, expected), needed = _measured(proof, batch, train_set)
        local = fit_context(proof.device, train_set, batch_size=batch, amp=False)
        local.ranks = listening = _Listening()
        sizes: list[int] = []
        found = _short(local, batch, sizes) if proof.rehearsal else _limited(proof, local, needed, sizes)
    yield from shown("made up" if proof.rehearsal else "by PyTorch's allocator", listening.errors, sizes, batch)
    yield at_most("update, relative difference from the whole batch's", difference(found, expected), TOLERANCE)


def shown(by: str, errors: Sequence[str], sizes: Sequence[int], batch: int) -> Iterator[Finding]:
    """Whether memory was short, and whether the training loop answered it.

    Args:
        sizes: examples of every call of the loss, in two steps; those that ran out of memory counted.
    """
    first = f"{len(errors)} times" + (f"; {errors[0][:160]}" if errors else "")
    yield Finding(f"out of memory, {by}", first, "once at least", Status.PASSED if errors else Status.FAILED)
    smallest = min(sizes)
    status = Status.PASSED if smallest < batch else Status.FAILED
    yield Finding(f"a batch of {batch} was trained in micro-batches of", str(smallest), f"< {batch}", status)
    yield judged("tries with the whole batch, in two steps", sizes.count(batch), 1)


def _measured(proof: Proof, batch: int, train_set: Examples) -> tuple[tuple[float, Tensor], int]:
    """What the fit gives undisturbed, and the bytes that it needs beyond those allocated before; 0 on the CPU."""
    local = fit_context(proof.device, train_set, batch_size=batch, amp=False)
    if proof.rehearsal:
        return update_of(local), 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(proof.device)
    before = torch.cuda.memory_allocated(proof.device)
    made = update_of(local)
    return made, torch.cuda.max_memory_allocated(proof.device) - before


def _limited(proof: Proof, local: FitContext, needed: int, sizes: list[int]) -> Tensor:
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(proof.device)
    allowed = torch.cuda.memory_reserved(proof.device) + int(SHARE * needed)
    torch.cuda.set_per_process_memory_fraction(allowed / total)  # of the current device
    try:
        return _update(local, _noting(loss_of(local), sizes))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def _short(local: FitContext, batch: int, sizes: list[int]) -> Tensor:
    loss = loss_of(local)

    def short(images: Tensor, labels: Tensor) -> Tensor:
        if len(labels) > batch // 4:
            raise torch.OutOfMemoryError("made up: the CPU has enough")
        return loss(images, labels)

    return _update(local, _noting(short, sizes))


def _noting(loss: Loss, sizes: list[int]) -> Loss:
    """The loss, which notes how many examples it is called with."""

    def noting(images: Tensor, labels: Tensor) -> Tensor:
        sizes.append(len(labels))
        return loss(images, labels)

    return noting


def _update(local: FitContext, loss: Loss) -> Tensor:
    return update_of(local, lambda: train(local, loss).loss)[1]
