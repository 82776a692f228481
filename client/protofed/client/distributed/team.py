"""The processes that train for one site as one: its daemon, which is rank 0, and those that follow it.

All of them do the same, so they come to the same exchanges of numbers in the same order. Before each of them all say
whether they are well: one that has failed somewhere says so at the next exchange, and all leave the work together.
Nothing but plain tensors and bytes goes between them; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from protofed.client.agent.failure_codes import reason_of
from protofed.client.agent.heartbeat import TaskAbortedError
from protofed.common.errors import FailureReason, TaskFailedError

WELL, SHORT, CALLED_OFF, FAILED = 0, 1, 2, 3  # FAILED + the number of a reason
REASONS = tuple(FailureReason)
Numbers: TypeAlias = dist.ProcessGroup | None  # None: the group of all, over which processes also talk


class LostError(BaseException):
    """Another rank has ended or hangs: this process cannot go on, either. Nothing of the task counts as failed."""


class ElsewhereError(TaskFailedError):
    """All leave the work, because another rank does."""


class ShortElsewhereError(torch.OutOfMemoryError):
    """Another rank's memory did not suffice for a step."""


class Team:
    """All ranks, as one of them sees them; the process group of all is there.

    Args:
        device: where gradients are.
        numbers: the group for what is on the device.
    """

    def __init__(self, device: torch.device, numbers: Numbers = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device, self._numbers = device, numbers

    @property
    def leads(self) -> bool:
        """Whether it is the daemon's process."""
        return self.rank == 0

    def rows(self, count: int) -> slice | None:
        """This rank's part of a batch; None: each rank does all of it, because there is not an example for each."""
        if count < self.size:
            return None
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that all ranks do, to its end or to the first failure of one of them.

        Raises:
            ElsewhereError: another one failed, or the task was called off there.
        """
        try:
            yield
            self.agree()
        except ElsewhereError:
            raise
        except Exception as error:
            self._say(_word(error))
            raise

    def agree(self, size: int = 0) -> None:
        """Go on only if all are well.

        Args:
            size: of what is to be exchanged, which must be the same everywhere.

        Raises:
            ElsewhereError, ShortElsewhereError: as another rank says.
        """
        if len(sizes := set(self._heard(size))) > 1:
            raise TaskFailedError(
                FailureReason.INTERNAL, f"the ranks do not do the same: {sorted(sizes)} numbers to exchange"
            )

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of one shape [...] over all ranks, in place; the result has the same bits everywhere."""
        self.agree(tensor.numel())
        _exchange(lambda: dist.all_reduce(tensor, group=self._numbers))
        return tensor

    def give(self, data: bytes | None) -> bytes:
        """Bytes of rank 0, for all; None: it is another rank."""
        size = self._heard(len(data or b""))[0]
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
        self.agree(size)
        if size:
            _exchange(lambda: dist.broadcast(buffer, src=0))
        return buffer.numpy().tobytes()

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss []: every rank has the whole batch's, so each takes its share of it."""
        (loss / self.size).backward()  # type: ignore[no-untyped-call]

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Sum gradients of any shapes [...] over all ranks, in one exchange: its latency is paid once a step."""
        if not gradients:
            return
        flat = self.add(torch.cat([gradient.flatten() for gradient in gradients]))
        wholes = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, whole in zip(gradients, wholes, strict=True):
            gradient.copy_(whole.view_as(gradient))

    def short_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Tell the others, unless it was one of them who said so.

        Raises:
            ElsewhereError: another one cannot go on at all.
        """
        if isinstance(error, ShortElsewhereError):
            return
        worst = max(word for word, _ in self._say(SHORT))
        if worst > SHORT:
            reason = FailureReason.INTERNAL if worst == CALLED_OFF else REASONS[worst - FAILED]
            raise ElsewhereError(reason, "another rank has left the step")

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """Layers that draw by themselves draw other numbers on every rank, and the same again in a fit that goes on."""
        digest = hashlib.blake2b(f"{seed}/{call}/{epoch}/{self.rank}".encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(number)

    def _heard(self, size: int) -> list[int]:
        """What size every rank says; all are well."""
        said = self._say(WELL, size)
        worst, rank = max((word, -number) for number, (word, _) in enumerate(said))
        if worst == SHORT:
            raise ShortElsewhereError(f"the memory of rank {-rank} did not suffice")
        if worst == CALLED_OFF:
            raise ElsewhereError(FailureReason.INTERNAL, "the task was called off")
        if worst >= FAILED:
            reason = REASONS[worst - FAILED]
            raise ElsewhereError(reason, f"rank {-rank} of {self.size} failed ({reason}); its log says why")
        return [one for _, one in said]

    def _say(self, word: int, size: int = 0) -> list[tuple[int, int]]:
        """What every rank says, by its number."""
        said = torch.zeros(self.size, 2, dtype=torch.int64)
        said[self.rank] = torch.tensor((word, size))
        _exchange(lambda: dist.all_reduce(said))
        return [(int(one), int(other)) for one, other in said.tolist()]


def _word(error: Exception) -> int:
    if isinstance(error, TaskAbortedError):
        return CALLED_OFF
    reason = error.reason if isinstance(error, TaskFailedError) else reason_of(error)
    return FAILED + REASONS.index(reason)


def _exchange(work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError as error:  # gloo's and NCCL's, of a peer that has gone or does not answer
        first = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise LostError(f"another process of this site has ended, or does not answer: {first}") from error
