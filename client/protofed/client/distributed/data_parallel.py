"""How ranks share a batch: each computes the body's features of its own examples, then all gather all features.

Heads and losses see the whole batch on every rank, so a loss need not be a mean over examples. FedPRP's softmax over
the batch is the same as in one process. Normalisation over a batch is over the whole batch, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from protofed.client.distributed.team import Team

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@contextmanager
def shared(body: nn.Module, team: Team) -> Iterator[None]:
    """Within the `with` block all ranks compute each call of `body` together; all call it with the same batch.

    The modules are of subclasses meanwhile. So a copy that a method makes of the body is computed by all ranks, too,
    with the weights of the copy. Afterwards whoever has one computes it alone.
    """
    batches = _SplitBatches(team)
    kinds = {module: type(module) for module in body.modules() if module is body or isinstance(module, _NORMS)}
    for module, kind in kinds.items():
        _become(module, batches.shared_kind(kind))
    try:
        yield
    finally:
        for module, kind in kinds.items():
            _become(module, kind)
        batches.team = None


class _SplitBatches:
    """How the forward functions of a body, its copies and their normalisation layers divide batches over the ranks.

    Attributes:
        team: None: the fit is over, and whoever still has a copy computes it alone.
    """

    def __init__(self, team: Team) -> None:
        self.team: Team | None = team
        self._counts: tuple[int, int] | None = None  # of the batch in a body: this rank's examples, and all

    def shared_kind(self, kind: type[nn.Module]) -> type[nn.Module]:
        """The subclass whose forward function computes together what that of `kind` computes."""
        forward = self._norm if issubclass(kind, _NORMS) else self._body

        def shared_forward(module: Any, images: Tensor) -> Tensor:
            return forward(module, images, kind)

        # Not an attribute of the instance: a deep copy would have it, and with it the weights of the original.
        return type(f"Shared{kind.__name__}", (kind,), {"forward": shared_forward})

    def _body(self, body: nn.Module, images: Tensor, kind: type[nn.Module]) -> Tensor:
        """A body's features, [B, channels, height, width] -> [B, D]. This rank computes its own rows."""
        rows = None if self.team is None else self.team.rows(len(images))
        if self.team is None or rows is None:
            return cast("Tensor", kind.forward(body, images))
        self._counts = rows.stop - rows.start, len(images)
        try:
            own = kind.forward(body, images[rows])
        finally:
            self._counts = None
        return cast("Tensor", _GatherRows.apply(own, self.team, rows, len(images)))

    def _norm(self, layer: _Norm, images: Tensor, kind: type[nn.Module]) -> Tensor:
        """A layer's output, with mean and variance over all ranks' examples, unless it uses running ones.

        Images [B, channels, ...] -> the same shape. `torch.nn.SyncBatchNorm` does this on GPUs only.
        """
        if self.team is None or self._counts is None or not (layer.training or layer.running_mean is None):
            return cast("Tensor", kind.forward(layer, images))
        own_count, total_count = self._counts
        count = images.numel() // images.shape[1] * total_count // own_count
        return _normalised(layer, images, count, self.team)


class _GatherRows(torch.autograd.Function):
    """Gather the rows of all ranks.

    Every rank computes the same loss from them, and backpropagates 1/size of the loss (`Team.backward`). So the
    gradient of a rank's own rows is size times what arrives here.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team, rows: slice, count: int) -> Tensor:
        """This rank's rows [R, D] -> all rows [N, D], the same on every rank."""
        ctx.rows, ctx.size = rows, team.size
        whole = own.new_zeros(count, *own.shape[1:])
        whole[rows] = own
        return team.sum(whole)  # zeros elsewhere: the sum puts the rows together

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients [N, D] -> [R, D], times the number of ranks."""
        return gradients[0][ctx.rows] * ctx.size, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks. Each rank's loss depends on the sum, so gradients are added up over all ranks, too."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team) -> Tensor:
        """The sum over all ranks of tensors of one shape [...]."""
        ctx.team = team
        return team.sum(own.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sum over all ranks of gradients of one shape [...]."""
        return ctx.team.sum(gradients[0].clone()), None


def _normalised(layer: _Norm, images: Tensor, count: int, team: Team) -> Tensor:
    """Batch normalisation in training (Ioffe and Szegedy, ICML 2015) over all ranks; updates the running statistics.

    Args:
        images: this rank's, [B, channels, ...].
        count: values that a channel's mean is over, of all ranks: examples times positions.
    """
    dims = [dim for dim in range(images.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(images.dim())]
    x = images.to(torch.promote_types(images.dtype, torch.float32))

    def total(values: Tensor) -> Tensor:
        return cast("Tensor", _SumOverRanks.apply(values.sum(dims), team))

    mean = total(x) / count  # [channels]
    centred = x - mean.view(shape)
    variance = total(centred.square()) / count
    normal = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    with torch.no_grad():
        # Running variance is the unbiased one, as in PyTorch.
        _update_running(layer, mean, variance * (count / max(count - 1, 1)))
    return normal.to(images.dtype)


def _update_running(layer: _Norm, mean: Tensor, variance: Tensor) -> None:
    if not layer.training or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None  # noqa: S101  (there with the two others)
    layer.num_batches_tracked.add_(1)
    weight = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean), weight)
    layer.running_var.lerp_(variance.to(layer.running_var), weight)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change a module's class; its parameters, buffers and their names stay."""
    object.__setattr__(module, "__class__", kind)
