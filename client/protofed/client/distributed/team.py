"""The processes that train for one site as one: its daemon, which is rank 0, and those that follow it.

All of them do the same work, so they reach the same exchanges of tensors in the same order. Before each exchange all
ranks exchange their status: one that has failed says so at the next exchange, and all leave the work together. Nothing
but plain tensors and bytes goes between them; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from protofed.client.site import TaskAbortedError, classify_error
from protofed.common.errors import FailureReason, TaskFailedError

# Statuses; the largest of all ranks decides. FAILED + the position of a reason in REASONS.
WELL, OUT_OF_MEMORY, ABORTED, FAILED = 0, 1, 2, 3
REASONS = tuple(FailureReason)
TensorGroup: TypeAlias = dist.ProcessGroup | None  # None: the default group (gloo), which also carries the statuses


class RankLostError(BaseException):
    """Another rank has ended or hangs, so this process cannot go on either.

    A BaseException: the task has not failed, and no handler of failed tasks may catch this. All ranks are restarted.
    """


class OtherRankError(TaskFailedError):
    """This rank leaves the work, because another rank has failed."""


class OtherRankMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory in a step."""


class Team:
    """All ranks, as one of them sees them; the default process group must exist. It is the `Ranks` of a `FitContext`.

    Args:
        device: where gradients are.
        group: of all ranks, for tensors on the device.
    """

    def __init__(self, device: torch.device, group: TensorGroup = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device, self._group = device, group

    @property
    def leads(self) -> bool:
        """Whether this is the daemon's process."""
        return self.rank == 0

    def rows(self, count: int) -> slice | None:
        """This rank's part of a batch of `count` examples; None: fewer than ranks, so each computes all of them."""
        if count < self.size:
            return None
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that all ranks do, to its end or to the first failure of one of them.

        Raises:
            OtherRankError: another rank failed, or its task was aborted.
        """
        try:
            yield
            self.agree()
        except OtherRankError:
            raise
        except Exception as error:
            self._exchange_status(_encode_error(error))
            raise

    def agree(self, size: int = 0) -> None:
        """Go on only if no rank has failed.

        Args:
            size: elements of the tensor to be exchanged next.

        Raises:
            OtherRankError, OtherRankMemoryError: another rank has failed, or run out of memory.
            TaskFailedError: the sizes differ, so the ranks no longer do the same work.
        """
        if len(sizes := set(self._sizes(size))) > 1:
            raise TaskFailedError(
                FailureReason.INTERNAL, f"the ranks do not do the same work: {sorted(sizes)} elements to exchange"
            )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of one shape [...] over all ranks, in place; the result has the same bits everywhere."""
        self.agree(tensor.numel())
        _exchange(lambda: dist.all_reduce(tensor, group=self._group))
        return tensor

    def broadcast(self, data: bytes | None) -> bytes:
        """Send rank 0's bytes to all ranks; every other rank calls it with None."""
        size = self._sizes(len(data or b""))[0]
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
        self.agree(size)
        if size:
            _exchange(lambda: dist.broadcast(buffer, src=0))
        return buffer.numpy().tobytes()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss []: every rank has the whole batch's loss, so each takes 1/size of it."""
        (loss / self.size).backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum gradients of any shapes [...] over all ranks, in one exchange: its latency is paid once a step."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        sums = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))

    def ran_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Tell the other ranks, unless the error came from one of them: then all know.

        Raises:
            OtherRankError: another rank has failed in this step.
        """
        if isinstance(error, OtherRankMemoryError):
            return
        worst = max(status for status, _ in self._exchange_status(OUT_OF_MEMORY))
        if worst > OUT_OF_MEMORY:
            reason = FailureReason.INTERNAL if worst == ABORTED else REASONS[worst - FAILED]
            raise OtherRankError(reason, "another rank has left the step")

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """Seed PyTorch's default generators for an epoch, each rank's differently.

        Dropout then draws other numbers for every rank's examples, and the same again in a fit that is resumed.
        """
        digest = hashlib.blake2b(f"{seed}/{call}/{epoch}/{self.rank}".encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(number)

    def _sizes(self, size: int) -> list[int]:
        """The sizes of all ranks; none has failed."""
        statuses = self._exchange_status(WELL, size)
        # The worst status, and of the ranks that have it the first: all ranks name the same one.
        worst, rank = max((status, -number) for number, (status, _) in enumerate(statuses))
        if worst == OUT_OF_MEMORY:
            raise OtherRankMemoryError(f"rank {-rank} ran out of memory")
        if worst == ABORTED:
            raise OtherRankError(FailureReason.INTERNAL, "the task was aborted")
        if worst >= FAILED:
            reason = REASONS[worst - FAILED]
            raise OtherRankError(reason, f"rank {-rank} of {self.size} failed ({reason}); its log says why")
        return [other_size for _, other_size in statuses]

    def _exchange_status(self, status: int, size: int = 0) -> list[tuple[int, int]]:
        """Status and size of every rank, by rank."""
        table = torch.zeros(self.size, 2, dtype=torch.int64)  # a row a rank: their sum has every rank's own
        table[self.rank] = torch.tensor((status, size))
        _exchange(lambda: dist.all_reduce(table))
        return [(int(row[0]), int(row[1])) for row in table.tolist()]


def _encode_error(error: Exception) -> int:
    if isinstance(error, TaskAbortedError):
        return ABORTED
    reason = error.reason if isinstance(error, TaskFailedError) else classify_error(error)
    return FAILED + REASONS.index(reason)


def _exchange(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:  # gloo's and NCCL's, of a peer that has ended or does not answer
        first = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise RankLostError(f"another process of this site has ended, or does not answer: {first}") from error
