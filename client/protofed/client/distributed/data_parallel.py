"""How ranks share the work on a batch: each takes its examples through the model's body, then all have all features.

Heads and losses see the whole batch on every rank, so a loss need not be a mean over examples: FedPRP's softmax over
the batch is what it is in one process. Normalisation over a batch is over the whole batch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from protofed.client.distributed.team import Team

Forward: TypeAlias = Callable[[Tensor], Tensor]
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@contextmanager
def shared(body: nn.Module, team: Team) -> Iterator[None]:
    """Meanwhile, every call of `body` is the work of all ranks; all of them make it, with the same batch."""
    parts = _Parts(team)
    with ExitStack() as replaced:
        for module in body.modules():
            if isinstance(module, _NORMS):
                replaced.enter_context(_replaced(module, parts.norm(module, module.forward)))
        replaced.enter_context(_replaced(body, parts.body(body.forward)))
        yield


class _Parts:
    """Of one body's batches."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._on_way: tuple[int, int] | None = None  # of the batch in the body: examples here, and all of them

    def body(self, forward: Forward) -> Forward:
        """[B, channels, height, width] -> [B, D]; of them this rank computes its own."""

        def joined(images: Tensor) -> Tensor:
            rows = self._team.rows(len(images))
            if rows is None:
                return forward(images)
            self._on_way = rows.stop - rows.start, len(images)
            try:
                own = forward(images[rows])
            finally:
                self._on_way = None
            return cast("Tensor", _Joined.apply(own, self._team, rows, len(images)))

        return joined

    def norm(self, layer: _Norm, forward: Forward) -> Forward:
        """Batch normalisation by mean and variance of the examples of all ranks, where it is not by running ones."""

        def over_all(images: Tensor) -> Tensor:
            if self._on_way is None or not (layer.training or layer.running_mean is None):
                return forward(images)
            own, all_ = self._on_way
            return _normalised(layer, images, images.numel() // images.shape[1] * all_ // own, self._team)

        return over_all


class _Joined(torch.autograd.Function):
    """The rows of all ranks. The loss behind it is on every rank, and each takes 1/size of it (`Team.backward`): the
    gradient of a rank's own rows is size times what comes back.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team, rows: slice, count: int) -> Tensor:
        """This rank's rows [R, D] -> all rows [N, D], the same on every rank."""
        ctx.rows, ctx.size = rows, team.size
        whole = own.new_zeros(count, *own.shape[1:])
        whole[rows] = own
        return team.add(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients [N, D] -> [R, D]; times the ranks, since each rank's loss is divided by their number."""
        return gradients[0][ctx.rows] * ctx.size, None, None, None


class _Sum(torch.autograd.Function):
    """Over all ranks, each of which goes on with it: the sum of what they come to is differentiated."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team) -> Tensor:
        """The sum over all ranks of tensors of one shape [...]."""
        ctx.team = team
        return team.add(own.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of one shape [...] are summed likewise."""
        return ctx.team.add(gradients[0].clone()), None


def _normalised(layer: _Norm, images: Tensor, count: int, team: Team) -> Tensor:
    """As the layer does it in training (Ioffe and Szegedy, ICML 2015), over all ranks; running statistics move on.

    Args:
        count: of examples and places that a channel's mean is over.
    """
    dims = [dim for dim in range(images.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(images.dim())]
    x = images.to(torch.promote_types(images.dtype, torch.float32))

    def total(values: Tensor) -> Tensor:
        return cast("Tensor", _Sum.apply(values.sum(dims), team))

    mean = total(x) / count  # [channels]
    centred = x - mean.view(shape)
    variance = total(centred.square()) / count
    normal = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    with torch.no_grad():
        _move_on(layer, mean, variance * (count / max(count - 1, 1)))
    return normal.to(images.dtype)


def _move_on(layer: _Norm, mean: Tensor, variance: Tensor) -> None:
    if not layer.training or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None  # noqa: S101  (there with the two others)
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean), share)
    layer.running_var.lerp_(variance.to(layer.running_var), share)


@contextmanager
def _replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """The module computes this meanwhile; its names and numbers stay what they are."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
