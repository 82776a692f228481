"""All sites' core models: each site trains its own and mixes all: APPLE (METHODS §5.17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofed.client.models.split import SplitModel, dump, load, site_models
from protofed.client.training.context import FitContext
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload, Tensors

# Of the site's memory, in part PRIVATE.
_OWN, _OTHERS, _ROW, _SENT, _BEGAN = "own", "others", "row", "sent.", "began."


@dataclass(frozen=True)
class Cores:
    """The N models of part SITE_MODELS and the site's own among them; a row keeps its number from round to round.

    All sites are sent the same, and nothing says whose a row is. A site finds its own row by the head that it sent.

    Attributes:
        core: BODY and HEAD of the own core as the server has it; the received model, if it has none of this site.
        row: the own core's; None: the server has none of this site yet.
        own: the own core's place among the N: its row, or the one after the last.
        stacks: by parameter [N, ...], with zeros at the own place.
    """

    core: Payload
    row: int | None
    own: int
    stacks: dict[str, Tensor]

    @classmethod
    def of(cls, local: FitContext, received: Payload) -> Cores:
        """Those of a broadcast, as far as the site's memory tells them apart.

        Raises:
            CodecError: they are not of the run's model: a server sent them.
        """
        models, sent = site_models(received), received.get(Part.SITE_MODELS, {})
        row = _own_row(local.client_state.get(Part.PRIVATE, {}), models)
        own = len(models) if row is None else row
        stacks = {}
        for name, parameter in local.model.named_parameters():
            stack = sent.get(name, np.empty((0, *parameter.shape)))
            if stack.shape != (len(models), *parameter.shape):
                raise CodecError(f"site models: {name} is {list(stack.shape)}, expected rows {list(parameter.shape)}")
            rows = np.concatenate([stack, np.zeros((int(row is None), *parameter.shape), stack.dtype)])
            rows[own] = 0
            stacks[name] = torch.from_numpy(rows).to(parameter.detach())
        return cls(received if row is None else models[row], row, own, stacks)

    def __len__(self) -> int:
        """N: 1 for a site that knows no other core."""
        return len(next(iter(self.stacks.values())))

    def load_own(self, model: SplitModel) -> None:
        """Make the model the own core.

        Raises:
            CodecError, KeyError: as of `load`.
        """
        load(model.body, self.core[Part.BODY])
        load(model.head, self.core[Part.HEAD])

    def mixed(self, model: SplitModel, p: Tensor) -> dict[str, Tensor]:
        """sum_j p_j w_j by parameter, for p [N]; the own core is the model, so that it and p get gradients."""
        own = model.named_parameters()
        return {name: p[self.own] * w + torch.tensordot(p, self.stacks[name], 1) for name, w in own}

    @torch.no_grad()
    def mix_into(self, model: SplitModel, p: Tensor) -> None:
        """Make the model, which is the own core, the mixture by p [N]; buffers stay the own core's."""
        for name, value in self.mixed(model, p).items():
            model.get_parameter(name).copy_(value)

    def remembered(self, local: FitContext) -> Tensor:
        """The vector p [N]: p_0 = 1/N, and what was learnt beside it, so that a new site changes p_0 alone."""
        memory, like = local.client_state.get(Part.PRIVATE, {}), next(local.model.parameters())
        learnt = np.zeros(len(self))
        weights = memory.get(_OTHERS, learnt)[: len(self)]
        learnt[: len(weights)] = weights
        learnt[self.own] = memory.get(_OWN, 0.0)
        return torch.from_numpy(learnt + 1 / len(self)).to(like.detach())

    def remember(self, local: FitContext, p: Tensor) -> None:
        """Keep p [N], and what tells the own core: its row, or the head that the site sends now.

        Args:
            local: its model is the own core, trained.
        """
        learnt = p.numpy(force=True) - 1 / len(self)
        memory = {_OTHERS: np.where(np.arange(len(self)) == self.own, 0, learnt), _OWN: np.array(learnt[self.own])}
        if self.row is not None:
            local.client_state[Part.PRIVATE] = {**memory, _ROW: np.array(self.row)}
            return
        heads = (_SENT, dump(local.model.head)), (_BEGAN, self.core[Part.HEAD])
        marks = {f"{prefix}{name}": array for prefix, head in heads for name, array in head.items()}
        local.client_state[Part.PRIVATE] = {**memory, **marks}


def _own_row(marks: Tensors, models: Sequence[Payload]) -> int | None:
    if _ROW in marks:
        row = int(marks[_ROW])
        return row if row < len(models) else None
    return next((row for row, model in enumerate(models) if _is_own(marks, model[Part.HEAD])), None)


def _is_own(marks: Tensors, head: Tensors) -> bool:
    """Whether this is the head that was sent: some of it may have left as the fit began it (`min_images_per_unit`)."""
    sent = {name: marks[f"{_SENT}{name}"] for name in head if f"{_SENT}{name}" in marks}
    began = {name: marks[f"{_BEGAN}{name}"] for name in sent}
    return (
        sent.keys() == head.keys()
        and all(bool(((head[n] == sent[n]) | (head[n] == began[n])).all()) for n in head)
        and any(bool((head[n] != began[n]).any()) for n in head)
    )
