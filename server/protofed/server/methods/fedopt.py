"""FedAvgM (Hsu et al., 2019), FedAdam and FedYogi (Reddi et al., ICLR 2021), server side (METHODS §5.21)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.server.method import (
    Array,
    ExpectedUpdate,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    Tensors,
    Update,
    Weighting,
    is_buffer,
    like,
    server_methods,
    weighted_mean,
)

MOMENTS = ("m", "v")


@dataclass(frozen=True)
class FedOptServer(ABC):
    """Reddi et al., Algorithm 1: w <- ServerOpt(w, delta) with delta = sum_k p_k w_k - w. Buffers are averaged."""

    global_model: ClassVar[bool] = True
    server_lr: Annotated[float, Field(gt=0)] = 1.0  # eta
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made; it has no moments yet."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The global model; moments are private."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model."""
        return ExpectedUpdate(like(state, Part.BODY, Part.HEAD), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """One step towards the (weighted) mean of the sites' models."""
        return self._stepped(state, weighted_mean(updates, (Part.BODY, Part.HEAD), self.weighting))

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return self._stepped(state, sums.averaged(state))

    def _stepped(self, state: Payload, mean: Payload) -> Payload:
        model, moments = {part: dict(tensors) for part, tensors in mean.items()}, dict[str, Array]()
        old = state.get(Part.PRIVATE, {})
        for part, tensors in mean.items():
            for name, towards in tensors.items():
                if towards.dtype.kind != "f" or is_buffer(name):
                    continue
                w, paths = state[part][name], {moment: f"{moment}.{part}.{name}" for moment in MOMENTS}
                known = {moment: old[path] for moment, path in paths.items() if path in old}
                stepped, new = self._step(w, towards - w, known)
                model[part][name] = np.asarray(stepped)  # of a 0-d array NumPy makes a scalar
                moments |= {paths[moment]: np.asarray(array) for moment, array in new.items()}
        return {**model, Part.PRIVATE: moments}

    @abstractmethod
    def _step(self, w: Array, delta: Array, old: Tensors) -> tuple[Array, Tensors]:
        """ServerOpt: a tensor [...] one step along the pseudo-gradient, and its moments, which are `old` next time."""


@server_methods.register(Method("fedavgm", "FedAvgM", "Hsu et al., 2019"))
@dataclass(frozen=True)
class FedAvgMServer(FedOptServer):
    """m <- beta m + delta; w <- w + eta m."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # beta

    def _step(self, w: Array, delta: Array, old: Tensors) -> tuple[Array, Tensors]:
        """SGD with momentum."""
        m = self.momentum * old.get("m", 0.0) + delta
        return w + self.server_lr * m, {"m": m}


@dataclass(frozen=True)
class AdaptiveServer(FedOptServer):
    """Algorithm 2: m <- beta1 m + (1 - beta1) delta; w <- w + eta m / (sqrt(v) + tau), without bias correction."""

    server_lr: Annotated[float, Field(gt=0)] = 0.01  # eta
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3  # v begins as tau^2: the larger, the less adaptive

    def _step(self, w: Array, delta: Array, old: Tensors) -> tuple[Array, Tensors]:
        """A step for each weight by how large its pseudo-gradients have been."""
        m = self.beta1 * old.get("m", 0.0) + (1 - self.beta1) * delta
        v = self._second(old.get("v", np.full_like(w, self.tau**2)), delta**2)
        return w + self.server_lr * m / (np.sqrt(v) + self.tau), {"m": m, "v": v}

    @abstractmethod
    def _second(self, v: Array, squared: Array) -> Array:
        """The next v, from this one and delta^2."""


@server_methods.register(Method("fedadam", "FedAdam", "Reddi et al., ICLR 2021"))
@dataclass(frozen=True)
class FedAdamServer(AdaptiveServer):
    """m <- beta1 m + (1 - beta1) delta; v <- beta2 v + (1 - beta2) delta^2; w <- w + eta m / (sqrt(v) + tau)."""

    def _second(self, v: Array, squared: Array) -> Array:
        """Forgets by the same share, whatever comes."""
        return self.beta2 * v + (1 - self.beta2) * squared


@server_methods.register(Method("fedyogi", "FedYogi", "Reddi et al., ICLR 2021"))
@dataclass(frozen=True)
class FedYogiServer(AdaptiveServer):
    """As FedAdam, but v <- v - (1 - beta2) delta^2 sign(v - delta^2)."""

    def _second(self, v: Array, squared: Array) -> Array:
        """Forgets by no more than what comes."""
        return np.asarray(v - (1 - self.beta2) * squared * np.sign(v - squared))
