"""A model as body and head, and its numbers as parts of a payload."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from protofed.client.transfer import to_arrays, to_tensors
from protofed.common.errors import CodecError
from protofed.common.payload import Array, Tensors


class SplitModel(nn.Module):
    """`head(body(x))`: the body gives [B, D] features, the head [B, C] logits.

    Args:
        body: feature extractor, [B, channels, height, width] -> [B, D].
        head: classifier, [B, D] -> [B, C]; a method may put its own in its place.
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.features: int | None = None  # D, of a model that the catalogue has built

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [B, channels, height, width] -> [B, C]."""
        return cast("Tensor", self.head(self.body(images)))


def dump(module: nn.Module) -> Tensors:
    """Parameters and buffers of any shapes by name, as contiguous NumPy copies on the CPU."""
    state = module.state_dict()
    if any(tensor.device.type != "cpu" for tensor in state.values()):
        return to_arrays(state)
    return {name: np.array(tensor.numpy(), order="C") for name, tensor in state.items()}


def load(module: nn.Module, tensors: Tensors) -> None:
    """Copy tensors of any shapes into a module's parameters and buffers of the same names and shapes.

    Raises:
        CodecError: naming the first name or shape that differs; the module is unchanged.
    """
    state = module.state_dict()
    if state.keys() != tensors.keys():
        different = sorted(state.keys() ^ tensors.keys())
        raise CodecError(f"the model and what was received differ in {different[0]} and {len(different) - 1} more")
    for name, array in tensors.items():
        if tuple(state[name].shape) != array.shape:
            raise CodecError(f"{name} is {array.shape}: the model expects {tuple(state[name].shape)}")
    elsewhere = {name: target for name, target in state.items() if target.device.type != "cpu"}
    to_tensors(tensors, elsewhere)
    for name in state.keys() - elsewhere.keys():
        np.copyto(state[name].numpy(), tensors[name], casting="unsafe")  # as PyTorch casts


def load_joined(head: nn.Module, matrix: Array) -> None:
    """Load a linear head from one matrix: [C, D], or [C, D + 1] of a head with a bias, which is the last column.

    Raises:
        CodecError: the matrix is not of the head's shape; the head is unchanged.
    """
    weight, bias = head.get_parameter("weight"), dict(head.named_parameters()).get("bias")
    expected = (weight.shape[0], weight.shape[1] + (bias is not None))
    if matrix.shape != expected:
        raise CodecError(f"a head in one matrix is {matrix.shape}: the model expects {expected}")
    load(head, {"weight": matrix} if bias is None else {"weight": matrix[:, :-1], "bias": matrix[:, -1]})


def held(module: nn.Module, tensors: Tensors) -> Callable[[Tensor], Tensor]:
    """What a module would compute with other numbers: in evaluation mode and without gradients; its own stay.

    In place of a deep copy that nobody trains. Several processes that train as one compute either together.

    Args:
        tensors: parameters and buffers of any shapes, of the module's own names and shapes.

    Returns:
        A function [B, ...] -> [B, D], as the module's.
    """
    like = module.state_dict()
    values = {name: torch.from_numpy(np.array(tensors[name])).to(like[name]) for name in like}

    def compute(images: Tensor) -> Tensor:
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                return cast("Tensor", functional_call(module, values, (images,), strict=True))
        finally:
            module.train(training)

    return compute
