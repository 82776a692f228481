"""Batches of one example, which BatchNorm cannot train on where an image has become one value a channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.client.data.site_data import Batch
from protofed.common.errors import FailureReason, TaskFailedError

_ERROR = "Expected more than 1 value per channel when training"  # of torch.nn.functional.batch_norm


def lone_example(error: ValueError, batch: int) -> TaskFailedError | None:
    """What PyTorch's error in a step means: BatchNorm saw one value a channel; None: something else.

    Args:
        batch: examples of the step, of which a part of one was computed, if not all.
    """
    if _ERROR not in str(error):
        return None
    if batch > 1:
        text = "no two examples fit into the device's memory, and BatchNorm cannot be trained on one"
        return TaskFailedError(FailureReason.OUT_OF_MEMORY, text)
    text = "a batch is of one example, on which BatchNorm cannot be trained: a larger plan.batch_size, or more examples"
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

    A site whose examples leave one over must not have to say so: asked with ever other batch sizes it would tell how
    many it has.

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
