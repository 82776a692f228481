"""What a broadcast has besides one model: class models, mixed by the site (METHODS §3), models of sites, controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from protofed.common.errors import CodecError
from protofed.common.payload import Array, Part, Payload, Tensors

FACTORS = "factors"


def start_of(base: Payload, shares: Tensor) -> Payload:
    """The model that a site's fit starts from: the one that was sent, or its mixture, if class models alone were.

    Args:
        shares: p [C], of the site.

    Raises:
        CodecError: as `mixture`.
    """
    if Part.CLASS_MODELS not in base or Part.HEAD in base:
        return base
    return {**base, **mixture(base[Part.CLASS_MODELS], shares)}


def class_models(base: Payload, classes: int) -> Iterator[Payload]:
    """The base with each of its class models in the place of part CLASS_MODELS; none where `start_of` mixes none.

    Raises:
        CodecError: as `mixture`.
    """
    if (models := base.get(Part.CLASS_MODELS)) is not None and Part.HEAD not in base:
        rest: Payload = {part: tensors for part, tensors in base.items() if part is not Part.CLASS_MODELS}
        for c in range(classes):
            yield {**rest, **mixture(models, one_hot(torch.tensor(c), classes))}


def site_models(base: Payload) -> list[Payload]:
    """The models of part SITE_MODELS, BODY and HEAD each: tensors [M, ...] named `body.conv1.weight`, ….

    Other tensors of the part, whose names begin with no part, belong to the method.

    Raises:
        CodecError: the tensors have not as many rows each: a server sent them.
    """
    stacks = {}
    for path, stack in base.get(Part.SITE_MODELS, {}).items():
        part, dot, name = path.partition(".")
        if dot and part in (Part.BODY, Part.HEAD):
            stacks[Part(part), name] = stack
    counts = {len(stack) if stack.ndim else -1 for stack in stacks.values()}
    if len(counts) > 1 or -1 in counts:
        raise CodecError(f"site models of {sorted(counts)} rows: expected as many in each tensor")
    models: list[Payload] = []
    for row in range(max(counts, default=0)):
        model: dict[Part, dict[str, Array]] = {Part.BODY: {}, Part.HEAD: {}}
        for (part, name), stack in stacks.items():
            model[part][name] = np.asarray(stack[row])  # of a vector it is no array
        models.append(model)
    return models


def led_by_controls(base: Payload, length: float) -> Payload:
    """The BODY and HEAD to which control variates alone would lead a fit, from those of the base (METHODS §5.3).

    Args:
        length: of all steps of the fit together, J eta without momentum.

    Raises:
        CodecError: a control variate is of no tensor of the model, or of another shape: a server sent them.
    """
    led: dict[Part, dict[str, Array]] = {part: dict(base[part]) for part in (Part.BODY, Part.HEAD)}
    for path, control in base.get(Part.CONTROL, {}).items():
        part, _, name = path.partition(".")
        tensor = led[Part(part)].get(name) if part in led else None
        if tensor is None or tensor.shape != control.shape:
            raise CodecError(f"control variate '{path}' {list(control.shape)} is of no tensor of the model")
        led[Part(part)][name] = np.asarray(tensor - length * control, dtype=tensor.dtype)
    return led


def mixed(models: Sequence[Payload], weights: Sequence[float] | Array) -> Payload:
    """sum_m weights_m * model_m, BODY and HEAD; integer tensors (BatchNorm's counters) are the first model's.

    Args:
        models: M of one structure, at least one.
        weights: [M], of any sum; they are rounded to the tensors' own dtype.

    Raises:
        CodecError: a tensor is missing in one of them, or of another shape: a server sent them.
    """
    sums: dict[Part, dict[str, Array]] = {}
    for part in (Part.BODY, Part.HEAD):
        for name, first in models[0][part].items():
            arrays = [model.get(part, {}).get(name) for model in models]
            if any(array is None or array.shape != first.shape for array in arrays):
                raise CodecError(f"{part}/{name} is not {list(first.shape)} in all {len(models)} models")
            terms = [array * array.dtype.type(w) for array, w in zip(arrays, weights, strict=True) if array is not None]
            sums.setdefault(part, {})[name] = np.asarray(sum(terms[1:], terms[0])) if first.dtype.kind == "f" else first
    return sums


def mixture(models: Tensors, shares: Tensor) -> Payload:
    """sum_j p_j w_j^G, for the site's own p.

    Args:
        models: tensors [R, ...] named `head.weight`, …, and `factors` [C, R], by which R rows make the C class models.
        shares: p [C].

    Raises:
        CodecError: the tensors are not such ones: a server sent them.
    """
    p = shares.cpu().numpy().astype(float)
    factors = models.get(FACTORS)
    if factors is None or factors.ndim != 2 or len(factors) != len(p):
        raise CodecError(f"class models without {FACTORS} [{len(p)}, R]")
    weights = p @ factors  # [R]
    mixed: dict[Part, dict[str, Array]] = {}
    for path, stack in models.items():
        if path != FACTORS:
            part, _, name = path.partition(".")
            if part not in (Part.BODY, Part.HEAD) or stack.shape[:1] != weights.shape:
                raise CodecError(
                    f"class models {path[:80]} {list(stack.shape)}: expected {len(weights)} rows of a model"
                )
            real = stack.dtype.kind == "f"  # of BatchNorm's counters it is the largest, as everywhere
            whole = np.tensordot(weights.astype(stack.dtype), stack, 1) if real else stack.max(axis=0)
            mixed.setdefault(Part(part), {})[name] = np.asarray(whole)
    return mixed
