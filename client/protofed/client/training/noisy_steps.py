"""Differentially private SGD (Abadi et al., CCS 2016) over units: a patient's images together, or one image.

A step samples units, each with probability q (Poisson). It adds up the gradient of each unit over its images, and clips
it to norm C over all trained tensors together. It adds up the clipped gradients and N(0, (sigma C)^2), and divides by
the recipe's batch size. No number in it but the noisy sum depends on how many units a site has.

Sums and counts of classes under `[plan.dp]`: one Gaussian mechanism on all units, whose contributions are clipped.

An image adds (v / R, w) / sqrt(2) to its class's row of a matrix [C, D + 1]: v its feature times its weight w, and R
`max_feature_norm`. So an image whose feature has a norm of R at most adds a norm of 1 at most. What a unit adds with
all its images together is clipped to 1. Then every number gets noise N(0, class_noise_multiplier^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import one_hot

from protofed.client.data.augmentation import build_augmentation
from protofed.client.models.split import SplitModel
from protofed.client.training.context import FitContext
from protofed.client.training.dp import DpContext
from protofed.client.training.progress import TrainingState
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, FailureReason, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.plugins import error_line

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # images [B, ch, H, W], labels [B] -> mean loss of the batch
_OVER_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_IMAGES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Images whose gradients are held at once. On a CPU more leave a core's cache, and take longer; a GPU waits for fewer.
MICRO_BATCH, MICRO_BATCH_GPU = 8, 64


class PerExample:
    """Gradients of a loss by example, of one call of `train`.

    Args:
        model: whose modules the loss computes with.
        trained: parameters of it.
        loss: as `train` takes it; called with batches of one example.

    Raises:
        ConfigError: a tensor to train is no parameter of the model: its gradient by example cannot be taken.
    """

    def __init__(self, model: nn.Module, trained: Sequence[Tensor], loss: Loss) -> None:
        # In place. In the layout of channels last, some operations have no rule in `vmap`, and go through a slow loop.
        model.to(memory_format=torch.contiguous_format)
        self._call = _LossModule(model, loss)
        parameters = dict(self._call.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        if any(id(tensor) not in names for tensor in trained):
            raise ConfigError(
                "with [plan.dp] only the model's parameters are trained, and the loss uses another tensor"
            )
        self._trained = {names[id(tensor)]: tensor for tensor in trained}
        self._fixed = {name: tensor for name, tensor in parameters.items() if name not in self._trained}
        self._of_all = vmap(grad_and_value(self._of_one), in_dims=(None, None, 0, 0), randomness="different")

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        """Of images [B, channels, H, W] and labels [B]: gradients [B, ...] of each trained tensor, and losses [B]."""
        trained, fixed = ({n: t.detach() for n, t in tensors.items()} for tensors in (self._trained, self._fixed))
        gradients, losses = self._of_all(trained, fixed, images, labels)
        if losses.requires_grad:
            # The loss holds a parameter itself, in place of the module that has it: what it adds would go unclipped.
            raise ConfigError("with [plan.dp] a loss may use parameters through the model's modules only")
        return list(gradients.values()), losses

    def _of_one(
        self, trained: Mapping[str, Tensor], fixed: Mapping[str, Tensor], image: Tensor, label: Tensor
    ) -> Tensor:
        """[channels, H, W], [] -> []."""
        arguments = (image.unsqueeze(0), label.unsqueeze(0))
        return cast("Tensor", functional_call(self._call, {**trained, **fixed}, arguments))


class _LossModule(nn.Module):
    """A loss as a module, so that the parameters of the model that it uses can be replaced during a call."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        return self._loss(images, labels)


class ClippedSum:
    """The sum of clipped unit gradients; a unit's images come one after the other, in one or more micro-batches.

    Args:
        like: tensors of the gradients' shapes [...].
        most: C, to which the norm of a unit's gradient is clipped.
    """

    def __init__(self, like: Sequence[Tensor], most: float) -> None:
        self.total = [torch.zeros_like(tensor) for tensor in like]
        self._most, self._open = most, list[Tensor]()  # of a unit that goes on in the next micro-batch

    def add(self, gradients: Sequence[Tensor], units: Tensor | None, *, ends: bool) -> None:
        """Add a micro-batch.

        Args:
            gradients: by example [B, ...].
            units: [B] on the CPU, equal neighbours are of one unit; None: each example is a unit.
            ends: whether its last unit has no image in the next micro-batch.
        """
        if units is None:
            self._add_clipped(gradients)
            return
        of_units = _summed(gradients, units)
        if self._open:
            for sums, before in zip(of_units, self._open, strict=True):
                sums[0] += before
        self._open = [] if ends else [sums[-1].clone() for sums in of_units]
        self._add_clipped(of_units if ends else [sums[:-1] for sums in of_units])

    def _add_clipped(self, gradients: Sequence[Tensor]) -> None:
        """Of units, [U, ...] each."""
        if not len(gradients[0]):
            return
        rows = [gradient.reshape(len(gradient), -1) for gradient in gradients]  # [U, P] each
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)  # [U]
        finite = norms.isfinite()
        if not finite.all():  # a unit whose gradient is no number counts as nothing: it must not end the fit, either
            rows = [row.where(finite.unsqueeze(1), 0.0) for row in rows]
        factors = (self._most / norms).clamp(max=1.0).where(finite, 0.0)
        for total, row in zip(self.total, rows, strict=True):
            total += (factors @ row).view_as(total)


def _summed(gradients: Sequence[Tensor], units: Tensor) -> list[Tensor]:
    """Sums [U, ...] of gradients [B, ...] over the images of each unit."""
    _, index = torch.unique_consecutive(units, return_inverse=True)
    count = int(index[-1]) + 1
    # An image whose gradient is no number counts as nothing: in a product it would take the other units' sums with it.
    gradients = [gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients]
    if count == len(index):
        return gradients
    # A product, not `index_add`: on a GPU that adds up in any order.
    members = torch.nn.functional.one_hot(index, count).T.to(gradients[0])  # [U, B]
    return [(members @ gradient.reshape(len(index), -1)).view(count, *gradient.shape[1:]) for gradient in gradients]


class NoisySteps:
    """The steps of one call of `train` under `[plan.dp]`.

    Args:
        loss: as `train` takes it, already with the plan's precision.
        regularizer: as `train` takes it.

    Raises:
        ConfigError: as of `PerExample`; or the fit has no noise to draw.
        TaskFailedError: as of `DpContext.begin_steps`.
    """

    def __init__(
        self, local: FitContext, state: TrainingState, epochs: int, loss: Loss, regularizer: Callable[[], Tensor] | None
    ) -> None:
        self._local, self._state, self._regularizer = local, state, regularizer
        self._dp = require_dp(local)
        self._trained = [tensor for optimizer in state.optimizers for tensor in optimizer.trained]
        self._per_example = PerExample(local.model, self._trained, loss)
        units = local.data.train.units
        self._grouped = units is not None
        # [N] each: the images by unit, so that those of one come one after the other, and the unit of each of these.
        units = torch.arange(len(local.data.train)) if units is None else units
        self._order = units.argsort(stable=True)
        self._units = units[self._order]
        self._count = int(self._units.max()) + 1
        self._dp.begin_steps(self._dp.plan.steps(epochs))

    def epoch(self, number: int) -> None:
        """The steps of an epoch, counted from 1.

        Raises:
            TaskFailedError: the model is not finite after it, or one example alone does not fit into memory.
        """
        for step in range(self._dp.plan.steps(number - 1) + 1, self._dp.plan.steps(number) + 1):
            self._local.check()
            self._step(step)
            reach("batch-done")
        # Not the loss: whether it is finite would tell of a single image, and this follows from noisy sums alone.
        if not all(bool(tensor.isfinite().all()) for tensor in self._trained):
            raise TaskFailedError(FailureReason.NUMERIC, f"the model is not finite after epoch {number}; lower plan.lr")

    def _step(self, number: int) -> None:
        dp, local, plan = self._dp, self._local, self._local.plan
        chosen = dp.noise.chosen(self._count, dp.plan.sampling_rate, local.train_calls, number, "units")
        drawn = chosen[self._units].nonzero().flatten()  # [B] places in the order
        while (result := self._attempt(drawn, number)) is None:
            self._shrink(len(drawn))
        sums, losses = result
        for index, (tensor, total) in enumerate(zip(self._trained, sums, strict=True)):
            # A public divisor: the number of images that were drawn, or are there, would show in the noise's scale.
            tensor.grad = self._noisy(total, number, index).div_(plan.batch_size).to(tensor.dtype)
        if self._regularizer is not None:
            self._regularizer().backward()  # type: ignore[no-untyped-call]
        for optimizer in self._state.optimizers:
            optimizer.step()
        self._state.total += losses
        self._state.examples += len(drawn)
        self._state.steps += 1
        local.throughput.step(len(drawn))

    def _noisy(self, total: Tensor, step: int, index: int) -> Tensor:
        """The sum [...] of a trained tensor's gradients with the step's noise, float64."""
        dp = self._dp
        if dp.plan.shared_by is not None:  # the sum of all sites' updates has it
            return total.double()
        noise = dp.noise.normal(total.shape, self._local.train_calls, step, "noise", index, device=total.device)
        return noise.mul_(dp.plan.noise_multiplier * dp.plan.max_unit_norm).add_(total)

    @property
    def _size(self) -> int:
        """Images of a micro-batch."""
        return self._state.micro_batch or (MICRO_BATCH_GPU if self._local.data.device.type == "cuda" else MICRO_BATCH)

    def _attempt(self, drawn: Tensor, step: int) -> tuple[list[Tensor], Tensor] | None:
        """The sum of clipped gradients, and that of the losses []; None: out of memory."""
        try:
            return self._sums(drawn, step)
        except torch.OutOfMemoryError:
            return None

    def _sums(self, drawn: Tensor, step: int) -> tuple[list[Tensor], Tensor]:
        local, size = self._local, self._size
        clipped = ClippedSum(self._trained, self._dp.plan.max_unit_norm)
        losses = torch.zeros_like(self._state.total)
        rows, units = self._order[drawn], self._units[drawn]
        moves = self._moves(len(drawn), local.train_calls, step)
        for begin in range(0, len(drawn), size):
            end = min(begin + size, len(drawn))
            batch_moves = None if moves is None else moves[begin:end]
            images, labels = local.data.at(rows[begin:end], local.plan.augmentation, batch_moves)
            gradients, of_each = self._per_example(images, labels)
            ends = end == len(drawn) or bool(units[end] != units[end - 1])
            clipped.add(gradients, units[begin:end] if self._grouped else None, ends=ends)
            losses += of_each.detach().nan_to_num(0.0, 0.0, 0.0).sum()
        return clipped.total, losses

    def _moves(self, count: int, *path: int) -> Tensor | None:
        """Moves of so many images [count, ...], if the plan has an augmentation; and seed dropout.

        Both come from the secret. If the draws were known, one unit more would shift the draws of all others, which
        change the sum by more than C.
        """
        noise, augmentation = self._dp.noise, self._local.plan.augmentation
        torch.default_generator.manual_seed(noise.number(*path, "dropout"))
        if self._local.data.device.type == "cuda":
            torch.cuda.manual_seed(noise.number(*path, "dropout"))
        if augmentation == "none":
            return None
        rng = torch.Generator().manual_seed(noise.number(*path, "augmentation"))
        return build_augmentation(augmentation).draw(count, rng)

    def _shrink(self, drawn: int) -> None:
        size = min(self._size, drawn)
        if size == 1:
            raise TaskFailedError(FailureReason.OUT_OF_MEMORY, "not even one example fits into the device's memory")
        self._state.micro_batch = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def require_dp(local: FitContext) -> DpContext:
    """What a fit draws its noise from.

    Raises:
        ConfigError: the plan asks for noise, and there is nothing to draw it from: such as an evaluator's refinement.
    """
    if local.dp is None:
        raise ConfigError("[plan.dp] asks for noise, which only a trainer's fit draws")
    return local.dp


def check_model(model: SplitModel, images: Input, device: torch.device) -> None:
    """Check that gradients of a model can be taken by example, with one blank image.

    Raises:
        ConfigError: it normalises over a batch, or its body has layers that do not compute by example.
    """
    for name, module in model.named_modules():
        if isinstance(module, _OVER_BATCHES) or (isinstance(module, _OF_IMAGES) and module.track_running_stats):
            raise ConfigError(
                f"{name} is a {type(module).__name__}: with [plan.dp] what is computed from one image may not "
                'depend on other images. Set model.norm = "group" (GroupNorm: resnet18, resnet50), or choose a '
                "model without this layer"
            )
    body = model.body

    def loss(image: Tensor, _: Tensor) -> Tensor:
        """[1, channels, H, W], [1] -> []."""
        return cast("Tensor", body(image)).square().mean()

    blank = torch.zeros(2, *images.shape, device=device)
    try:
        with torch.random.fork_rng(devices=[]):  # of the CPU; a fit seeds a GPU's before it draws
            PerExample(model, list(body.parameters()), loss)(blank, torch.zeros(2, dtype=torch.int64, device=device))
    except (RuntimeError, NotImplementedError) as error:  # of torch.func, which has no rule for some operations
        raise ConfigError(
            f"[plan.dp] needs gradients of each example, which this model cannot give: {error_line(error)}"
        ) from error


_HALF = math.sqrt(0.5)  # of the squared norm of an image's row each for feature and count


def noisy_means(local: FitContext, of_batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """By class the mean [D] from a noisy sum and a noisy count, if that is at least `min_noisy_count`.

    In evaluation mode, without augmentation and gradients.

    Args:
        of_batch: images [B, channels, H, W], labels [B] -> features [B, D], times their weights, and weights [B].

    Raises:
        ConfigError, TaskFailedError: as of `noisy_matrix`.
    """
    bound = require_dp(local).plan.max_feature_norm

    def rows(images: Tensor, labels: Tensor) -> Tensor:
        """[B, D + 1]: features and weight."""
        features, weights = of_batch(images, labels)
        return torch.cat((features / bound, weights.unsqueeze(1)), dim=1) * _HALF

    train = local.data.train
    local.model.eval()
    with torch.no_grad():
        values = local.data.computed(rows, train, local.check)
        noisy = noisy_matrix(local, values, train.labels.to(values.device)) / _HALF  # [C, D + 1]
    counts = noisy[:, -1]
    present = _present(local, counts).flatten()
    means = (noisy[present, :-1] / counts[present].unsqueeze(1) * bound).to(values.dtype)
    return dict(zip(present.tolist(), means.unbind(), strict=True))


def label_shares(local: FitContext) -> Tensor:
    """The share of each class among the site's training labels, [C] float32 on the device, to be read only.

    With `plan.dp` it is one class release: of noisy counts; counts below `min_noisy_count` are 0; uniform, if all are.
    """
    if local.plan.dp is None:
        return local.data.label_frequencies()
    labels = local.data.train.labels
    noisy = noisy_matrix(local, one_hot(labels, local.classes).double().sum(1, keepdim=True), labels)  # [C, 1]
    counts = torch.zeros_like(noisy[:, 0])
    present = _present(local, noisy[:, 0]).flatten()
    counts[present] = noisy[present, 0]
    if not len(present):
        counts += 1
    return (counts / counts.sum()).float().to(local.data.device)


def noisy_matrix(local: FitContext, values: Tensor, labels: Tensor) -> Tensor:
    """The sum by class of examples' values, with each unit's part clipped to norm 1, and noise: [C, E] float64.

    Args:
        values: of all training examples in their order, [N, E].
        labels: [N].

    Raises:
        ConfigError: the plan has no `class_noise_multiplier`, or there is no noise to draw.
        TaskFailedError: the method has not declared this release.
    """
    dp = require_dp(local)
    if (multiplier := dp.plan.class_noise_multiplier) is None:
        raise ConfigError("plan.dp.class_noise_multiplier is not set: this method releases class sums")
    release = dp.begin_release()
    values = values.double().nan_to_num(0.0, 0.0, 0.0)
    units = torch.arange(len(labels)) if local.data.train.units is None else local.data.train.units
    # Of a unit, by class: only so many pairs as there are, not units times classes.
    pairs, index = torch.unique(units.to(labels.device) * local.classes + labels, return_inverse=True)
    sums = values.new_zeros(len(pairs), values.shape[1]).index_add_(0, index, values)
    of_unit = pairs // local.classes
    squares = values.new_zeros(int(of_unit.max()) + 1).index_add_(0, of_unit, sums.square().sum(1))
    clipped = sums * squares.rsqrt().clamp(max=1.0)[of_unit].unsqueeze(1)
    total = values.new_zeros(local.classes, values.shape[1]).index_add_(0, pairs % local.classes, clipped)
    return total + multiplier * dp.noise.normal(total.shape, "classes", release, device=total.device)


def _present(local: FitContext, counts: Tensor) -> Tensor:
    """The classes whose noisy count [C] is enough, as indices [P, 1]."""
    return ((counts >= require_dp(local).plan.min_noisy_count) & (counts > 0)).nonzero()
