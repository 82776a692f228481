"""How well each of several models suits a site's examples."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from protofed.client.data.site_data import Examples
from protofed.client.models.split import load
from protofed.client.training.context import FitContext
from protofed.client.training.losses import supervised
from protofed.common.payload import Part, Payload
from protofed.common.tensors import norm_of

BATCH = 512  # images at a time, as in evaluation
WORST = 1e6  # of a cross-entropy: a probability of e^-1000000


def losses_of(local: FitContext, models: Iterable[Payload], examples: Examples) -> list[float]:
    """The plan's mean loss of each model over these examples, in evaluation mode and without augmentation.

    One that is larger than `WORST`, or no number, counts as `WORST`: such a model, of whoever it is, is never the best.
    `local.model` has the last one's numbers afterwards.

    Args:
        models: BODY and HEAD of `local.model`, as a server sent them.
        examples: of the site, at least one.

    Raises:
        CodecError, KeyError: as of `load`.
    """
    losses = []
    local.model.eval()
    for model in models:
        load(local.model.body, model[Part.BODY])
        load(local.model.head, model[Part.HEAD])
        total = torch.zeros((), dtype=torch.float64, device=local.data.device)
        with torch.no_grad():
            for images, labels in local.data.ordered(examples, BATCH):
                local.check()
                total += supervised(local, local.model(images), labels) * len(labels)
        loss = total.item() / len(examples)
        losses.append(loss if loss < WORST else WORST)  # NaN is not below
    return losses


def distance(local: FitContext, one: Payload, other: Payload) -> float:
    """||w - w'|| of two models over the parameters of `local.model`; buffers, such as running statistics, are none."""
    names = {Part.BODY: local.model.body.named_parameters(), Part.HEAD: local.model.head.named_parameters()}
    return norm_of({part: {name: one[part][name] for name, _ in some} for part, some in names.items()}, other)
