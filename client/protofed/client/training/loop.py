"""What client algorithms are made of: the SGD loop `train`, class means, and small helpers around them.

Batches of one example, which BatchNorm cannot train on where an image has become one value a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.client.data.site_data import Batch
from protofed.client.training.context import FitContext
from protofed.client.training.losses import supervised
from protofed.client.training.noisy_steps import NoisySteps, noisy_means
from protofed.client.training.progress import Optimizer, ParameterGroup, TrainingState, restore_epoch, save_epoch
from protofed.common.errors import CodecError, ConfigError, FailureReason, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.payload import Array, Part, Tensors

_ERROR = "Expected more than 1 value per channel when training"  # of torch.nn.functional.batch_norm


def lone_example(error: ValueError, batch: int) -> TaskFailedError | None:
    """What PyTorch's error in a step means: BatchNorm saw one value a channel; None: something else.

    Args:
        batch: examples of the step; perhaps only a part of it was computed.
    """
    if _ERROR not in str(error):
        return None
    if batch > 1:
        text = "no two examples fit into the device's memory, and BatchNorm cannot be trained on one"
        return TaskFailedError(FailureReason.OUT_OF_MEMORY, text)
    text = (
        "a batch has one example, and BatchNorm cannot be trained on one. Set a larger plan.batch_size, or add examples"
    )
    return TaskFailedError(FailureReason.REFUSED, text)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer of the model computes over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def trains_on_one(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the model can be trained on a batch of one example [channels, H, W]; it stays as it is.

    True as well of a model whose own layers compute with values: what it cannot do, the first fit says.
    """
    if not has_batch_norm(model):
        return True
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    # Shapes alone: nothing is computed, and no statistic moves.
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    training = model.training
    try:
        model.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            functional_call(model, empty, (torch.empty(1, *shape, device="meta"),))
    except ValueError as error:
        return _ERROR not in str(error)
    except (RuntimeError, TypeError):
        return True
    finally:
        model.train(training)
    return True


def without_lone(batches: Iterable[Batch], model: nn.Module, shape: tuple[int, ...]) -> Iterator[Batch]:
    """An epoch's batches; a last one of a single example joins the one before, if the model cannot be trained on it.

    A site whose examples leave one over must not have to say so. If a server asked with many batch sizes, the answers
    would tell how many examples the site has.

    Args:
        shape: of an image, [channels, H, W].
    """
    before: Batch | None = None
    for batch in batches:
        if before is None:
            before = batch
        elif len(batch[1]) == 1 and len(before[1]) > 1 and not trains_on_one(model, shape):
            before = torch.cat((before[0], batch[0])), torch.cat((before[1], batch[1]))
        else:
            yield before
            before = batch
    if before is not None:
        yield before


Weigher: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # features [B, D], labels [B] -> weights of examples [B]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # images [B, ch, H, W], labels [B] -> mean loss of the batch


Step: TypeAlias = Callable[[Loss], Tensor]  # a loss -> what it was [], once what it depends on has moved


@dataclass(frozen=True)
class Trained:
    """What a call of `train` came to.

    Attributes:
        loss: its mean over all examples trained on, repetitions counted.
        steps: that moved by it, over all epochs: one a batch.
    """

    loss: float
    steps: int


def train(
    local: FitContext,
    loss: Loss,
    parameters: Iterable[Tensor | ParameterGroup] | None = None,
    epochs: int | None = None,
    after: Callable[[Step], object] | None = None,
    regularizer: Callable[[], Tensor] | None = None,
) -> Trained:
    """The plan's epochs of stochastic gradient descent on the site's training examples.

    A batch that does not fit into the device's memory is split into micro-batches whose gradients are added up. If the
    plan asks for checkpoints, an interrupted fit goes on here after the last epoch that it had done. Where several
    processes train as one, each of them calls this with the same arguments.

    `after(step)` is called after each batch's step, for what a method does there. It may change tensors in place (no
    gradient is recorded), and take further steps on the same batch. `step(other)` moves those of `parameters` that
    `other` depends on, as `loss` moved its own: by the optimizers, clipping, micro-batches and processes of this call.
    What it changes are tensors that checkpoints cover: the model's, and those that `parameters` names, whether they
    need a gradient or not. It takes random numbers from `local.rng` alone, and gradients from `step` alone. Every
    process calls it, and one process has only a share of the gradients; so all processes make the same changes. It is
    called once a batch, however many micro-batches memory takes.

    With `plan.dp` steps are those of `noisy_steps`, 1 / sampling_rate steps an epoch. The loss is called with single
    examples, and the loss of a batch is their mean.

    Args:
        loss: images [B, channels, H, W] and labels [B] -> the batch's mean loss []. When memory is short it is called
            with parts of a batch.
        parameters: what is trained, tensors of any shapes; those outside of groups form one group; by default all
            parameters of the model.
        epochs: in place of the plan's.
        regularizer: a term that is added to each batch's loss [] and depends on no example, so that with `plan.dp` it
            is neither clipped nor hidden by noise.

    Raises:
        TaskFailedError: a loss is not finite, or one example alone does not fit into memory; with `plan.dp` the model
            is not finite, or there are more steps than the method has declared.
        ConfigError: with `plan.dp` there is no noise, or the method asks for what has none.
        ValueError: two groups have the same tensor.
    """
    plan, model = local.plan, local.model
    groups = _groups(model.parameters() if parameters is None else parameters)
    optimizers = [Optimizer.of(group, plan, local.lr) for group in groups]
    covered = [tensor for group in groups for tensor in group.parameters]
    state = TrainingState(covered, optimizers, torch.zeros((), device=local.data.device))
    epochs = plan.epochs if epochs is None else epochs
    local.train_calls += 1
    of_epoch: Callable[[int], None]
    if plan.dp is None:
        of_epoch = partial(_plain_epoch, local, _Step(local, state), _regularized(loss, regularizer), after)
    elif after is not None:
        raise ConfigError("with [plan.dp] a method takes no steps of its own (after): they would have no noise")
    else:
        of_epoch = NoisySteps(local, state, epochs, _with_precision(local, loss), regularizer).epoch
    model.train()
    progress = local.fit_progress  # written in place: the heartbeat reads it
    progress.epochs = epochs
    local.throughput.start()
    for progress.epoch in range(restore_epoch(local, state) + 1, epochs + 1):
        local.ranks.seed(local.rng.initial_seed(), local.train_calls, progress.epoch)
        of_epoch(progress.epoch)
        save_epoch(local, state, progress.epoch)
        reach("epoch-done")
    return Trained(state.total.item() / max(state.examples, 1), state.steps)


def _plain_epoch(
    local: FitContext, step: _Step, loss: Loss, after: Callable[[Step], object] | None, number: int
) -> None:
    plan, state = local.plan, step.state
    batches = local.data.batches(plan.batch_size, local.rng, plan.augmentation, plan.drop_last, plan.sampling)
    if has_batch_norm(local.model):
        batches = without_lone(batches, local.model, local.data.input.shape)
    for images, labels in batches:
        local.check()
        state.total += step(images, labels, loss) * len(labels)  # stays on the device: no step waits for it
        state.examples += len(labels)
        state.steps += 1
        if after is not None:
            with torch.no_grad():
                after(partial(step.further, images, labels))
        local.throughput.step(len(labels))
        reach("batch-done")
    total = (state.total + step.further_total).item()  # once an epoch: `item` waits for the device
    if not math.isfinite(total) and not local.to_its_end:
        raise TaskFailedError(FailureReason.NUMERIC, f"the loss is {total} in epoch {number}; lower plan.lr")


def _regularized(loss: Loss, regularizer: Callable[[], Tensor] | None) -> Loss:
    return loss if regularizer is None else lambda images, labels: loss(images, labels) + regularizer()


def named(means: Mapping[int, Tensor]) -> Tensors:
    """Class means {class: [D]} as the tensors of a payload's part, named by class."""
    if not means:
        return {}
    rows = torch.stack(list(means.values())).cpu().numpy()  # [P, D] one copy from the device, not one a class
    return {str(c): row for c, row in zip(means, rows, strict=True)}


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Within the `with` block no parameter of the module is trained; afterwards those are that were before."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def train_head(local: FitContext, head: nn.Module, epochs: int) -> Trained:
    """Train a head on the plan's loss of what it makes of the frozen body's features; as `train`.

    Without weight decay, as FedPRP's release trains its private heads: the plan's is the body's.
    """
    body, group = local.model.body, ParameterGroup(head.parameters(), weight_decay=0.0)
    with frozen(body):
        return train(local, lambda x, y: supervised(local, head(body(x)), y), [group], epochs)


def stacked(rows: Mapping[str, Array], classes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Prototypes [D] by class name as one matrix [C, D], and which classes have one, [C] bool; on `like`'s device.

    Args:
        like: [.., D], whose dtype and device the matrix takes.

    Raises:
        CodecError: a row of another length, or of a class that the run does not have.
    """
    # On the CPU first: one copy to the device, not one a class.
    matrix, known = torch.zeros(classes, like.shape[-1], dtype=like.dtype), torch.zeros(classes, dtype=torch.bool)
    for name, row in rows.items():
        if not name.isdecimal() or int(name) >= classes or row.shape != matrix.shape[1:]:
            raise CodecError(
                f"prototype '{name}' is {row.shape}: expected a class of 0 to {classes - 1}, {tuple(matrix.shape[1:])}"
            )
        matrix[int(name)] = torch.from_numpy(np.array(row))  # a copy: rows of a received payload are read-only
        known[int(name)] = True
    return matrix.to(like.device), known.to(like.device)


def remembered(local: FitContext, part: Part, name: str, first: Tensor) -> Tensor:
    """A tensor [...] of the site's memory, on the CPU; `first`, of the same shape, while the site has none."""
    tensors = local.client_state.get(part, {})
    return torch.from_numpy(np.array(tensors[name])) if name in tensors else first


def class_means(
    local: FitContext, embed: Callable[[Tensor], Tensor], weigh: Weigher | None = None
) -> dict[int, Tensor]:
    """The mean of `embed(images)` [B, D] over the site's training examples of each class that it has: {class: [D]}.

    In evaluation mode, without augmentation. A class without examples at the site is missing from the result. With
    `plan.dp` it is one class release, and a class with a noisy count below `min_noisy_count` is missing.

    Args:
        embed: images [B, channels, H, W] -> features [B, D].
        weigh: features [B, D] and labels [B] -> positive weights [B]; the mean is weighted by them.
    """

    def of_batch(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = in_full(embed(images))
        if weigh is None:
            return features, torch.ones_like(labels, dtype=features.dtype)
        weights = weigh(features, labels).to(features.dtype)
        return features * weights.unsqueeze(1), weights

    if local.plan.dp is not None:
        return noisy_means(local, of_batch)
    return means_by_class(local, of_batch, local.data.scoring_batch)


def means_by_class(
    local: FitContext, of_batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], batch: int
) -> dict[int, Tensor]:
    """Of each class that the site has, the sum of its training examples' values over the sum of their weights.

    In evaluation mode, without augmentation and gradients, in one pass that draws no random number.

    Args:
        of_batch: images [B, channels, H, W], labels [B] -> values, times their weights, [B, ...], and weights [B].
        batch: B at most.

    Returns:
        By class, [...].

    Raises:
        ConfigError: with `plan.dp`: these have no noise.
    """
    if local.plan.dp is not None:
        raise ConfigError(
            "with [plan.dp] a method may release only class means and class shares (class_means, label_shares)"
        )
    local.model.eval()
    sums = counts = None
    with torch.no_grad():
        for images, labels in local.data.ordered(local.data.train, batch):
            local.check()
            values, weights = of_batch(images, labels)
            if sums is None or counts is None:
                sums = values.new_zeros(local.classes, *values.shape[1:])
                counts = values.new_zeros(local.classes)
            sums.index_add_(0, labels, values)
            counts.index_add_(0, labels, weights)
    if sums is None or counts is None:
        return {}
    present = counts.nonzero().flatten()  # [P] the only time that the device is waited for
    means = sums[present] / counts[present].view(-1, *(1,) * (sums.ndim - 1))
    return dict(zip(present.tolist(), means.unbind(), strict=True))


def in_full(values: Tensor) -> Tensor:
    """In float32 at least, before they are added up: thousands of bfloat16 numbers would lose whole digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def frequent(local: FitContext, means: Mapping[int, Tensor], at_least: int) -> dict[int, Tensor]:
    """Those of `class_means` [D] that are means of at least so many of the site's examples: what a method may send.

    With `plan.dp` all of them: they are those of noisy counts, and the true ones say nothing beside.
    """
    if local.plan.dp is not None:
        return dict(means)
    counts = local.data.train.labels.bincount(minlength=local.classes).tolist()
    return {c: mean for c, mean in means.items() if counts[c] >= at_least}


def _groups(parameters: Iterable[Tensor | ParameterGroup]) -> list[ParameterGroup]:
    """All tensors outside of groups as one group, before the others."""
    items = list(parameters)
    alone = [item for item in items if not isinstance(item, ParameterGroup)]
    grouped = [replace(item, parameters=tuple(item.parameters)) for item in items if isinstance(item, ParameterGroup)]
    groups = [ParameterGroup(alone), *grouped] if alone else grouped
    tensors = [id(tensor) for group in groups for tensor in group.parameters]
    if len(set(tensors)) < len(tensors):
        raise ValueError("a tensor is in two groups, or twice in one; expected each once")
    return groups


class _Step:
    """One optimizer step: in as many micro-batches as memory needs, by as many processes as there are."""

    def __init__(self, local: FitContext, state: TrainingState) -> None:
        self._local, self.state, self._ranks = local, state, local.ranks
        self._trained = [tensor for optimizer in state.optimizers for tensor in optimizer.trained]
        self.further_total = torch.zeros_like(state.total)  # of losses: not finite if one of them is not

    @torch.enable_grad()
    def __call__(self, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Move what this loss gives a gradient; its mean over the batch, [] on the device."""
        loss = _with_precision(self._local, loss)
        while (value := self._attempt(images, labels, loss)) is None:
            # Not while the error is handled: its traceback holds all that the attempt computed, and none of it is free.
            self._shrink(len(labels))
        for optimizer in self.state.optimizers:
            optimizer.step()
        return value

    def further(self, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """A step that `after` asks for."""
        value = self(images, labels, loss)
        self.further_total += value
        self._local.throughput.further(len(labels))
        return value

    def _attempt(self, images: Tensor, labels: Tensor, loss: Loss) -> Tensor | None:
        """The batch's mean loss [], once all processes have its gradients; None: one of them ran out of memory."""
        try:
            value = self._gradients(images, labels, loss)
            self._ranks.sum_gradients(self._trained)
            return value
        except torch.OutOfMemoryError as error:
            self._ranks.ran_out_of_memory(error)
            return None
        except ValueError as error:
            if (failed := lone_example(error, len(labels))) is None:
                raise
            raise failed from error

    def _gradients(self, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        self._free_gradients()
        size = self.state.micro_batch or len(labels)
        if size >= len(labels):
            whole = loss(images, labels)
            self._ranks.backward(whole)
            return whole.detach()
        parts = []
        for micro_images, micro_labels in zip(self._divided(images, size), self._divided(labels, size), strict=True):
            # Weighted by its share, so that the parts' gradients add up to those of the whole batch's mean.
            part = loss(micro_images, micro_labels) * (len(micro_labels) / len(labels))
            self._ranks.backward(part)
            parts.append(part.detach())
        return torch.stack(parts).sum()

    def _divided(self, rows: Tensor, size: int) -> tuple[Tensor, ...]:
        """Rows [B, ...] in parts of at most so many; for BatchNorm evenly, so that none is of one where two fit."""
        even = len(rows) % size == 1 and has_batch_norm(self._local.model)
        return torch.tensor_split(rows, math.ceil(len(rows) / size)) if even else torch.split(rows, size)

    def _shrink(self, batch: int) -> None:
        size = min(self.state.micro_batch or batch, batch)
        if size == 1:
            raise TaskFailedError(FailureReason.OUT_OF_MEMORY, "not even one example fits into the device's memory")
        self.state.micro_batch = (size + 1) // 2  # halved, and kept for all later steps of this call
        self._free_gradients()  # before the cache is emptied
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _free_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None


def _with_precision(local: FitContext, loss: Loss) -> Loss:
    """The loss under bfloat16 autocast and in channels_last layout, on a GPU and if the plan asks for it."""
    if local.data.device.type != "cuda" or not local.plan.amp:
        return loss

    by_example = local.plan.dp is not None  # torch.func knows no layout but the plain one

    def cast(images: Tensor, labels: Tensor) -> Tensor:
        """[B, channels, H, W], [B] -> []."""
        with torch.autocast("cuda", torch.bfloat16):
            return loss(images if by_example else images.contiguous(memory_format=torch.channels_last), labels)

    return cast


BATCH = 64  # examples at a time: a matrix [C, D] each is in memory


def class_gradients(local: FitContext) -> dict[int, Tensor]:
    """The gradient of the cross-entropy by the model's head, mean over the site's training examples of each class.

    As `means_by_class` has them: a class without examples at the site is missing from the result.

    Returns:
        By class [C, D], of the weight; [C, D + 1] of a head with a bias, whose gradient is the last column.

    Raises:
        ConfigError: the head is not linear.
    """
    model, head = local.model, local.model.head
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"the model's head is a {type(head).__name__}: expected a torch.nn.Linear, whose gradients have this form"
        )

    def of_batch(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = model.body(images)
        own = (labels.unsqueeze(1) == torch.arange(local.classes, device=labels.device)).to(features)  # [B, C]
        errors = head(features).softmax(dim=1) - own  # [B, C]: the gradient by the logits
        inputs = features if head.bias is None else pad(features, (0, 1), value=1.0)  # [B, E]
        by_example = in_full(errors.unsqueeze(2) * inputs.unsqueeze(1))  # [B, C, E]
        return by_example, torch.ones_like(labels, dtype=by_example.dtype)

    return means_by_class(local, of_batch, BATCH)
