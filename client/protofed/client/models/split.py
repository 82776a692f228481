"""A model as body and head: its numbers as parts of a payload, mixtures of several, and the heads of methods.

A broadcast may have more than one model: class models, which the site mixes (METHODS §3), models of sites, controls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize, one_hot

from protofed.client.device import page_locked
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Array, Part, Payload, Tensors
from protofed.common.plugins import PluginKind, check_type
from protofed.common.plugins import load as load_plugin

FACTORS = "factors"
H = TypeVar("H", bound=nn.Module)
# How features are compared with prototypes: by their cosine, or by how far they are apart.
ComparedBy: TypeAlias = Literal["direction", "distance"]
OWN: Final = "own"  # the head that the architecture has
EXACT = "donot_use_mm_for_euclid_dist"  # mode of torch.cdist: its matrix product cancels digits of near neighbours


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


def to_arrays(tensors: Mapping[str, Tensor]) -> Tensors:
    """Contiguous NumPy copies of tensors of any shapes, dtypes and layouts, by name and in their order."""
    arrays: dict[str, Array] = {}
    for names in _alike(tensors, lambda name: (tensors[name].device, tensors[name].dtype)):
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        staged = page_locked(flat.shape, flat.dtype)
        staged.copy_(flat)  # waits for the device, once
        for name, piece in zip(names, torch.split(staged, [tensors[name].numel() for name in names]), strict=True):
            arrays[name] = np.array(piece.view(tensors[name].shape).numpy())  # a copy: page-locked memory is scarce
    return {name: arrays[name] for name in tensors}


def to_tensors(arrays: Tensors, targets: Mapping[str, Tensor]) -> None:
    """Copy the arrays of these tensors' names, of the same shapes and any dtypes, into the tensors, in place."""
    for names in _alike(targets, lambda name: (targets[name].device, arrays[name].dtype)):
        flat = np.concatenate([arrays[name].reshape(-1) for name in names])
        staged = page_locked(flat.shape, torch.from_numpy(flat).dtype)
        staged.numpy()[:] = flat
        moved = staged.to(targets[names[0]].device, non_blocking=True)
        for name, piece in zip(names, torch.split(moved, [arrays[name].size for name in names]), strict=True):
            targets[name].copy_(piece.view(targets[name].shape))


def _alike(names: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    """The names whose keys are equal, together and in their order: one copy each, not one for each layer's tensors.

    A copy from a GPU waits for all the work that is queued there, and so does one from memory that is not page-locked.
    """
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


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


def choose_start(base: Payload, shares: Callable[[], Tensor]) -> Payload:
    """The model that a site's fit starts from: the model that was sent, or a mixture, if only class models were sent.

    Args:
        shares: gives p [C], of the site; asked for a mixture alone.

    Raises:
        CodecError: as `mixture`.
    """
    if Part.CLASS_MODELS not in base or Part.HEAD in base:
        return base
    return {**base, **mixture(base[Part.CLASS_MODELS], shares())}


def class_models(base: Payload, classes: int) -> Iterator[Payload]:
    """The base with each of its class models in the place of part CLASS_MODELS; none where `choose_start` mixes none.

    Raises:
        CodecError: as `mixture`.
    """
    if (models := base.get(Part.CLASS_MODELS)) is not None and Part.HEAD not in base:
        common: Payload = {part: tensors for part, tensors in base.items() if part is not Part.CLASS_MODELS}
        for c in range(classes):
            yield {**common, **mixture(models, one_hot(torch.tensor(c), classes))}


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
            raise CodecError(f"control variate '{path}' {list(control.shape)} belongs to no tensor of the model")
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
        models: tensors [R, ...] named `head.weight`, …, and `factors` [C, R], which make the C class models from R
            rows.
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


class MethodHead(nn.Module, ABC):
    """A head that a method puts in place of the model's own, [B, D] -> [B, C]; it says itself how it is exported.

    Attributes:
        compared_by: how it compares features with prototypes; None: it does not.

    Raises:
        TypeError: of a subclass inside a function: an exported model names it by its path.
    """

    compared_by: ClassVar[ComparedBy | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "<locals>" in cls.__qualname__:
            raise TypeError(f"head {cls.__qualname__} is inside a function: expected a class of a module, with a path")

    def deployed(self) -> nn.Module:
        """What computes the same logits without what only training needs; ONNX must have all of its operations."""
        return self

    @classmethod
    @abstractmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head to load the state dict of a deployed one into, in place of the model's own, with `weight` [C, D]."""


class CosineHead(MethodHead):
    """`scale * unit(features) @ prototypes.T`, without bias: FedNH's model (Dai et al., AAAI 2023, section 4.1).

    The state dict holds `prototypes` [C, D] and `scale` [], whether the scale is learnable or not. Features are
    normalised here, so a body may or may not do it: unit vectors stay what they are. A zero feature gives zero logits.

    Args:
        prototypes: one row a class, [C, D], copied; frozen: a buffer, so no optimizer sees it. Rows are used as they
            are: unit length is the caller's to give.
        scale: the logit scale s, one number; converted to the prototypes' dtype and device.
        fixed: the scale is a buffer; otherwise it is a parameter (as in the authors' runs, METHODS 1.2).

    Raises:
        CodecError: prototypes that are no matrix of floats, or a scale of more than one number: the server sends both.
    """

    compared_by = "direction"
    prototypes: Tensor  # [C, D]
    scale: Tensor  # []

    def __init__(self, prototypes: Tensor | Array, scale: float | Tensor, fixed: bool) -> None:
        super().__init__()
        # np.array: received arrays may be read-only views of a blob, which torch must never alias.
        rows = torch.from_numpy(np.array(prototypes)) if isinstance(prototypes, np.ndarray) else prototypes
        rows = rows.detach().clone()
        if rows.ndim != 2 or not rows.is_floating_point():
            raise CodecError(
                f"prototypes are {tuple(rows.shape)} of {rows.dtype}: expected floats, [classes, features]"
            )
        s = torch.as_tensor(scale).detach().to(rows, copy=True)
        if s.numel() != 1:
            raise CodecError(f"scale is {tuple(s.shape)}: expected one number")
        self.register_buffer("prototypes", rows)
        if fixed:
            self.register_buffer("scale", s.reshape(()))
        else:
            self.scale = nn.Parameter(s.reshape(()))

    @classmethod
    def of(cls, model: SplitModel) -> CosineHead:
        """A model's head, which `like` must have made."""
        return _checked(model, cls)

    @classmethod
    def like(cls, head: nn.Module, fixed: bool) -> Self:
        """A head to load into, with shape [C, D], dtype and device of a linear head or of an earlier cosine head."""
        state = head.state_dict()
        rows: Tensor = state["prototypes" if "prototypes" in state else "weight"]
        return cls(torch.zeros_like(rows), 1.0, fixed)

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head with fixed scale to load into, of the shape of `own`."""
        return cls.like(own, fixed=True)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, [B, D] -> [B, C]; `eps` of the norm is 1e-12, as in the released code."""
        return self.scale * (normalize(features, dim=-1) @ self.prototypes.T)


class NearestHead(MethodHead):
    """Minus the Euclidean distance to each prototype: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    Computes what `PrototypeHead` does, without a branch and without `cdist`, so that it can be exported to ONNX.

    Args:
        prototypes: one row a class, [C, D].
        known: [C], 1 for a class that has a prototype, else 0; at least one.
    """

    compared_by = "distance"
    prototypes: Tensor  # [C, D]
    known: Tensor  # [C]

    def __init__(self, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("prototypes", prototypes.detach().clone())
        self.register_buffer("known", known.detach().clone())

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head without prototypes to load into."""
        weight = own.get_parameter("weight")
        return cls(torch.zeros_like(weight), torch.zeros(len(weight)))

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]; minus infinity for a class without a prototype."""
        distances: Tensor = torch.linalg.vector_norm(features.unsqueeze(1) - self.prototypes, dim=2)
        return -distances.masked_fill(self.known == 0, torch.inf)


class PrototypeHead(MethodHead):
    """Nearest-prototype classification around a model's own head: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    The state dict holds `own.*`, `prototypes` [C, D] and `known` [C]: a stored model can predict either way.

    Args:
        own: the model's linear head, which is trained.
        classes: C.
        by_own: predict with `own` rather than with prototypes.
    """

    compared_by = "distance"
    prototypes: Tensor  # [C, D]
    known: Tensor  # [C], 1 for a class that has a prototype, else 0

    def __init__(self, own: nn.Module, classes: int, by_own: bool = False) -> None:
        super().__init__()
        self.own, self.by_own = own, by_own
        weight = own.get_parameter("weight")
        self.register_buffer("prototypes", torch.zeros(classes, weight.shape[1]).to(weight))
        self.register_buffer("known", torch.zeros(classes).to(weight))

    @classmethod
    def around(cls, head: nn.Module, classes: int, by_own: bool) -> PrototypeHead:
        """`head` itself if it is a PrototypeHead, else a new one around it."""
        if not isinstance(head, PrototypeHead):
            return cls(head, classes, by_own)
        head.by_own = by_own
        return head

    @classmethod
    def of(cls, model: SplitModel) -> PrototypeHead:
        """A model's head, which `around` must have made."""
        return _checked(model, cls)

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head around `own` that has no prototypes yet."""
        return cls(own, len(own.get_parameter("weight")))

    def deployed(self) -> nn.Module:
        """The linear head or the prototypes, whichever it predicts with."""
        return self.own if self._by_own else NearestHead(self.prototypes, self.known)

    def set_prototypes(self, prototypes: Tensor, known: Tensor) -> None:
        """Classify by these prototypes, [C, D], of the classes that `known` [C] marks."""
        self.prototypes.copy_(prototypes)
        self.known.copy_(known)

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]: minus the Euclidean distance to each prototype, minus infinity for a class without one.

        With `by_own`, and while no class has a prototype, the linear head's logits.
        """
        if self._by_own:
            return cast("Tensor", self.own(features))
        return -torch.cdist(features, self.prototypes, compute_mode=EXACT).masked_fill(self.known == 0, torch.inf)

    @property
    def _by_own(self) -> bool:
        return self.by_own or not bool(self.known.any())


# Of what is exported; any other class is named by its path.
HEADS: Mapping[str, type[MethodHead]] = {"cosine": CosineHead, "nearest": NearestHead}


def name_head(head: nn.Module) -> str:
    """The name of the deployed head in an exported model: `own`, one of HEADS, or the path of a class."""
    kind = type(head)
    path = f"{kind.__module__}:{kind.__qualname__}" if isinstance(head, MethodHead) else OWN
    return next((name for name, known in HEADS.items() if known is kind), path)


def blank_head(kind: str, own: nn.Module, allowed: frozenset[str]) -> nn.Module:
    """A head to load into, of a kind that `name_head` names.

    Args:
        own: the architecture's.
        allowed: plug-ins that may be imported.

    Raises:
        ConfigError: the kind is a plug-in's that is not allowed, or no head at all.
    """
    if kind == OWN:
        return own
    head_class = HEADS.get(kind) or check_type(
        load_plugin(PluginKind.MODEL, kind, HEADS, allowed), type, f"head '{kind}'"
    )
    if not issubclass(head_class, MethodHead):
        raise ConfigError(f"head '{kind}' is a {head_class.__name__}: expected a subclass of MethodHead")
    return head_class.blank(own)


def _checked(model: SplitModel, kind: type[H]) -> H:
    if not isinstance(model.head, kind):
        raise TypeError(f"the head is a {type(model.head).__name__}: expected a {kind.__name__}")
    return model.head
